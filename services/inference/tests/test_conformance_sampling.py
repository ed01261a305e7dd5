"""Every engine samples what a plain forward pass of transformers says."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
from quartet.v1 import inference_service_pb2 as pb
from quartet.v1 import rollout_pb2

from .conformance import CONTEXT, VLLM_ARGS, Replica
from .told import chosen, distribution, random_prompt, scores

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_greedy_tokens_and_their_logprobs_are_those_of_a_plain_forward(replica: Replica) -> None:
    """Trap 3 of vLLM's CPU build: an update leaves a tied head's packed weights as they were, and no word."""
    model = await replica.serve(1)
    rng = random.Random(1)
    prompts = [random_prompt(rng, 200) for _ in range(30)]
    answers = await asyncio.gather(*[replica.one(p, temperature=0, ignore_eos=True) for p in prompts])
    for answer in answers:
        plain = distribution(model, answer.prompt, answer.tokens)
        best = plain.max(-1).values
        behind = best - chosen(plain, answer.tokens)
        assert behind.max() <= replica.tolerance, "not the best token, nor one that ties with it"
        assert replica.difference(answer) <= replica.tolerance


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_p": 0.8},
        {"top_k": 5},
        {"min_p": 0.2, "temperature": 0.9},
        {"repetition_penalty": 1.4, "temperature": 0.8},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    ],
    ids=lambda sampling: ",".join(sampling) or "plain",
)
async def test_sampled_logprobs_are_those_before_truncation(
    replica: Replica, sampling: dict[str, Any]
) -> None:
    rng = random.Random(2)
    prompts = [random_prompt(rng) for _ in range(8)]
    groups = await asyncio.gather(*[replica.ask(p, n=3, ignore_eos=True, **sampling) for p in prompts])
    shaping = {k: v for k, v in sampling.items() if k not in ("top_p", "top_k", "min_p")}
    answers = [answer for group in groups for answer in group]
    assert max(replica.difference(answer, **shaping) for answer in answers) <= replica.tolerance
    model = replica.models[answers[0].versions[0]]
    for answer in answers:
        plain = distribution(model, answer.prompt, answer.tokens, **shaping)
        drawn = chosen(plain, answer.tokens)[:, None]
        better = (plain > drawn + 1e-4).sum(-1)
        mass_of_better = torch.where(plain > drawn + 1e-4, plain.exp(), 0.0).sum(-1)
        if "top_k" in sampling:
            assert better.max() < sampling["top_k"]
        if "top_p" in sampling:
            assert mass_of_better.max() < sampling["top_p"] + 1e-4
        if "min_p" in sampling:
            least = plain.max(-1).values + torch.tensor(sampling["min_p"]).log()
            assert (drawn[:, 0] >= least - 1e-4).all()
        if sampling.get("temperature") == 0.0:
            assert better.max() == 0


async def test_what_is_drawn_follows_the_distribution(replica: Replica) -> None:
    """2048 first tokens: their surprise is the entropy, the likeliest comes as often as it should."""
    model = await replica.serve(3)
    prompt = list(range(20))
    groups = await asyncio.gather(
        *[replica.ask(prompt, n=256, max_tokens=1, temperature=0.7, seed=seed) for seed in range(8)]
    )
    plain = distribution(model, prompt, [0], temperature=0.7)[0].double()
    drawn = [answer.tokens[0] for group in groups for answer in group]
    likely = int(plain.argmax())
    chance = plain[likely].exp().item()
    deviation = (len(drawn) * chance * (1 - chance)) ** 0.5
    assert abs(drawn.count(likely) - len(drawn) * chance) < 4.5 * deviation
    surprise = -plain[torch.tensor(drawn)]
    entropy = -(plain.exp() * plain).sum().item()
    spread = (surprise.var() / len(drawn)).sqrt().item()
    assert abs(surprise.mean().item() - entropy) < 4.5 * spread


async def test_seeds_decide_whoever_else_is_in_the_batch(replica: Replica) -> None:
    """Trap 9 of vLLM's CPU build: a seed of its own ends its core where a prompt is computed in parts."""
    rng = random.Random(3)
    prompt = [rng.randrange(256) for _ in range(2 * VLLM_ARGS["max_num_batched_tokens"])]
    wanted = {"temperature": 0.9, "ignore_eos": True}
    alone = await replica.ask(prompt, n=3, seed=5, **wanted)
    assert len({tuple(a.tokens) for a in alone}) == 3
    noise = [replica.ask(random_prompt(rng), max_tokens=50) for _ in range(30)]
    crowded, *_ = await asyncio.gather(replica.ask(prompt, n=3, seed=5, **wanted), *noise)
    assert [a.tokens for a in crowded] == [a.tokens for a in alone]
    for other in (6, 2**64 - 1, None):
        different = await replica.ask(prompt, n=3, **wanted, **({} if other is None else {"seed": other}))
        assert [a.tokens for a in different] != [a.tokens for a in alone]


async def test_given_tokens_are_scored_as_a_plain_forward_scores_them(replica: Replica) -> None:
    model = await replica.serve(13)
    rng = random.Random(9)
    lengths = [2, 5, 60, 200, CONTEXT]
    sequences = [[rng.randrange(256) for _ in range(length)] for length in lengths]
    samples = []
    for tokens in sequences:
        first = rng.randint(1, len(tokens) - 1)
        spans = [rollout_pb2.PolicySpan(start=first, length=len(tokens) - first)]
        samples.append(rollout_pb2.Sample(token_ids=tokens, spans=spans))
    noise = asyncio.create_task(replica.ask([1], n=16, max_tokens=100))
    scored = await replica.stub.Score(pb.ScoreRequest(samples=samples), timeout=60)
    await noise
    for sample, tokens, answer in zip(samples, sequences, scored.samples, strict=True):
        first = sample.spans[0].start
        expected = scores(model, tokens)[first - 1 :]
        assert (expected - torch.tensor(list(answer.logprobs))).abs().max() <= replica.tolerance
        assert answer.policy_version == max(replica.models)
