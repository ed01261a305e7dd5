"""What a member's attempts are, and what costs none (sampling.py 2)."""

from __future__ import annotations

import asyncio

import pytest
from quartet.errors import QuartetError
from quartet.v1 import common_pb2 as cpb
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import rollout_pb2 as rpb
from quartet_orchestrator import outage
from quartet_orchestrator.permits import Permits
from quartet_orchestrator.sampling import MEMBER_ATTEMPTS, Sampling


@pytest.mark.parametrize(
    ("reason", "tries"),
    [
        ("NOT_READY", None),
        ("RUN_NOT_SERVED", None),
        ("UNAUTHENTICATED", None),
        ("INTERNAL", MEMBER_ATTEMPTS),
        ("PROMPT_TOO_LONG", 1),
    ],
)
async def test_the_reason_says_whether_the_model_is_away_or_refuses_the_member(monkeypatch, reason, tries):
    """sampling.py 2: what is away costs no attempt, and is waited for until the patience ends."""
    monkeypatch.setattr(outage, "MAX_BACKOFF_S", 0.01)

    now = [0.0]

    class Hosts:
        tries = 0

        async def run(self, asked):
            self.tries += 1
            now[0] += 0.02
            rollout = rpb.Rollout(member=0)
            failure = rpb.RolloutFailure(kind=rpb.FAILURE_KIND_MODEL, reason=f"ERROR_REASON_{reason}")
            failure.retryable = reason in ("NOT_READY", "INTERNAL")
            rollout.failure.CopyFrom(failure)
            yield rollout

    def note(message, *, warning=False):
        pass

    hosts, model = Hosts(), outage.Outage("the model", 0.5, note, lambda: now[0])
    sampling = Sampling(hosts, Permits(1), outage.Outage("the host", 60.0, note), model)
    sampled = sampling.complete(epb.RunRolloutsRequest(), [0], lambda _: True, all_or_nothing=True)
    if tries is None:
        with pytest.raises(outage.RunInterrupted, match="the model has been away"):
            await sampled
        assert hosts.tries > 3 * MEMBER_ATTEMPTS
    else:
        assert set(await sampled) == {0} and hosts.tries == tries


@pytest.mark.parametrize("reason", ["VERSION_UNAVAILABLE", "DEADLINE"])
async def test_a_version_that_a_trainer_comes_to_again_costs_no_attempt_before(monkeypatch, reason):
    """sampling.py 2: a replay may take longer than all attempts together; behind it they count."""
    monkeypatch.setattr(outage, "MAX_BACKOFF_S", 0.01)

    class Hosts:
        tries = 0

        async def run(self, asked):
            self.tries += 1
            failure = rpb.RolloutFailure(kind=rpb.FAILURE_KIND_MODEL, reason=f"ERROR_REASON_{reason}")
            failure.retryable = True
            yield rpb.Rollout(member=0, failure=failure)

    def note(message, *, warning=False):
        pass

    hosts, away = Hosts(), [outage.Outage(name, 0.1, note) for name in ("the host", "the model")]
    sampling = Sampling(hosts, Permits(1), *away, replays=lambda: hosts.tries <= 30)
    failed = await sampling.complete(epb.RunRolloutsRequest(), [0], lambda _: True, all_or_nothing=True)
    assert set(failed) == {0} and hosts.tries == 30 + MEMBER_ATTEMPTS


async def test_a_member_that_the_model_never_answers_while_it_answers_others_fails(monkeypatch):
    """Invariant 8 and sampling.py 2: its retries are bounded by the run's patience, too."""
    monkeypatch.setattr(outage, "MAX_BACKOFF_S", 0.01)
    notes = []
    model = outage.Outage("the model", 0.3, lambda message, *, warning=False: notes.append(message))

    class Hosts:
        async def run(self, asked):
            model.answered()  # another group's rollout
            failure = rpb.RolloutFailure(kind=rpb.FAILURE_KIND_MODEL, reason="ERROR_REASON_OVERLOADED")
            yield rpb.Rollout(member=0, failure=failure)

    sampling = Sampling(Hosts(), Permits(1), outage.Outage("the host", 60.0, notes.append), model)
    async with asyncio.timeout(60):
        failed = await sampling.complete(epb.RunRolloutsRequest(), [0], lambda _: True, all_or_nothing=True)
    assert failed[0].reason == cpb.ERROR_REASON_OVERLOADED


async def test_a_stream_that_breaks_behind_its_last_rollout_has_told_all():
    """Invariant 9: a host killed at that moment is not asked for nobody, which a host refuses."""
    asked_for = []

    class Hosts:
        async def run(self, asked):
            asked_for.append(list(asked.members))
            if not asked.members:
                raise QuartetError("INVALID_REQUEST", "name 1 to 256 members")
            good, bad = rpb.Rollout(member=0), rpb.Rollout(member=1)
            good.samples.add(token_ids=[5, 6], logprobs=[-1.0]).spans.add(start=1, length=1)
            bad.failure.CopyFrom(rpb.RolloutFailure(kind=rpb.FAILURE_KIND_TIMEOUT))
            yield good
            yield bad
            raise QuartetError("NOT_READY", "the host went away")

    def note(message, *, warning=False):
        pass

    away = [outage.Outage(name, 60.0, note) for name in ("the host", "the model")]
    told = []
    failed = await Sampling(Hosts(), Permits(2), *away).complete(
        epb.RunRolloutsRequest(), [0, 1], lambda one: told.append(one.member) or True, all_or_nothing=False
    )
    assert set(failed) == {1} and told == [0, 1] and asked_for == [[0, 1]]
