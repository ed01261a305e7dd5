"""Advice: what the field's rules of thumb say of a run, said when its metrics show the symptom.

1. A symptom is looked for in the means over WINDOW steps. Sooner is told only what fewer steps are enough
   for: that training is not stable (stability.py), and that all rollouts of a run were cut so far.
2. It is told when it begins, and again only after it was away for WINDOW steps.
3. A piece of advice names what was seen, and the keys to change with their present values.
4. Nothing is too hard or too easy where rewards are not learned from, nor alike where they are not compared.
5. What only follows from another symptom is held back: too hard, or all alike, where nearly every rollout is
   cut; these, and the cutting, where a reward that was there went with the stability of the training.

docs/advice.md has the whole table. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean

from quartet import trainable
from quartet.run.config import RunConfig

from quartet_orchestrator.metrics import SAMPLED
from quartet_orchestrator.stability import (
    HALF,
    HISTORY,
    SOON,
    WINDOW,
    Steps,
    collapsed,
    disagree,
    falls,
    is_far,
    jumps,
    mean,
    skips,
)

#: What is to be said at the end of these steps; None where they show nothing.
Symptom = Callable[[Steps], str | None]

#: Steps whose metrics say all that is to be known: as far back as a symptom looks, for WINDOW ends.
REMEMBERED = HISTORY + WINDOW - 1
#: Groups of an environment that earn all or nothing; groups without spread where they do neither.
NEARLY_ALL, MOST = 0.9, 0.75
#: Prefix breaks for each rollout.
MANY_BREAKS = 0.1


def advice(config: RunConfig, steps: Steps) -> Iterator[str]:
    """What is to be said now, causes first. `steps`: metrics of the last REMEMBERED steps, or of all where
    there are fewer, oldest first."""
    ends = range(len(steps), max(0, len(steps) - WINDOW), -1)
    now, *before = [steps[max(0, end - HISTORY) : end] for end in ends] or [steps]
    for symptom in _symptoms(config):
        said = symptom(now)
        if said is not None and not any(symptom(earlier) for earlier in before):
            yield said


def _symptoms(config: RunConfig) -> Iterator[Symptom]:
    of_trainer = (disagree, jumps, falls, skips, is_far, _outgrows, _routes_itself)
    for of_training in () if config.external_trainer else of_trainer:
        yield partial(of_training, config)
    for of_rollouts in (_cut, _breaks, _thrown_away, _never_penalised):
        yield partial(of_rollouts, config)
    for env in config.env:
        for of_environment in _of_rewards(config):
            yield partial(of_environment, config, env.label)


def _of_rewards(config: RunConfig) -> Iterator[Callable[[RunConfig, str, Steps], str | None]]:
    """What is judged by rewards, as far as the run learns from these."""
    if config.algorithm.advantage == "zero":
        return
    yield from (_too_hard, _too_easy)
    if config.algorithm.compares and config.rollouts_per_example > 1:
        yield _alike


def _too_hard(config: RunConfig, env: str, steps: Steps) -> str | None:
    share = _share(steps, env, "solved_none")
    if share < NEARLY_ALL or _follows(config, env, steps):
        return None
    return (
        f"{env} is too hard as it is: in {share:.0%} of its groups no rollout earned anything; take args for "
        "easier examples, a larger model, quartet sft before, or a reward with partial credit"
        + _filter(config)
    )


def _too_easy(config: RunConfig, env: str, steps: Steps) -> str | None:
    share = _share(steps, env, "solved_all")
    if share < NEARLY_ALL:
        return None
    return (
        f"{env} has little left to teach: in {share:.0%} of its groups every rollout earned the full reward; "
        "take args for harder examples, or a lower weight" + _filter(config)
    )


def _share(steps: Steps, env: str, name: str) -> float:
    """Of all complete groups: those of a batch that a filter makes are chosen for what they earned."""
    all_of_them, of_batch = f"env/{env}/{SAMPLED}/{name}", f"env/{env}/{name}"
    values = [step.get(all_of_them, step.get(of_batch)) for step in steps]
    return mean([{} if value is None else {name: value} for value in values], name)


def _alike(config: RunConfig, env: str, steps: Steps) -> str | None:
    share, none, every = (
        mean(steps, f"env/{env}/{name}") for name in ("no_spread", "solved_none", "solved_all")
    )
    if share < MOST or max(none, every) >= NEARLY_ALL or _follows(config, env, steps):
        return None
    # Where most of them earn all, or nothing, it is the examples: another temperature finds nothing there.
    if every > HALF * share:
        remedy = "most earn the full reward: take args for harder examples, or a lower weight"
    elif none > HALF * share:
        remedy = "most earn nothing: take args for easier examples, or a reward with partial credit"
    else:
        remedy = (
            f"raise sampling.temperature (now {config.sampling.temperature:g}) or rollouts_per_example (now "
            f"{config.rollouts_per_example}), or give rewards more shades"
        )
    equal = f"in {share:.0%} of the groups of {env} all rewards are equal, and move nothing; "
    return equal + remedy + _filter(config)


def _follows(config: RunConfig, env: str, steps: Steps) -> bool:
    """Whether what an environment's groups earn says nothing of it or of the model."""
    all_cut = mean(steps, "rollout/truncated_fraction") >= NEARLY_ALL
    return all_cut or collapsed(config, steps, f"env/{env}/reward")


def _filter(config: RunConfig) -> str:
    return "" if config.resamples else "; [difficulty_filter] replaces such groups by fresh ones"


def _cut(config: RunConfig, steps: Steps) -> str | None:
    shares = [step.get("rollout/truncated_fraction", 0.0) for step in steps[-WINDOW:]]
    share = fmean(shares) if shares else 0.0
    enough = SOON if min(shares, default=0.0) >= NEARLY_ALL else WINDOW
    # Rewards that fall because answers grew longer than the limit are told beside that.
    if len(shares) < enough or share < HALF or collapsed(config, steps, "train/reward", by_fall=False):
        return None
    return (
        f"{share:.0%} of the rollouts were cut by a limit; raise sampling.max_tokens (now "
        f"{_limits(config)}), or the turns that the environment allows"
    )


def _limits(config: RunConfig) -> str:
    """Of an answer, and of those of environments that have another."""
    limits = {env.label: config.sampling_of(env).max_tokens for env in config.env}
    shared = config.sampling.max_tokens
    others = ", ".join(f"of {label} {limit}" for label, limit in limits.items() if limit != shared)
    return f"{shared or 'the end of the context'}{'; ' if others else ''}{others}"


def _breaks(config: RunConfig, steps: Steps) -> str | None:
    breaks = mean(steps, "rollout/prefix_breaks")
    if breaks < MANY_BREAKS * config.batch_size:
        return None
    return (
        f"{breaks:.0f} times a step a later prompt did not go on from the tokens before it, and the rollout "
        "became several samples; take a chat template that keeps earlier turns as they were (some drop the "
        "thinking in them)"
    )


def _thrown_away(config: RunConfig, steps: Steps) -> str | None:
    replaced = mean(steps, "rollout/resampled")
    if replaced < config.groups_per_batch:
        return None
    share = replaced / (replaced + config.groups_per_batch)
    return (
        f"{share:.0%} of the groups are sampled for nothing: they teach too little and are replaced "
        "(ledger/discarded says why); take tasks that the model solves sometimes, or wider bounds in "
        f"[difficulty_filter], or a lower max_resample (now {config.resamples})"
    )


def _never_penalised(config: RunConfig, steps: Steps) -> str | None:
    """Answers that are merely short are no symptom: none can be so long, and a rollout has one of them."""
    window, longest = config.algorithm.overlong_penalty, config.longest_answer
    if window is None or longest is None or window.from_tokens < longest:
        return None
    if len(steps) < WINDOW or any(step.get("rollout/turns", 0.0) > 1 for step in steps[-WINDOW:]):
        return None
    return (
        "algorithm.overlong_penalty takes nothing from any rollout: it begins above from_tokens = "
        f"{window.from_tokens} sampled tokens, and sampling.max_tokens ends each at {longest}; lower "
        "from_tokens and to_tokens, or remove it"
    )


def _outgrows(config: RunConfig, steps: Steps) -> str | None:
    """Answers grow as a run learns, and its batch cannot be made smaller then."""
    parts = config.algorithm.num_minibatches
    tokens, sampled = (mean(steps, f"train/{name}") / parts for name in ("tokens", "loss_tokens"))
    size = trainable.call_bytes(tokens, sampled, referenced=config.algorithm.has_teacher)
    share = size / trainable.MAX_CALL_BYTES
    if share < HALF:
        return None
    return (
        f"a call of the trainer carries {share:.0%} of what it may: a batch that grows beyond that is "
        "refused, and the run cannot go on; let another one begin with its newest state (initial_state), "
        f"with a lower batch_size (now {config.batch_size}) or sampling.max_tokens (now {_limits(config)}), "
        f"or a higher algorithm.num_minibatches (now {parts})"
    )


def _routes_itself(config: RunConfig, steps: Steps) -> str | None:
    share = mean(steps, "train/replayed_fraction", 1.0)
    if not config.algorithm.router_replay or share >= NEARLY_ALL:
        return None
    return (
        f"the experts of {1 - share:.0%} of the tokens are not replayed (train/replayed_fraction): a rollout "
        "tells as many as fit into its message of 4 MiB; lower sampling.max_tokens, or the turns that the "
        "environment allows"
    )
