"""A device that is not the CPU, simulated on it, and the trainer's work on both: what they gave, as JSON.

A tensor of the device holds one of the CPU that computes for it. As on an accelerator, an operation that is
given tensors of both is an error, and so is NumPy's view of one of the device. It knows neither streams nor
kernels of its own: what it shows is that every tensor is where it belongs.

In a process of its own, because torch knows of one such backend at most, and for good:

    python other_device.py MODEL_FOLDER MOE_FOLDER
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quartet.v1 import trainer_service_pb2 as pb
from quartet.weights.store import WeightStore
from quartet_trainer.bases import Bases
from quartet_trainer.passes import Machine
from quartet_trainer.run import Run
from quartet_trainer.sample import Sample, make_sample
from quartet_trainer.spec import LoraSpec, ReferenceSpec, RunSpec
from quartet_trainer.spec.optimizer import OptimizerSpec
from quartet_trainer.states import StateStore
from quartet_trainer.wire import loss_spec
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "elsewhere"
VOCAB = 96
STEPS = 3
#: What changes of a run from case to case.
CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {"optimizer": OptimizerSpec(kind="muon", learning_rate=1e-3)},
    "sgd": {"optimizer": OptimizerSpec(kind="sgd", learning_rate=1e-2)},
    "moving reference": {"reference": ReferenceSpec(sync_steps=1, mixup_alpha=0.5)},
    "recomputing": {"gradient_checkpointing": True},
    "adapter": {"lora": LoraSpec(rank=4, alpha=8)},
    "bfloat16": {"compute_dtype": "bfloat16", "served_dtype": "bfloat16"},
    "experts": {},
}
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

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class Simulated(TorchDispatchMode):
    """While it is on, tensors can be made on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
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
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    out = _on_cpu(func, _held(args), _held(kwargs))
    if not to_there:
        return out
    return return_and_correct_aliasing(func, args, kwargs, tree_map_only(torch.Tensor, Elsewhere, out))


def _on_cpu(func: Any, args: Any, kwargs: Any) -> Any:
    if func is torch.ops.aten.histc.default and not args[0].is_floating_point():
        # Accelerators count integers, too.
        return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


def _held(tree: Any) -> Any:
    return tree_map_only(Elsewhere, lambda one: one.held, tree)


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


def samples() -> list[Sample]:
    """Three groups of four, ragged; one has no advantage."""
    rng, made = np.random.default_rng(0), list[Sample]()
    for group in range(3):
        prompt = rng.integers(0, VOCAB, 8).tolist()
        for _ in range(4):
            tail = rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()
            sampled = rng.uniform(-6, -2, len(tail)).tolist()
            advantage = float(rng.normal()) if group else 0.0
            made.append(make_sample(len(made), prompt + tail, [(8, len(tail), 0)], sampled, [advantage]))
    return made


def trained(device: torch.device, folder: Path, work: Path, changes: dict[str, Any]) -> list[float]:
    """What a run finds that trains, verifies, publishes, scores, exports, is saved, restored, goes on."""
    settings = {"reference": ReferenceSpec(), "optimizer": OptimizerSpec(learning_rate=1e-3)} | changes
    float32 = {"compute_dtype": "float32", "served_dtype": "float32"}
    spec = RunSpec(**{"base_model": str(folder), "retain_versions": 4} | float32 | settings)
    loss = loss_spec(
        pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT, kl_coef=0.1, entropy_coef=0.01, proximal_version=0)
    )
    batch = samples()

    def opened() -> Run:
        machine = Machine(device, 64, None, False)
        return Run("r", spec, machine, WeightStore(4), lambda: None, Bases())

    def stepped(run: Run) -> list[float]:
        done = run.forward_backward(batch, loss, 10.0, verify_logprobs=True)
        assert done.verification is not None
        diagnostics = [done.diagnostics[name] for name in sorted(done.diagnostics)]
        return [done.loss, run.optim_step(None).grad_norm, done.verification.max_difference, *diagnostics]

    found, run = [], opened()
    run.publish()
    for _ in range(STEPS):
        found += stepped(run)
    run.publish()
    for version in (None, STEPS):
        found += [float(logprobs.sum()) for logprobs in run.forward(batch, version, 0.7)]
    run.export(work / "exported")
    store = StateStore(work / "states", keep_last=1)
    store.save("r", "s", STEPS, STEPS, run.content(STEPS))
    newest = store.newest_sound("r")
    assert newest is not None
    again = opened()
    again.restore(newest[1])
    return found + stepped(again)


def main() -> None:
    folder, experts = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    kept = register()
    found: dict[str, dict[str, list[float]]] = {}
    for case, changes in CASES.items():
        found[case] = {}
        for name, simulating in (("cpu", nullcontext()), (NAME, Simulated())):
            with tempfile.TemporaryDirectory() as work, simulating:
                model = experts if case == "experts" else folder
                found[case][name] = trained(torch.device(name), model, Path(work), changes)
    assert kept
    print(json.dumps(found))


if __name__ == "__main__":
    main()
