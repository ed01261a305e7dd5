"""Every engine: the likeliest tokens beside those that were sampled, told by the engine and by its front."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
from quartet_inference.engine import MAX_TOP

from .conformance import Replica
from .engine_calls import caught_midway, complete, complete_one
from .told import Told, chosen, distribution, random_prompt, tops_difference

pytestmark = pytest.mark.asyncio(loop_scope="session")

#: Tokens are named by their ids: a byte that is half a character has no text of its own.
BY_ID: dict[str, Any] = {
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "ignore_eos": True,
}


def by_id(names: dict[str, float]) -> dict[int, float]:
    """Alternatives as an engine tells them, of those named `token_id:N`."""
    return {int(name.removeprefix("token_id:")): logprob for name, logprob in names.items()}


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_p": 0.8},
        {"top_k": 2},
        {"min_p": 0.2, "temperature": 0.9},
        {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.3},
    ],
    ids=lambda sampling: ",".join(sampling) or "plain",
)
async def test_alternatives_are_those_of_a_plain_forward(replica: Replica, sampling: dict[str, Any]) -> None:
    """Of the distribution of the token's own log-probability: what top-k, top-p and min-p exclude as well."""
    rng = random.Random(1)
    prompts = [random_prompt(rng) for _ in range(4)]
    wanted: dict[str, Any] = {"n": 3, "top": 5, "max_tokens": 40, "ignore_eos": True, **sampling}
    groups = await asyncio.gather(*[complete(replica.door.engine, p, **wanted) for p in prompts])
    shaping = {k: v for k, v in sampling.items() if k not in ("top_p", "top_k", "min_p")}
    answers = [answer for group in groups for answer in group]
    worst = max(tops_difference(answer, replica.models, 5, **shaping) for answer in answers)
    assert worst <= replica.tolerance
    ranks = {
        list(top).index(token) if token in top else None
        for answer in answers
        for token, top in zip(answer.tokens, answer.tops, strict=True)
    }
    if sampling.get("temperature") == 0.0:
        assert ranks == {0}
    elif "top_k" in sampling:
        assert ranks == {0, 1}
    elif not shaping:
        assert {0, None} < ranks, "tokens were sampled that are among them, and some that are not"


async def test_each_request_of_a_batch_gets_as_many_as_it_asks_for(replica: Replica) -> None:
    """Also where every token is looked at as it comes, for the sake of a stop string."""
    engine, rng = replica.door.engine, random.Random(2)
    asked = [0, 5, 1, MAX_TOP, 0, 3] * 4
    calls = [
        complete_one(engine, random_prompt(rng, 60), top=top, max_tokens=40, stop=stop)
        for top, stop in zip(asked, [(), (), (), ("\x00never",)] * 6, strict=True)
    ]
    for top, answer in zip(asked, await asyncio.gather(*calls), strict=True):
        assert len(answer.tokens) == 40 and replica.difference(answer) <= replica.tolerance
        if top:
            assert tops_difference(answer, replica.models, top) <= replica.tolerance
        else:
            assert answer.tops == []


async def test_tokens_and_their_log_probabilities_are_the_same_to_the_bit_with_and_without(
    replica: Replica,
) -> None:
    prompt = list(range(40, 140))
    wanted: dict[str, Any] = {"temperature": 0.8, "presence_penalty": 0.3, "top_p": 0.9, "max_tokens": 60}

    async def ask(**more: Any) -> Told:
        return await complete_one(replica.door.engine, prompt, seeds=(7,), **wanted, **more)

    await ask()  # it leaves the prompt's keys for those that follow
    without, with_them = await ask(), await ask(top=MAX_TOP)
    assert with_them.tokens == without.tokens
    assert with_them.logprobs == without.logprobs
    assert len(with_them.tops) == 60 and without.tops == []


async def test_alternatives_go_on_through_an_update_each_of_the_version_that_sampled(
    replica: Replica,
) -> None:
    rng = random.Random(3)
    wanted: dict[str, Any] = {"top": 4, "max_tokens": 200, "temperature": 0.8}
    engine = replica.door.engine

    def begin() -> list[asyncio.Task[Told]]:
        return [
            asyncio.create_task(complete_one(engine, random_prompt(rng, 30), **wanted)) for _ in range(16)
        ]

    calls = await caught_midway(engine, begin, completions=16, tokens=100)
    await replica.serve(31)
    await engine.resume()
    answers = await asyncio.gather(*calls)
    assert any(len(set(answer.versions)) > 1 for answer in answers), "none was in flight at the update"
    worst = max(tops_difference(answer, replica.models, 4, temperature=0.8) for answer in answers)
    assert worst <= replica.tolerance


async def test_a_completion_begun_elsewhere_tells_those_of_the_tokens_sampled_here(replica: Replica) -> None:
    prompt = [9, 8, 7]
    wanted: dict[str, Any] = {"seeds": (4,), "top": 3, "max_tokens": 40}
    whole = await complete_one(replica.door.engine, prompt, **wanted)
    rest = await complete_one(replica.door.engine, prompt + whole.tokens[:17], resumed=17, **wanted)
    assert rest.tokens == whole.tokens[17:]
    for here, there in zip(rest.tops, whole.tops[17:], strict=True):
        values = list(there.values())
        assert list(here.values()) == pytest.approx(values, abs=2 * replica.tolerance, rel=0)
    assert tops_difference(rest, replica.models, 3) <= replica.tolerance


def chat_told(prompt: list[int], ids: list[int], content: list[Any], version: int) -> Told:
    """A choice of /v1/chat/completions as an engine tells it."""
    assert all(
        one.bytes == list(one.token.encode()) for entry in content for one in (entry, *entry.top_logprobs)
    )
    assert [entry.token for entry in content] == [f"token_id:{token}" for token in ids]
    tops = [by_id({one.token: one.logprob for one in entry.top_logprobs}) for entry in content]
    return Told(prompt, ids, [entry.logprob for entry in content], [version] * len(ids), tops)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_tells_alternatives_beside_each_token(replica: Replica, stream: bool) -> None:
    await replica.serve(32)
    asked: dict[str, Any] = {"seed": 5, "max_tokens": 50, "temperature": 0.9, "n": 2, "extra_body": BY_ID}
    answer = await replica.door.chat(logprobs=True, top_logprobs=3, stream=stream, **asked)
    ids: list[list[int]] = [[], []]
    content: list[list[Any]] = [[], []]
    prompt: list[int] = []
    async for piece in answer if stream else one_by_one(answer):
        prompt = getattr(piece, "prompt_token_ids", None) or prompt
        for choice in piece.choices:
            ids[choice.index] += getattr(choice, "token_ids", None) or []
            content[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert prompt and ids[0] != ids[1]
    for told in (chat_told(prompt, *one, max(replica.models)) for one in zip(ids, content, strict=True)):
        assert len(told.tokens) == 50
        assert replica.difference(told, temperature=0.9) <= replica.tolerance
        assert tops_difference(told, replica.models, 3, temperature=0.9) <= replica.tolerance


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_tell_alternatives_and_the_token_among_them(replica: Replica, stream: bool) -> None:
    """As OpenAI does: so many of the likeliest, and the sampled one where it is not one of them."""
    await replica.serve(33)
    prompts = [[5, 6, 7], [200]]
    asked: dict[str, Any] = {"seed": 5, "max_tokens": 50, "n": 2, "extra_body": BY_ID}
    answer = await replica.door.complete(prompt=prompts, logprobs=2, stream=stream, **asked)
    ids: list[list[int]] = [[], [], [], []]
    logprobs: list[list[float]] = [[], [], [], []]
    tops: list[list[dict[str, float]]] = [[], [], [], []]
    async for piece in answer if stream else one_by_one(answer):
        for choice in piece.choices:
            ids[choice.index] += getattr(choice, "token_ids", None) or []
            if choice.logprobs:
                logprobs[choice.index] += choice.logprobs.token_logprobs
                tops[choice.index] += choice.logprobs.top_logprobs
    beside = 0
    for index, tokens in enumerate(ids):
        prompt = prompts[index // 2]
        told = Told(prompt, tokens, logprobs[index], [max(replica.models)] * 50)
        for token, logprob, names in zip(tokens, logprobs[index], tops[index], strict=True):
            top = by_id(names)
            assert top[token] == logprob
            if len(top) == 3:
                beside += 1
                assert list(top)[-1] == token
                del top[token]
            told.tops.append(top)
        assert replica.difference(told) <= replica.tolerance
        assert tops_difference(told, replica.models, 2) <= replica.tolerance
    assert 0 < beside < 4 * 50


async def test_an_echo_tells_alternatives_of_prompt_and_completion_alike(replica: Replica) -> None:
    """Those of Score, as all log-probabilities beside a prompt: at temperature 1, without penalties."""
    model = await replica.serve(34)
    prompt = list(range(70, 100))
    (choice,) = (
        await replica.door.complete(
            prompt=prompt, echo=True, logprobs=4, max_tokens=20, temperature=0.5, extra_body=BY_ID
        )
    ).choices
    whole = [*prompt, *choice.token_ids]
    plain = distribution(model, whole[:1], whole[1:])
    assert len(whole) == 50 and len(choice.logprobs.top_logprobs) == 50
    for row, token, names in zip(plain, whole[1:], choice.logprobs.top_logprobs[1:], strict=True):
        top = by_id(names)
        assert len(top) in (4, 5) and token in top
        have = torch.tensor(list(top.values()))
        assert (have - chosen(row.expand(len(top), -1), list(top))).abs().max() <= replica.tolerance
        assert (have[:4] - row.topk(4).values).abs().max() <= replica.tolerance


async def test_who_asks_for_none_is_told_none(replica: Replica) -> None:
    """Beside a request that asks for some, which both engines compute together with it."""
    door, asked = replica.door, {"max_tokens": 30, "seed": 1, "extra_body": {"ignore_eos": True}}
    some, none, zero, completion = await asyncio.gather(
        door.chat(logprobs=True, top_logprobs=MAX_TOP, **asked),
        door.chat(**asked),
        door.chat(logprobs=True, top_logprobs=0, **asked),
        door.complete(logprobs=0, **asked),
    )
    assert {len(entry.top_logprobs) for entry in some.choices[0].logprobs.content} == {MAX_TOP}
    assert none.choices[0].logprobs is None
    assert len(zero.choices[0].logprobs.content) == 30
    assert {len(entry.top_logprobs) for entry in zero.choices[0].logprobs.content} == {0}
    assert completion.choices[0].logprobs.top_logprobs is None
    assert len({one.choices[0].message.content for one in (some, none, zero)}) == 1


async def one_by_one(answer: Any) -> Any:
    """An answer that is not streamed, as a stream of one piece."""
    yield answer
