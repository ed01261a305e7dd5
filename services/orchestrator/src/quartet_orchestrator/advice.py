"""Advice: what the field's rules of thumb say of a run, said when its metrics show the symptom.

1. A symptom is looked for in the means over WINDOW steps, never in one step.
2. It is told when it begins, and again only after it was away for WINDOW steps.
3. A piece of advice names what was seen, and the keys to change with their present values.

docs/advice.md has the whole table. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean

from quartet.run.config import RunConfig

Steps = Sequence[Mapping[str, float]]
#: What is to be said of a window; None where it shows nothing.
Symptom = Callable[[Steps], str | None]

WINDOW = 10
#: Steps whose metrics say all that is to be known: WINDOW windows, each a step later than the one before.
REMEMBERED = 2 * WINDOW - 1
#: Groups of an environment that earn all or nothing; groups without spread where they do neither.
NEARLY_ALL, MOST = 0.9, 0.75
#: Of rollouts; of a reward, within a window; of the samples that count after weighting.
HALF = 0.5
#: Prefix breaks for each rollout.
MANY_BREAKS = 0.1


def advice(config: RunConfig, steps: Steps) -> Iterator[str]:
    """What is to be said now. `steps`: metrics of the last REMEMBERED steps or fewer, oldest first."""
    windows = [steps[end - WINDOW : end] for end in range(len(steps), WINDOW - 1, -1)]
    for symptom in _symptoms(config) if windows else ():
        said = symptom(windows[0])
        if said is not None and not any(symptom(window) for window in windows[1:]):
            yield said


def _symptoms(config: RunConfig) -> Iterator[Symptom]:
    for env in config.env:
        for of_environment in (_too_hard, _too_easy, _alike):
            yield partial(of_environment, config, env.label)
    for of_rollouts in (_cut, _breaks, _thrown_away):
        yield partial(of_rollouts, config)
    for of_training in () if config.external_trainer else (_falls, _skips, _is_far, _routes_itself):
        yield partial(of_training, config)


def _too_hard(config: RunConfig, env: str, steps: Steps) -> str | None:
    share = _mean(steps, f"env/{env}/solved_none")
    if share < NEARLY_ALL:
        return None
    return (
        f"{env} is too hard as it is: in {share:.0%} of its groups no rollout earned anything; take args for "
        "easier examples, a larger model, quartet sft before, or a reward with partial credit"
        + _filter(config)
    )


def _too_easy(config: RunConfig, env: str, steps: Steps) -> str | None:
    share = _mean(steps, f"env/{env}/solved_all")
    if share < NEARLY_ALL:
        return None
    return (
        f"{env} has little left to teach: in {share:.0%} of its groups every rollout earned the full reward; "
        "take args for harder examples, or a lower weight" + _filter(config)
    )


def _alike(config: RunConfig, env: str, steps: Steps) -> str | None:
    share = _mean(steps, f"env/{env}/no_spread")
    if share < MOST or _too_hard(config, env, steps) or _too_easy(config, env, steps):
        return None
    return (
        f"in {share:.0%} of the groups of {env} all rewards are equal, and move nothing; raise "
        f"sampling.temperature (now {config.sampling.temperature:g}) or rollouts_per_example (now "
        f"{config.rollouts_per_example}), or give rewards more shades" + _filter(config)
    )


def _filter(config: RunConfig) -> str:
    return "" if config.resamples else "; [difficulty_filter] replaces such groups by fresh ones"


def _cut(config: RunConfig, steps: Steps) -> str | None:
    share = _mean(steps, "rollout/truncated_fraction")
    if share < HALF:
        return None
    limit = config.sampling.max_tokens or "the end of the context"
    return (
        f"{share:.0%} of the rollouts were cut by a limit; raise sampling.max_tokens (now {limit}), or the "
        "turns that the environment allows"
    )


def _breaks(config: RunConfig, steps: Steps) -> str | None:
    breaks = _mean(steps, "rollout/prefix_breaks")
    if breaks < MANY_BREAKS * config.batch_size:
        return None
    return (
        f"{breaks:.0f} times a step a later prompt did not go on from the tokens before it, and the rollout "
        "became several samples; take a chat template that keeps earlier turns as they were (some drop the "
        "thinking in them)"
    )


def _thrown_away(config: RunConfig, steps: Steps) -> str | None:
    replaced = _mean(steps, "rollout/resampled")
    if replaced < config.groups_per_batch:
        return None
    share = replaced / (replaced + config.groups_per_batch)
    return (
        f"{share:.0%} of the groups are sampled for nothing: they teach too little and are replaced "
        "(ledger/discarded says why); take tasks that the model solves sometimes, or wider bounds in "
        f"[difficulty_filter], or a lower max_resample (now {config.resamples})"
    )


def _falls(config: RunConfig, steps: Steps) -> str | None:
    middle = len(steps) // 2
    before, after = (
        fmean([step["train/reward"] for step in half]) for half in (steps[:middle], steps[middle:])
    )
    if not 0 < before * HALF > after:
        return None
    return (
        f"the mean reward fell from {before:.3g} to {after:.3g} within {WINDOW} steps: training is not stable"
        + _calmer(config)
    )


def _skips(config: RunConfig, steps: Steps) -> str | None:
    skipped = sum(step.get("train/skipped_steps", 0.0) for step in steps)
    if skipped < 2:
        return None
    return (
        f"{skipped:.0f} optimizer steps of the last {WINDOW} batches had no finite loss or gradients"
        + _calmer(config)
    )


def _calmer(config: RunConfig) -> str:
    return (
        f"; lower learning_rate (now {config.learning_rate:g}), raise batch_size (now {config.batch_size}) "
        f"or rollouts_per_example (now {config.rollouts_per_example}), or hold the policy with [kl_penalty]"
    )


def _is_far(config: RunConfig, steps: Steps) -> str | None:
    size = _mean(steps, "train/effective_sample_size", 1.0)
    if size >= HALF:
        return None
    return (
        "the policy that is trained is far from the one that sampled: importance weights leave "
        f"{size:.0%} of the tokens' worth (train/effective_sample_size); lower max_off_policy_steps (now "
        f"{config.max_off_policy_steps}) or learning_rate (now {config.learning_rate:g})"
    )


def _routes_itself(config: RunConfig, steps: Steps) -> str | None:
    share = _mean(steps, "train/replayed_fraction", 1.0)
    if not config.algorithm.router_replay or share >= NEARLY_ALL:
        return None
    return (
        f"the experts of {1 - share:.0%} of the tokens are not replayed (train/replayed_fraction): a rollout "
        "tells as many as fit into its message of 4 MiB; lower sampling.max_tokens, or the turns that the "
        "environment allows"
    )


def _mean(steps: Steps, name: str, otherwise: float = 0.0) -> float:
    """Over the steps that have it, if half of them do: an environment may be rare."""
    values = [step[name] for step in steps if name in step]
    return fmean(values) if len(values) >= HALF * len(steps) else otherwise
