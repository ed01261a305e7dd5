"""Experts over the real service: from which position, in which parts, and who is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quartet.errors import QuartetError
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb
from quartet_inference import service

from . import chat_templates as templates
from .random_models import byte_tokenizer, causal
from .routes import as_sets, routes
from .test_generate_resumed import PROMPT, generate, serving, tokens

#: Thinking of earlier turns is not rendered again: a later prompt may be shorter than what was sampled.
FORGETFUL = templates.CONTINUES_THE_TURN.replace(
    "+ m.content }}\n        {%- for c",
    "+ m.content }}{%- if false %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"
    "\n        {%- for c",
).replace(
    "messages[-1].role != 'tool' %}{{- '<|im_start|>model\\n' }}",
    "messages[-1].role != 'tool' %}{{- '<|im_start|>model\\n<think>\\n' }}",
)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    causal("qwen3_moe", 0).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


async def frames(stub: Any, request: pb.GenerateRequest) -> list[Any]:
    return [frame async for frame in stub.Generate(request, timeout=20)]


async def test_they_come_in_parts_behind_the_last_delta(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GenerateResponse's comment: start, delta, experts, finish; parts of at most MAX_EXPERTS_BYTES."""
    row = 2 * 2
    monkeypatch.setattr(service, "MAX_EXPERTS_BYTES", 10 * row + 1)
    request = tokens(PROMPT, n=2)
    request.experts_from = 2
    async with serving(mixture, routed_experts=True) as stub:
        told = await frames(stub, request)
    sampled: dict[int, list[int]] = {0: [], 1: []}
    parts: dict[int, list[Any]] = {0: [], 1: []}
    for frame in told:
        if frame.HasField("delta"):
            assert not parts[frame.delta.index], "no token comes behind them"
            sampled[frame.delta.index].extend(frame.delta.token_ids)
        if frame.HasField("experts"):
            parts[frame.experts.index].append(frame.experts.experts)
        if frame.HasField("finish"):
            assert parts[frame.finish.index], "they come before the end"
    model = causal("qwen3_moe", 0)
    for index, each in parts.items():
        assert [len(part.numbers) for part in each] == [10 * row] * 4 + [row]
        assert [part.start for part in each] == [2, 12, 22, 32, 42]
        numbers = np.frombuffer(b"".join(part.numbers for part in each), np.uint8)
        expected = routes(model, [*PROMPT, *sampled[index][:-1]])[2:]
        assert as_sets(numbers.reshape(-1, 2, 2)) == expected


async def test_of_a_prompt_that_breaks_they_are_told_from_its_beginning(
    mixture: Path, tmp_path: Path
) -> None:
    """GenerateRequest.experts_from: also where the prompt is shorter than the tokens that were given."""
    template = tmp_path / "template.jinja"
    assert FORGETFUL.count("<think>") == 2
    template.write_text(FORGETFUL)
    chat = {"template_file": template}
    async with serving(mixture, chat=chat, max_model_len=256, routed_experts=True) as stub:
        asked = pb.MessagesPrompt(messages=[common_pb2.Message(role="user", content="hi")])
        sampling = common_pb2.SamplingParams(max_tokens=60, seed=1, ignore_eos=True)
        begun, deltas, _ = await generate(stub, pb.GenerateRequest(messages=asked, sampling=sampling))
        known = [*begun.prompt_token_ids, *(token for delta in deltas for token in delta.token_ids)]
        later = tokens(known, max_tokens=4)
        later.experts_from = len(known) - 1
        later.tokens.tail_messages.add(role="tool", content="42")
        told = await frames(stub, later)
    starts = [frame.start for frame in told if frame.HasField("start")]
    prompt = starts[0].prompt_token_ids
    assert not starts[0].prefix_kept and len(prompt) < len(known)
    (part,) = (frame.experts.experts for frame in told if frame.HasField("experts"))
    assert part.start == 0 and len(part.numbers) == (len(prompt) + 3) * 4


@pytest.mark.parametrize(
    ("noted", "start", "remedy"),
    [(False, 0, "start the replica with routed_experts = true"), (True, 5, "at most the prompt's length, 4")],
)
async def test_what_cannot_be_told_is_refused(mixture: Path, noted: bool, start: int, remedy: str) -> None:
    request = tokens(PROMPT)
    request.experts_from = start
    async with serving(mixture, routed_experts=noted) as stub:
        with pytest.raises(QuartetError, match=remedy) as refused:
            await generate(stub, request)
    assert refused.value.reason == "INVALID_REQUEST" and refused.value.metadata["field"] == "experts_from"
