"""Every engine: nothing ends a completion before `min_tokens`, and what is told is the free distribution."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
import torch
from quartet.errors import QuartetError
from quartet.v1 import inference_service_pb2 as pb

from .conformance import CONTEXT, Replica
from .told import distribution, random_prompt

pytestmark = pytest.mark.asyncio(loop_scope="session")

#: So many of the 260 tokens that a completion ends almost at once where they are not held back.
STOP_TOKENS = list(range(0, 250, 2))
LEAST = 12


async def ends(replica: Replica) -> set[int]:
    return {*STOP_TOKENS, *(await replica.info()).end_token_ids}


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.02},
        {"temperature": 1.5, "top_p": 0.6},
        {"top_k": 1},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "min_p": 0.05},
    ],
    ids=lambda sampling: ",".join(sampling) or "plain",
)
async def test_nothing_ends_a_completion_before_and_logprobs_are_those_before_the_restriction(
    replica: Replica, sampling: dict[str, Any]
) -> None:
    """sampler.py 1, 3; restriction.py 2: whoever else is in the batch."""
    rng = random.Random(41)
    held = await ends(replica)
    wanted = {"stop_token_ids": STOP_TOKENS, "max_tokens": 80, **sampling}
    prompts = [random_prompt(rng, 60) for _ in range(6)]
    calls = [replica.ask(prompt, n=2, min_tokens=LEAST, **wanted) for prompt in prompts]
    free = [replica.ask(prompt, n=1, **wanted) for prompt in prompts]
    *groups, others = await asyncio.gather(*calls, asyncio.gather(*free))
    answers = [answer for group in groups for answer in group]
    stopped = 0
    for answer in answers:
        stops = answer.finish.finish_reason == pb.FINISH_REASON_STOP
        assert len(answer.tokens) > LEAST and not held & set(answer.tokens[:-1])
        assert stops == (answer.tokens[-1] in held) and (stops or len(answer.tokens) == 80)
        stopped += stops
    if sampling.get("temperature", 1.0) >= 1.0 and "top_k" not in sampling:  # else one may go round and round
        assert stopped == len(answers)
        assert min(len(one.tokens) for (one,) in others) <= LEAST, "the others end when they like"
    shaping = {k: v for k, v in sampling.items() if k not in ("top_p", "top_k", "min_p")}
    # At a temperature of 0.02 the log-probabilities are in thousands.
    tolerance = replica.tolerance * (50 if sampling.get("temperature") == 0.02 else 1)
    assert max(replica.difference(answer, **shaping) for answer in answers) <= tolerance


async def test_a_greedy_completion_takes_the_likeliest_token_that_does_not_end_it(replica: Replica) -> None:
    model = replica.models[max(replica.models)]
    held, rng, ended = sorted(await ends(replica)), random.Random(43), False
    wanted = {"stop_token_ids": STOP_TOKENS, "min_tokens": LEAST, "temperature": 0, "max_tokens": LEAST}
    prompts = [random_prompt(rng, 40) for _ in range(8)]
    for answer in await asyncio.gather(*[replica.one(prompt, **wanted) for prompt in prompts]):
        rows = distribution(model, answer.prompt, answer.tokens)
        ended |= bool({int(token) for token in rows.argmax(-1)} & set(held))
        rows[:, held] = -float("inf")
        behind = rows.amax(-1) - rows.gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert behind.max() <= replica.tolerance, "not the likeliest, nor one that ties with it"
    assert ended, "none of them would have ended"


async def test_end_tokens_that_end_nothing_are_sampled_from_the_first_token_on(replica: Replica) -> None:
    """engine.Sampling.ends: with ignore_eos a completion ends at stop tokens alone."""
    end = (await replica.info()).end_token_ids[0]
    wanted = {"min_tokens": 200, "max_tokens": 200, "temperature": 4.0}
    prompts = [random_prompt(random.Random(seed), 30) for seed in range(16)]
    through = await asyncio.gather(*[replica.one(one, ignore_eos=True, **wanted) for one in prompts])
    assert any(end in answer.tokens for answer in through)
    held = await asyncio.gather(*[replica.one(one, **wanted) for one in prompts])
    assert all(len(answer.tokens) == 200 and end not in answer.tokens for answer in held)


async def test_tokens_that_were_sampled_elsewhere_count(replica: Replica) -> None:
    """completion.py 3."""
    wanted = {"stop_token_ids": STOP_TOKENS, "min_tokens": LEAST, "max_tokens": 80, "seed": 5}
    prompt = [2, 7, 1, 8]
    whole = await replica.one(prompt, **wanted)
    for cut in (1, LEAST - 1, LEAST):
        rest = await replica.one(prompt + whole.tokens[:cut], resumed=cut, **wanted)
        assert rest.tokens == whole.tokens[cut:], cut


async def test_a_stop_string_ends_it_only_behind_them_and_the_text_there(replica: Replica) -> None:
    """stop_strings.py 2, 3."""
    prompt, wanted = [7, 8, 9], {"seed": 21, "max_tokens": 200, "ignore_eos": True}
    whole = await replica.one(prompt, **wanted)
    letters = Counter(letter for letter in whole.text if letter.isascii() and letter.isprintable())
    ((stop, times),) = letters.most_common(1)
    assert times > 1, "the text says nothing twice"
    early = await replica.one(prompt, stop=[stop, "\x00never"], **wanted)
    assert early.text == whole.text[: whole.text.index(stop)]
    least = len(early.tokens)  # whose last token ends the stop string
    answer = await replica.one(prompt, stop=[stop, "\x00never"], min_tokens=least, **wanted)
    assert (answer.finish.finish_reason, answer.finish.stop_match) == (pb.FINISH_REASON_STOP, stop)
    assert answer.tokens == whole.tokens[: len(answer.tokens)] and len(answer.tokens) > least
    assert answer.text == whole.text[: whole.text.index(stop, len(early.text) + 1)]
    last = await replica.one(prompt, stop=[stop], **(wanted | {"min_tokens": least - 1}))
    assert last.tokens == early.tokens, "one fewer, and it ends there"


async def test_the_context_is_the_limit_all_the_same(replica: Replica) -> None:
    answer = await replica.one([1] * (CONTEXT - 5), min_tokens=50, max_tokens=60)
    assert len(answer.tokens) == 5 and answer.finish.finish_reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    ("wanted", "remedy"),
    [
        (
            {"min_tokens": 9, "max_tokens": 8},
            "min_tokens = 9 is refused; ask for at most max_tokens of them, 8",
        ),
        ({"min_tokens": 1, "structure": {"regex": "[a-z]*"}}, "a structure itself says where it ends"),
    ],
)
async def test_what_contradicts_it_is_refused(replica: Replica, wanted: dict[str, Any], remedy: str) -> None:
    """restriction.py 1."""
    with pytest.raises(QuartetError) as refused:
        await replica.one([1, 2], **wanted)
    assert refused.value.reason == "INVALID_REQUEST" and refused.value.metadata["field"] == "min_tokens"
    assert remedy.split("; ")[-1] in str(refused.value)
