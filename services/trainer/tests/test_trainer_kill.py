"""Invariant 9 for the trainer: after SIGKILL and restart the run continues bit-equal to one never killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from quartet.kit.channel import connect
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1.trainer_service_pb2_grpc import TrainerServiceStub
from quartet_trainer.state_root import hold

START_SECONDS = 120.0


async def launch(tmp_path: Path) -> tuple[asyncio.subprocess.Process, Any]:
    """A trainer that tells in its log what it imports."""
    port_file = tmp_path / "port"
    port_file.unlink(missing_ok=True)
    with (tmp_path / "log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "quartet_trainer", "--state-dir", str(tmp_path / "states"),
            "--device", "cpu", "--server.port-file", str(port_file),
            stderr=log, env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
        )  # fmt: skip
    async with asyncio.timeout(START_SECONDS):
        while not port_file.exists():
            assert process.returncode is None, "the trainer did not start"
            await asyncio.sleep(0.05)
    return process, connect(port_file.read_text().strip())


async def steps(stub: Any, first: int, batches: list[Any]) -> list[tuple[float, bytes]]:
    done = []
    for index, samples in enumerate(batches):
        seq_id = first + 3 * index

        async def frames(seq_id: int = seq_id, samples: Any = samples) -> Any:
            loss = pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT)
            start = pb.ForwardBackwardStart(run_id="r", seq_id=seq_id, loss=loss, normalizer=40.0)
            yield pb.ForwardBackwardRequest(start=start)
            yield pb.ForwardBackwardRequest(batch=pb.SampleBatch(samples=samples))
            tokens = sum(len(one.sample.token_ids) for one in samples)
            yield pb.ForwardBackwardRequest(
                commit=pb.StreamCommit(sample_count=len(samples), token_count=tokens)
            )

        batch = await stub.ForwardBackward(frames())
        await stub.OptimStep(pb.OptimStepRequest(run_id="r", seq_id=seq_id + 1))
        published = await stub.PublishWeights(pb.PublishWeightsRequest(run_id="r", seq_id=seq_id + 2))
        done.append((batch.loss, published.digest))
    return done


async def refused_beside_it(tmp_path: Path) -> None:
    """Two trainers never share a state_dir."""
    arguments = [sys.executable, "-m", "quartet_trainer", "--state-dir", str(tmp_path / "states")]
    for more in ([], ["--preflight"]):
        second = await asyncio.create_subprocess_exec(
            *arguments, *more, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        _, said = await asyncio.wait_for(second.communicate(), START_SECONDS)
        assert second.returncode == 2
        (refusal,) = [line for line in said.decode().splitlines() if line.startswith("error: ")]
        assert "belongs to a trainer that is running; stop it" in refusal


def imports_no_spread_tensors(log: Path) -> None:
    """Of ranks one process needs what it is alone with, whatever it does."""
    imported = set(
        re.findall(r"^import time: .*\bquartet_trainer\.ranks\.(\w+)$", log.read_text(), re.MULTILINE)
    )
    assert {"alone", "layout"} <= imported
    assert not imported & {"group", "sharding", "shards", "muon", "lead", "command"}


async def test_a_killed_trainer_continues_bit_equally(
    folder: Path, tmp_path: Path, make_samples: Any
) -> None:
    """And its state_dir is nobody else's while it runs, and free behind it, however it ends; and it imports
    nothing that only several ranks need.
    """
    batches = [make_samples(seed=seed) for seed in range(4)]
    spec = pb.RunSpec(base_model=str(folder), optimizer=pb.OptimizerSpec(learning_rate=1e-2))
    create = pb.CreateRunRequest(run_id="r", spec=spec)
    process, channel = await launch(tmp_path)
    try:
        await refused_beside_it(tmp_path)
        stub = TrainerServiceStub(channel)
        await stub.CreateRun(create)
        await steps(stub, 1, batches[:2])
        await stub.SaveState(pb.SaveStateRequest(run_id="r", seq_id=7, name="a"))
        straight = await steps(stub, 8, batches[2:])
        # Killed with a save under way: it is whole or absent, and here nobody waited for it.
        saving = stub.SaveState(pb.SaveStateRequest(run_id="r", seq_id=14, name="b", export_model=True))
        asyncio.get_running_loop().call_later(0.01, os.kill, process.pid, signal.SIGKILL)
        await asyncio.gather(saving, return_exceptions=True)
        await process.wait()
        assert process.returncode == -signal.SIGKILL
        await channel.close()
        process, channel = await launch(tmp_path)  # the lock went with the process
        stub = TrainerServiceStub(channel)
        run = (await stub.CreateRun(create)).run
        if run.applied_seq_id == 14:
            # It was whole: go back to the one before.
            run = (await stub.LoadState(pb.LoadStateRequest(run_id="r", seq_id=15, name="a"))).run
        assert (run.applied_seq_id, run.policy_version, run.published_version) == (7, 2, 2)
        assert await steps(stub, 8, batches[2:]) == straight
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
        hold(tmp_path / "states").close()
        imports_no_spread_tensors(tmp_path / "log")
    finally:
        await channel.close()
        if process.returncode is None:
            process.kill()
            await process.wait()
