"""Devices that are not the CPU, for tests of more than one folder: CUDA where there is one, and a simulated.

A tensor of the simulated one holds one of the CPU that computes for it. As on an accelerator, an operation
that is given tensors of both is an error, and so is NumPy's view of one of the device. It knows neither
streams nor kernels of its own: what it shows is that every tensor is where it belongs.

In a process of its own, because torch knows of one such backend at most, and for good.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

NAME = "elsewhere"
#: The devices of such a test.
DEVICES = [
    NAME,
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
#: A dozen small cases, half of them on a device of Python, on a machine that is shared.
CHILD_SECONDS = 300

#: What was told: by case and device.
Found = dict[str, dict[str, list[float]]]


def found_by(service: Path, device: str, *arguments: Path | str) -> Found:
    """What tests/other_device.py of a service prints, in a process of its own."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "tests.other_device", device, *map(str, arguments)],
        cwd=service,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=CHILD_SECONDS,
    )
    # A rank that fails says so on the one, and Python on the other.
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    answer: Found = json.loads(done.stdout.splitlines()[-1])
    return answer


def modes(device: str) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """What is entered to compute on the CPU and on a device."""
    return {"cpu": nullcontext, device: Simulated if device == NAME else nullcontext}


#: Elements that left the device for another type. On an accelerator they travel as they are, and the CPU
#: casts them.
CAST_BY_HOST: list[int] = []
#: Tensors that came to the device. On an accelerator each waits for all that was begun there.
ARRIVED: list[str] = []
_COPY, _MOVE = torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default


class Elsewhere(torch.Tensor):
    """A tensor of the device."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Elsewhere:
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=torch.device(NAME, 0),
        )  # fmt: skip
        made.held = held
        return made

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, other: Elsewhere) -> None:
        self.held = other.held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class Simulated(TorchDispatchMode):
    """While it is on, tensors can be made on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = list(_tensors((args, kwargs)))
    there = [one for one in tensors if isinstance(one, Elsewhere)]
    # A number may come from anywhere.
    here = [one for one in tensors if not isinstance(one, Elsewhere) and one.ndim]
    if there and here and func not in (_COPY, _MOVE):
        raise RuntimeError(f"{func} was given tensors of two devices")
    asked = kwargs.get("device")
    if func is _COPY:
        to_there = isinstance(args[0], Elsewhere)
    else:
        to_there = bool(there) if asked is None else torch.device(asked).type == NAME
    _count(func, tensors, to_there, kwargs.get("dtype"))
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    out = _on_cpu(func, _held(args), _held(kwargs))
    if not to_there:
        return out
    made = Elsewhere(out) if isinstance(out, torch.Tensor) else tree_map_only(torch.Tensor, Elsewhere, out)
    return return_and_correct_aliasing(func, args, kwargs, made)


def _count(func: Any, tensors: list[torch.Tensor], to_there: bool, dtype: torch.dtype | None) -> None:
    if func not in (_COPY, _MOVE):
        return
    source = tensors[-1]
    if to_there and not isinstance(source, Elsewhere):
        ARRIVED.append(str(source.dtype))
    if not to_there and isinstance(source, Elsewhere):
        target = tensors[0].dtype if func is _COPY else dtype or source.dtype
        if target != source.dtype:
            CAST_BY_HOST.append(source.numel())


def _on_cpu(func: Any, args: Any, kwargs: Any) -> Any:
    if func is torch.ops.aten.histc.default and not args[0].is_floating_point():
        # Accelerators count integers, too.
        return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


def _held(tree: Any) -> Any:
    """Arguments are made of nothing else; torch's own tree_map takes several times as long for them."""
    if isinstance(tree, Elsewhere):
        return tree.held
    if isinstance(tree, (tuple, list)):
        return type(tree)(map(_held, tree))
    if isinstance(tree, dict):
        return {name: _held(one) for name, one in tree.items()}
    return tree


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list, dict)):
        for one in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(one)


def _empty(size: Any, **options: Any) -> Elsewhere:
    return Elsewhere(torch.empty(size, dtype=options.get("dtype")))


def _empty_strided(size: Any, stride: Any, **options: Any) -> Elsewhere:
    return Elsewhere(torch.empty_strided(size, stride, dtype=options.get("dtype")))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _held(target).copy_(_held(source))
    return target


def _narrowed(operation: Any) -> Any:
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(one: Any) -> Any:
        wide = isinstance(one, torch.Tensor) and one.dtype == torch.float32
        return one.to(torch.get_autocast_dtype(NAME)) if wide else one

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            return operation(*map(cast, args), **{name: cast(one) for name, one in kwargs.items()})

    return kernel


def register() -> list[torch.library.Library]:
    """Make the device known; it is for as long as the result is kept."""

    class Backend(backend_registration._DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16]

    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Backend())
    # torch.tensor(..., device=...) asks no mode.
    own, all_of_them = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    own.impl("empty.memory_format", _empty, "PrivateUse1")
    own.impl("empty_strided", _empty_strided, "PrivateUse1")
    own.impl("_copy_from", _copy_from, "PrivateUse1")
    # As autocast does for accelerators, for what models are made of; the rest it leaves alone.
    all_of_them.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in ("linear", "matmul", "mm", "bmm", "scaled_dot_product_attention"):
        own.impl(name, _narrowed(getattr(torch.ops.aten, name)), "AutocastPrivateUse1")
    return [own, all_of_them]
