"""What of a file of prime-rl is the orchestrator's: batches, their pace, and credit.

1. **Pace.** prime-rl is one batch ahead of its trainer, and drops a rollout whose tokens have become older
   than max_off_policy_steps. Here the pace is the bound, and nothing is dropped: a rollout that takes long is
   waited for. So max_off_policy_steps is 1, the pace, or less where the file says less: no token is older
   than the file allows.
2. **Groups without a signal.** prime-rl leaves rollouts out whose advantage is 0, and their tokens out of the
   number that the loss is divided by: algorithm.zero_advantage_filtering. Where it samples others in their
   place that is dynamic_sampling.
3. One group size and one algorithm hold for all environments of a run here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quartet.run.credit import MAX_RESAMPLE
from quartet.run.dialect import RunDraft, refuse, shown
from quartet.run.prime_rl.environments import Environment
from quartet.run.prime_rl.given import Given, Said, leave_rest, one_of_all

#: prime-rl is so many batches ahead of its trainer.
AHEAD: Final = 1
_PLACES: Final = ("", "trainer.", "orchestrator.")
_OWN_CREDIT: Final = (
    "write a function of your own ([orchestrator.advantages], docs/algorithms.md), and choose it in a second "
    'file: [algorithm] advantage = "custom" and custom_advantage = "NAME"; remove it here'
)
#: What algo.type is here.
CREDITS: Final = {"grpo": "dr_grpo", "max_rl": "max_rl"}
_DISTILLS = (
    'distillation is a table of Quartet\'s own: in a second file [algorithm] preset = "opd" and '
    '[algorithm.reference] model = "..."'
)
OTHER_CREDITS: Final = {
    "opd": _DISTILLS,
    "opsd": _DISTILLS,
    "sft": "write rollouts of the model that is to be imitated into a file, and train by quartet sft",
    "echo": "tokens of environments are never learned here",
    "rae": "a baseline that is remembered is no credit here; roles are compared by themselves: leave it out",
    "hierarchical_grpo": "roles are compared by themselves here: leave it out",
}


def batches(given: Given, run: RunDraft, environments: Sequence[Environment]) -> None:
    """How many rollouts, of what groups."""
    size = given.take("orchestrator.batch_size", default=128)
    shared = given.take("orchestrator.group_size", "orchestrator.rollouts_per_example", default=1)
    nearer = given.take("orchestrator.train.group_size")
    shared = nearer if nearer.is_given else shared
    own = [one.group_size if one.group_size.is_given else shared for one in environments]
    group = one_of_all("group sizes", own) or shared
    run.put("rollouts_per_example", group.value, group.source)
    run.put("batch_size", size.value, size.source)
    _under_way(given, run, size, group)
    if given.take("orchestrator.mask_truncated_completions", default=False).flag():
        run.put("algorithm.overlong_filtering", True, "orchestrator.mask_truncated_completions")
    seed = given.take("orchestrator.seed")
    if seed.value is not None:
        run.put("seed", seed.value, seed.source)


def _under_way(given: Given, run: RunDraft, size: Said, group: Said) -> None:
    """How many rollouts at once."""
    under_way = given.take(
        *("orchestrator.max_inflight_rollouts", "orchestrator.max_concurrent"),
        "orchestrator.concurrency.max_inflight",
    )
    groups = given.take("orchestrator.max_inflight_groups")
    factor = given.take("orchestrator.oversampling_factor")
    if under_way.value is not None:
        chosen, most = under_way, under_way.value
    elif groups.value is not None:
        chosen, most = groups, groups.count() * group.count()
    elif factor.value is not None:
        chosen, most = factor, max(int(size.count() * factor.number()), group.count())
    else:
        return
    run.put("max_concurrent", most, chosen.source)
    others = [said for said in (groups, factor) if said.value is not None and said is not chosen]
    run.leave(shown(said.source, said.value, f"{chosen.source} decides") for said in others)


def pace(given: Given, run: RunDraft) -> None:
    """How far ahead."""
    levels = [f"{place}{key}" for key in ("max_async_level", "async_level") for place in _PLACES]
    ahead = given.take(*levels, default=AHEAD)
    oldest = given.take("orchestrator.max_off_policy_steps", default=8)
    if oldest.count(0) < ahead.count(0):
        run.put("max_off_policy_steps", oldest.value, oldest.source)
        return
    run.put("max_off_policy_steps", ahead.value, ahead.source)
    if oldest.is_given and oldest.value > ahead.value:
        why = (
            f"as there sampling is {ahead.value} ahead, and here no token is older; --max-off-policy-steps, "
            "Quartet's own, lets it be further ahead"
        )
        run.leave([shown(oldest.source, oldest.value, why)])


def credit(given: Given, run: RunDraft, environments: Sequence[Environment]) -> None:
    """From rewards to advantages, and which groups are trained on."""
    shared = given.take("orchestrator.train.algo", "orchestrator.algo", default={"type": "grpo"})
    own = [one.algo if one.algo.is_given else shared for one in environments]
    algo = one_of_all("algorithms", own) or shared
    table = Given(algo.table(), algo.source)
    kind = table.take("type", default="grpo")
    if not isinstance(kind.value, str) or kind.value not in CREDITS:
        remedy = OTHER_CREDITS.get(str(kind.value), f"choose {' or '.join(CREDITS)}")
        refuse(kind.source, kind.value, remedy)
    for key, nothing in (
        ("length_penalty", None),
        ("length_weighted_baseline", False),
        ("loss_aggregation", "token"),
        ("continue_prob", 0.0),
    ):
        said = table.take(key, default=nothing)
        if said.value not in (nothing, None):
            refuse(said.source, said.value, _OWN_CREDIT)
    source = table.take("sampling.source", default="policy")
    if source.value != "policy":
        refuse(source.source, source.value, "the policy itself samples; remove it")
    advantage = CREDITS[kind.value]
    if "orchestrator.advantage" in given and given.peek("orchestrator.advantage") is None:
        advantage = "none"
    run.put("algorithm.advantage", advantage, kind.source)
    _signal(given, run, environments, compares=advantage != "none")
    leave_rest(table, run, {"failsafe_min_members": "rollouts are waited for"}, {})


def _signal(given: Given, run: RunDraft, environments: Sequence[Environment], *, compares: bool) -> None:
    drops = given.take("orchestrator.train.filter_zero_advantages", default=True)
    keys = ("constant_trainer_batch_size", "buffer.online_difficulty_filtering")
    either = [given.take(f"orchestrator.{key}", default=False) for key in keys]
    replaces = next((said for said in either if said.flag()), either[0])
    for name, zero in (("filters", False), ("post_batch_filters", False), ("pre_batch_filters", True)):
        for one in given.entries(f"orchestrator.{name}"):
            said = _enforced(one, run)
            if said is not None and zero:
                replaces = said if said.value else replaces
            elif said is not None:
                drops = said
    gates = [one.gate for one in environments]
    if gates and all(gate is not None for gate in gates):
        replaces = gates[0] or replaces
    elif found := next((gate for gate in gates if gate is not None), None):
        refuse(found.source, found.value, "give it to all environments, or to none")
    if not compares:
        return
    run.put("algorithm.zero_advantage_filtering", drops.flag(), drops.source)
    if replaces.value:
        run.put("algorithm.dynamic_sampling", True, replaces.source)
        # There a place is sampled again for as long as it takes.
        run.put("algorithm.max_resample", MAX_RESAMPLE, replaces.source)


def _enforced(one: Given, run: RunDraft) -> Said | None:
    """Of a filter: whether the one about advantages acts; None where it is another, which must not."""
    kind, acts = one.take("type"), one.take("enforce")
    dropped = one.take("action").value == "drop"
    if kind.value == "zero_advantage":
        leave_rest(one, run, {}, {})
        return Said(dropped or acts.value is not False, kind.source, True)
    if kind.value not in ("gibberish", "repetition") or acts.value or dropped:
        refuse(kind.source, kind.value, "rollouts are not judged by their tokens here; remove it")
    run.leave([shown(kind.source, kind.value, "it only counts")])
    for key in ("token_id_threshold", "logprob_offset", "window", "prob_threshold"):
        one.take(key)
    leave_rest(one, run, {}, {})
    return None
