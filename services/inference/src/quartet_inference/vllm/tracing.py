"""Where the values of a version end up in a model, seen while vLLM's own reload puts them there.

The reload copies a version's tensors, mostly views of them, into fresh tensors of a layer, and those into the
parameters that CUDA graphs know. Which of its loaders does what is not asked: every operation is watched.

1. Followed are views, copies and constants. Anything else that reads a version, a layer's fresh tensors or
   the model (a product, a packed matrix, a look at a value) may make what no copy makes: it says `why`.
   Kernels that PyTorch's dispatcher does not see (a composite operation in C++, Triton's) go unnoticed.
2. What is copied into a fresh tensor goes on into the model, all of it, and the fresh tensor goes. Where it
   does not, something else was made of it, or it is used as it is: `astray` says so.
3. Where the same elements are written twice, the last counts.
4. The reload itself is not changed by being watched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Of one copy whose target is not in one piece; each is a copy of its own in every update.
MAX_PIECES = 1 << 14

FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


@dataclass(frozen=True)
class Part:
    """A view of a version's tensor; the offset is in elements from its first."""

    name: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """Elements that lie together in a target, and what is there; None: something that is no version's."""

    start: int
    count: int
    part: Part | None


#: What is known of a target, by where it starts.
Runs = dict[int, Run]


@dataclass
class _Fresh:
    """A tensor that the reload has made; the reference keeps its address from being used anew."""

    storage: StorageWeakRef
    address: int
    dtype: torch.dtype
    runs: Runs = field(default_factory=dict)
    has_arrived: bool = False


class _Addresses:
    """Which of some tensors, that stay where they are, has an address; of one in another, the outer."""

    def __init__(self, tensors: Mapping[Any, Tensor]) -> None:
        starts = ((one.data_ptr(), -one.nbytes, key) for key, one in tensors.items() if one.nbytes)
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._keys: list[Any] = []
        for start, size, key in sorted(starts, key=lambda one: one[:2]):
            if not self._ends or start - size > self._ends[-1]:
                self._starts.append(start)
                self._ends.append(start - size)
                self._keys.append(key)

    def find(self, address: int) -> Any:
        """The tensor's key, or None."""
        at = bisect_right(self._starts, address) - 1
        return self._keys[at] if at >= 0 and address < self._ends[at] else None


@dataclass(frozen=True)
class Slot:
    """A parameter or buffer of a model."""

    layer: nn.Module
    name: str
    tensor: Tensor
    address: int

    @property
    def stayed(self) -> bool:
        """Whether it is still there, and in the same memory."""
        return self.now is self.tensor and self.tensor.data_ptr() == self.address

    @property
    def now(self) -> Tensor | None:
        """What the layer has there now."""
        held = self.layer._parameters.get(self.name)
        return held if held is not None else self.layer._buffers.get(self.name)


def slots_of(model: nn.Module) -> dict[str, Slot]:
    """All of them, one that several layers share once."""
    both = (*model.named_parameters(), *model.named_buffers())
    slots = {}
    for name, tensor in both:
        layer, _, own = name.rpartition(".")
        slots[name] = Slot(model.get_submodule(layer), own, tensor, tensor.data_ptr())
    return slots


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Entered around one reload."""

    def __init__(self, tensors: Mapping[str, Tensor], slots: Mapping[str, Slot]) -> None:
        """A version, contiguous, and the model that takes it; both keep their memory meanwhile."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.why = ""
        self.reached: dict[str, Runs] = {}
        self._tensors = tensors
        self._slots = slots
        self._sources = _Addresses(tensors)
        self._targets = _Addresses({name: slot.tensor for name, slot in slots.items()})
        self._fresh: dict[int, _Fresh] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let it happen, and note what it did."""
        result = func(*args, **(kwargs or {}))
        if not self.why:
            self._note(func, args, kwargs or {}, result)
        return result

    def astray(self) -> str:
        """What is wrong with where copies went, once the reload is done; empty where nothing is."""
        for fresh in self._fresh.values():
            part = next((run.part for run in fresh.runs.values() if run.part is not None), None)
            if part is not None and not fresh.has_arrived:
                return f"{part.name} is not used as it was copied"
            if not fresh.storage.expired():  # type: ignore[no-untyped-call]
                return "a layer keeps weights elsewhere, too"
        return ""

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        if func is torch.ops.aten.copy_.default:
            self._copied(args[0], args[1])
            return
        known = [
            one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and self._is_known(one)
        ]
        if not known:
            return
        if func in FILLS:
            self._wrote(args[0], None)
        elif not _is_view(func) and not _is_meta(result):
            self.why = f"{func} of a tensor of {list(known[0].shape)}"

    def _is_known(self, one: Tensor) -> bool:
        return self._source_of(one) is not None or self._runs_of(one) is not None

    def _source_of(self, one: Tensor) -> str | None:
        if one.is_meta or not one.numel():
            return None
        found: str | None = self._sources.find(one.data_ptr())
        return found

    def _runs_of(self, one: Tensor) -> tuple[Runs, int, torch.dtype] | None:
        """What is known of the tensor that this is a view of, where that begins, and its type."""
        if one.is_meta or not one.numel():
            return None
        target = self._targets.find(one.data_ptr())
        if target is not None:
            slot = self._slots[target]
            return self.reached.setdefault(target, {}), slot.address, slot.tensor.dtype
        fresh = self._fresh.get(one.untyped_storage()._cdata)
        return None if fresh is None else (fresh.runs, fresh.address, fresh.dtype)

    def _copied(self, target: Tensor, given: Tensor) -> None:
        if target.is_meta or not target.numel():
            return
        given = given.expand_as(target)
        if given.data_ptr() == target.data_ptr() and given.stride() == target.stride():
            return  # onto itself
        name = self._source_of(given)
        if name is not None:
            whole = self._tensors[name]
            offset, rest = divmod(given.data_ptr() - whole.data_ptr(), whole.itemsize)
            if rest or given.dtype != whole.dtype:
                self.why = f"{name} is read as {given.dtype}"
                return
            self._wrote(target, Part(name, offset, tuple(given.shape), tuple(given.stride())))
        elif self._runs_of(given) is not None:
            self._moved(target, given)
        elif self._is_known(target):
            self._wrote(target, None)  # by 1 it depends on nothing of the version

    def _into(self, target: Tensor) -> tuple[Runs, int] | None:
        """What is known of what a view is written to, and where the view begins there."""
        if self._source_of(target) is not None:
            self.why = "the version itself is written to"
            return None
        found = self._runs_of(target)
        if found is None:
            storage = target.untyped_storage()
            held = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            fresh = _Fresh(held, storage.data_ptr(), target.dtype)
            self._fresh[storage._cdata] = fresh
            found = fresh.runs, fresh.address, fresh.dtype
        runs, address, dtype = found
        if dtype != target.dtype:
            self.why = f"a tensor of {dtype} is written to as {target.dtype}"
            return None
        return runs, (target.data_ptr() - address) // target.itemsize

    def _wrote(self, target: Tensor, part: Part | None) -> None:
        """A view of something has this part of the version from now on, or a constant."""
        found = self._into(target)
        if found is None:
            return
        runs, first = found
        for count, run in enumerate(_pieces(first, tuple(target.shape), target.stride(), part)):
            if count == MAX_PIECES:
                self.why = f"a tensor of {list(target.shape)} lies in more than {MAX_PIECES} pieces"
                return
            runs[run.start] = run

    def _moved(self, target: Tensor, given: Tensor) -> None:
        """What is known of a layer's fresh tensor is known of where it goes."""
        known, found = self._runs_of(given), self._into(target)
        if known is None or found is None:
            return
        (runs, address, dtype), (into, start) = known, found
        same = dtype == given.dtype == target.dtype
        if not same or not given.is_contiguous() or not target.is_contiguous():
            self.why = f"a tensor of {list(given.shape)} is not moved as it is"
            return
        first = (given.data_ptr() - address) // given.itemsize
        for run in tuple(runs.values()):
            if run.start < first or run.start + run.count > first + given.numel():
                self.why = f"a tensor of {list(given.shape)} is moved in part"
                return
            into[start + run.start - first] = replace(run, start=start + run.start - first)
        fresh = self._fresh.get(given.untyped_storage()._cdata)
        if fresh is not None:
            fresh.has_arrived = True


def _pieces(first: int, size: tuple[int, ...], stride: tuple[int, ...], part: Part | None) -> Iterator[Run]:
    """A view, in runs."""
    if contiguous(size, stride):
        yield Run(first, prod(size), part)
        return
    for at in range(size[0]):
        row = part and Part(part.name, part.offset + at * part.stride[0], part.size[1:], part.stride[1:])
        yield from _pieces(first + at * stride[0], size[1:], stride[1:], row)


def contiguous(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether its elements lie together, in order."""
    expected = 1
    for extent, step in zip(reversed(size), reversed(stride), strict=True):
        if extent != 1 and step != expected:
            return False
        expected *= extent
    return True


def _is_view(func: Any) -> bool:
    """Whether it makes nothing but other views of what it is given."""
    returned = func._schema.returns
    written = any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments)
    return bool(returned) and not written and all(one.alias_info is not None for one in returned)


def _is_meta(result: Any) -> bool:
    made = tree_leaves(result)
    return bool(made) and all(isinstance(one, Tensor) and one.is_meta for one in made)
