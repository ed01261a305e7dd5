"""Prompts told back with their log-probabilities: what tools of evaluation read log-likelihoods from."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from quartet_inference.engine import Delta, Finish, Request, ScoreRequest, ServedWeights
from quartet_inference.openai import answers
from tokenizers.processors import TemplateProcessing

from .engine_calls import update
from .openai_door import Door, opened
from .random_models import byte_tokenizer, qwen3
from .told import TOLERANCE, scores

Make = Callable[..., Any]
NEAR: dict[str, Any] = {"abs": TOLERANCE["embedded"], "rel": 0}


def tokens(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(1, 250), k=length)


async def test_each_token_has_the_log_probability_of_a_plain_forward_pass(
    door: Door, make_model: Make
) -> None:
    """echo.py 1: prompt and completion, of several prompts, at temperature 1 whatever the request's."""
    model = make_model(0)
    prompts = [tokens(40), tokens(3, 2), [7]]
    asked: Any = {"prompt": prompts, "echo": True, "logprobs": 2, "n": 2, "max_tokens": 4, "seed": 5}
    extra: Any = {"return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True}
    answer = await door.complete(**asked, temperature=0.5, presence_penalty=1.0, extra_body=extra)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for choice in answer.choices:
        prompt = prompts[choice.index // 2]
        whole, told = [*prompt, *choice.token_ids], choice.logprobs
        assert told.tokens == [f"token_id:{token}" for token in whole] and len(choice.token_ids) == 4
        plain = model(torch.tensor([whole])).logits[0, :-1].log_softmax(-1)
        assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
        assert told.token_logprobs[1:] == pytest.approx(scores(model, whole).tolist(), **NEAR)
        for row, token, logprob, top in zip(
            plain, whole[1:], told.token_logprobs[1:], told.top_logprobs[1:], strict=True
        ):
            best = row.topk(2)
            wanted = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            wanted[token] = float(row[token])
            assert top == pytest.approx({f"token_id:{one}": value for one, value in wanted.items()}, **NEAR)
            assert (logprob == max(top.values())) == (token == best.indices[0]), "greedy, to the bit"
        assert choice.logprobs_policy_version == 0
    assert answer.usage.prompt_tokens == sum(map(len, prompts))


async def test_the_prompt_comes_first_and_offsets_point_into_the_text(door: Door) -> None:
    asked: Any = {"max_tokens": 12, "seed": 3, "extra_body": {"ignore_eos": True}}
    for prompt in ("Zoë: 日本", list("Zoë: 日本".encode())):
        plain = await door.complete(prompt=prompt, **asked)
        (alone,) = (await door.complete(prompt=prompt, echo=True, **asked)).choices
        assert alone.logprobs is None
        (choice,) = (await door.complete(prompt=prompt, echo=True, logprobs=0, **asked)).choices
        assert choice.text == alone.text and choice.text.endswith(plain.choices[0].text)
        if isinstance(prompt, str):
            assert choice.text == prompt + plain.choices[0].text
    told = choice.logprobs
    assert told.top_logprobs is None and len(told.text_offset) == len(told.tokens)
    (given,) = (await door.complete(prompt="A日B", echo=True, logprobs=0, max_tokens=0)).choices
    assert (given.text, given.logprobs.text_offset) == ("A日B", [0, 1, 1, 1, 2])


async def test_what_a_tokenizer_puts_before_a_text_is_scored_and_not_told(tmp_path: Path) -> None:
    qwen3(0).save_pretrained(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    tokenizer.save_pretrained(tmp_path)
    async with opened(tmp_path) as door:
        (choice,) = (await door.complete(prompt="hi!", echo=True, logprobs=0, max_tokens=0)).choices
        assert (choice.text, choice.logprobs.text_offset) == ("hi!", [0, 0, 1, 2])
        assert choice.logprobs.tokens[0] == "<|endoftext|>"


async def test_nothing_is_sampled_for_no_tokens(door: Door, make_model: Make) -> None:
    """echo.py 2: such a prompt may fill the context; one that is longer is refused as ever."""
    before, full = door.engine.info().tokens_sampled, tokens(256)
    answer = await door.complete(prompt=full, echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer.choices
    assert choice.finish_reason == "length" and answer.usage.completion_tokens == 0
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(scores(make_model(0), full).tolist(), **NEAR)
    (alone,) = (await door.complete(prompt=[7], echo=True, logprobs=1, max_tokens=0)).choices
    assert (alone.logprobs.token_logprobs, alone.logprobs.top_logprobs) == ([None], [None])
    assert alone.logprobs.text_offset == [0] and len(alone.logprobs.tokens) == 1
    assert door.engine.info().tokens_sampled == before
    with pytest.raises(openai.BadRequestError, match="257 tokens"):
        await door.complete(prompt=tokens(257), echo=True, logprobs=1, max_tokens=0)
    with pytest.raises(openai.APIStatusError) as refused:
        await door.complete(prompt=full, echo=True, max_tokens=0, extra_body={"exact_policy_version": 4})
    assert refused.value.status_code == 412


@pytest.mark.parametrize("max_tokens", [0, 20])
async def test_a_stream_tells_the_same(door: Door, max_tokens: int) -> None:
    asked: Any = {"prompt": ["hi", "ho"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    asked |= {"seed": 3, "extra_body": {"return_token_ids": True}}
    whole = await door.complete(**asked)
    text, ends, ids = [""] * 4, {}, [[], [], [], []]  # type: ignore[var-annotated]
    async for chunk in await door.complete(stream=True, **asked):
        for choice in chunk.choices:
            text[choice.index] += choice.text
            ids[choice.index] += getattr(choice, "token_ids", None) or []
            if choice.finish_reason:
                ends[choice.index] = choice
    assert text == [choice.text for choice in whole.choices]
    assert ids == [choice.token_ids for choice in whole.choices]
    for choice in whole.choices:
        end = ends[choice.index]
        assert end.finish_reason == choice.finish_reason
        assert end.logprobs.token_logprobs[1:] == pytest.approx(choice.logprobs.token_logprobs[1:], **NEAR)
        assert end.logprobs.text_offset == choice.logprobs.text_offset
        assert end.logprobs.top_logprobs[1].keys() == choice.logprobs.top_logprobs[1].keys()


async def test_an_update_in_the_middle_mixes_no_versions_and_is_told(
    door: Door, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """echo.py 1: sampled by version 0, whole scored by version 1; pinned to 0 it is refused."""
    generate, other = door.engine.generate, make_model(1)

    async def and_update(request: Request) -> AsyncIterator[Delta | Finish]:
        async for event in generate(request):
            if isinstance(event, Finish) and door.engine.info().served.version == 0:
                await update(door.engine, other, ServedWeights("", 1, b"1"))
            yield event

    monkeypatch.setattr(door.engine, "generate", and_update)
    asked: Any = {"prompt": tokens(30), "echo": True, "logprobs": 1, "max_tokens": 5}
    extra: Any = {"return_token_ids": True, "ignore_eos": True}
    (choice,) = (await door.complete(**asked, extra_body=extra)).choices
    assert choice.policy_versions == [{"start": 0, "length": 5, "policy_version": 0}]
    assert choice.logprobs_policy_version == 1
    wanted = scores(other, [*tokens(30), *choice.token_ids]).tolist()
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(wanted, **NEAR)
    with pytest.raises(openai.APIStatusError) as refused:
        await door.complete(**asked, extra_body={"exact_policy_version": 0})
    assert refused.value.status_code == 412


async def test_an_answer_of_too_many_log_probabilities_is_refused(door: Door) -> None:
    asked: Any = {"prompt": "x", "echo": True, "logprobs": 20}
    assert (await door.complete(**asked, max_tokens=9)).choices
    for more in ({"max_tokens": 50_000}, {"n": 200, "max_tokens": 300}):
        with pytest.raises(openai.BadRequestError, match="at most 900000 log-probabilities"):
            await door.complete(**{**asked, **more})


async def test_a_request_is_scored_for_its_run(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ScoreRequest] = []
    score = door.engine.score

    async def spied(request: ScoreRequest) -> Any:
        asked.append(request)
        return await score(request)

    monkeypatch.setattr(door.engine, "score", spied)
    await door.complete(prompt=[1, 2], echo=True, logprobs=3, max_tokens=0, n=2,
                        extra_body={"exact_policy_version": 0})  # fmt: skip
    assert asked == [ScoreRequest((1, 2), ((1, 1),), "", 0, top=3)] * 2


async def test_large_answers_are_made_into_json_one_at_a_time(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """answers.py 4."""
    under_way, most = [0], [0]

    class Slow:
        @staticmethod
        def dumps(answer: Any) -> str:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
            time.sleep(0.05)
            under_way[0] -= 1
            return json.dumps(answer)

    monkeypatch.setattr(answers, "json", Slow)
    asked = [door.complete(prompt=[3, 5, 7], echo=True, logprobs=2, max_tokens=1) for _ in range(4)]
    assert [len(one.choices[0].logprobs.tokens) for one in await asyncio.gather(*asked)] == [4] * 4
    assert most == [1]
