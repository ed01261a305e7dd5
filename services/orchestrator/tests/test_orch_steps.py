"""What is written of a step, from a journal whose stamps are given (steps.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from quartet.run.config import parse_run
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet_orchestrator import journal
from quartet_orchestrator.book import Book
from quartet_orchestrator.difficulty import NO_SPREAD
from quartet_orchestrator.steps import Trained, of_acks, of_calls, record_step

#: Two groups of two rollouts a step, each group a mini-batch: two optimizer steps.
CONFIG = parse_run(
    'model = "m"\nmax_steps = 2\nbatch_size = 4\nrollouts_per_example = 2\n'
    '[algorithm]\nnum_minibatches = 2\n[[env]]\nid = "toy"'
)
#: Of a step.
TIMES = ("step", "wait_rollouts", "wait_evaluation", "train")


@pytest.fixture
def at(tmp_path, monkeypatch):
    """`at(seconds, kind=...)` writes a record that is stamped so; `at.book` is the book."""
    now_s = 0
    monkeypatch.setattr(journal, "time", SimpleNamespace(time_ns=lambda: now_s * 10**9))
    book = Book(tmp_path)

    def write(seconds, **kind):
        nonlocal now_s
        now_s = seconds
        if kind:
            book.write(**kind)

    write.book = book
    write(1, submitted={"run_id": "r"})
    yield write
    book.close()


def group_of(at, seconds, number, batch, rewards, version=0):
    """A group's dispatch, and its rollouts, each from a replica of its own; a reward of None stands for an
    attempt that failed."""
    at(seconds, dispatched={"group": number, "batch": batch, "members": 2})
    members = iter(range(2))
    for reward in rewards:
        spans = [{"length": 1, "policy_version": version}]
        rollout = {"reward": reward, "samples": [{"token_ids": [1, 2], "spans": spans}]}
        if reward is None:
            rollout = {"failure": {"message": "of the test"}, "failed_attempts": 3}
        else:
            rollout["member"] = next(members)
            rollout["replicas"] = [f"r{rollout['member']}:1"]
        at(seconds, rollout={"group": number, "rollout": rollout})


def answered(at, first, stamps, losses=(1.0, 3.0), verified=({}, {})):
    """The answers to the calls of a batch. `verified`: more of those of its mini-batches."""
    kinds = [
        {"forward_backward": {"loss": losses[0], "tokens": 4, **verified[0]}},
        {"optim_step": {"grad_norm": 1.0}},
        {"forward_backward": {"loss": losses[1], "tokens": 6, **verified[1]}},
        {"optim_step": {"grad_norm": 2.0}},
        {"publish": {}},
    ]
    for seq_id, (seconds, kind) in enumerate(zip(stamps, kinds, strict=True), first):
        at(seconds, call={"seq_id": seq_id, **kind})


def metrics_of(book):
    return book.state.recent[-1]


async def test_a_step_is_what_its_journal_says_of_it(at):
    """Also where the next batch was closed before the step ended: its own time begins there."""
    at(10, call={"seq_id": 1, "publish": {}})
    group_of(at, 11, 0, 0, [None, 1.0, 0.0])
    group_of(at, 12, 1, 0, [1.0, 1.0])
    at(13, discarded={"group": 1, "reason": NO_SPREAD})
    group_of(at, 14, 2, 0, [1.0, 0.0])
    at(15, batch={"batch": 0, "groups": [0, 2]})
    group_of(at, 16, 3, 1, [1.0, 0.0], version=2)
    group_of(at, 16, 4, 1, [1.0, 0.0], version=2)
    at(17, batch={"batch": 1, "groups": [3, 4]})
    answered(at, 2, [16, 16, 17, 17, 18])
    at(20)
    await record_step(at.book, CONFIG, 0, of_calls(at.book, CONFIG, 0))
    told = metrics_of(at.book)
    times = [told[f"time/{name}_s"] for name in ("step", "wait_rollouts", "train")]
    assert times == [8, 5, 3]
    assert told["train/loss"] == 2 and told["train/tokens"] == 10 and told["train/grad_norm"] == 1.5
    assert told["rollout/failed"] == 1 + 3 and told["rollout/resampled"] == told["env/toy/resampled"] == 1
    assert told["train/reward"] == 0.5 and at.book.state.ledger.trained == 4
    assert told["rollout/reward"] == pytest.approx(4 / 6), "of the group that was replaced, too"
    ends = ("env/toy/solved_all", "env/toy/sampled/solved_all", "rollout/solved_all", "rollout/solved_none")
    assert [told[name] for name in ends] == pytest.approx([0, 1 / 3, 1 / 3, 0])
    answered(at, 7, [21, 21, 22, 22, 24])
    await record_step(at.book, CONFIG, 1, of_calls(at.book, CONFIG, 1))
    told = metrics_of(at.book)
    times = [told[f"time/{name}_s"] for name in ("step", "wait_rollouts", "train")]
    assert times == [4, 0, 4]
    assert told["rollout/failed"] == told["rollout/resampled"] == told["staleness/max"] == 0
    assert told["rollout/reward"] == told["train/reward"] and "env/toy/sampled/solved_all" not in told


@pytest.mark.parametrize("compared", ["both", "one", "not how many tokens"])
async def test_what_a_trainer_compared_of_each_sample_is_told_of_each_replica(at, compared):
    """Over mini-batches; a trainer of one's own may leave any of it out."""
    at(10, call={"seq_id": 1, "publish": {}})
    group_of(at, 11, 0, 0, [1.0, 0.0])
    group_of(at, 12, 1, 0, [1.0, 0.0])
    at(13, batch={"batch": 0, "groups": [1, 0]})
    tokens = [] if compared == "not how many tokens" else [100, 100]
    told = {"mean_difference": 0.25, "tokens_compared": 200, "sample_tokens": tokens}
    first, second = ({"verification": {**told, "sample_differences": each}} for each in ([0, 0.5], [0, 0.25]))
    answered(at, 2, [16, 16, 17, 17, 18], verified=(first, {} if compared == "one" else second))
    await record_step(at.book, CONFIG, 0, of_calls(at.book, CONFIG, 0))
    name = "train/logprob_difference_by_replica"
    found = {one: value for one, value in metrics_of(at.book).items() if one.startswith(name)}
    assert found == ({f"{name}/r0:1": 0.0, f"{name}/r1:1": 0.375} if compared == "both" else {})


@pytest.mark.parametrize(
    ("measured_s", "waited_s"),
    [(13, 0), (16, 0), (19, 2)],
    ids=["before the batch was whole", "while it was learned", "after it was learned"],
)
async def test_waiting_for_an_evaluation_is_no_training(at, measured_s, waited_s):
    at(10, call={"seq_id": 1, "publish": {}})
    group_of(at, 11, 0, 0, [1.0, 0.0])
    happened = [(measured_s, {"eval": pb.EvalEvent(step=0)}), (15, {"batch": {"batch": 0, "groups": [0]}})]
    for seconds, kind in sorted(happened, key=lambda one: one[0]):
        at(seconds, **kind)
    answered(at, 2, [16, 16, 17, 17, 20])
    await record_step(at.book, CONFIG, 0, of_calls(at.book, CONFIG, 0))
    told = metrics_of(at.book)
    times = [told[f"time/{name}_s"] for name in TIMES]
    assert times == [10, 5, waited_s, 5 - waited_s]


async def test_a_group_that_ended_otherwise_was_not_too_easy(at):
    at(10, call={"seq_id": 1, "publish": {}})
    group_of(at, 11, 0, 0, [None])
    at(12, discarded={"group": 0, "reason": "failed"})
    group_of(at, 13, 1, 0, [1.0, 0.0])
    at(14, batch={"batch": 0, "groups": [1]})
    await record_step(at.book, CONFIG, 0, Trained({}, 10_000, 15_000, 15_000))
    assert metrics_of(at.book)["rollout/resampled"] == 0


async def test_a_clock_that_was_set_back_makes_no_time_negative(at):
    at(10, call={"seq_id": 1, "publish": {}})
    group_of(at, 4, 0, 0, [1.0, 0.0])
    at(5, batch={"batch": 0, "groups": [0]})
    await record_step(at.book, CONFIG, 0, Trained({}, 10_000, 6_000, 6_000))
    assert {metrics_of(at.book)[f"time/{name}_s"] for name in TIMES} == {0}


def test_a_foreign_step_lasts_from_the_first_dispatch_to_the_last_acknowledgement(at):
    """In whatever order the groups of the batch are acknowledged."""
    for number in range(3):
        group_of(at, 5 + number, number, 0, [1.0, 0.0])
    at(8, batch={"batch": 0, "groups": [0, 1, 2]})
    for seconds, number in ((12, 0), (20, 2), (22, 1)):
        at(seconds, acked={"group": number})
    assert of_acks(at.book, 0) == Trained({}, 5_000, 22_000, 22_000)


async def test_advice_is_a_warning(at, monkeypatch):
    monkeypatch.setattr("quartet_orchestrator.steps.advice", lambda config, recent: ["take care"])
    group_of(at, 2, 0, 0, [1.0, 0.0])
    at(3, batch={"batch": 0, "groups": [0]})
    await record_step(at.book, CONFIG, 0, Trained({}, 1_000, 4_000, 4_000))
    (note,) = [one.note for one in at.book.journal.events(0, 100, rollouts=False) if one.HasField("note")]
    assert (note.level, note.message) == (pb.NOTE_LEVEL_WARNING, "take care")
