"""The ranks of one trainer as a group: how they tell each other, agree, and add up.

1. Every method is called by all ranks in the same order; each is one collective, or two.
2. Sums do not depend on which rank was quicker: equal calls give equal bits.
3. What a rank waits for comes within WAIT_SECONDS, or the waiting ends with an error: while nobody calls, the
   first rank says so every BEAT_SECONDS. A peer that dies is noticed at once, by its closed connection.
4. Commands and verdicts go over gloo on the CPU, gradients and parameters over NCCL where there is CUDA.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import structlog
import torch
import torch.distributed as dist
from quartet.errors import QuartetError
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

from quartet_trainer import model as base
from quartet_trainer.one_pass import Pass
from quartet_trainer.packing import PADDING, MicroBatch, Row
from quartet_trainer.ranks.balance import assignment, cost
from quartet_trainer.ranks.command import (
    MAX_COMMAND_BYTES,
    MAX_SAMPLE_BYTES,
    Command,
    command_bytes,
    parse_command,
    parse_samples,
    sample_bytes,
)
from quartet_trainer.ranks.context import Context, ContextForward
from quartet_trainer.ranks.meeting import MEETING
from quartet_trainer.ranks.sharding import ShardedForward, shard
from quartet_trainer.recompute import Recomputed
from quartet_trainer.sample import Sample
from quartet_trainer.worker import STUCK_SECONDS, release_memory, within_memory

T = TypeVar("T")

log = structlog.get_logger()

#: A job that says nothing for a fourth of it is stuck in one process, too, and its liveness says so. But the
#: first rank flushes a large state alone, and hashes the model beside it, and says so there, while the others
#: wait.
WAIT_SECONDS = 4 * STUCK_SECONDS
#: Often enough that no rank waits a tenth of that for nothing.
BEAT_SECONDS = 60.0
#: An error of the contract: its text is clipped to less (quartet.errors).
MAX_VERDICT_BYTES = 16 << 10


class Group:
    """This rank, among the others. Implements `quartet_trainer.ranks.alone.Ranks`."""

    def __init__(self, device: torch.device, context_parallel: int = 1) -> None:
        """Meet the others, as the environment says: ours, or torchrun's. Errors: ConfigError."""
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        wait = timedelta(seconds=WAIT_SECONDS)
        store: Any
        self.rank: int
        self.size: int
        if place := os.environ.get(MEETING):
            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store = dist.FileStore(place)  # type: ignore[attr-defined]
            store.set_timeout(wait)
        else:
            store, self.rank, self.size = next(rendezvous("env://", timeout=wait))
        # The store outlives a group that it starts again, with the addresses of the dead in it.
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        store = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=wait)
        #: For what is on the CPU.
        self.host_group = dist.new_group(backend="gloo", timeout=wait)
        self._mesh = init_device_mesh(device.type, (self.size,))
        several = context_parallel > 1
        self._context = Context.of(self.rank, self.size, context_parallel, wait) if several else None
        # Ranks that have the same rows count as one.
        self._share, self._shares = self.rank // context_parallel, self.size // context_parallel

    @property
    def first(self) -> bool:
        """Whether this is the rank that serves."""
        return self.rank == 0

    # -- telling

    def tell(self, command: Command, samples: Sequence[Sample] = ()) -> None:
        """The first rank's half of `hear`."""
        body, arrays = command_bytes(command), sample_bytes(samples)
        assert len(body) <= MAX_COMMAND_BYTES and len(arrays) <= MAX_SAMPLE_BYTES, "bounded where it came in"
        dist.broadcast(torch.tensor([len(body), len(arrays)]), src=0)
        _shared(body)
        _shared(arrays)

    def hear(self) -> tuple[Command, list[Sample]]:
        """What the first rank tells."""
        sizes = torch.zeros(2, dtype=torch.int64)
        dist.broadcast(sizes, src=0)
        body, arrays = (_shared(size) for size in sizes.tolist())
        return parse_command(body), parse_samples(arrays)

    def agree(self, job: Callable[[], T]) -> T | None:
        """Let the first rank do something: its result there, None here, or its error everywhere.

        Errors: those of the job; INTERNAL for one that is not of the contract. All ranks are in step then.
        """
        if not self.first:
            size = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(size, src=0)
            if int(size):
                raise _error(_shared(int(size)))
            return None
        try:
            result = within_memory(job)
        except QuartetError as error:
            self._disagree(error)
            raise
        except Exception as error:
            log.exception("failed_on_the_first_rank")
            unforeseen = QuartetError("INTERNAL", "the first rank failed; its log says how")
            self._disagree(unforeseen)
            raise unforeseen from error
        dist.broadcast(torch.tensor([0]), src=0)
        return result

    def hand(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of the first rank, whole, float32 and on the host, in all of them; the others give none."""
        shapes = json.dumps({name: list(one.shape) for name, one in tensors.items()}).encode()
        size = torch.tensor([len(shapes)])
        dist.broadcast(size, src=0)
        handed = {}
        for name, shape in json.loads(_shared(shapes if self.first else int(size))).items():
            handed[name] = tensors[name].contiguous() if self.first else torch.empty(shape)
            dist.broadcast(handed[name], src=0)
        return handed

    def _disagree(self, error: QuartetError) -> None:
        body = _error_bytes(error)
        dist.broadcast(torch.tensor([len(body)]), src=0)
        _shared(body)

    # -- sharing work

    def mine(self, rows: Sequence[Row], width: int) -> Sequence[Row]:
        """The rows of this rank."""
        shares = assignment([cost(row.length, width) for row in rows], self._shares)
        return [row for row, share in zip(rows, shares, strict=True) if share == self._share]

    def even(self, batches: list[MicroBatch], token: int) -> list[MicroBatch]:
        """As many on every rank: each forward pass is a collective."""
        most = torch.tensor([len(batches)])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        batches = batches + [_empty(token)] * (int(most) - len(batches))
        return batches if self._context is None else [self._context.part_of(batch) for batch in batches]

    def settle(self, refused: QuartetError | None) -> None:
        """The error of the lowest rank that has one, in all of them."""
        for body in self.of_each(b"" if refused is None else _error_bytes(refused)):
            if body:
                raise _error(body)

    def of_each(self, body: bytes) -> Iterator[bytes]:
        """What each rank gives, in their order; whoever stops early stops everywhere."""
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(body)
        dist.all_reduce(sizes)
        for rank, size in enumerate(sizes.tolist()):
            yield _shared(body if rank == self.rank else size, rank)

    def join(self, done: Pass, lengths: Sequence[int]) -> None:
        """Every rank gets all values. Each is computed by one rank; the others add zero to it."""
        ends = np.cumsum(lengths)
        values = torch.zeros(2, sum(lengths))
        losses = torch.zeros(self.size, dtype=torch.float64)
        # All ranks of a context have the same values.
        if self._context is None or self._context.place == 0:
            for row, arrays in zip(values, (done.logprobs, done.measured), strict=True):
                for end, array in zip(ends, arrays, strict=True):
                    row[end - len(array) : end] = torch.from_numpy(array)
            losses[self.rank] = done.loss
        dist.all_reduce(values)
        dist.all_reduce(losses)
        done.logprobs, done.measured = (np.split(row.numpy(), ends)[:-1] for row in values)
        done.loss = float(losses.sum())
        if done.routing is not None:
            dist.all_reduce(done.routing)
        if done.own is not None:
            found = list(self.of_each(json.dumps(done.own.found).encode()))
            # Of each context one.
            done.own.join([json.loads(one) for one in found[:: self.size // self._shares]])

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Parameter by parameter; one that no loss reached here counts as zero."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)

    # -- models

    @property
    def shares_sequences(self) -> bool:
        """Whether ranks have parts of a row."""
        return self._context is not None

    def place(
        self, load: Callable[[torch.device], Any], folder: Path, device: torch.device, name: str
    ) -> Any:
        """The first rank loads, all get their parts. Errors: INVALID_CONFIG, those of `load`."""
        full = self.agree(lambda: load(torch.device("cpu")))
        tied = torch.tensor([full is not None and base.is_tied(full)])
        dist.broadcast(tied, src=0)
        skeleton = base.without_memory(folder, bool(tied))
        if self._context is not None:
            self._context.enter(skeleton, name)
        if full is not None:
            base.exported_as(full, skeleton)
        model = shard(skeleton, full, device, self._mesh)
        # The whole of it is not needed any more.
        del full
        release_memory()
        return model

    def policy(
        self,
        model: Any,
        device: torch.device,
        autocast: torch.dtype | None,
        recomputed: Recomputed,
    ) -> ShardedForward:
        """What a placed model computes."""
        if self._context is not None:
            return ContextForward(self._context, model, device, autocast, recomputed)
        return ShardedForward(model, device, autocast, recomputed)


def _empty(token: int) -> MicroBatch:
    """A token that nothing reads: what a rank computes while others have rows left."""
    return MicroBatch(
        np.full((1, 1), token, np.int64),
        np.zeros((1, 1), np.int64),
        np.full((1, 1), PADDING),
        needs_mask=False,
        predictors_K=np.empty(0, np.int64),
        targets_K=np.empty(0, np.int64),
        members=(),
    )


def leave() -> None:
    """Close the connections; the others must be doing the same."""
    dist.destroy_process_group()


def _shared(body: bytes | int, source: int = 0) -> bytes:
    """The bytes that one rank has; the others give how many."""
    if not body:
        return b""
    if isinstance(body, int):
        values = torch.empty(body, dtype=torch.uint8)
        dist.broadcast(values, src=source)
        return values.numpy().tobytes()
    # torch takes none that cannot be written to.
    dist.broadcast(torch.frombuffer(bytearray(body), dtype=torch.uint8), src=source)
    return body


def _error_bytes(error: QuartetError) -> bytes:
    body = json.dumps([error.reason, error.message, error.retry_after_ms, error.metadata]).encode()
    assert len(body) <= MAX_VERDICT_BYTES
    return body


def _error(body: bytes) -> QuartetError:
    reason, message, retry_after_ms, metadata = json.loads(body)
    return QuartetError(reason, message, retry_after_ms=retry_after_ms, **metadata)
