"""Completions carried on elsewhere, breaks of the prefix, answers told together, over the real service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import REGISTRY
from quartet.errors import QuartetError, from_rpc
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import start
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb
from quartet.v1 import inference_service_pb2_grpc as rpc
from quartet_inference import app
from quartet_inference.answering import Ended, Started
from quartet_inference.config import InferenceConfig
from quartet_inference.conversations import MAX_CONVERSATIONS, Conversations
from quartet_inference.engine import Delta, Span
from quartet_inference.joined import joined

from . import chat_templates as templates
from .random_models import byte_tokenizer, qwen3

PROMPT = [5, 6, 7, 8]


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[Any]:
    """A stub of a running service."""
    config = InferenceConfig.model_validate(
        {"model": folder, "max_model_len": 128, "embedded": {"kv_cache_bytes": 1 << 24}, **settings}
    )
    health = Health()
    async with app.services(config, health) as services:
        server = await start(services, config.server, health)
        async with connect(server.address) as channel:
            yield rpc.InferenceServiceStub(channel)
        await server.stop(0)


async def generate(stub: Any, request: pb.GenerateRequest) -> tuple[pb.GenerateStart, list[Any], Any]:
    """Start, deltas and the finish; errors typed."""
    begun, deltas, finish = pb.GenerateStart(), [], None
    try:
        async for frame in stub.Generate(request, timeout=20):
            if frame.HasField("start"):
                begun = frame.start
            if frame.HasField("delta"):
                deltas.append(frame.delta)
            if frame.HasField("finish"):
                finish = frame.finish
    except grpc.RpcError as error:
        raise from_rpc(error) from None
    return begun, deltas, finish


def tokens(ids: list[int], resumed: int = 0, n: int = 1, **sampling: Any) -> pb.GenerateRequest:
    params = common_pb2.SamplingParams(**{"seed": 3, "max_tokens": 40, "ignore_eos": True, **sampling})
    prompt = pb.TokensPrompt(token_ids=ids)
    return pb.GenerateRequest(tokens=prompt, sampling=params, resumed_tokens=resumed, n=n)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"top_k": 5, "temperature": 0.7},
]


@pytest.mark.parametrize("sampling", SETTINGS)
async def test_a_resumed_completion_is_the_one_that_was_begun(
    model_folder: Path, sampling: dict[str, Any]
) -> None:
    """The same tokens, the same finish: none lost, none sampled twice, none told twice."""
    async with serving(model_folder) as stub:
        _, deltas, whole = await generate(stub, tokens(PROMPT, **sampling))
        sampled = [t for d in deltas for t in d.token_ids]
        logprobs = [value for d in deltas for value in d.logprobs]
        for cut in (1, 17, 39):
            _, rest, finish = await generate(stub, tokens(PROMPT + sampled[:cut], cut, **sampling))
            assert [t for d in rest for t in d.token_ids] == sampled[cut:]
            assert [v for d in rest for v in d.logprobs] == pytest.approx(logprobs[cut:], abs=2e-5)
            assert rest[0].spans[0].start == cut, "positions count from the completion's first token"
            assert finish.message.content == whole.message.content
            assert finish.finish_reason == whole.finish_reason == pb.FINISH_REASON_LENGTH
            assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (len(PROMPT), 40)
        _, rest, finish = await generate(stub, tokens(PROMPT + sampled, 40, **sampling))
        assert rest == [] and finish.message.content == whole.message.content


async def test_a_stop_string_may_lie_across_the_cut(model_folder: Path) -> None:
    async with serving(model_folder) as stub:
        _, deltas, whole = await generate(stub, tokens(PROMPT))
        sampled = [t for d in deltas for t in d.token_ids]
        text = whole.message.content
        at = next(
            i
            for i in range(4, len(text) - 2)
            if text[i : i + 2].isascii() and text.count(text[i : i + 2]) == 1
        )
        stop = text[at : at + 2]
        _, _, stopped = await generate(stub, tokens(PROMPT, stop=[stop]))
        count = stopped.usage.completion_tokens
        for cut in (count - 1, count - 2):
            _, rest, finish = await generate(stub, tokens(PROMPT + sampled[:cut], cut, stop=[stop]))
            assert sum(len(d.token_ids) for d in rest) == count - cut
            assert (finish.stop_match, finish.message.content) == (stop, text[:at])


@pytest.mark.parametrize(
    ("written", "stop", "reasoning"),
    [
        ("Hm.</think>So", ".</think>S", "Hm"),  # of the thinking's mark, which is told apart
        ("Hm.</think>So", ".So", None),  # the mark stands between
        ("H<|im_start|>m.", "Hm", ""),  # what is left out does not
    ],
)
async def test_stop_strings_are_looked_for_in_the_text_that_is_told(
    tmp_path: Path, written: str, stop: str, reasoning: str | None
) -> None:
    """stop_strings.py 4: where the marks of thinking are special tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
    tokenizer.chat_template = templates.QWEN3
    tokenizer.save_pretrained(tmp_path)
    qwen3(0, vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    said = tokenizer.encode(written)
    async with serving(tmp_path) as stub:
        wanted = tokens(PROMPT + said, len(said), stop=[stop], max_tokens=len(said))
        _, _, finish = await generate(stub, wanted)
    assert finish.stop_match == ("" if reasoning is None else stop)
    told = finish.message.reasoning_content + finish.message.content
    assert told == ("Hm.So" if reasoning is None else reasoning)


async def test_malformed_resumptions_are_refused(model_folder: Path) -> None:
    async with serving(model_folder) as stub:
        by_messages = pb.GenerateRequest(
            messages=pb.MessagesPrompt(messages=[common_pb2.Message(role="user", content="x")]),
            resumed_tokens=1,
        )
        with_tail = tokens(PROMPT, 1)
        with_tail.tokens.tail_messages.add(role="user", content="x")
        cases = [tokens(PROMPT, 4), tokens(PROMPT, 9), tokens(PROMPT, 1, n=2), by_messages, with_tail]
        for request in cases:
            with pytest.raises(QuartetError) as caught:
                await generate(stub, request)
            assert caught.value.reason == "INVALID_REQUEST"
            assert caught.value.metadata["field"] == "resumed_tokens"
        _, rest, finish = await generate(stub, tokens([1] * 128, 100, max_tokens=200))
        assert rest == [] and finish.finish_reason == pb.FINISH_REASON_LENGTH, "the context was full"
        with pytest.raises(QuartetError) as caught:
            await generate(stub, tokens([1] * 129, 100, max_tokens=200))
        assert caught.value.reason == "PROMPT_TOO_LONG"


async def test_a_break_of_the_prefix_is_reported_and_counted(model_folder: Path, tmp_path: Path) -> None:
    """Invariant 6, prompts.py 1: a template without a sound way to append is rendered whole, and counted."""
    template = tmp_path / "template.jinja"
    template.write_text(templates.CONTINUES_THE_TURN)
    before = REGISTRY.get_sample_value("quartet_prefix_breaks_total") or 0.0
    async with serving(model_folder, chat={"template_file": template}) as stub:
        first = pb.GenerateRequest(
            messages=pb.MessagesPrompt(messages=[common_pb2.Message(role="user", content="hi")]),
            sampling=common_pb2.SamplingParams(max_tokens=4, seed=1, ignore_eos=True),
        )
        begun, deltas, _ = await generate(stub, first)
        assert begun.prefix_kept
        known = [*begun.prompt_token_ids, *(t for d in deltas for t in d.token_ids)]

        question = tokens(known, max_tokens=4)
        question.tokens.tail_messages.add(role="user", content="more")
        begun, _, _ = await generate(stub, question)
        assert begun.prefix_kept and list(begun.prompt_token_ids)[: len(known)] == known

        answer = tokens(known, max_tokens=4)
        answer.tokens.tail_messages.add(role="tool", content="42")
        begun, _, _ = await generate(stub, answer)
        assert not begun.prefix_kept
        assert b"42" in bytes_of(begun)
        assert (await stub.GetModel(pb.GetModelRequest(), timeout=5)).prefix_breaks == 1

        unknown = tokens([*known, 1], max_tokens=4)
        unknown.tokens.tail_messages.add(role="tool", content="42")
        with pytest.raises(QuartetError) as caught:
            await generate(stub, unknown)
        assert caught.value.metadata["field"] == "tokens.tail_messages"
        assert "whole conversation" in caught.value.metadata["remedy"]
        assert (await stub.GetModel(pb.GetModelRequest(), timeout=5)).prefix_breaks == 2
    assert REGISTRY.get_sample_value("quartet_prefix_breaks_total") == before + 2


def bytes_of(begun: pb.GenerateStart) -> bytes:
    """The bytes of a prompt: the test's tokenizer has one token for each, in the order of its alphabet."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return "".join(alphabet[token] for token in begun.prompt_token_ids if token < 256).encode()


def test_conversations_are_bounded() -> None:
    held = Conversations()
    for number in range(MAX_CONVERSATIONS + 10):
        held.keep([number], "", ({"role": "user", "content": str(number)},))
    assert held.recall([9], "") is None and held.recall([10], "") is not None
    for number in range(3):
        held.keep([10, number], "", ({"role": "user", "content": "x" * (30 << 20)},))
    assert held.recall([10, 0], "") is None and held.recall([10, 2], "") is not None
    assert held.recall([MAX_CONVERSATIONS], "") is None, "what was used longest ago went first"


async def test_what_came_together_is_told_together() -> None:
    def delta(start: int, count: int, version: int, index: int = 0) -> Delta:
        tokens = list(range(start, start + count))
        tops = [{token: 0.0} for token in tokens]
        return Delta(index, tokens, [float(t) for t in tokens], [Span(start, count, version)], tops)

    sent: list[Any] = [
        Started((1,), [], True, True),
        delta(0, 32, 1),
        delta(0, 8, 1, index=1),
        delta(32, 30, 1),
        delta(62, 3, 2),
        delta(8, 8, 2, index=1),
        Ended(0, pb.FINISH_REASON_STOP, "", "", common_pb2.Message(), 1, 65, 0),
    ]

    told_of_silence = asyncio.Event()

    async def events() -> AsyncIterator[Any]:
        for event in sent:
            yield event
        await told_of_silence.wait()
        raise QuartetError("INTERNAL", "later")

    batches: list[list[Any]] = []
    with pytest.raises(QuartetError):
        async for batch in joined(events(), 0.05):
            batches.append(batch)
            if not batch:
                told_of_silence.set()
    assert [] in batches, "silence is told"
    told = [event for batch in batches for event in batch]
    assert isinstance(told[0], Started) and isinstance(told[-1], Ended)
    for index, spans in ((0, [(0, 62, 1), (62, 3, 2)]), (1, [(0, 8, 1), (8, 8, 2)])):
        mine = [event for event in told if isinstance(event, Delta) and event.index == index]
        assert all(len(event.token_ids) <= 64 for event in mine)
        assert [t for event in mine for t in event.token_ids] == list(range(spans[-1][0] + spans[-1][1]))
        assert [
            list(top) == [t] for event in mine for t, top in zip(event.token_ids, event.tops, strict=True)
        ]
        assert [(s.start, s.length, s.version) for event in mine for s in event.spans] == spans
    assert len(told) == 5


async def test_tokens_of_one_version_and_other_weights_are_not_told_as_one_span() -> None:
    """As after an update to a version of the same number, of another run of that name."""

    async def events() -> AsyncIterator[Any]:
        for at, weights_id in enumerate((7, 7, 8)):
            yield Delta(0, [at], [-1.0], [Span(at, 1, 1, weights_id)])

    told = [event async for batch in joined(events(), 5.0) for event in batch]
    spans = [(one.start, one.length, one.weights_id) for event in told for one in event.spans]
    assert spans == [(0, 2, 7), (2, 1, 8)]
