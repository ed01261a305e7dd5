"""The adapters of the embedded engine: low-rank matrices beside the model's linear modules, row by row.

1. Each row of a pass gets the products of its own adapter or of none, whoever else is in the pass: the rows
   of one adapter are multiplied together, with bits that do not depend on how many they are.
2. Rows know their run's `Slot`; an update changes what is in the slot, between two steps.
3. Every content of a slot has a serial of its own, never used again: what was computed under another one is
   told apart by it. 0 is the base model's.
4. At most `max_adapters` slots and `max_bytes` of matrices; what goes beyond is refused with OVERLOADED, one
   that is too large by itself with INVALID_REQUEST.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from quartet.errors import QuartetError
from torch import Tensor, nn

from quartet_inference.adapter import no_place
from quartet_inference.embedded.model import as_torch
from quartet_inference.embedded.packs import Packs
from quartet_inference.embedded.products import linear
from quartet_inference.engine import ServedWeights
from quartet_inference.lora import LoraTensors


@dataclass(frozen=True, eq=False)
class Matrices:
    """One version of an adapter, ready to multiply."""

    scale: float
    nbytes: int
    device: torch.device
    modules: dict[str, tuple[Tensor, Tensor]]
    packs: Packs

    @classmethod
    def of(cls, adapter: LoraTensors, like: Tensor) -> Matrices:
        """Copies, of this tensor's type and on its device: the payload that they came in can go."""
        modules = {
            name: (as_torch(low).to(like, copy=True), as_torch(high).to(like, copy=True))
            for name, (low, high) in adapter.modules.items()
        }
        nbytes = sum(one.nbytes for pair in modules.values() for one in pair)
        return cls(adapter.scale, nbytes, like.device, modules, Packs(nbytes))


@dataclass(eq=False)
class Slot:
    """Where a run's adapter stands."""

    weights: ServedWeights
    matrices: Matrices
    serial: int


@dataclass(frozen=True)
class Plan:
    """Which rows of a pass belong to which adapter; None for all of them."""

    rows: int
    groups: tuple[tuple[Slot, Tensor | None], ...]

    @property
    def serial(self) -> int | None:
        """Of the adapter of all rows, 0 where none has one; None: they differ."""
        if not self.groups:
            return 0
        slot, index = self.groups[0]
        return slot.serial if index is None else None

    def add(self, out: Tensor, x: Tensor, module: str, start: int = 0) -> None:
        """Add a module's low-rank products to its output, which begins at column `start` of `out`.

        The first dimensions of both, flattened, are rows times tokens.
        """
        for slot, index in self.groups:
            pair = slot.matrices.modules.get(module)
            if pair is None:
                continue
            (low, high), packs = pair, slot.matrices.packs
            part, place = x, out
            if index is not None:
                part = x.reshape(self.rows, -1, x.shape[-1]).index_select(0, index)
                place = out.view(self.rows, -1, out.shape[-1])
            inner = linear(part.reshape(-1, x.shape[-1]), low, packs=packs)
            products = linear(inner, high, packs=packs).mul_(slot.matrices.scale)
            products = products.to(out.dtype)  # of logits, which are wider
            place = place.narrow(-1, start, len(high))
            if index is None:
                place.add_(products.view(place.shape))
            else:
                place.index_add_(0, index, products.view(len(index), -1, len(high)))


NO_ADAPTER = Plan(0, ())


@dataclass
class Bank:
    """The adapters, and which row of the KV cache belongs to which."""

    max_adapters: int
    max_bytes: int
    slots: dict[str, Slot] = field(default_factory=dict)
    _rows: list[Slot | None] = field(default_factory=list)
    _plans: dict[tuple[int, int], Plan] = field(default_factory=dict)
    _serials: Iterator[int] = field(default_factory=lambda: count(1))
    _active: Plan = NO_ADAPTER
    _hooked: set[str] = field(default_factory=set)

    # -- slots

    def put(self, matrices: Matrices, weights: ServedWeights) -> Slot:
        """Fill a run's slot. Errors: OVERLOADED, INVALID_REQUEST."""
        slot = self.slots.get(weights.run_id)
        others = sum(one.matrices.nbytes for one in self.slots.values() if one is not slot)
        if slot is None and len(self.slots) >= self.max_adapters:
            raise no_place(self.max_adapters)
        if matrices.nbytes > self.max_bytes:
            raise QuartetError(
                "INVALID_REQUEST",
                f"the adapter has {matrices.nbytes} bytes, more than adapters.max_bytes = {self.max_bytes}",
                field="adapter",
                value=matrices.nbytes,
                remedy="raise adapters.max_bytes",
            )
        if others + matrices.nbytes > self.max_bytes:
            raise QuartetError(
                "OVERLOADED",
                f"adapters would take {others + matrices.nbytes} bytes, more than adapters.max_bytes = "
                f"{self.max_bytes} of this replica; raise that and start it again, or stop a run that it "
                "serves",
            )
        if slot is None:
            slot = self.slots[weights.run_id] = Slot(weights, matrices, next(self._serials))
        else:
            slot.weights, slot.matrices, slot.serial = weights, matrices, next(self._serials)
        return slot

    # -- rows

    def set_rows(self, first: int, slots: Sequence[Slot | None]) -> None:
        """Rows of the cache belong to these, from `first` on; there are none behind them."""
        self._rows[first:] = slots
        self._plans.clear()

    def fill_hole(self, hole: int, last: int) -> None:
        """The last row has become this one."""
        self._rows[hole] = self._rows[last]
        self.set_rows(last, ())

    def plan(self, first: int, rows: int) -> Plan:
        """For a pass over rows of the cache."""
        plan = self._plans.get((first, rows))
        if plan is None:
            plan = self._plans[first, rows] = plan_of(self._rows[first : first + rows])
        return plan

    # -- modules of a transformers model

    @contextmanager
    def active(self, plan: Plan) -> Iterator[None]:
        """The model's own modules add these products."""
        self._active = plan
        try:
            yield
        finally:
            self._active = NO_ADAPTER

    def hook(self, network: nn.Module, matrices: Matrices) -> None:
        """Let the modules of an adapter listen to `active`."""
        for name in matrices.modules.keys() - self._hooked:

            def add(module: nn.Module, inputs: tuple[Any, ...], out: Tensor, name: str = name) -> None:
                if self._active.groups:
                    self._active.add(out, inputs[0], name)

            network.get_submodule(name).register_forward_hook(add)
            self._hooked.add(name)


def plan_of(slots: Sequence[Slot | None]) -> Plan:
    """A row for each slot."""
    found: dict[int, list[int]] = {}
    by_id = {id(slot): slot for slot in slots if slot is not None}
    for row, slot in enumerate(slots):
        if slot is not None:
            found.setdefault(id(slot), []).append(row)
    groups = []
    for key, rows in found.items():
        slot = by_id[key]
        everywhere = len(rows) == len(slots)
        groups.append((slot, None if everywhere else torch.tensor(rows, device=slot.matrices.device)))
    return Plan(len(slots), tuple(groups))
