"""CloseRun: what it frees, what it keeps, and that a deployment outlives many runs."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from quartet.errors import QuartetError, from_rpc
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1 import weights_pb2
from quartet.v1.weights_pb2_grpc import WeightServiceStub
from quartet.weights.fetch import fetch_version
from quartet.weights.tree import RelayTree
from quartet_trainer import worker
from quartet_trainer.optimizer import Optimizer
from quartet_trainer.run import Run
from quartet_trainer.sequence import Sequence

from .held_up import WAIT_SECONDS, held_up, jobs_pending, until


async def close(trainer: Any, run_id: str = "r", save_at: int = 0) -> None:
    await trainer.stub.CloseRun(pb.CloseRunRequest(run_id=run_id, save_at_seq_id=save_at))


def half_a_step(
    begun: threading.Event, go_on: threading.Event, moved: list[weakref.ref[Any]] | None = None
) -> Callable[..., None]:
    """In the place of an optimizer's step: moves one parameter, waits, and fails."""

    def half(self: Optimizer, *_: Any) -> None:
        parameter = next(iter(self._parameters.values()))
        parameter.data.add_(1000.0)
        if moved is not None:
            moved.append(weakref.ref(parameter))
        begun.set()
        assert go_on.wait(WAIT_SECONDS)
        raise MemoryError("no room for the rest")

    return half


async def test_many_runs_in_sequence_work_on_one_trainer(folder: Path, serve_trainer: Any) -> None:
    async with serve_trainer(max_runs=2) as trainer:
        await trainer.create("stays", base_model=str(folder))
        for number in range(4):
            run_id = f"run-{number}"
            await trainer.create(run_id, base_model=str(folder))
            await trainer.refused(trainer.create("one-more", base_model=str(folder)), "OVERLOADED")
            await close(trainer, run_id)
        await trainer.stub.GetRun(pb.GetRunRequest(run_id="stays"))
        await trainer.create("run-0", base_model=str(folder))
        states = (await trainer.stub.ListStates(pb.ListStatesRequest(run_id="run-0"))).states
        assert not states, "nobody asked for one"


async def test_a_closed_run_is_freed_and_goes_on_from_its_newest_state(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """roster.py 3."""
    alive: list[weakref.ref[Any]] = []
    plain = Run.__init__

    def noted(self: Run, *args: Any) -> None:
        plain(self, *args)
        alive.extend([weakref.ref(self._model), weakref.ref(next(iter(self._model.parameters())))])

    monkeypatch.setattr(Run, "__init__", noted)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), retain_versions=2)
        await trainer.forward_backward(1, make_samples())
        await trainer.optim_step(2)
        digest = (await trainer.publish(3)).digest
        await trainer.save(4, "a")
        await trainer.forward_backward(5, make_samples())
        assert all(one() is not None for one in alive)
        for _ in range(2):  # a repeated CloseRun is the same CloseRun
            await close(trainer)
        assert [one() for one in alive] == [None, None]
        await trainer.refused(trainer.stub.GetRun(pb.GetRunRequest(run_id="r")), "RUN_UNKNOWN")
        manifest = WeightServiceStub(trainer.channel).GetManifest(weights_pb2.GetManifestRequest(run_id="r"))
        await trainer.refused(manifest, "RUN_UNKNOWN")
        run = await trainer.create(base_model=str(folder), retain_versions=2)
        assert (run.applied_seq_id, run.policy_version) == (4, 1)
        assert (await fetch_version(trainer.channel, "r", 1)).manifest.digest == digest
        await trainer.forward_backward(5, make_samples())
    async with serve_trainer() as trainer:
        await close(trainer, "never-there")


async def test_a_run_that_is_closed_with_its_state_is_opened_where_it_was(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """roster.py 3."""
    spec = {"base_model": str(folder), "retain_versions": 2}
    closing = pb.CloseRunRequest(run_id="r", save_at_seq_id=5)
    async with serve_trainer() as trainer:
        await trainer.create(**spec)
        await trainer.save(1, "a")
        await trainer.forward_backward(2, make_samples())
        stepped = await trainer.optim_step(3)
        published = await trainer.publish(4)
        await trainer.forward_backward(5, make_samples(seed=1))
        told = (await trainer.stub.GetRun(pb.GetRunRequest(run_id="r"))).run
        assert (told.applied_seq_id, told.policy_version, told.published_version) == (5, 1, 1)
        # Where it cannot be saved it stays open.
        with monkeypatch.context() as patch:
            patch.setattr("quartet_trainer.content.save_file", full_disk)
            await trainer.refused(trainer.stub.CloseRun(closing), "NOT_READY")
        await trainer.stub.CloseRun(closing)
        run = await trainer.create(**spec)
        assert (run.applied_seq_id, run.policy_version, run.published_version) == (5, 1, 1)
        assert (await fetch_version(trainer.channel, "r", 1)).manifest.digest == published.digest
        assert (await trainer.optim_step(6)).grad_norm != stepped.grad_norm
        states = (await trainer.stub.ListStates(pb.ListStatesRequest(run_id="r"))).states
        assert [(state.name, state.seq_id) for state in states] == [("a", 1), ("closed", 5)]
        # One call further than its caller knows: it goes back to what was saved.
        await trainer.stub.CloseRun(closing)
        assert (await trainer.create(**spec)).applied_seq_id == 5


def full_disk(*args: Any) -> None:
    raise OSError(28, "no space left")


@pytest.mark.parametrize("caller_leaves", [False, True])
async def test_a_run_is_closed_after_the_call_under_way(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch, caller_leaves: bool
) -> None:
    """roster.py 3: and saved as it stands behind that."""
    begun, go_on = held_up(monkeypatch, "forward_backward")
    async with serve_trainer(max_runs=1) as trainer:
        await trainer.create(base_model=str(folder))
        batch = asyncio.create_task(trainer.forward_backward(1, make_samples()))
        try:
            assert await asyncio.to_thread(begun.wait, WAIT_SECONDS)
            closing = asyncio.create_task(close(trainer, save_at=1))
            async with asyncio.timeout(WAIT_SECONDS):
                get = pb.GetRunRequest(run_id="r")
                while await known(trainer.stub.GetRun(get)):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert not closing.done()
            if caller_leaves:
                closing.cancel()
                await asyncio.wait({closing})
        finally:
            go_on.set()
        assert (await batch).loss_tokens > 0
        if not caller_leaves:
            await closing
        # The place is free, also where nobody waited for it.
        assert (await trainer.create("next", base_model=str(folder))).applied_seq_id == 0
        await close(trainer, "next")
        assert (await trainer.create(base_model=str(folder))).applied_seq_id == 1


async def test_a_run_is_extended_after_the_call_under_way(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """roster.py 1: what that call did is the longer run's, too."""
    begun, go_on = held_up(monkeypatch, "forward_backward")
    settling, plain, was_known = asyncio.Event(), Sequence.settle, []

    async def noted(sequence: Sequence) -> None:
        # What no call finds gets none more, of which the saved state would not know.
        was_known.append(await known(trainer.stub.GetRun(pb.GetRunRequest(run_id="r"))))
        settling.set()
        await plain(sequence)

    monkeypatch.setattr(Sequence, "settle", noted)
    spec = {"base_model": str(folder), "schedule": pb.SCHEDULE_LINEAR}
    async with serve_trainer(max_runs=1) as trainer:
        await trainer.create(**spec, total_steps=2)
        batch = asyncio.create_task(trainer.forward_backward(1, make_samples()))
        try:
            assert await asyncio.to_thread(begun.wait, WAIT_SECONDS)
            longer = {**spec, "total_steps": 4, "earlier_total_steps": [2]}
            extending = asyncio.create_task(trainer.create(**longer))
            async with asyncio.timeout(WAIT_SECONDS):
                await settling.wait()
        finally:
            go_on.set()
        assert (await batch).loss_tokens > 0
        assert (await extending).applied_seq_id == 1
        assert was_known == [False]
        assert (await trainer.optim_step(2)).grad_norm > 0


@pytest.mark.parametrize("lora", [None, pb.LoraSpec(rank=2, alpha=4.0)])
async def test_a_run_that_tears_while_its_closing_waits_is_not_saved(
    folder: Path,
    serve_trainer: Any,
    make_samples: Any,
    monkeypatch: pytest.MonkeyPatch,
    lora: pb.LoraSpec | None,
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    pending = jobs_pending(monkeypatch)
    spec = {"base_model": str(folder), "lora": lora}
    async with serve_trainer() as trainer:
        await trainer.create(**spec)
        # Another run on the same base: an adapter that leaves it twice would be in its way.
        await trainer.create("beside", **spec)
        await trainer.save(1, "a")
        await trainer.forward_backward(2, make_samples())
        with monkeypatch.context() as patched:
            patched.setattr(Optimizer, "step", half_a_step(begun, go_on))
            stepping = asyncio.create_task(trainer.optim_step(3))
            try:
                assert await asyncio.to_thread(begun.wait, WAIT_SECONDS)
                scores = asyncio.create_task(trainer.forward(make_samples()))
                await until(lambda: pending() == 2)
                closing = trainer.stub.CloseRun(pb.CloseRunRequest(run_id="r", save_at_seq_id=2))
                async with asyncio.timeout(WAIT_SECONDS):
                    while await known(trainer.stub.GetRun(pb.GetRunRequest(run_id="r"))):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            finally:
                go_on.set()
            await trainer.refused(stepping, "OVERLOADED")
            # They waited behind the step, and would have been those of a mixture.
            await trainer.refused(scores, "RUN_UNKNOWN")
            await closing
        await trainer.forward_backward(1, make_samples(), run_id="beside")
        assert (await trainer.create(**spec)).applied_seq_id == 1
        states = (await trainer.stub.ListStates(pb.ListStatesRequest(run_id="r"))).states
        assert [state.name for state in states] == ["a"]


async def test_a_torn_run_is_closed_although_the_worker_is_full(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """worker.py 3."""
    begun, go_on, moved = threading.Event(), threading.Event(), list[weakref.ref[Any]]()
    pending = jobs_pending(monkeypatch)
    spec = {"base_model": str(folder), "lora": pb.LoraSpec(rank=2, alpha=4.0)}
    async with serve_trainer() as trainer:
        await trainer.create(**spec)
        # It keeps the base, which an adapter that stays in it keeps in turn.
        await trainer.create("beside", **spec)
        await trainer.forward_backward(1, make_samples())
        with monkeypatch.context() as patched:
            patched.setattr(Optimizer, "step", half_a_step(begun, go_on, moved))
            stepping = asyncio.create_task(trainer.optim_step(2))
            try:
                assert await asyncio.to_thread(begun.wait, WAIT_SECONDS)
                scores = asyncio.create_task(trainer.forward(make_samples()))
                await until(lambda: pending() == 2)
                patched.setattr(worker, "MAX_PENDING", 1)
            finally:
                go_on.set()
            with pytest.raises(grpc.RpcError, match="no room for the rest"):
                await stepping
            await trainer.refused(scores, "RUN_UNKNOWN")
        await trainer.forward_backward(1, make_samples(), run_id="beside")
        gc.collect()
        assert moved[0]() is None


@pytest.mark.parametrize("fails", ["step", "restore"])
async def test_what_a_run_held_that_failed_is_free_before_it_is_opened_again(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """roster.py 4 and worker.py 4: for two of it there may be no room."""
    made: list[weakref.ref[Any]] = []
    alive: list[bool] = []
    plain = Run.__init__

    def noted(self: Run, *args: Any) -> None:
        alive.extend(one() is not None for one in made)
        plain(self, *args)
        made.append(weakref.ref(next(iter(self._model.parameters()))))

    def no_room(*_: Any) -> None:
        raise MemoryError("no room")

    def harmed(*_: Any) -> None:
        raise QuartetError("CHECKSUM_MISMATCH", "of another model")

    monkeypatch.setattr(Run, "__init__", noted)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        await trainer.save(1, "a")
        await trainer.forward_backward(2, make_samples())
        with monkeypatch.context() as patched:
            if fails == "step":
                patched.setattr(Optimizer, "step", no_room)
                await trainer.refused(trainer.optim_step(3), "OVERLOADED")
            else:
                await close(trainer)
                patched.setattr(Run, "restore", harmed)
                await trainer.refused(trainer.create(base_model=str(folder)), "CHECKSUM_MISMATCH")
        await trainer.create(base_model=str(folder))
    assert alive and not any(alive)


async def test_a_run_that_nobody_waits_for_any_more_is_opened_once(
    folder: Path, serve_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when loading takes longer than the caller's deadline, and the caller tries again."""
    begun, go_on, opened, plain = threading.Event(), threading.Event(), [], Run.__init__

    def waiting(self: Run, *args: Any) -> None:
        opened.append(self)
        begun.set()
        assert go_on.wait(WAIT_SECONDS)
        plain(self, *args)

    monkeypatch.setattr(Run, "__init__", waiting)
    async with serve_trainer(max_runs=1) as trainer:
        creating = asyncio.create_task(trainer.create(base_model=str(folder)))
        try:
            assert await asyncio.to_thread(begun.wait, WAIT_SECONDS)
            creating.cancel()
            await asyncio.wait({creating})
            again = asyncio.create_task(trainer.create(base_model=str(folder)))
            with pytest.raises(grpc.RpcError):
                await trainer.stub.GetRun(pb.GetRunRequest(run_id="r"))
        finally:
            go_on.set()
        assert (await again).applied_seq_id == 0 and len(opened) == 1


async def known(call: Any) -> bool:
    try:
        await call
    except grpc.RpcError as error:
        assert from_rpc(error).reason == "RUN_UNKNOWN"
        return False
    return True


async def test_a_watch_does_not_hold_up_the_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quartet.kit.channel import connect
    from quartet.kit.server import ServerConfig, start
    from quartet_trainer.assembly import assemble
    from quartet_trainer.config import TrainerConfig

    arrived, plain = asyncio.Event(), RelayTree.join

    def joined(*args: Any) -> Any:
        arrived.set()
        return plain(*args)

    monkeypatch.setattr(RelayTree, "join", joined)
    config = TrainerConfig(
        state_dir=tmp_path, device="cpu", server=ServerConfig(address="127.0.0.1:0", drain_seconds=60)
    )
    trainer = assemble(config)
    server = await start(trainer.services, config.server, trainer.health)
    channel = connect(server.address)
    try:
        watching = WeightServiceStub(channel).Watch(weights_pb2.WatchRequest())
        reading = asyncio.ensure_future(watching.read())
        async with asyncio.timeout(WAIT_SECONDS):
            await arrived.wait()
        assert not reading.done()
        began = time.monotonic()
        trainer.health.drain()
        await server.stop(config.server.drain_seconds)
        assert time.monotonic() - began < config.server.drain_seconds / 2
        with pytest.raises(grpc.RpcError) as raised:
            await reading
        assert from_rpc(raised.value).reason == "NOT_READY"
    finally:
        await channel.close()
        await trainer.worker.close()
