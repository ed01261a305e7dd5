"""A world for runs: both fakes on ports, an orchestrator's runs in a folder; how a run looks at its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from loopback import LOOPBACK
from orch_fakes import FakeHost, FakePolicy, FakeTrainer
from quartet.kit.channel import ClientSecurity, connect
from quartet.kit.health import Health
from quartet.kit.server import RunningServer, ServerConfig, Service, start
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1.envhost_service_pb2_grpc import add_EnvHostServiceServicer_to_server
from quartet.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from quartet.v1.orchestrator_service_pb2_grpc import (
    OrchestratorServiceStub,
    add_OrchestratorServiceServicer_to_server,
)
from quartet.v1.trainer_service_pb2_grpc import add_TrainerServiceServicer_to_server
from quartet.v1.weights_pb2_grpc import add_WeightServiceServicer_to_server
from quartet_orchestrator.assembly import Services
from quartet_orchestrator.config import OrchestratorConfig
from quartet_orchestrator.runs import Runs
from quartet_orchestrator.service import SERVICE_NAME, OrchestratorServicer
from quartet_orchestrator.state import RESTING

RUN = "run"


def _add_trainer(servicer, server) -> None:
    add_TrainerServiceServicer_to_server(servicer, server)
    add_WeightServiceServicer_to_server(servicer, server)


#: Nothing here takes as long.
WAIT_S = 60.0


class World:
    """Both fakes on ports that stay the same over restarts, and an orchestrator's runs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trainer = FakeTrainer()
        self.host = FakeHost(self.trainer)
        self._servers: dict[str, RunningServer] = {}
        self.addresses: dict[str, str] = {}
        # Of the environment hosts that a test serves besides.
        self.more_hosts: list[str] = []
        self.patience_s = 20.0
        self.journal_keep_bytes = 1 << 30
        self.advantages: dict[str, str] = {}
        self.goes_on_with = ""

    async def serve(self, name: str) -> None:
        add, servicer = {
            "trainer": (_add_trainer, self.trainer),
            "policy": (add_InferenceServiceServicer_to_server, FakePolicy(self.trainer)),
            "host": (add_EnvHostServiceServicer_to_server, self.host),
        }[name]
        config = ServerConfig(address=self.addresses.get(name, f"{LOOPBACK}:0"))
        self._servers[name] = await start([Service(f"fake.{name}", add, servicer)], config, Health())
        self.addresses[name] = self._servers[name].address

    async def kill(self, name: str) -> None:
        await self._servers.pop(name).stop(0)
        if name == "trainer":
            self.trainer.forget()

    def services(self) -> Services:
        return Services.connect(
            OrchestratorConfig(
                trainer_address=self.addresses.get("trainer", ""),
                envhost_addresses=[self.addresses["host"], *self.more_hosts],
                inference_addresses=[self.addresses["policy"]] if "policy" in self.addresses else [],
                security=ClientSecurity(),
                patience_seconds=self.patience_s,
                journal_keep_bytes=self.journal_keep_bytes,
                advantages=self.advantages,
            )
        )

    def runs(self, services: Services) -> Runs:
        self._runs = Runs(self.folder / "runs", services, self.goes_on_with)
        return self._runs

    def have_patience(self, patience_s: float) -> None:
        """Also the orchestrator that is there has it, with the runs that it begins or resumes from now on."""
        self.patience_s = patience_s
        self._runs._services = replace(self._runs._services, patience_s=patience_s)

    @asynccontextmanager
    async def orchestrator(self) -> AsyncIterator[Runs]:
        """All runs of the folder, as a process has them from its start to its end."""
        services = self.services()
        runs = self.runs(services)
        try:
            runs.start()
            yield runs
        finally:
            await runs.close()
            await services.close()

    async def rest(self, runs: Runs, run_id: str = "run", timeout_s: float = 100.0):
        """The run, once it does nothing more."""
        book = runs.get(run_id)
        async with asyncio.timeout(timeout_s):
            while book.state.phase not in RESTING:
                await book.changed()
        return book.run()

    async def undisturbed(self, toml: str) -> str:
        """The weights a run ends with when nothing happens; the world is then slower, and knows of no run."""
        async with self.orchestrator() as runs:
            await runs.submit(RUN, toml, dry_run=False)
            await self.rest(runs)
        final = self.trainer.disk[RUN, "final"].weights
        self.trainer.disk.clear()
        self.trainer.applied_calls.clear()
        self.trainer.latest.clear()
        self.trainer.delay_s = 0.01
        self.folder = self.folder / "again"
        return final

    def toml(
        self, *, steps: int = 4, off_policy: int = 1, evals: int = 4, env: str = "toy", **more: object
    ) -> str:
        lines = [
            'model = "m"',
            f"max_steps = {steps}",
            "batch_size = 8",
            "rollouts_per_example = 4",
            f"max_off_policy_steps = {off_policy}",
            *(f"{key} = {value}" for key, value in more.items()),
            f'[[env]]\nid = "{env}"',
            f"[eval]\nnum_examples = {evals}",
            "[ckpt]\ninterval = 2",
            "[checks]\nverify_logprobs = true",
        ]
        return "\n".join(lines)

    async def close(self) -> None:
        for server in self._servers.values():
            await server.stop(0)


@asynccontextmanager
async def serving(world):
    """An orchestrator of the world's on a port: its stub."""
    services = world.services()
    runs = world.runs(services)
    runs.start()
    health = Health()
    service = Service(
        SERVICE_NAME, add_OrchestratorServiceServicer_to_server, OrchestratorServicer(runs, health)
    )
    server = await start([service], ServerConfig(), health)
    channel = connect(server.address)
    try:
        yield OrchestratorServiceStub(channel)
    finally:
        await channel.close()
        await server.stop(0)
        await runs.close()
        await services.close()


def taught_by(address: str, more: str = "") -> str:
    """What makes a run's reference a teacher."""
    return f'\n[algorithm]\npreset = "opd"\nreference = {{ address = "{address}" }}\n{more}'


def assert_complete(world, run, steps=4):
    assert run.phase == pb.RUN_PHASE_COMPLETED, run.error
    final = world.trainer.disk[RUN, "final"]
    assert run.step == steps == final.version
    assert run.ledger.in_flight == 0
    assert run.ledger.trained == steps * 8
    assert run.ledger.dispatched == run.ledger.trained + sum(run.ledger.discarded.values())
    assert run.model_path == "/model"
    assert len(final.trained) == steps * 8


async def events(runs, after=0, rollouts=False, run_id=RUN):
    return [record async for record in runs.get(run_id).events(after, rollouts=rollouts)]


async def notes(runs, run_id=RUN):
    seen = await events(runs, run_id=run_id)
    return [record.note.message for record in seen if record.WhichOneof("kind") == "note"]


async def until(done) -> None:
    """Until this is so."""
    async with asyncio.timeout(WAIT_S):
        while not done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
