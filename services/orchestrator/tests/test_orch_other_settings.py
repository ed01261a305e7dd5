"""A run goes on with other settings of how it is carried out: the same run, batches and calls."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orch_world import RUN, assert_complete, events
from quartet.errors import QuartetError
from quartet.run.config import parse_run
from quartet.run.operation import carried_out_as, computes_the_same, differences
from quartet.run.written_out import is_same_run
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import rollout_pb2 as rpb
from quartet_orchestrator.calls import CallKind, CallPlan, Saving
from quartet_orchestrator.service import to_response
from quartet_orchestrator.state import RESTING

FILE = """
model = "m"
max_concurrent = 256
[[env]]
id = "toy"
timeout_seconds = 5.0
[eval]
interval = 3
[[eval.env]]
id = "toy"
[ckpt]
interval = 2
"""


def otherwise(toml: str, *changes: tuple[str, str]) -> str:
    for was, now in changes:
        assert toml.count(was) == 1, was
        toml = toml.replace(was, now)
    return toml


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("max_concurrent = 256", "max_concurrent = 64"),
        ("max_concurrent = 256", "messages_of_members = 0"),
        ("timeout_seconds = 5.0", "timeout_seconds = 9.0"),
        ("timeout_seconds = 5.0", "max_retries = 7"),
        ("interval = 3", "interval = 4\ntimeout_seconds = 7.0"),
        ('[[eval.env]]\nid = "toy"', '[[eval.env]]\nid = "toy"\ntimeout_seconds = 1.0\nmax_retries = 0'),
        ("[ckpt]\ninterval = 2", "[ckpt]\ninterval = 5\nkeep_last = 9"),
        ("[ckpt]\ninterval = 2", "[ckpt]\ninterval = 2\nkeep_interval = 4"),
    ],
)
def test_how_a_run_is_carried_out_decides_nothing_that_is_computed(was, now):
    known, asked = parse_run(FILE), parse_run(otherwise(FILE, (was, now)))
    assert computes_the_same(known, asked) and computes_the_same(asked, known)
    assert not is_same_run(known, asked) and carried_out_as(known, asked) == asked
    assert differences(known, asked) and not differences(asked, asked)


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (
            "microbatch_tokens = 64",
            "microbatch_tokens was 0 and is 64, and sums that are cut otherwise have other",
        ),
        ("seed = 1", "seed was 0 and is 1"),
        ("rollouts_per_example = 4", "rollouts_per_example was 8 and is 4"),
        ("max_off_policy_steps = 2", "max_off_policy_steps was 1 and is 2"),
    ],
)
def test_what_decides_what_is_computed_does_not_differ(now, told):
    """operation.py 2"""
    known, asked = parse_run(FILE), parse_run(otherwise(FILE, ("max_concurrent = 256", now)))
    assert not computes_the_same(known, asked)
    assert [one for one in differences(known, asked) if one.startswith(told)]
    more = parse_run(FILE + '[[eval.env]]\nid = "toy"\nname = "other"\n'.replace("[ckpt]", ""))
    assert not computes_the_same(known, more)


def test_arguments_of_environments_are_not_told():
    """docs/security.md: one of them may be a judge's key, and a refusal is in the log."""
    was, now = (
        f'id = "toy"\nargs = {{ key = "{key}", deep = [{{ key = "{key}" }}] }}' for key in ("k1", "k2")
    )
    text = otherwise(FILE, ('[[eval.env]]\nid = "toy"', f"[[eval.env]]\n{was}"))
    known, asked = (parse_run(otherwise(text, (was, one))) for one in (was, now))
    paths = ("eval.env.0.args.deep.0.key", "eval.env.0.args.key")
    assert differences(known, asked) == [f"{path} is another" for path in paths]


def test_where_a_run_is_shown_is_no_difference():
    known, shown = parse_run(FILE), parse_run(f'keep_rollouts = 3{FILE}[wandb]\nproject = "p"\n')
    assert computes_the_same(known, shown) and differences(known, shown) == []


# An interval, names in turn, and every how many states is kept.
settings = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2))
changes = st.lists(st.tuples(st.integers(0, 12), settings), max_size=3)


@given(st.integers(1, 12), st.sets(st.integers(0, 11), max_size=2), changes, settings)
def test_a_plan_that_saves_otherwise_begins_with_what_was_before(max_steps, ends, earlier, last_ones):
    """calls.py 1 and 2"""

    def saving_of(until, chosen):
        interval, keep_last, every = chosen
        return Saving(until, interval, keep_last, every * interval)

    earlier_saving = [saving_of(min(until, max_steps), chosen) for until, chosen in sorted(earlier)]
    now = saving_of(99, last_ones)
    ends = sorted(end for end in ends if end < max_steps)

    def planned(saving, now):
        return CallPlan(
            max_steps=max_steps,
            earlier_ends=ends,
            save_interval=now.interval,
            keep_last=now.keep_last,
            keep_interval=now.keep_interval,
            earlier_saving=saving,
        )

    plan = planned(earlier_saving, now)
    last = plan.last_of(max_steps - 1)
    calls = [plan.call(seq_id) for seq_id in range(1, last + 1)]
    assert [plan.first_of(s) for s in range(max_steps)] == [
        call.seq_id for call in calls if call.kind is CallKind.FORWARD_BACKWARD
    ]
    assert [call.batch for call in calls if call.kind is CallKind.PUBLISH] == list(range(-1, max_steps))
    for number, before in enumerate(earlier_saving):
        was = planned(earlier_saving[:number], before)
        until = was.last_of(int(before.until) - 1)
        assert [was.call(seq_id) for seq_id in range(1, until + 1)] == calls[:until]
    # What a trainer keeps, call by call.
    kept: dict[str, int] = {}
    for call in calls[:-1]:
        if call.kind is CallKind.SAVE:
            saving = next((s for s in earlier_saving if call.batch + 1 <= s.until), now)
            assert call.keep == saving.keeps(call.batch + 1)
            kept.pop(call.state_name, None)
            kept[call.state_name] = call.batch + 1
            kept = dict(list(kept.items())[-saving.keep_last :])
        assert plan.covered_steps(call.seq_id) == (min(kept.values()) if len(kept) >= now.keep_last else 0)


@pytest.mark.parametrize("seed", range(3))
async def test_settings_that_change_while_a_run_works_change_nothing_of_what_it_learns(world, seed):
    """going_on.py 4, and invariants 1 and 2: as with kills, every call is applied once, in one plan."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    plain = world.toml(steps=8, off_policy=0)
    undisturbed = await world.undisturbed(plain)
    run, changed = pb.Run(), 0
    async with world.orchestrator() as runs:
        await runs.submit(RUN, plain, dry_run=False)
        while run.phase not in RESTING:
            with_others = otherwise(
                plain,
                ("[ckpt]\ninterval = 2", f"[ckpt]\ninterval = {chance.randint(1, 3)}"),
                ("num_examples = 4", f"num_examples = 4\ntimeout_seconds = {10.0 + changed}"),
            )
            run = await runs.submit(RUN, with_others, dry_run=False)
            changed += 1
            with suppress(TimeoutError):
                run = await world.rest(runs, timeout_s=chance.uniform(0.0, 0.15) * (1 + changed / 10))
        seen = await events(runs)
    assert changed >= 3
    assert_complete(world, run, steps=8)
    assert world.trainer.disk[RUN, "final"].weights == undisturbed
    assert set(world.trainer.applied_calls.values()) == {1}
    told = [to_response(record) for record in seen if record.WhichOneof("kind") == "changed"]
    assert len(told) >= changed - 1 and all("timeout_seconds was " in one.note.message for one in told)
    async with world.orchestrator() as runs:
        assert await events(runs) == seen and runs.status(RUN) == run


async def test_a_run_that_ran_out_of_time_goes_on_with_more_of_it(world):
    """going_on.py 4: of a run that is stopped; a trainer without any state replays it by the old plan."""
    world.host.failing_tasks, world.host.kind = set(range(50)), rpb.FAILURE_KIND_TIMEOUT
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=6, off_policy=0), dry_run=False)
        stopped = await world.rest(runs)
        assert stopped.phase == pb.RUN_PHASE_STOPPED and "failed:TIMEOUT" in stopped.error
        longer = otherwise(
            world.toml(steps=6, off_policy=0),
            ('id = "toy"', 'id = "toy"\ntimeout_seconds = 1200.0'),
            ("[ckpt]\ninterval = 2", "[ckpt]\ninterval = 3"),
        )
        assert await runs.submit(RUN, longer, dry_run=True) == stopped
        run = await runs.submit(RUN, longer, dry_run=False)
        assert run.phase == pb.RUN_PHASE_STOPPED and "timeout_seconds = 1200.0" in run.config_toml
        assert await runs.submit(RUN, longer, dry_run=False) == run, "once"
    world.host.failing_tasks, world.trainer.delay_s = set(), 0.02
    world.host.requests.clear()
    async with world.orchestrator() as runs:
        assert runs.status(RUN).config_toml == longer
        await runs.resume(RUN)
        while runs.get(RUN).state.step < 4:
            await runs.get(RUN).changed()
        await world.kill("trainer")
        world.trainer.disk.clear()
        await world.serve("trainer")
        run = await world.rest(runs)
        assert_complete(world, run, steps=6)
        seen = await events(runs)
        assert not any(r.step.metrics.get("train/versions_changed") for r in seen)
        (told,) = [to_response(r).note for r in seen if r.WhichOneof("kind") == "changed"]
    assert {request.timeout_ms for request in world.host.requests if request.split == 1} == {1_200_000}
    saving, time = "ckpt.interval was 2 and is 3", "env.0.timeout_seconds was 600.0 and is 1200.0"
    assert told.message == f"goes on with other settings: {saving}; {time}"
    assert {name for run_id, name in world.trainer.disk} == {"state-1", "final"}


async def test_an_extended_run_may_be_carried_out_otherwise_too(world):
    """going_on.py 3"""
    plain = world.toml(steps=3, off_policy=0)
    async with world.orchestrator() as runs:
        await runs.submit(RUN, plain, dry_run=False)
        run = await world.rest(runs)
        same = otherwise(plain, ("[ckpt]\ninterval = 2", "[ckpt]\ninterval = 1"))
        assert await runs.submit(RUN, same, dry_run=False) == run, "nothing is left to carry out"
        longer = world.toml(steps=6, off_policy=0).replace("interval = 2", "interval = 1")
        await runs.submit(RUN, longer, dry_run=False)
        assert_complete(world, await world.rest(runs), steps=6)
        assert runs.get(RUN).state.earlier_saving == [Saving(3, 2, 2)]
        assert set(world.trainer.applied_calls.values()) == {1}
        with pytest.raises(QuartetError, match="another configuration: seed was 0 and is 4; choose another"):
            await runs.submit(RUN, world.toml(steps=6, off_policy=0, seed=4), dry_run=False)


async def test_a_run_that_works_keeps_its_turn(world):
    """going_on.py 4: who waits does not overtake it."""
    world.trainer.delay_s = 0.02
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=6), dry_run=False)
        await runs.submit("other", world.toml(steps=1), dry_run=False)
        while runs.get(RUN).state.step < 1:
            await runs.get(RUN).changed()
        changed = otherwise(world.toml(steps=6), ("num_examples = 4", "num_examples = 4\ninterval = 2"))
        # Whoever asks may leave at once.
        asking = asyncio.create_task(runs.submit(RUN, changed, dry_run=False))
        await asyncio.sleep(0)
        asking.cancel()
        assert_complete(world, await world.rest(runs), steps=6)
        assert runs.status(RUN).config_toml == changed
        assert runs.status("other").phase not in (pb.RUN_PHASE_COMPLETED, pb.RUN_PHASE_TRAINING)
        assert (await world.rest(runs, "other")).phase == pb.RUN_PHASE_COMPLETED


async def test_a_run_that_is_broken_off_begins_again_once(world):
    """execution.py 3: whoever left while it was broken off, and whoever asks for more at that moment."""
    world.trainer.delay_s = 0.02
    plain = world.toml(steps=6)
    with_others = [
        otherwise(plain, ("num_examples = 4", f"num_examples = 4\ninterval = {n}")) for n in (2, 3)
    ]
    async with world.orchestrator() as runs:
        await runs.submit(RUN, plain, dry_run=False)
        while runs.get(RUN).state.step < 1:
            await runs.get(RUN).changed()
        leaving = asyncio.create_task(runs.submit(RUN, with_others[0], dry_run=False))
        for _ in range(3):
            await asyncio.sleep(0)
        leaving.cancel()
        await runs.submit(RUN, with_others[1], dry_run=False)
        assert_complete(world, await world.rest(runs), steps=6)
        assert runs.status(RUN).config_toml == with_others[1]
    assert set(world.trainer.applied_calls.values()) == {1}


async def test_what_is_kept_may_change_and_the_trainer_is_told(world):
    """going_on.py 4; calls.py 1: earlier steps are replayed under the names that they had."""
    plain = world.toml(steps=8, off_policy=0)
    world.trainer.delay_s = 0.02
    async with world.orchestrator() as runs:
        await runs.submit(RUN, plain, dry_run=False)
        while runs.get(RUN).state.step < 4:
            await runs.get(RUN).changed()
        keeps = "[ckpt]\ninterval = 2\nkeep_last = 5\nkeep_interval = 2"
        await runs.submit(RUN, otherwise(plain, ("[ckpt]\ninterval = 2", keeps)), dry_run=False)
        while runs.get(RUN).state.step < 7:
            await runs.get(RUN).changed()
        await world.kill("trainer")
        world.trainer.disk.clear()
        await world.serve("trainer")
        assert_complete(world, await world.rest(runs), steps=8)
        (told,) = [to_response(r).note for r in await events(runs) if r.WhichOneof("kind") == "changed"]
        (was,) = runs.get(RUN).state.earlier_saving
    assert told.message.endswith("ckpt.keep_interval was nothing and is 2; ckpt.keep_last was 2 and is 5")
    assert (was.interval, was.keep_last, was.keep_interval) == (2, 2, 0)
    plan = CallPlan(max_steps=8, earlier_saving=[was], save_interval=2, keep_last=5, keep_interval=2)
    calls = [plan.call(seq_id) for seq_id in range(1, plan.last_of(7) + 1)]
    names = [call.state_name for call in calls if call.kind is CallKind.SAVE]
    assert names[:2] == ["state-1", "state-0"] and names[-1] == "final"
    assert {name for _, name in world.trainer.disk} == set(names)
    assert world.trainer.keep_last[0] == 2 and set(world.trainer.keep_last[1:]) == {5}
    async with world.orchestrator() as runs:
        assert runs.get(RUN).state.earlier_saving == [was]


async def test_a_run_goes_on_from_a_kept_state(world):
    """Invariant 9: also where the answer to its saving was lost, and where it is the only one left."""
    toml = otherwise(
        world.toml(steps=8, off_policy=0), ("[ckpt]\ninterval = 2", "[ckpt]\ninterval = 2\nkeep_interval = 4")
    )
    undisturbed = await world.undisturbed(toml)
    world.trainer.kept.clear()
    plan = CallPlan(max_steps=8, save_interval=2, keep_last=2, keep_interval=4)
    world.trainer.lose_answer_of = {plan.last_of(3)}
    async with world.orchestrator() as runs:
        await runs.submit(RUN, toml, dry_run=False)
        assert world.trainer.checked[-1].keep_states == 2 + 2
        while runs.get(RUN).state.step < 7:
            await runs.get(RUN).changed()
        await world.kill("trainer")
        for other in set(world.trainer.disk) - {(RUN, "step-4")}:
            del world.trainer.disk[other]
        await world.serve("trainer")
        assert_complete(world, await world.rest(runs), steps=8)
    assert world.trainer.disk[RUN, "final"].weights == undisturbed
    assert world.trainer.applied_calls[plan.last_of(3)] == 1, "found, and not saved again"
    assert world.trainer.kept == ["step-4", "final"]
    assert {name for _, name in world.trainer.disk} == {"step-4", "state-1", "final"}
