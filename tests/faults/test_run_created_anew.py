"""A run is deleted and one of its name created anew, while a replica of inference is frozen and cut off.

Traffic: a run "a" on two replicas, then another of that name with another seed and rate. Nemesis: the second
replica is frozen before the deletion, and goes on once the new run has made a step, cut off from the trainer
and while the first one is frozen: it answers with the old run's weights, under a number that the new run
trains a little later. Checker: it did answer, and nothing that it answered was written down or trained;
the trainer computes every log-probability that was trained from the version that its token is stamped with.
Then the same with a run "w", on the same services: "a" trains an adapter, "w" the whole model.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from quartet.kit.channel import connect
from quartet.v1 import inference_service_pb2 as ipb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1.inference_service_pb2_grpc import InferenceServiceStub
from quartet.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from severed import Way, way_to

from tests.conftest import REPOSITORY
from tests.forked_services import Forks, Process

OLD_STEPS, STEPS, STALENESS = 5, 12, 6
#: Enough to see that it answered, and the time in which it has to: what is under way at the first one goes on
#: at the second 15 s after its last word.
REFUSALS, ANSWERS_SECONDS = 4, 80.0
START_SECONDS, RUN_SECONDS = 120, 280
#: Each run, and what else its configuration has.
KINDS = {"a": "[lora]\nenabled = true\nr = 8", "w": ""}


def toml(model: Path, kind: str, *, seed: int, steps: int, rate: float) -> str:
    """So large a rate that the weights of two runs are far apart."""
    return f"""
model = "{model}"
max_steps = {steps}
seed = {seed}
batch_size = 16
rollouts_per_example = 4
learning_rate = {rate}
max_off_policy_steps = {STALENESS}
[sampling]
max_tokens = 13
[[env]]
id = "reverse-text"
[eval]
num_examples = 0
[checks]
verify_logprobs = true
{kind}
"""


class Processes:
    """The services, each a process."""

    def __init__(self, folder: Path, forks: Forks) -> None:
        self._folder, self._forks = folder, forks
        self.by_name: dict[str, Process] = {}

    async def start(self, name: str, service: str, *arguments: str) -> str:
        """Where it listens, once it does."""
        port, log = self._folder / f"{name}.port", self._folder / f"{name}.log"
        words = ["--server.port_file", str(port), *arguments]
        process = self._forks.start(service, words, log)
        self.by_name[name] = process
        deadline = time.monotonic() + START_SECONDS
        while not port.exists():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            await asyncio.sleep(0.05)
        return port.read_text().strip()

    def end(self) -> None:
        for process in self.by_name.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


@contextlib.contextmanager
def processes_in(folder: Path, forks: Forks) -> Iterator[Processes]:
    processes = Processes(folder, forks)
    try:
        yield processes
    finally:
        processes.end()


async def seen(orchestrator: Any, run: str, events: list[pb.WatchRunResponse]) -> None:
    """What is told of the run, until it rests."""
    async for response in orchestrator.WatchRun(pb.WatchRunRequest(run_id=run, include_rollouts=True)):
        if response.event:
            events.append(response)


def steps_of(events: list[pb.WatchRunResponse]) -> int:
    return max((one.step.step for one in events if one.HasField("step")), default=0)


def refused_in(events: list[pb.WatchRunResponse]) -> list[Any]:
    """The rollouts that the run before has answered."""
    rollouts = [one.rollout.rollout for one in events if one.HasField("rollout")]
    return [one for one in rollouts if "an earlier run" in one.failure.message]


@dataclass
class Circle:
    """The services, and who speaks to them."""

    processes: Processes
    way: Way
    orchestrator: Any
    second: Any


@contextlib.asynccontextmanager
async def circle_in(folder: Path, model: Path, forks: Forks) -> AsyncIterator[Circle]:
    """The second replica has a way of its own to the trainer."""
    async with contextlib.AsyncExitStack() as stack:
        processes = stack.enter_context(processes_in(folder, forks))
        trainer = await processes.start("trainer", "trainer", "--state_dir", str(folder / "states"))
        way = await stack.enter_async_context(way_to(trainer))
        options = ("--model", str(model), "--embedded.kv_on_update", "recompute")
        replicas = [
            await processes.start("first", "inference", *options, "--weights_address", trainer),
            await processes.start("second", "inference", *options, "--weights_address", way.address),
        ]
        policy = ("--inference_addresses", str(replicas).replace("'", '"'))
        python = ("--python", str(REPOSITORY / ".venv-envs/bin/python"))
        host = await processes.start("envhost", "envhost", *policy, *python)
        address = await processes.start(
            "orchestrator",
            "orchestrator",
            *("--data_dir", str(folder / "runs"), "--trainer_address", trainer, *policy),
            *("--envhost_addresses", f'["{host}"]'),
        )
        orchestrator = OrchestratorServiceStub(await stack.enter_async_context(connect(address)))  # type: ignore[no-untyped-call]
        second = InferenceServiceStub(await stack.enter_async_context(connect(replicas[1])))  # type: ignore[no-untyped-call]
        yield Circle(processes, way, orchestrator, second)


@pytest.mark.slow
@pytest.mark.timeout(START_SECONDS + len(KINDS) * RUN_SECONDS)
async def test_nothing_of_the_run_before_is_trained_under_the_new_ones_versions(
    tiny_model: Path, tmp_path: Path, forks: Forks
) -> None:
    async with circle_in(tmp_path, tiny_model, forks) as circle:
        for run, kind in KINDS.items():
            print(f"run {run}")
            async with asyncio.timeout(RUN_SECONDS):
                await created_anew(circle, tiny_model, run, kind)
                # The next one has the services to itself.
                await circle.orchestrator.DeleteRun(pb.DeleteRunRequest(run_id=run))


async def created_anew(circle: Circle, model: Path, run: str, kind: str) -> None:
    """All of the above, with one run."""
    orchestrator, second, way = circle.orchestrator, circle.second, circle.way
    first, frozen = circle.processes.by_name["first"], circle.processes.by_name["second"]

    old = toml(model, kind, seed=1, steps=OLD_STEPS, rate=3e-2)
    await orchestrator.SubmitRun(pb.SubmitRunRequest(run_id=run, config_toml=old))
    await seen(orchestrator, run, before := [])
    assert steps_of(before) == OLD_STEPS, before[-1]
    while await served(second, run) != OLD_STEPS:  # noqa: ASYNC110 - it comes when it does
        await asyncio.sleep(0.1)

    frozen.send_signal(signal.SIGSTOP)
    way.cut()
    await orchestrator.DeleteRun(pb.DeleteRunRequest(run_id=run))
    new = toml(model, kind, seed=2, steps=STEPS, rate=1e-4)
    await orchestrator.SubmitRun(pb.SubmitRunRequest(run_id=run, config_toml=new))
    watching = asyncio.create_task(seen(orchestrator, run, events := []))
    while steps_of(events) < 1:
        assert not watching.done(), events[-1]
        await asyncio.sleep(0.02)
    first.send_signal(signal.SIGSTOP)
    frozen.send_signal(signal.SIGCONT)
    woke = len(events)
    assert await served(second, run) == OLD_STEPS, "it is as it was"
    until = time.monotonic() + ANSWERS_SECONDS
    while len(refused_in(events)) < REFUSALS and time.monotonic() < until:
        assert not watching.done(), events[-1]
        await asyncio.sleep(0.05)
    print(f"it was cut off up to step {steps_of(events)}")
    way.mend(lost=True)
    first.send_signal(signal.SIGCONT)
    await watching

    (rested,) = [one.phase.run for one in events[-1:]]
    assert rested.phase == pb.RUN_PHASE_COMPLETED, rested.error
    refused = refused_in(events[woke:])
    print(f"{len(refused)} attempts were of the run before; {rested.max_logprob_difference:g} off at most")
    assert refused and not any(one.samples for one in refused)
    assert rested.max_logprob_difference < 1e-4, "a token was stamped with what did not sample it"
    assert rested.ledger.trained == STEPS * 16 and not rested.ledger.in_flight
    assert not rested.ledger.discarded.get("version_unpublished")


async def served(replica: Any, run: str) -> int | None:
    """The version of the run that it answers with."""
    model = await replica.GetModel(ipb.GetModelRequest())
    if model.run_id == run:
        return int(model.policy_version)
    return next((int(one.policy_version) for one in model.adapters if one.run_id == run), None)
