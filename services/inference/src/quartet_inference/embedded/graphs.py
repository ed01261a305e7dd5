"""Decode steps as CUDA graphs: one launch does all operations of a pass.

On a GPU to launch them takes longer than to compute them.

1. A step gives what its forward pass gives for rows and a context that are filled up to sizes of which there
   are two between a number and its double. What fills up is masked, or is a row that nobody has.
2. What is recorded is a pass over one token of each of the first rows, all of one adapter or of none, when
   its sizes come for the second time. Every other pass runs as it is.
3. A recording knows where things lie: the weights, which never move (forward.py 4), the matrices of its
   adapter, whose serial is never used again, and the keys and values. When the tensor of these grows, all
   recordings go.
4. At most MOST_RECORDED are kept; they share their memory and one buffer of logits, which holds until the
   next step. After a pass that cannot be recorded, for want of memory, say, none is any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import structlog
import torch
from torch import Tensor

from quartet_inference.embedded import forward
from quartet_inference.embedded.forward import Forward
from quartet_inference.embedded.kv_cache import KvCache
from quartet_inference.embedded.lora import Bank
from quartet_inference.embedded.packs import Packs
from quartet_inference.embedded.products import size_of

#: A batch that fills and empties while its rows grow meets a few dozen.
MOST_RECORDED = 64
SIZES_PER_DOUBLING = 2
#: Shorter contexts cost as much.
LEAST_CONTEXT = 64

log = structlog.get_logger()


class Recorder(Protocol):
    """Records work on a device."""

    def begin(self) -> None:
        """Nothing that was recorded is done any more."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Given work that has been done once, what does it again. Errors: RuntimeError, also of the work."""


def choose(model: Any, cache: KvCache, bank: Bank, packs: Packs, wanted: bool) -> Forward:
    """A model's forward pass, recorded where that is wanted and can be: the engine's own, on CUDA."""
    run = forward.choose(model, cache, bank, packs)
    device = cache.shape.device
    if not wanted or device.type != "cuda" or not isinstance(run, forward.LeanForward):
        return run
    vocabulary = len(model.get_output_embeddings().weight)
    return GraphedForward(run, cache, bank, vocabulary, CudaRecorder(device))


class CudaRecorder:
    """Records on one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.begin()

    def begin(self) -> None:
        """A pool that no recording uses any more takes no other one."""
        self._pool = torch.cuda.graph_pool_handle()
        self._latest: torch.cuda.CUDAGraph | None = None

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """As a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                work()  # libraries prepare themselves for a stream, which cannot be recorded
                # Other threads may stage weights meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        finally:
            current.wait_stream(self._stream)  # also where it failed: what was begun reads and writes there
        self._latest = graph  # keeps the pool in use, whatever is forgotten
        return graph.replay


class GraphedForward:
    """A forward pass whose decode steps are recorded."""

    def __init__(self, run: Forward, cache: KvCache, bank: Bank, vocabulary: int, recorder: Recorder) -> None:
        self._run = run
        self._cache = cache
        self._bank = bank
        self._vocabulary = vocabulary
        self._recorder: Recorder | None = recorder
        # By rows, context and the adapter's serial; None: met once.
        self._recorded: OrderedDict[tuple[int, int, int], Callable[[], None] | None] = OrderedDict()
        self._begin()

    def _begin(self) -> None:
        """Forget what was recorded: keys and values have another place."""
        self._recorded.clear()
        self._logits = torch.empty(0)  # makes room for the next one
        rows, device = self._cache.rows, self._cache.shape.device
        self._ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._positions = torch.zeros_like(self._ids)
        self._logits = torch.empty(rows, self._vocabulary, device=device)
        self._place = self._cache.place  # last: where there was no room the next step begins again

    def __call__(
        self, first_row: int, ids_BT: Tensor, positions_BT: Tensor, context: int, last_B: Tensor | None
    ) -> Tensor:
        rows, tokens = ids_BT.shape
        is_step = first_row == 0 and tokens == 1 and last_B is None
        serial = self._bank.plan(0, rows).serial if is_step else None
        if self._recorder is None or serial is None:
            return self._run(first_row, ids_BT, positions_BT, context, last_B)
        if self._place != self._cache.place:
            self._recorder.begin()
            self._begin()
        all_rows = min(self._cache.rows, size_of(rows, SIZES_PER_DOUBLING))
        whole = min(self._cache.length, size_of(max(context, LEAST_CONTEXT), SIZES_PER_DOUBLING))
        for buffer, given in ((self._ids, ids_BT), (self._positions, positions_BT)):
            buffer[:rows] = given
            buffer[rows:all_rows] = 0  # a place that every sequence fills anew
        step = self._step(all_rows, whole, serial)
        if step is None:
            return self._run(first_row, ids_BT, positions_BT, context, last_B)
        step()
        return self._logits[:rows]

    def _step(self, rows: int, context: int, serial: int) -> Callable[[], None] | None:
        """What computes a step of this size, all of whose rows have this adapter; None: no step is recorded
        any more."""

        def compute() -> None:
            ids, positions = self._ids[:rows], self._positions[:rows]
            self._logits[:rows] = self._run(0, ids, positions, context, None)

        key = (rows, context, serial)
        is_met = key in self._recorded
        step = self._recorded.pop(key, None)
        if is_met and step is None and self._recorder is not None:
            try:
                step = self._recorder.record(compute)
            except RuntimeError as error:
                log.warning("steps_not_recorded", why=str(error).partition("\n")[0])
                self._recorder = None
                self._recorded.clear()
                self._logits = torch.empty(0)
                return None
        self._recorded[key] = step
        if len(self._recorded) > MOST_RECORDED:
            self._recorded.popitem(last=False)
        return step or compute
