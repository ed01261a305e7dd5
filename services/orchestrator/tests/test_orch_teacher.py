"""The teacher: what it is asked, what of its answers is refused, how long it may be away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from certificates import needs_openssl, write_certificates
from orch_world import RUN, World, taught_by, until
from quartet.errors import QuartetError
from quartet.kit.channel import ClientSecurity
from quartet.kit.health import Health
from quartet.kit.options import MAX_MESSAGE_BYTES
from quartet.kit.security import ServerTls
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import inference_service_pb2 as ipb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1.inference_service_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from quartet.v1.journal_pb2 import JournalRecord
from quartet.v1.rollout_pb2 import FAILURE_KIND_HOST, Rollout
from quartet_orchestrator import teacher as module
from quartet_orchestrator.assembly import Services
from quartet_orchestrator.outage import Outage, RunInterrupted
from quartet_orchestrator.permits import Permits
from quartet_orchestrator.sampling import ROLLOUT_BYTES, Sampling
from quartet_orchestrator.service import to_response
from quartet_orchestrator.teacher import Teacher, Teachers
from quartet_orchestrator.trouble import Note


class Scorer(InferenceServiceServicer):
    def __init__(self) -> None:
        self.requests: list[ipb.ScoreRequest] = []
        self.away = 0
        self.answer: Callable[[int], list[float]] = lambda count: [-0.5] * count
        self.dropped = 0
        self.versions: Iterator[int] = iter(())
        self.shown: list[str] = []

    async def Score(self, request, context):
        self.shown += [value for key, value in context.invocation_metadata() if key == "authorization"]
        if self.away:
            self.away -= 1
            raise QuartetError("NOT_READY", "loading")
        self.requests.append(request)
        counts = [sum(span.length for span in one.spans) for one in request.samples]
        version = next(self.versions, 0)
        scored = [ipb.ScoredSample(logprobs=self.answer(count), policy_version=version) for count in counts]
        return ipb.ScoreResponse(samples=scored[self.dropped :])


@asynccontextmanager
async def teaching(
    scorer: Scorer, patience_s: float = 20.0, note: Note = lambda message, warning=False: None
) -> AsyncIterator[Teacher]:
    service = Service("teacher", add_InferenceServiceServicer_to_server, scorer)
    server = await start([service], ServerConfig(address="127.0.0.1:0"), Health())
    teachers = Teachers(ClientSecurity())
    try:
        yield teachers.at(server.address, RUN, Outage("the teacher", patience_s, note), note)
    finally:
        await teachers.close()
        await server.stop(0)


def rollout(*lengths: int) -> Rollout:
    made = Rollout(reward=1.0)
    for length in lengths:
        sample = made.samples.add(token_ids=range(2 + length), logprobs=[-1.0] * length)
        sample.spans.add(start=2, length=length, policy_version=3)
    return made


async def test_every_token_is_judged_and_the_samplers_opinion_is_not_told() -> None:
    """teacher.py 1"""
    scorer, judged = Scorer(), rollout(3, 5)
    async with teaching(scorer) as teacher:
        await teacher.judge(judged)
    assert [list(one.reference_logprobs) for one in judged.samples] == [[-0.5] * 3, [-0.5] * 5]
    (request,) = scorer.requests
    assert [len(one.token_ids) for one in request.samples] == [5, 7]
    assert not any(one.logprobs for one in request.samples) and not request.run_id


async def test_large_rollouts_are_asked_about_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """teacher.py 3"""
    monkeypatch.setattr(module, "REQUEST_BYTES", 400)
    scorer, judged = Scorer(), rollout(*[30] * 9)
    async with teaching(scorer) as teacher:
        await teacher.judge(judged)
    assert len(scorer.requests) > 1 and sum(len(one.samples) for one in scorer.requests) == 9
    assert all(len(one.reference_logprobs) == 30 for one in judged.samples)


async def test_many_short_samples_are_asked_about_in_parts() -> None:
    """teacher.py 3: a replica refuses more of them in one call, and the run would be stopped for it."""
    scorer, judged = Scorer(), rollout(*[1] * 1025)
    async with teaching(scorer) as teacher:
        await teacher.judge(judged)
    assert [len(one.samples) for one in scorer.requests] == [1024, 1], "ScoreRequest.samples"
    assert all(len(one.reference_logprobs) == 1 for one in judged.samples)


async def test_a_teacher_that_is_away_is_waited_for() -> None:
    """teacher.py 2"""
    scorer, judged = Scorer(), rollout(3)
    scorer.away = 2
    async with teaching(scorer) as teacher:
        await teacher.judge(judged)
    assert len(judged.samples[0].reference_logprobs) == 3
    scorer.away = 10**6
    async with teaching(scorer, patience_s=0.3) as teacher:
        with pytest.raises(RunInterrupted, match="the teacher"):
            await teacher.judge(rollout(3))


async def test_answers_that_fit_no_token_stop_the_run() -> None:
    for answer in (lambda count: [-0.5] * (count + 1), lambda count: [float("nan")] * count):
        scorer = Scorer()
        scorer.answer = answer
        async with teaching(scorer) as teacher:
            with pytest.raises(RunInterrupted, match="the run's tokenizer"):
                await teacher.judge(rollout(3))
    scorer = Scorer()
    scorer.dropped = 1
    async with teaching(scorer) as teacher:
        with pytest.raises(RunInterrupted, match="scored 1 samples of 2"):
            await teacher.judge(rollout(3, 4))


async def test_the_token_is_shown_to_no_teacher_that_only_a_run_names(tmp_path: Path) -> None:
    """teacher.py 6: a run's file is anybody's who may submit one."""
    (token := tmp_path / "token").write_text("secret")
    note: Note = lambda message, warning=False: None  # noqa: E731
    outage, security = Outage("the teacher", 20.0, note), ClientSecurity(token_file=token)
    for asks in (token, None):
        scorer = Scorer()
        service = Service("teacher", add_InferenceServiceServicer_to_server, scorer)
        server = await start([service], ServerConfig(token_file=asks), Health())
        stranger, known = Teachers(security), Teachers(security, [server.address])
        try:
            named_by_a_run = stranger.at(server.address, RUN, outage, note)
            if asks:
                with pytest.raises(RunInterrupted, match="add it to teacher_addresses of the orchestrator's"):
                    await named_by_a_run.judge(rollout(3))
            else:
                await named_by_a_run.judge(rollout(3))
            assert not scorer.shown
            await known.at(server.address, RUN, outage, note).judge(rollout(3))
            assert scorer.shown == ["Bearer secret"]
        finally:
            await stranger.close()
            await known.close()
            await server.stop(0)


@needs_openssl
async def test_a_teacher_whose_certificates_break_between_two_processes_is_waited_for(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """teacher.py 2, runs.py 2 and 5: the run says why, and goes on by itself."""
    write_certificates(tmp_path)
    cert, key, ca = (tmp_path / name for name in ("client.crt", "client.key", "ca.crt"))
    whole, broken = cert.read_bytes(), (tmp_path / "stranger.crt").read_bytes()
    tls = ServerTls(cert_file=tmp_path / "server.crt", key_file=tmp_path / "server.key", client_ca_file=ca)
    service = Service("teacher", add_InferenceServiceServicer_to_server, Scorer())
    server = await start([service], ServerConfig(tls=tls), Health())
    plain, made = world.services, list[Teachers]()

    def secured() -> Services:
        made.append(Teachers(ClientSecurity(ca_file=ca, cert_file=cert, key_file=key)))
        return replace(plain(), teachers=made[-1])

    monkeypatch.setattr(world, "services", secured)
    world.trainer.delay_s = 0.02
    try:
        async with world.orchestrator() as runs:
            await runs.submit(RUN, world.toml() + taught_by(server.address), dry_run=False)
            while runs.get(RUN).state.step < 1:
                await runs.get(RUN).changed()
        cert.write_bytes(broken)
        async with world.orchestrator() as runs:
            async with asyncio.timeout(60):
                while "cannot be called: cert_file" not in runs.status(RUN).doing:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            cert.write_bytes(whole)
            run = await world.rest(runs)
            assert run.phase == pb.RUN_PHASE_COMPLETED, run.error
            await until(lambda: not made[-1]._called)
    finally:
        await server.stop(0)


async def test_the_last_run_that_rests_closes_the_connection() -> None:
    """teacher.py 5"""
    note: Note = lambda message, warning=False: None  # noqa: E731
    outage = Outage("the teacher", 20.0, note)
    service = Service("teacher", add_InferenceServiceServicer_to_server, Scorer())
    server = await start([service], ServerConfig(), Health())
    teachers = Teachers(ClientSecurity())
    one, other = (teachers.at(server.address, name, outage, note) for name in "ab")
    try:
        await one.judge(rollout(3))
        await teachers.left("a")
        assert list(teachers._called) == [server.address]
        await other.judge(rollout(3))
        await teachers.left("b")
        assert not teachers._called
        await teachers.left("b")
    finally:
        await teachers.close()
        await server.stop(0)


async def test_a_reference_that_moves_is_told_of_once() -> None:
    """teacher.py 4: a replica of the run itself has many addresses."""
    scorer, notes = Scorer(), list[tuple[str, bool]]()
    scorer.versions = iter([7, 7, 8, 7, 9])
    async with teaching(scorer, note=lambda message, warning=False: notes.append((message, warning))) as one:
        for _ in range(2):
            await one.judge(rollout(3, 5))
        assert not notes, "one that stands still"
        for _ in range(3):
            await one.judge(rollout(3, 5))
    ((message, warning),) = notes
    assert warning and "scored by version 7 of its model, and now by 8: it serves what somebody" in message


@pytest.mark.parametrize(
    ("tokens", "message", "fits"), [(80_000, 0, True), (80_000, 1 << 20, True), (110_000, 0, False)]
)
async def test_what_a_teacher_adds_never_makes_a_rollout_too_large_to_be_told(
    tokens: int, message: int, fits: bool
) -> None:
    """sampling.py 6 and invariant 8: the host lets it pass, its event fits into a message all the same."""
    from_host = Rollout(member=1, reward=1.0)
    for _ in range(4):
        sample = from_host.samples.add(token_ids=[70_000] * (tokens + 1), logprobs=[-1.0] * tokens)
        sample.spans.add(start=1, length=tokens)
    if message:
        from_host.messages.add(role="user", content="x" * message)
    assert from_host.ByteSize() <= ROLLOUT_BYTES

    class Hosts:
        async def run(self, _):
            yield from_host

    told: list[Rollout] = []
    outages = [Outage(name, 20.0, lambda note, warning=False: None) for name in ("the host", "the model")]
    async with teaching(Scorer()) as teacher:
        failed = await Sampling(Hosts(), Permits(1), *outages, teacher.judge).complete(
            epb.RunRolloutsRequest(), [1], lambda one: told.append(one) or True, all_or_nothing=True
        )
    (one,) = told
    event = to_response(JournalRecord(event=1, rollout=pb.RolloutEvent(group=1, rollout=one)))
    assert event.ByteSize() <= MAX_MESSAGE_BYTES and one.member == 1
    if fits:
        assert not failed and len(one.samples[3].reference_logprobs) == tokens and not one.messages
    else:
        assert failed[1].kind == FAILURE_KIND_HOST and not failed[1].retryable and not one.samples
