"""What shows that training is not stable, in the metrics of a run's steps and of its evaluations: for each
symptom a function that returns what is to be said at their end, or None.

1. The policy jumps: in FEW steps in a row, for each step of staleness, `train/mismatch_kl` is JUMP or more.
2. The reward fell: the mean of the last SOON or WINDOW steps is less than half of the best that as many
   earlier ones had, and by more than MARGIN standard errors of such means, as steps differ among themselves.
3. An evaluation fell: it is less than two thirds of the best before it, and by more than EVAL_MARGIN standard
   errors.
4. Where 1 or 2 was seen and the reward is gone, what else the metrics show of answers follows from that
   (`collapsed`).
5. Trainer and engine disagree: in FEW steps in a row the log-probabilities of sampled tokens under equal
   weights are DISAGREES nats apart or more, on average: of all, or of those that one replica sampled.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from quartet.run.config import RunConfig

from quartet_orchestrator.metrics import DIFFERENCE, OF_REPLICAS

#: Metrics of the steps so far, at most HISTORY of them, oldest first.
Steps = Sequence[Mapping[str, float]]
#: Metrics of evaluations by the steps applied before them.
Evaluations = Mapping[int, Mapping[str, float]]
_Measured = tuple[int, Mapping[str, float]]

REWARD = "eval/reward"

#: Of means; the shorter ones for what has to be told soon; steps in a row that are no accident.
WINDOW, SOON, FEW = 10, 3, 2
#: How far back "the best so far" reaches: every step kept is memory of the orchestrator.
HISTORY = 4 * WINDOW
#: Of rollouts; of a reward; of the samples that count after weighting.
HALF, TWO_THIRDS = 0.5, 2 / 3
#: Nats a token. Healthy runs stay below 0.2 for each step of staleness, also of a tiny model at a high rate.
JUMP = 0.5
#: Nats a token. Rounding alone, in bfloat16 on either side, makes it a hundredth.
DISAGREES = 0.1
#: Replicas of a sentence.
NAMED = 4
#: Of the effective sample size in FEW steps. One step of a healthy run may have 0.3: a single token does it.
VERY_LOW = 0.1
#: The best of many windows, compared after every step: of runs of small batches, whose rewards are noise,
#: one in 30 is told of a fall within 50 steps; at 4 it would be one in 10.
MARGIN = 5.0
#: An evaluation is compared a few times, and mostly over the same examples, which differ less.
EVAL_MARGIN = 3.0


def jumps(config: RunConfig, steps: Steps) -> str | None:
    last = steps[-FEW:]
    if not _jumped(config, last):
        return None
    divergence = fmean([step["train/mismatch_kl"] for step in last])
    size = fmean([step.get("train/effective_sample_size", 1.0) for step in last])
    fresher = f", or lower max_off_policy_steps (now {config.max_off_policy_steps})"
    return (
        f"training is not stable: in the last {FEW} steps the policy was {divergence:.2g} nats a token away "
        "from the one that sampled (train/mismatch_kl; less than 0.1 is usual), and importance weights left "
        f"{size:.0%} of the tokens' worth (train/effective_sample_size)"
        + _calmer(config)
        + (fresher if config.max_off_policy_steps > 1 else "")
    )


def disagree(config: RunConfig, steps: Steps) -> str | None:
    last = steps[-FEW:]
    if len(last) < FEW:
        return None
    replicas = [name for name in last[-1] if name.startswith(f"{OF_REPLICAS}/")]
    # The farthest first: what was read back from the journal has no order.
    differ = [name for name in replicas if _differs(name, last)]
    off = sorted(differ, key=lambda name: (-last[-1][name], name))
    as_a_whole = _differs(DIFFERENCE, last)
    if not off and not as_a_whole:
        return None
    # Where all are off, or it is not known who samples what, there is no single one to look at. Of others too
    # few tokens may have been compared to be told of.
    single = off if len(off) < len(replicas) or not as_a_whole else []
    names = [name.removeprefix(f"{OF_REPLICAS}/") for name in single[:NAMED]]
    who = f"{', '.join(names)}{' and others' * (len(single) > NAMED)}"
    tokens = f"tokens that {who} sampled" if single else "sampled tokens"
    apart = fmean(step[name] for step in last for name in single or [DIFFERENCE])
    metric = OF_REPLICAS if single else DIFFERENCE
    looked_at = "this replica has" if len(single) == 1 else "a replica has"
    return (
        f"trainer and engine disagree: in the last {FEW} steps log-probabilities of {tokens} were "
        f"{apart:.2g} nats apart under the same weights ({metric}; in bfloat16 0.01 is usual, in float32 "
        f"0); {looked_at} another base model or computes otherwise: see what its engine is started with"
    )


def _differs(name: str, last: Steps) -> bool:
    return all(step.get(name, 0.0) >= DISAGREES for step in last)  # nor where one is no number


def falls(config: RunConfig, steps: Steps) -> str | None:
    for size in (SOON, WINDOW):
        earlier, last = steps[:-size], steps[-size:]
        if len(earlier) < size:
            return None
        best, now = _best(_rewards(earlier), size), fmean(_rewards(last))
        error = _noise(config, steps) * math.sqrt(2 / size)
        if 0 < best * HALF > now and best - now > MARGIN * error:
            return (
                f"the mean reward fell from {best:.3g} at its best to {now:.3g} in the last {size} steps: "
                "training is not stable" + _calmer(config)
            )
    return None


def skips(config: RunConfig, steps: Steps) -> str | None:
    last = steps[-WINDOW:]
    skipped = sum(step.get("train/skipped_steps", 0.0) for step in last)
    if skipped < FEW:
        return None
    return (
        f"{skipped:.0f} optimizer steps of the last {len(last)} batches had no finite loss or gradients"
        + _calmer(config)
    )


def is_far(config: RunConfig, steps: Steps) -> str | None:
    name = "train/effective_sample_size"
    last = [step.get(name, 1.0) for step in steps[-FEW:]]
    size = fmean(last) if len(last) == FEW and max(last) < VERY_LOW else mean(steps, name, 1.0)
    if size >= HALF or _jumped(config, steps[-WINDOW:]):
        return None
    return (
        "the policy that is trained is far from the one that sampled: importance weights leave "
        f"{size:.0%} of the tokens' worth ({name}); lower max_off_policy_steps (now "
        f"{config.max_off_policy_steps}) or learning_rate (now {config.learning_rate:g})"
    )


def evaluation_fell(config: RunConfig, evaluations: Evaluations) -> str | None:
    """What is to be said of the latest evaluation: that it fell, where the one before had not.

    `evaluations`: the metrics of each of the run's evaluations, by the steps applied before it; those that
    are `compared` are enough.
    """
    measured = [(step, one) for step, one in sorted(evaluations.items()) if REWARD in one]
    if config.external_trainer or not measured or measured[-1][0] != max(evaluations):
        return None
    fall = _fall(measured)
    if fall is None or _fall(measured[:-1]) is not None:
        return None
    (at_best, best), (at, now) = fall
    kept = "; quartet export --best takes the best model that is kept" if at_best else ""
    return (
        f"the evaluation fell from {best[REWARD]:.3g} after {at_best} steps to {now[REWARD]:.3g} after {at}: "
        "training makes the model worse" + _calmer(config) + kept
    )


def compared(rewards: Mapping[int, float | None]) -> list[int]:
    """Of all evaluations, by the steps before them, whose mean rewards are given: those that
    `evaluation_fell` looks at. They are a few, however many there are."""
    measured = [step for step in sorted(rewards) if rewards[step] is not None]
    before = [steps for steps in (measured[:-1], measured[:-2]) if steps]
    best = [max(steps, key=lambda step: rewards[step] or 0.0) for steps in before]
    return sorted({max(rewards), *measured[-2:], *best})


def collapsed(config: RunConfig, steps: Steps, reward: str, *, by_fall: bool = True) -> bool:
    """Whether `reward`, a metric, was there and is gone, in a run that was seen to be unstable: by jumps, or
    by the fall of its mean reward."""
    rewards = [step[reward] for step in steps if reward in step]
    if config.external_trainer or len(rewards) <= SOON:
        return False
    gone = 0 < _best(rewards, SOON) * HALF > fmean(rewards[-SOON:])
    return gone and (_jumped(config, steps) or (by_fall and falls(config, steps) is not None))


def mean(steps: Steps, name: str, otherwise: float = 0.0) -> float:
    """Over those of the last WINDOW steps that have it, if half of them do: an environment may be rare."""
    last = steps[-WINDOW:]
    values = [step[name] for step in last if name in step]
    return fmean(values) if len(last) == WINDOW and len(values) >= HALF * WINDOW else otherwise


def _jumped(config: RunConfig, steps: Steps) -> bool:
    """Whether FEW steps in a row did, among these."""
    far = [_is_jump(config, step) for step in steps]
    return any(all(far[at : at + FEW]) for at in range(len(far) - FEW + 1))


def _is_jump(config: RunConfig, step: Mapping[str, float]) -> bool:
    lag = step.get("staleness/mean", 1.0)
    if lag == 0 and config.versions_per_step == 1:
        return False  # the policies are the same: it is the engine that computes otherwise
    return step.get("train/mismatch_kl", 0.0) >= JUMP * max(1.0, lag)


def _rewards(steps: Steps) -> list[float]:
    # Absent where it is no finite number.
    return [step.get("train/reward", 0.0) for step in steps]


def _best(values: Sequence[float], length: int) -> float:
    """The largest mean of so many in a row."""
    return max(fmean(values[at : at + length]) for at in range(len(values) - length + 1))


def _noise(config: RunConfig, steps: Steps) -> float:
    """Standard deviation of a step's mean reward: as neighbouring steps differ, and at least what so many
    rollouts make of it. The largest drop is left out, which may be the fall itself; few differences count
    for more, as they may be small by chance."""
    differences = sorted(after - before for before, after in pairwise(_rewards(steps)))[1:]
    variance = fmean([one**2 for one in differences]) / 2 * (1 + 4 / len(differences))
    spread = fmean([step.get("train/reward_std", 0.0) ** 2 for step in steps])
    return math.sqrt(max(variance, spread / config.batch_size))


def _fall(measured: Sequence[_Measured]) -> tuple[_Measured, _Measured] | None:
    """The best evaluation and the last one, where that fell from it."""
    if len(measured) < FEW:
        return None
    now = measured[-1]
    best = max(measured[:-1], key=lambda one: one[1][REWARD])
    before, after = best[1][REWARD], now[1][REWARD]
    fell = 0 < before * TWO_THIRDS > after and before - after > EVAL_MARGIN * _error(best[1], now[1])
    return (best, now) if fell else None


def _error(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Of the difference of two means, as far as nothing has changed: the spread is that of all results
    together. Of a few that are all alike it would be 0 in each."""
    counts = [each["eval/rollouts"] for each in (one, other)]
    means = [each[REWARD] for each in (one, other)]
    middle = sum(n * mean for n, mean in zip(counts, means, strict=True)) / sum(counts)
    squares = [each["eval/reward_std"] ** 2 + (each[REWARD] - middle) ** 2 for each in (one, other)]
    variance = sum(n * square for n, square in zip(counts, squares, strict=True)) / sum(counts)
    return math.sqrt(variance * sum(1 / n for n in counts))


def _calmer(config: RunConfig) -> str:
    rate, norm = f"lower learning_rate (now {config.learning_rate:g})", config.max_grad_norm
    lower = f"{rate} or max_grad_norm (now {norm:g})" if norm else f"{rate}, set max_grad_norm (now 0: never)"
    return (
        f"; {lower}, raise batch_size (now {config.batch_size}) or rollouts_per_example (now "
        f"{config.rollouts_per_example}), or hold the policy {_held(config)}"
    )


def _held(config: RunConfig) -> str:
    """By the name under which the run has its penalty, where it has one."""
    penalty, algorithm = config.kl_penalty, config.algorithm
    if algorithm.target_kl is not None:
        key = "kl_penalty" if penalty.enabled and penalty.target_kl is not None else "algorithm"
        return f"by a lower {key}.target_kl (now {algorithm.target_kl:g})"
    if algorithm.kl_coef:
        key = "kl_penalty.beta" if penalty.enabled else "algorithm.kl_coef"
        return f"by a larger {key} (now {algorithm.kl_coef:g})"
    return "with [kl_penalty]"
