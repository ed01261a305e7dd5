"""How much an evaluation on demand may be, and leave unread: counted, without a run."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.run.evaluation import EvaluateConfig
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet_orchestrator import on_demand
from quartet_orchestrator.on_demand import EvaluationOnDemand, Measurable
from quartet_orchestrator.state import RunState


def measurable(moves: list[int]) -> Any:
    """A run, of which its name is known, and when it moved."""
    book = SimpleNamespace(state=RunState(run_id="r"), moved=lambda: moves.append(len(moves)))
    unused: Any = None
    return Measurable(book, unused, unused, unused, unused)


def test_so_many_evaluations_of_a_run_have_a_place_and_give_it_back():
    """on_demand.py 3"""
    run = measurable([])
    for _ in range(2):
        with ExitStack() as held:
            for _ in range(on_demand.MAX_AT_ONCE):
                held.enter_context(run.place())
            with pytest.raises(QuartetError, match=r"4 evaluations of run 'r' are under way") as refused:
                held.enter_context(run.place())
            assert refused.value.reason == "OVERLOADED" and run.under_way == on_demand.MAX_AT_ONCE == 4
        assert run.under_way == 0
    with pytest.raises(KeyError), run.place():
        raise KeyError
    assert run.under_way == 0


async def test_what_is_left_unread_counts_together(monkeypatch):
    """on_demand.py 3: as many bytes as it may be, and no more; each of them moved the run."""
    moves: list[int] = []
    event = pb.RolloutEvent(env_id="e" * 50)
    monkeypatch.setattr(on_demand, "UNREAD_BYTES", 3 * event.ByteSize())
    evaluation = EvaluationOnDemand(measurable(moves), EvaluateConfig())
    for _ in range(3):
        evaluation._ended(0, event)
    with pytest.raises(on_demand._Behind):
        evaluation._ended(0, event)
    assert len(moves) == 4 and evaluation._unread.qsize() == 3
    told = on_demand._typed(on_demand._Behind())
    assert isinstance(told, QuartetError) and told.reason == "OVERLOADED"


def test_as_many_rollouts_as_may_be_are_taken(monkeypatch):
    """on_demand.py 3"""
    trial = SimpleNamespace(name="e", num_examples=5, rollouts_per_example=2)
    outcomes: Any = [SimpleNamespace(asked=10, examples=5, trial=trial) for _ in range(2)]
    monkeypatch.setattr(on_demand, "MAX_ROLLOUTS", 20)
    on_demand._check_size(outcomes)
    monkeypatch.setattr(on_demand, "MAX_ROLLOUTS", 19)
    with pytest.raises(QuartetError, match="and those of 1 more, are 20 rollouts; ask for at most 19"):
        on_demand._check_size(outcomes)
