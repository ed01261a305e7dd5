"""What a run learns in expectation: the orchestrator's credit and normaliser and the trainer's gradients
together, over every group that a tiny policy can sample, each as often as it does; against the exact
gradient. docs/algorithms.md ("What a step is in expectation") says what is shown here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quartet.config.load import validate
from quartet.kit.channel import connect
from quartet.run.config import RunConfig
from quartet.v1 import rollout_pb2 as rpb
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1.trainer_service_pb2_grpc import TrainerServiceStub
from quartet_orchestrator import batches
from quartet_orchestrator.specs import loss_spec
from safetensors.torch import load_file

VOCABULARY, END, LENGTH, GROUP = 3, 2, 3, 2
PROMPT = [0, 1]
Weights = dict[str, torch.Tensor]


def completions(length: int = LENGTH, before: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Every one that the policy can sample: up to its end, or so many tokens."""
    if len(before) == length or (before and before[-1] == END):
        yield before
    else:
        for token in range(VOCABULARY):
            yield from completions(length, (*before, token))


ALL = list(completions())
#: Of a policy that is stopped a token earlier: a fourth as many pairs, an eighth as many threes.
SHORT = list(completions(LENGTH - 1))
#: What each earns: of its own, and more where it is long.
REWARDS = [0.2 * len(one) + math.sin(3.0 * index) for index, one in enumerate(ALL)]


class Policy:
    """A model in float64, and what it says of every completion."""

    def __init__(self, folder: Path, samples: Sequence[tuple[int, ...]] = ALL) -> None:
        self.samples = samples
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder).double()
        #: Of the distribution before each token: of each completion [length, vocabulary].
        self.rows = [
            torch.log_softmax(self.model(torch.tensor([[*PROMPT, *one]])).logits[0, len(PROMPT) - 1 : -1], -1)
            for one in samples
        ]
        #: Log-probabilities of its tokens, with gradient.
        self.logps = [row[range(len(one)), list(one)] for row, one in zip(self.rows, samples, strict=True)]

    @property
    def chances(self) -> list[float]:
        """How often each is sampled."""
        return [float(logp.detach().sum().exp()) for logp in self.logps]

    def gradient(self, value: torch.Tensor) -> Weights:
        """Of anything made of the above."""
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(value, parameters, retain_graph=True), strict=True))

    def expected(self, of_tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        """The expectation of a sum over tokens where this policy samples; how often a completion comes is a
        constant of it."""
        return torch.stack(
            [chance * one.sum() for chance, one in zip(self.chances, of_tokens, strict=True)]
        ).sum()

    def earns(self, rewards: Sequence[float] = REWARDS) -> torch.Tensor:
        """The expected reward, with gradient."""
        earned = (logp.sum().exp() * reward for logp, reward in zip(self.logps, rewards, strict=True))
        return torch.stack(list(earned)).sum()


@pytest.fixture(scope="module")
def policies(write_qwen3: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders of the policy and of another one."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "head_dim": 8, "intermediate_size": 8, "max_position_embeddings": 16,
    }  # fmt: skip
    made = [write_qwen3(tmp_path_factory.mktemp("policy"), seed=seed, **sizes) for seed in (3, 4)]
    for folder in made:
        (folder / "tokenizer_config.json").write_text("{}")
    return made


def rollout(sampler: Policy, index: int, reward: float) -> rpb.Rollout:
    """As an environment host sends it."""
    tokens = sampler.samples[index]
    span = rpb.PolicySpan(start=len(PROMPT), length=len(tokens))
    sample = rpb.Sample(token_ids=[*PROMPT, *tokens], spans=[span], logprobs=sampler.logps[index].tolist())
    return rpb.Rollout(reward=reward, samples=[sample])


@asynccontextmanager
async def trained(serving: Any, states: Path, policy: Path, reference: Path | None = None) -> Any:
    """A trainer with the run on it."""
    async with serving(states) as address, connect(address) as channel:
        stub: Any = TrainerServiceStub(channel)
        spec = pb.RunSpec(base_model=str(policy), optimizer=pb.OptimizerSpec(learning_rate=1.0))
        if reference is not None:
            spec.reference.model = str(reference)
        await stub.CreateRun(pb.CreateRunRequest(run_id="r", spec=spec))
        yield stub


async def expected_gradient(
    stub: Any, config: RunConfig, sampler: Policy, rewards: Sequence[float] = REWARDS
) -> Weights:
    """What the trainer accumulates when every group comes as often as the sampler makes it."""
    seq_id = 0
    several = range(len(sampler.samples))
    for group in itertools.combinations_with_replacement(several, config.rollouts_per_example):
        orders = len(set(itertools.permutations(group)))
        weight = orders * math.prod(sampler.chances[index] for index in group)
        groups = [[rollout(sampler, index, rewards[index]) for index in group]]
        rollouts, advantages = batches.credited(config.algorithm, groups)
        seq_id += 1
        start = pb.ForwardBackwardStart(
            run_id="r", seq_id=seq_id, loss=loss_spec(config, 0),
            normalizer=batches.normalizer(config, rollouts) / weight,
        )  # fmt: skip
        await stub.ForwardBackward(iter(batches.frames(start, rollouts, advantages)))
    saved = await stub.SaveState(pb.SaveStateRequest(run_id="r", seq_id=seq_id + 1, name="s"))
    return load_file(Path(saved.state.path) / "gradients.safetensors")


def run(group: int = GROUP, **algorithm: Any) -> RunConfig:
    """Of batches of one group."""
    given = {
        "model": "m", "batch_size": group, "rollouts_per_example": group, "env": [{"id": "e"}],
        "sampling": {"max_tokens": LENGTH}, "algorithm": algorithm,
    }  # fmt: skip
    return validate(RunConfig, given)


def apart(found: Weights, wanted: Weights) -> float:
    """How far, as a part of what is wanted."""
    assert found.keys() == wanted.keys()
    difference = sum(float((found[name].double() - wanted[name]).square().sum()) for name in wanted)
    return math.sqrt(difference / sum(float(one.square().sum()) for one in wanted.values()))


SEQUENCES = {"mode": "truncate", "level": "sequence", "cap": 1e6}
#: Of each: what is chosen, and the gradient as a multiple of that of the mean reward.
UNBIASED: dict[str, tuple[dict[str, Any], float]] = {
    "dr_grpo": ({"preset": "dr_grpo"}, (GROUP - 1) / GROUP / LENGTH),
    "rloo": ({"preset": "rloo", "aggregation": "constant"}, 1 / LENGTH),
    "luspo": ({"preset": "luspo", "advantage": "rloo"}, 1.0),
    "vespo": ({"preset": "vespo", "advantage": "rloo", "aggregation": "constant"}, 1 / LENGTH),
    "reinforce": ({"advantage": "none", "loss": "none", "aggregation": "constant"}, 1 / LENGTH),
}
OFF_POLICY = {"preset": "rloo", "aggregation": "constant", "loss": "ppo", "proximal": True}
EXACT = 1e-5  # float32 against float64: some 2e-7 was seen


@pytest.mark.parametrize(("algorithm", "factor"), UNBIASED.values(), ids=UNBIASED)
async def test_credit_without_deviation_and_a_constant_normaliser_have_no_bias(
    serving_trainer: Any, tmp_path: Path, policies: list[Path], algorithm: dict[str, Any], factor: float
) -> None:
    policy = Policy(policies[0])
    assert sum(policy.chances) == pytest.approx(1.0)
    async with trained(serving_trainer, tmp_path, policies[0]) as stub:
        found = await expected_gradient(stub, run(**algorithm), policy)
    assert apart(found, policy.gradient(-factor * policy.earns())) < EXACT


@pytest.mark.parametrize(("group", "samples"), [(2, ALL), (3, SHORT)], ids=["2", "3"])
async def test_max_rl_climbs_the_series_of_the_log_likelihood(
    serving_trainer: Any, tmp_path: Path, policies: list[Path], group: int, samples: list[tuple[int, ...]]
) -> None:
    """With n rollouts, rewarded 0 or 1, its first n - 1 terms: log p = -sum over k of (1 - p)^k / k."""
    policy = Policy(policies[0], samples)
    rewards = [float(one[0] == 1) for one in policy.samples]
    success = policy.earns(rewards)
    series = -torch.stack([(1 - success) ** k / k for k in range(1, group)]).sum()
    async with trained(serving_trainer, tmp_path, policies[0]) as stub:
        config = run(group, preset="max_rl", aggregation="constant")
        found = await expected_gradient(stub, config, policy, rewards)
    assert apart(found, policy.gradient(-series / LENGTH)) < EXACT


@pytest.mark.parametrize(("level", "low", "high"), [("sequence", 0.0, EXACT), ("token", 0.3, 1.0)])
async def test_what_another_policy_sampled_has_no_bias_with_weights_of_sequences_alone(
    serving_trainer: Any, tmp_path: Path, policies: list[Path], level: str, low: float, high: float
) -> None:
    policy, sampler = Policy(policies[0]), Policy(policies[1])
    config = run(**OFF_POLICY, correction={**SEQUENCES, "level": level})
    async with trained(serving_trainer, tmp_path, policies[0]) as stub:
        found = await expected_gradient(stub, config, sampler)
    assert low <= apart(found, policy.gradient(-policy.earns() / LENGTH)) < high


def divergences(policy: Policy, other: Policy) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """KL(policy || other) and KL(other || policy) of the tokens of every completion."""
    pairs = [(one, reference.detach()) for one, reference in zip(policy.rows, other.rows, strict=True)]
    forward = [(mine.exp() * (mine - theirs)).sum(-1) / LENGTH for mine, theirs in pairs]
    backward = [(theirs.exp() * (theirs - mine)).sum(-1) / LENGTH for mine, theirs in pairs]
    return forward, backward


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "distill"])
async def test_the_divergence_from_a_reference_is_that_of_each_token_behind_what_was_sampled(
    serving_trainer: Any, tmp_path: Path, policies: list[Path], estimator: str
) -> None:
    """k2 and distillation learn KL(policy || reference) of each token, k3 KL(reference || policy), k1
    nothing."""
    policy, other = Policy(policies[0], SHORT), Policy(policies[1], SHORT)
    forward, backward = divergences(policy, other)
    chosen = {"advantage": "zero", "loss": "none", "kl_coef": 1.0, "kl_estimator": estimator}
    if estimator == "distill":
        chosen = {"preset": "opd", "reference": {"model": "another"}}
    async with trained(serving_trainer, tmp_path, policies[0], policies[1]) as stub:
        found = await expected_gradient(stub, run(**chosen, aggregation="constant"), policy)
    wanted = policy.gradient(policy.expected(backward if estimator == "k3" else forward))
    if estimator == "k1":
        # A thousandth of a thousandth of what the divergence would teach.
        assert apart({name: found[name] + wanted[name] for name in wanted}, wanted) < EXACT
    else:
        assert apart(found, wanted) < EXACT


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("sampled_by", [0, 1])
async def test_a_weighted_divergence_is_that_of_the_policy_whoever_sampled(
    serving_trainer: Any, tmp_path: Path, policies: list[Path], estimator: str, sampled_by: int
) -> None:
    policy, other = Policy(policies[0], SHORT), Policy(policies[1], SHORT)
    sampler = (policy, other)[sampled_by]
    chosen = {"advantage": "zero", "kl_coef": 1.0, "kl_estimator": estimator, "kl_weighted": True}
    async with trained(serving_trainer, tmp_path, policies[0], policies[1]) as stub:
        found = await expected_gradient(stub, run(**chosen, aggregation="constant"), sampler)
    forward, _ = divergences(policy, other)
    assert apart(found, policy.gradient(sampler.expected(forward))) < EXACT
