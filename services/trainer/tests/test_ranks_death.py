"""Invariants 7 and 9 for ranks: one that dies ends the group at once, and torchrun's next one goes on.

What dies with torchrun: test_ranks_three.py, and while it starts, test_ranks_meeting.py.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from quartet.kit.channel import connect
from quartet.v1.trainer_service_pb2_grpc import TrainerServiceStub

from .conftest import Served
from .ranked import START_SECONDS, Ranked, alive, calling

#: A group ends within this; torchrun looks at its processes ten times a second. On a machine that is shared.
END_SECONDS = 10.0
SPEC = {"learning_rate": 1e-3, "max_grad_norm": 1.0}


async def restored(group: Ranked, old: list[int], folder: Path) -> tuple[Any, Any]:
    """The next group, once it serves, and its run."""
    async with asyncio.timeout(START_SECONDS):
        while alive(old) or not group.port_file.exists():
            assert group.process.poll() is None, group.log.read_text()[-4000:]
            await asyncio.sleep(0.05)
    channel = connect(group.wait_served())
    served = Served(TrainerServiceStub(channel), channel, group.state_dir)
    return served, await served.create(base_model=str(folder), **SPEC)


async def test_a_killed_rank_ends_the_group_and_the_next_one_continues_bit_equally(
    two_ranks: Ranked, folder: Path, make_samples: Any
) -> None:
    """The group is everybody's, before and behind it."""
    batches = [make_samples(seed=seed) for seed in range(4)]
    channel = connect(two_ranks.wait_served())
    before = len(two_ranks.log.read_text())
    trainer = Served(TrainerServiceStub(channel), channel, two_ranks.state_dir)
    await trainer.create(base_model=str(folder), **SPEC)
    straight = [await trainer.one_step(3 * n + 1, batches[n]) for n in range(2)]
    await trainer.save(7, "a")
    straight += [await trainer.one_step(3 * n + 2, batches[n]) for n in (2, 3)]
    for killed in (1, 0):
        # In the middle of a batch, which cannot end before: rank 1 stands still.
        pids = [two_ranks.rank_pid(rank) for rank in (0, 1)]
        two_ranks.port_file.unlink()
        os.kill(pids[1], signal.SIGSTOP)
        call = asyncio.ensure_future(trainer.forward_backward(14, make_samples(groups=400, seed=9)))
        await asyncio.sleep(0.5)
        os.kill(pids[killed], signal.SIGKILL)
        if killed == 0:
            os.kill(pids[1], signal.SIGCONT)
        began = time.monotonic()
        with pytest.raises(grpc.RpcError) as raised:
            await call
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        while alive(pids):
            await asyncio.sleep(0.01)
            assert time.monotonic() - began < END_SECONDS
        print(f"rank {killed} killed: all had ended after {time.monotonic() - began:.2f} s")
        await channel.close()
        trainer, run = await restored(two_ranks, pids, folder)
        channel = trainer.channel
        assert (run.applied_seq_id, run.policy_version, run.published_version) == (7, 2, 2)
        assert [await trainer.one_step(3 * n + 2, batches[n]) for n in (2, 3)] == straight[2:]
    await channel.close()
    why = two_ranks.log.read_text()[before:]
    assert '"event": "rank_ended"' in why and "by peer" in why
    async with calling(two_ranks):
        pass  # what it has of the run goes


async def test_a_disk_that_is_full_at_the_export_ends_no_rank(
    two_ranks: Ranked, write_qwen3: Any, tmp_path: Path, make_samples: Any
) -> None:
    """Lead promise 1: the state is refused as one process refuses it, and the run goes on."""
    folder = write_qwen3(
        tmp_path / "model", seed=7, vocab_size=96, hidden_size=128, num_hidden_layers=2,
        num_attention_heads=4, head_dim=32, intermediate_size=256, max_position_embeddings=128,
    )  # fmt: skip
    # Room for each rank's part of a state, and not for the whole model in one file.
    room = int(0.8 * (folder / "model.safetensors").stat().st_size)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with calling(two_ranks) as trainer:
        before = len(two_ranks.log.read_text())
        pids = [two_ranks.rank_pid(rank) for rank in (0, 1)]
        try:
            for pid in pids:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, unlimited[1]))
            await trainer.create(base_model=str(folder), **SPEC)
            await trainer.publish(1)
            error = await trainer.refused(trainer.save(2, "final", export=True), "NOT_READY")
            assert "ulimit -f" in error.message
            await trainer.save(2, "plain")
            await trainer.one_step(3, make_samples())
        finally:
            for pid in pids:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)
        assert all(alive([pid]) for pid in pids)
        assert "rank_ended" not in two_ranks.log.read_text()[before:]
