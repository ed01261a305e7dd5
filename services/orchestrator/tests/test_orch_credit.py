"""Every credit rule against the formula of its paper, in numpy, to 1e-6."""

from __future__ import annotations

import numpy as np
import pytest
from quartet.run.config import EnvConfig, RunConfig, parse_run
from quartet.run.sampling import SamplingConfig, SamplingKeys
from quartet.v1 import trainer_service_pb2 as tpb
from quartet.v1.rollout_pb2 import Rollout
from quartet_orchestrator import batches, credit, sampling

SEED = 4
EPSILON = 1e-4


def groups() -> list[list[float]]:
    rng = np.random.default_rng(SEED)
    graded = [rng.normal(size=n).tolist() for n in (2, 5, 8)]
    return [*graded, rng.integers(0, 2, 8).astype(float).tolist(), [0.3] * 4, [0.0] * 3, [1.0, 0.0]]


def grpo(r: np.ndarray, batch: list[np.ndarray]) -> np.ndarray:
    # arXiv 2402.03300, 4.1.2: r_i - mean(r) over std(r).
    return (r - r.mean()) / (r.std() + EPSILON)


def dr_grpo(r: np.ndarray, batch: list[np.ndarray]) -> np.ndarray:
    # arXiv 2503.20783, equation 3 without the std.
    return r - r.mean()


def rloo(r: np.ndarray, batch: list[np.ndarray]) -> np.ndarray:
    # arXiv 2402.14740, equation 8: each against the mean of the others.
    return np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))])


def reinforce_pp(r: np.ndarray, batch: list[np.ndarray]) -> np.ndarray:
    # arXiv 2501.03262, the baseline variant: centred in the group, scaled over the batch.
    centred = np.concatenate([one - one.mean() for one in batch])
    return (r - r.mean()) / (np.sqrt((centred**2).mean()) + EPSILON)


def max_rl(r: np.ndarray, batch: list[np.ndarray]) -> np.ndarray:
    # The gradient of log p(success): the success-weighted score, over the rate of success.
    # Within what non-negative rewards can come to.
    most = len(r) - 1
    return np.clip((r - r.mean()) / r.mean(), -most, most) if r.mean() > EPSILON else np.zeros(len(r))


FORMULAS = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "max_rl": max_rl,
    "none": lambda r, batch: r,
    "zero": lambda r, batch: 0 * r,
}


@pytest.mark.parametrize("kind", sorted(credit.CREDIT))
def test_credit_equals_the_formula(kind: str) -> None:
    batch = [np.array(group) for group in groups()]
    for ours, r in zip(credit.advantages(kind, groups()), batch, strict=True):
        np.testing.assert_allclose(ours, FORMULAS[kind](r, batch), atol=1e-6)


@pytest.mark.parametrize("kind", sorted(credit.CREDIT))
def test_advantages_of_any_rewards_are_finite_on_the_wire(kind: str) -> None:
    """credit.py 2: float32, of rewards as large as are taken."""
    most = sampling.MAX_REWARD
    odd = [[most, -most, 0.01], [most] * 7 + [-most], [most, 1e30 - most, 0.0, 0.0], [1.0, -1.0, 0.001, 0.0]]
    for group in odd:
        (ours,) = credit.advantages(kind, [group])
        sent = tpb.ForwardBackwardRequest()
        sent.batch.samples.add(advantages=ours)
        assert np.isfinite(sent.batch.samples[0].advantages).all(), (group, ours)
        if kind == "max_rl":
            assert max(map(abs, ours)) <= len(group) - 1


def test_max_rl_of_rewards_that_are_not_negative_is_cut_nowhere() -> None:
    """docs/algorithms.md"""
    rng = np.random.default_rng(SEED)
    for n in (1, 2, 8, 64):
        for r in (rng.random(n), (rng.random(n) < 0.2).astype(float), np.eye(1, n)[0]):
            if r.mean() > EPSILON:
                (ours,) = credit.advantages("max_rl", [r.tolist()])
                np.testing.assert_allclose(ours, (r - r.mean()) / r.mean(), rtol=1e-12)


def rollout(tokens: int, *, cut: bool = False, samples: int = 1) -> Rollout:
    made = Rollout(truncated=cut)
    for _ in range(samples):
        sample = made.samples.add(token_ids=range(tokens + 1), logprobs=[-1.0] * tokens)
        sample.spans.add(start=1, length=tokens)
    return made


def configured(aggregation: str, *, overlong: bool, minibatches: int = 1) -> RunConfig:
    return parse_run(
        f"""
        model = "m"
        batch_size = 12
        rollouts_per_example = 3
        [sampling]
        max_tokens = 9
        [[env]]
        id = "e"
        [algorithm]
        advantage = "reinforce_pp"
        aggregation = "{aggregation}"
        overlong_filtering = {str(overlong).lower()}
        num_minibatches = {minibatches}
        """
    )


def size_before_loss(rollouts: list[Rollout], *, overlong: bool) -> tuple[float, float]:
    """In tokens and in samples."""
    trained_on, _ = batches.credited(configured("token", overlong=overlong).algorithm, [rollouts])
    by_token, by_sequence = (
        batches.normalizer(configured(kind, overlong=overlong), trained_on) for kind in ("token", "sequence")
    )
    return by_token, by_sequence


def test_overlong_rollouts_are_in_neither_batch_nor_normaliser() -> None:
    rollouts = [rollout(3), rollout(9, cut=True), rollout(2, samples=2)]
    kept, advantages = batches.without_overlong(rollouts, [[1.0], [2.0], [3.0, 4.0]])
    assert kept == [rollouts[0], rollouts[2]] and advantages == [[1.0], [3.0, 4.0]]
    assert size_before_loss(rollouts, overlong=True) == (7, 3)
    assert size_before_loss(rollouts, overlong=False) == (16, 4)


def test_a_batch_of_overlong_rollouts_alone_teaches_nothing_and_is_not_empty() -> None:
    rollouts = [rollout(9, cut=True), rollout(9, cut=True)]
    assert batches.without_overlong(rollouts, [[1.0], [-1.0]]) == (rollouts, [[0.0], [0.0]])
    assert size_before_loss(rollouts, overlong=True) == (18, 2)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("overlong", [False, True])
def test_minibatches_are_the_batch_with_the_batchs_credit(aggregation: str, overlong: bool) -> None:
    config = configured(aggregation, overlong=overlong, minibatches=2)
    batch = [[rollout(3 + i), rollout(9, cut=i < 3), rollout(2, samples=2)] for i in range(4)]
    for i, group in enumerate(batch):
        for member, one in enumerate(group):
            one.reward = float(i * member)
    whole = batches.credited(config.algorithm, batch)
    parts = [batches.credited(config.algorithm, batch, number) for number in range(2)]
    assert [[*one, *other] for one, other in zip(*parts, strict=True)] == list(whole)
    assert all(rollouts for rollouts, _ in parts)
    # Means of the parts weigh as parts of the mean.
    found = [batches.normalizer(config, rollouts, minibatches=2) for rollouts, _ in parts]
    cut = 3 if overlong else 0
    size = credit.Size(18 + 36 + 16 - 9 * cut, 16 - cut)
    assert sum(found) == credit.normalizer(aggregation, size, rollouts=12, constant_tokens=9)
    assert batches.normalizer(config, whole[0]) == sum(found)


def test_a_constant_normaliser_is_the_longest_answer_of_any_environment() -> None:
    shared = configured("constant", overlong=False)
    own = [EnvConfig(id=name, sampling=SamplingKeys(max_tokens=most)) for name, most in (("a", 4), ("b", 20))]
    batch = [rollout(3)]
    for env, most in (((own[0],), 4), ((*own,), 20), ((own[0], EnvConfig(id="c")), 9)):
        config = shared.model_copy(update={"env": env})
        assert batches.normalizer(config, batch) == 12 * most
    unbounded = shared.model_copy(update={"env": (own[1], EnvConfig(id="c")), "sampling": SamplingConfig()})
    assert unbounded.constant_tokens is None, "refused where it is divided by"


def test_a_teachers_opinion_goes_beside_the_sample_not_in_it() -> None:
    judged = rollout(3)
    judged.samples[0].reference_logprobs.extend([-0.5, -0.25, -1.0])
    _, batch, _ = batches.frames(tpb.ForwardBackwardStart(run_id="r", seq_id=2), [judged], [[0.5]])
    (sent,) = batch.batch.samples
    assert list(sent.reference_logprobs) == [-0.5, -0.25, -1.0]
    assert not sent.sample.reference_logprobs and len(judged.samples[0].reference_logprobs) == 3
