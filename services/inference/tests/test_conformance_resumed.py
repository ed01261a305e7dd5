"""Every engine: a completion that was begun elsewhere goes on as if it had not moved."""

from __future__ import annotations

import random
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.seeds import completion_seed
from quartet.v1 import inference_service_pb2 as pb

from .conformance import Replica
from .told import random_prompt

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"seed": 4},
        {"seed": 4, "top_p": 0.9, "temperature": 0.8},
        {"temperature": 0.0, "frequency_penalty": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"seed": 9, "frequency_penalty": 1.0, "presence_penalty": 0.3},
    ],
    ids=lambda sampling: ",".join(sampling),
)
async def test_a_completion_begun_elsewhere_goes_on_as_if_it_had_not_moved(
    replica: Replica, sampling: dict[str, Any]
) -> None:
    rng = random.Random(8)
    prompt = random_prompt(rng, 50)
    wanted = {"max_tokens": 40, "ignore_eos": True, **sampling}
    whole = await replica.one(prompt, **wanted)
    for done in (1, 17, 39):
        rest = await replica.one(prompt + whole.tokens[:done], resumed=done, **wanted)
        assert rest.tokens == whole.tokens[done:]
        assert rest.finish.finish_reason == whole.finish.finish_reason
        assert rest.finish.usage.completion_tokens == 40
        assert rest.finish.usage.prompt_tokens == len(prompt)
        apart = max(abs(a - b) for a, b in zip(rest.logprobs, whole.logprobs[done:], strict=True))
        assert apart <= replica.tolerance
        assert rest.text == whole.text
    over = await replica.one(prompt + whole.tokens, resumed=40, **wanted)
    assert over.tokens == [] and over.finish.finish_reason == pb.FINISH_REASON_LENGTH
    assert over.text == whole.text


async def test_any_of_a_seeded_requests_completions_goes_on_by_itself(replica: Replica) -> None:
    """With its own place of the seed, whichever of the n it was."""
    prompt, seed = [3, 1, 4, 1, 5], 2**64 - 5
    wanted = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.9, "frequency_penalty": 0.5}
    group = await replica.ask(prompt, n=5, seed=seed, **wanted)
    assert len({tuple(one.tokens) for one in group}) == 5
    for index, whole in enumerate(group):
        for done in (0, 13):
            seeded = {"seed": completion_seed(seed, index), **wanted}
            rest = await replica.one(prompt + whole.tokens[:done], resumed=done, **seeded)
            assert rest.tokens == whole.tokens[done:]


async def test_completions_with_seeds_of_their_own_are_those_of_requests_of_their_own(
    replica: Replica,
) -> None:
    prompt, seeds = [2, 7, 1, 8], [5, 2**64 - 1, 0, 77]
    wanted = {"max_tokens": 30, "ignore_eos": True, "temperature": 0.9, "top_p": 0.95}
    together = await replica.ask(prompt, n=4, completion_seeds=seeds, **wanted)
    alone = [await replica.one(prompt, seed=seed, **wanted) for seed in seeds]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert len({tuple(one.tokens) for one in together}) == 4


@pytest.mark.parametrize(
    ("n", "wanted", "field"),
    [
        (3, {"completion_seeds": [1, 2]}, "completion_seeds"),
        (1, {"completion_seeds": [1], "seed": 1}, "seed"),
    ],
)
async def test_seeds_that_contradict_the_request_are_refused(
    replica: Replica, n: int, wanted: dict[str, Any], field: str
) -> None:
    with pytest.raises(QuartetError) as refused:
        await replica.ask([1, 2], n=n, **wanted)
    assert refused.value.reason == "INVALID_REQUEST" and refused.value.metadata["field"].endswith(field)


async def test_a_resumed_completion_ends_where_it_would_have_ended(replica: Replica) -> None:
    prompt, wanted = [7, 8, 9], {"seed": 21, "max_tokens": 60, "ignore_eos": True}
    whole = await replica.one(prompt, **wanted)
    pairs = [whole.text[i : i + 2] for i in range(3, len(whole.text) - 1)]
    stop = next(pair for pair in pairs if pair.isascii() and pair.isprintable())
    stopped = await replica.one(prompt, stop=[stop], **wanted)
    assert stopped.finish.stop_match == stop
    cut = len(stopped.tokens) - 1  # between the two characters of the stop string
    rest = await replica.one(prompt + stopped.tokens[:cut], resumed=cut, stop=[stop], **wanted)
    assert rest.tokens == stopped.tokens[cut:] and rest.finish.stop_match == stop
    assert rest.text == stopped.text
    done = len(stopped.tokens)
    ended = await replica.one(prompt + stopped.tokens, resumed=done, stop=[stop], **wanted)
    assert ended.tokens == [] and ended.finish.stop_match == stop
