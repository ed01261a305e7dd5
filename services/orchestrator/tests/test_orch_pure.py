"""Ledger, call plan, prompts, credit, metrics, batches, permits: the parts without I/O."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from collections import Counter
from copy import copy
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quartet.errors import QuartetError
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import trainer_service_pb2 as tpb
from quartet.v1.journal_pb2 import JournalRecord
from quartet.v1.rollout_pb2 import Rollout
from quartet_orchestrator import batches, credit, metrics
from quartet_orchestrator.calls import CallKind, CallPlan
from quartet_orchestrator.going_on import check_resumable
from quartet_orchestrator.ledger import Ledger
from quartet_orchestrator.permits import Permits
from quartet_orchestrator.prompts import Prompts, Source
from quartet_orchestrator.state import COMPLETED, FAILED, PENDING, STOPPED, TRAINING, TRANSITIONS, RunState


def test_ledger_balances_and_refuses_what_was_not_dispatched():
    """Invariant 1.

    ledger.py 1 and 2
    """
    ledger = Ledger()
    ledger.dispatch(8)
    ledger.discard(3, "stale")
    ledger.train(5)
    assert ledger.to_proto().discarded == {"stale": 3} and ledger.in_flight == 0
    for one_more in (Ledger.train, lambda full, count: full.discard(count, "stale")):
        with pytest.raises(AssertionError, match="more rollouts ended"):
            one_more(copy(ledger), 1)
    with pytest.raises(AssertionError):
        Ledger(trained=1).dispatch(1)


def test_what_a_ledger_will_be_changes_nothing_of_what_it_is():
    """Invariant 1: a step tells of the ledger after it.

    ledger.py 1
    """
    ledger = Ledger()
    ledger.dispatch(8)
    ledger.discard(1, "stale")
    after = ledger.after_training(5)
    after.discard(2, "stale")
    assert after.to_proto() == pb.Ledger(dispatched=8, trained=5, discarded={"stale": 3}, in_flight=0)
    assert ledger.to_proto() == pb.Ledger(dispatched=8, trained=0, discarded={"stale": 1}, in_flight=7)


def test_phases_change_along_their_transitions_and_no_other_way():
    """state.py 3."""
    for before, allowed in TRANSITIONS.items():
        for after in TRANSITIONS:
            run = RunState(phase=before)
            record = JournalRecord(phase=pb.PhaseEvent(run=pb.Run(phase=after, max_steps=1)))
            if after in allowed:
                run.apply(record)
                assert run.phase == after
            else:
                with pytest.raises(AssertionError):
                    run.apply(record)


def test_a_rollout_that_ends_after_its_group_was_given_up_changes_nothing():
    """state.py 1"""
    run, again = RunState(), RunState()
    records = [
        JournalRecord(dispatched={"group": 0, "members": 2}),
        JournalRecord(discarded={"group": 0, "reason": "stale"}),
        JournalRecord(rollout=pb.RolloutEvent(group=0, rollout=rollout(3))),
    ]
    for record in records:
        run.apply(record)
    for record in records[:2]:
        again.apply(record)
    assert run == again and run.ledger.discarded == {"stale": 2}


def test_a_run_that_failed_is_over_once_this_part_of_it_dispatched_a_group():
    """going_on.py 2"""
    run = RunState()

    def enter(*phases: int) -> None:
        for phase in phases:
            run.apply(JournalRecord(phase=pb.PhaseEvent(run=pb.Run(phase=phase, max_steps=1))))

    enter(PENDING, FAILED)
    check_resumable(run)
    enter(PENDING, TRAINING)
    run.apply(JournalRecord(dispatched={"group": 0, "members": 2}))
    enter(FAILED)
    with pytest.raises(QuartetError, match="is FAILED and cannot be resumed; submit a new run"):
        check_resumable(run)
    run = RunState(phase=STOPPED, next_group=1)
    check_resumable(run)
    enter(PENDING, TRAINING, FAILED)
    check_resumable(run)


def test_a_completed_run_goes_on_to_more_steps_with_what_its_phase_tells():
    """state.py 4."""
    run = RunState(phase=COMPLETED, max_steps=4, config_toml="a", model_path="/model", applied_seq_id=9)
    for steps in (3, 4):
        record = JournalRecord(
            phase=pb.PhaseEvent(run=pb.Run(phase=PENDING, max_steps=steps, config_toml="b"))
        )
        with pytest.raises(AssertionError):
            run.apply(record)
    record.phase.run.max_steps = 6
    run.apply(record)
    extended = RunState(
        phase=PENDING, max_steps=6, config_toml="b", earlier_ends=[4], model_path="", applied_seq_id=9
    )
    assert run == extended


@given(
    st.integers(0, 40),
    st.sets(st.integers(0, 40), max_size=3),
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_call_plan_is_one_contiguous_list(max_steps, ends, interval, keep_last, every):
    """calls.py 1-4"""
    earlier = sorted(end for end in ends if end < max_steps)
    saving = {"save_interval": interval, "keep_last": keep_last, "keep_interval": every * interval}
    plan = CallPlan(max_steps=max_steps, earlier_ends=earlier, **saving)
    ends = [*earlier, max_steps]
    expected = [(CallKind.PUBLISH, -1)]
    if 0 in ends:
        expected.append((CallKind.SAVE, -1))
    for step in range(max_steps):
        expected += [(CallKind.FORWARD_BACKWARD, step), (CallKind.OPTIM_STEP, step), (CallKind.PUBLISH, step)]
        if (step + 1) % interval == 0 or step + 1 in ends:
            expected.append((CallKind.SAVE, step))
    calls = [plan.call(seq_id) for seq_id in range(1, len(expected) + 1)]
    assert [(call.kind, call.batch) for call in calls] == expected
    assert plan.last_of(max_steps - 1) == len(expected)
    assert [call.batch + 1 for call in calls if call.export_model] == ends
    saved = [call for call in calls if call.kind is CallKind.SAVE]
    assert all((call.state_name == "final") == call.export_model for call in saved)
    kept = [call for call in saved if call.keep]
    due = [call for call in saved if every and (call.batch + 1) % (every * interval) == 0]
    assert kept == due
    assert all(call.state_name in (f"step-{call.batch + 1}", "final") for call in kept)
    assert len({call.state_name for call in saved if not call.keep} - {"final"}) <= keep_last
    assert not {call.state_name for call in saved if not call.keep} & {f"step-{n}" for n in range(41)}
    if earlier:
        # The shorter run's list is the beginning.
        shorter = CallPlan(max_steps=earlier[-1], earlier_ends=earlier[:-1], **saving)
        last = shorter.last_of(earlier[-1] - 1)
        assert [shorter.call(seq_id) for seq_id in range(1, last + 1)] == calls[:last]
    for step in range(max_steps):
        assert plan.call(plan.first_of(step)).kind is CallKind.FORWARD_BACKWARD
        assert plan.call(plan.published_by(step)).kind is CallKind.PUBLISH


@given(st.integers(0, 5), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_the_version_of_a_call_is_the_number_of_steps_so_far(max_steps, iterations, minibatches, interval):
    plan = CallPlan(
        max_steps=max_steps,
        save_interval=interval,
        keep_last=1,
        num_iterations=iterations,
        num_minibatches=minibatches,
    )
    steps = 0
    for seq_id in range(1, plan.last_of(max_steps - 1) + 1):
        call = plan.call(seq_id)
        steps += call.kind is CallKind.OPTIM_STEP
        assert plan.version_by(call) == steps


def test_prompts_cover_every_task_once_per_epoch_in_an_order_of_its_own():
    """prompts.py 1 and 2"""
    prompts, again = (Prompts([Source("a", 50), Source("b", 50)], 0) for _ in range(2))
    epochs = [[prompts.task(0, 50 * epoch + turn) for turn in range(50)] for epoch in range(2)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] and epochs[0] != list(range(50))
    assert epochs[0] != [prompts.task(1, turn) for turn in range(50)]
    assert epochs[0] != [Prompts([Source("a", 50)], 1).task(0, turn) for turn in range(50)]
    # Found again after a restart, from any turn.
    assert [again.task(0, turn) for turn in (70, 7)] == [epochs[1][20], epochs[0][7]]


def test_orders_that_were_made_ahead_are_those_that_are_made_when_they_are_needed():
    """prompts.py 1 and 3: of as many epochs as are asked for, each shuffled once."""
    plain, ahead, made = Prompts([Source("a", 50)], 0), Prompts([Source("a", 50)], 0), []
    wanted = [plain.task(0, turn) for turn in range(150)]
    shuffled = ahead._shuffled
    ahead._shuffled = lambda environment, epoch: made.append(epoch) or shuffled(environment, epoch)
    assert not ahead.at_hand(0, 49, 49)
    ahead.shuffle(0, 49, 50)
    assert ahead.at_hand(0, 0, 99) and not ahead.at_hand(0, 99, 100)
    ahead.shuffle(0, 50, 149)
    assert ahead.at_hand(0, 50, 149) and not ahead.at_hand(0, 49, 50), "what is over is not kept"
    assert [ahead.task(0, turn) for turn in range(50, 150)] == wanted[50:]
    assert made == [0, 1, 2]
    # The first tasks of a release before this one, of the same seed.
    assert wanted[:5] == [24, 31, 15, 11, 12]
    assert Prompts([Source("a", None)], 0).at_hand(0, 0, 10**9)


def test_an_infinite_environment_is_read_in_order():
    """prompts.py 2"""
    endless = Prompts([Source("a", None)], 0)
    assert [endless.task(0, turn) for turn in range(250)] == list(range(250))


def test_credit_by_hand():
    groups = [[1.0, 0.0, 0.0, 1.0], [0.5, 0.5]]
    assert credit.advantages("dr_grpo", groups) == [[0.5, -0.5, -0.5, 0.5], [0.0, 0.0]]
    assert credit.advantages("rloo", groups)[0] == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert credit.advantages("max_rl", groups)[0] == [1.0, -1.0, -1.0, 1.0]
    assert credit.advantages("max_rl", [[0.0, 0.0]]) == [[0.0, 0.0]]
    assert credit.advantages("grpo", groups)[0][0] == pytest.approx(0.5 / (0.5 + credit.EPSILON))
    scale = math.sqrt(4 * 0.25 / 6) + credit.EPSILON
    assert credit.advantages("reinforce_pp", groups)[0][0] == pytest.approx(0.5 / scale)
    assert credit.advantages("none", groups) == groups


@pytest.mark.parametrize("kind", sorted(credit.CREDIT.keys() - {"none"}))
def test_equal_rewards_teach_exactly_nothing(kind):
    """credit.py 2: also where their mean is rounded, and where nobody else is in the group."""
    groups = [[0.05] * 3, [0.47] * 7, [1.0]]
    assert fmean(groups[0]) != 0.05 and fmean(groups[1]) != 0.47
    assert credit.advantages(kind, groups) == [[0.0] * 3, [0.0] * 7, [0.0]]


rewards = st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8), min_size=1, max_size=5)


@given(st.sampled_from(sorted(credit.CREDIT)), rewards)
def test_credit_is_finite_and_centred(kind, groups):
    """credit.py 2"""
    result = credit.advantages(kind, groups)
    assert [len(group) for group in result] == [len(group) for group in groups]
    assert all(math.isfinite(a) for group in result for a in group)
    for group, advantages in zip(groups, result, strict=True):
        if kind not in ("none", "max_rl"):
            assert sum(advantages) == pytest.approx(0, abs=1e-6)
        if kind != "none" and min(group) == max(group):
            assert set(advantages) == {0.0}


def test_normalizer():
    """credit.py 3"""
    of, size = credit.normalizer, credit.Size(tokens=40, samples=9)
    assert of("token", size, rollouts=8, constant_tokens=None) == 40
    assert of("sequence", size, rollouts=8, constant_tokens=None) == 9
    assert of("constant", size, rollouts=8, constant_tokens=16) == 128


def rollout(tokens: int, version: int = 0, reward: float = 1.0) -> Rollout:
    result = Rollout(reward=reward)
    sample = result.samples.add(token_ids=range(tokens))
    sample.spans.add(start=0, length=tokens, policy_version=version)
    sample.logprobs.extend([-1.0] * tokens)
    result.usage.completion_tokens = tokens
    return result


def test_frames_carry_experts_up_to_the_bound_of_a_call(monkeypatch):
    """batches.py 3 and 4"""
    rollout = Rollout()
    sample = rollout.samples.add(token_ids=[1, 2], logprobs=[-1.0])
    sample.experts.numbers = bytes(1 << 20)
    monkeypatch.setattr("quartet.experts.MAX_CALL_BYTES", 3 << 20)
    _, *several, commit = batches.frames(tpb.ForwardBackwardStart(), [rollout] * 5, [[1.0]] * 5)
    assert all(frame.ByteSize() < 2 << 20 for frame in several) and len(several) == 5
    samples = [one for frame in several for one in frame.batch.samples]
    assert [one.sample.HasField("experts") for one in samples] == [True] * 3 + [False] * 2
    assert commit.commit.sample_count == 5 and sample.HasField("experts"), "the rollout keeps its own"


def test_frames_carry_every_sample_once_below_the_message_limit():
    """batches.py 1-3"""
    rollouts = [rollout(120_000) for _ in range(9)]
    start = tpb.ForwardBackwardStart(run_id="r", seq_id=2)
    frames = list(batches.frames(start, rollouts, [[float(i)] for i in range(9)]))
    assert all(frame.ByteSize() < 4 << 20 for frame in frames)
    assert len(frames) > 5
    assert frames[0].start.seq_id == 2
    samples = [sample for frame in frames for sample in frame.batch.samples]
    assert [list(sample.advantages) for sample in samples] == [[float(i)] for i in range(9)]
    assert frames[-1].commit == tpb.StreamCommit(sample_count=9, token_count=9 * 120_000)
    again = batches.frames(start, rollouts, [[float(i)] for i in range(9)])
    assert [f.SerializeToString() for f in again] == [f.SerializeToString() for f in frames]


def test_samples_of_the_longest_numbers_still_fill_a_frame_to_its_bound_at_most():
    """batches.py 3"""
    largest = Rollout()
    sample = largest.samples.add(
        token_ids=[2**32 - 1] * 40, logprobs=[-1.0] * 30, reference_logprobs=[-1.0] * 30
    )
    for _ in range(30):
        sample.spans.add(start=2**32 - 1, length=2**32 - 1, policy_version=2**64 - 1)
    _, *several, _ = batches.frames(tpb.ForwardBackwardStart(), [largest] * 3000, [[1.0]] * 3000)
    assert len(several) > 2
    assert all(0.9 * batches.FRAME_BYTES < one.ByteSize() <= batches.FRAME_BYTES for one in several[:-1])


def test_staleness_is_weighted_by_tokens():
    scored = [
        metrics.Scored("e", 0, rollout(30, version=4)),
        metrics.Scored("e", 0, rollout(10, version=3, reward=0.0)),
    ]
    times = metrics.StepTimes(2.0, 0.5, 0.5, 1.0)
    values = metrics.of_step(4, scored, {}, times, {})
    assert values["staleness/max"] == 1 and values["staleness/mean"] == 0.25
    assert values["train/reward"] == 0.5 and values["tokens_per_second"] == 20
    trained = metrics.of_training(tpb.ForwardBackwardResponse(), [tpb.OptimStepResponse()])
    assert "train/logprob_difference_max" not in trained and "train/entropy" not in trained


def test_a_metric_of_an_environment_that_is_no_finite_number_is_absent():
    """The logarithm of nothing, say: in some rollouts of a batch with one sign, in others with the other."""
    low, high, plain = (rollout(10, version=0) for _ in range(3))
    for one, value in ((low, -math.inf), (high, math.inf), (plain, 1.0)):
        one.metrics["odds"] = one.rewards["match"] = value
        one.metrics["length"] = 3.0
    scored = [metrics.Scored("e", 0, one) for one in (low, high, plain)]
    values = metrics.of_step(0, scored, {}, metrics.StepTimes(2.0, 0.5, 0.5, 1.0), {})
    assert values["metrics/length"] == 3.0
    assert not {"metrics/odds", "rewards/match"} & values.keys()


def test_the_full_reward_of_a_weighted_sum_is_the_full_reward():
    """0.9999999999999999, as floating point adds these weights."""
    full = [rollout(10, version=0, reward=0.7 + 0.2 + 0.1) for _ in range(2)]
    assert all(one.reward < 1 for one in full)
    scored = [metrics.Scored("e", 0, one) for one in full]
    values = metrics.of_step(0, scored, {}, metrics.StepTimes(2.0, 0.5, 0.5, 1.0), {})
    assert values["env/e/solved_all"] == values["env/e/no_spread"] == 1.0


def test_a_group_that_earned_nothing_and_differs_is_not_unsolved():
    """Penalties alone: the smaller one is what is learned."""
    groups = {0: (-1.0, -3.0), 1: (-2.0, -2.0), 2: (0.0, 0.0), 3: (0.0, -1.0)}
    scored = [
        metrics.Scored("e", group, rollout(10, version=0, reward=reward))
        for group, rewards in groups.items()
        for reward in rewards
    ]
    values = metrics.of_step(0, scored, {}, metrics.StepTimes(2.0, 0.5, 0.5, 1.0), {})
    assert values["env/e/solved_none"] == values["env/e/no_spread"] == 0.5


def test_the_divergence_of_a_run_is_that_from_its_reference():
    """Which is what a KL penalty and its target are about; the sampler's has a name of its own."""
    trained = tpb.ForwardBackwardResponse(diagnostics={"mismatch_kl": 0.5, "entropy": 1.0})
    values = metrics.of_training(trained, [tpb.OptimStepResponse()])
    assert values["train/kl_divergence"] == values["train/mismatch_kl"] == 0.5
    trained.diagnostics["reference_kl"] = 0.25
    values = metrics.of_training(trained, [tpb.OptimStepResponse()])
    assert (values["train/kl_divergence"], values["train/mismatch_kl"]) == (0.25, 0.5)
    assert values["train/reference_kl"] == 0.25


async def test_permits_are_fair_and_survive_cancellation():
    permits, order = Permits(4), []

    async def use(name: str, count: int) -> None:
        await permits.take(count)
        order.append(name)
        await asyncio.sleep(0.01)
        permits.give_back(count)

    first = asyncio.create_task(use("first", 3))
    large = asyncio.create_task(use("large", 4))
    gone = asyncio.create_task(use("gone", 2))
    small = asyncio.create_task(use("small", 1))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(first, large, small)
    assert order == ["first", "large", "small"]
    await asyncio.wait_for(permits.take(4), 60)


async def test_a_group_that_is_sampled_again_does_not_wait_behind_later_batches():
    """permits.py 1 and 2."""
    permits, order = Permits(4), []

    async def use(batch: int, place: int) -> None:
        await permits.take(4, batch)
        order.append((batch, place))
        await asyncio.sleep(0.005)
        permits.give_back(4)

    waiting = [asyncio.create_task(use(batch, place)) for batch in range(3) for place in range(2)]
    await asyncio.sleep(0)
    waiting.append(asyncio.create_task(use(0, 9)))
    await asyncio.gather(*waiting)
    assert order == [(0, 0), (0, 1), (0, 9), (1, 0), (1, 1), (2, 0), (2, 1)]


async def test_below_the_total_a_limit_that_changes_keeps_the_order_of_batches():
    """permits.py 3: what is let through waits elsewhere, first come first served."""
    permits, order = Permits(64, 4), []

    async def take(batch: int, count: int) -> None:
        await permits.take(count, batch)
        order.append(batch)

    waiting = [asyncio.create_task(take(batch, 4)) for batch in (1, 2, 3)]
    await asyncio.sleep(0)
    waiting.append(asyncio.create_task(take(0, 8)))
    await asyncio.sleep(0)
    assert order == [1]
    permits.give_back(3)
    await asyncio.sleep(0)
    assert order == [1]
    permits.give_back(1)
    await asyncio.sleep(0)
    assert order == [1, 0], "more than the limit, alone"
    permits.limit_to(12)
    await asyncio.sleep(0)
    assert order == [1, 0, 2]
    permits.limit_to(2)
    permits.give_back(12)
    await asyncio.gather(*waiting)
    assert order == [1, 0, 2, 3]


@given(st.integers(0, 2**16), st.integers(1, 8))
def test_permits_are_never_overdrawn(seed, total):
    import random

    async def play() -> None:
        chance, permits, held = random.Random(seed), Permits(total), Counter()

        async def use(number: int) -> None:
            count = chance.randint(1, total)
            await permits.take(count, chance.randint(0, 2))
            held[number] = count
            assert held.total() <= total
            await asyncio.sleep(0)
            del held[number]
            permits.give_back(count)

        tasks = [asyncio.create_task(use(number)) for number in range(8)]
        for task in tasks:
            await asyncio.sleep(0)
            if chance.random() < 0.3 and not task.done() and not held[tasks.index(task)]:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            assert task.cancelled() or task.exception() is None
        await asyncio.wait_for(permits.take(total), 60)

    asyncio.run(play())


def test_imports_neither_torch_nor_verifiers_nor_tokenizers():
    code = (
        "import sys, quartet_orchestrator.__main__\n"
        "bad = {'torch', 'verifiers', 'tokenizers', 'transformers'} & set(sys.modules)\n"
        "others = ('quartet_trainer', 'quartet_inference', 'quartet_envhost')\n"
        "bad |= {m for m in sys.modules if m.startswith(others)}\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
