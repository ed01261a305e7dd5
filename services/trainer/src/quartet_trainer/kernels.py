"""Liger's fused layer kernels in the place of transformers' own, where a model computes on CUDA.

1. Norms, rotary embeddings and gated MLPs are fused. The output layer and the losses are this trainer's own
   (head.py, loss/). Experts stay as they are: Liger's compute outside of autocast.
2. A model computes what it computed before, or it is refused.
3. They act on the models given to `fuse` alone, and on CUDA alone: another model of the same class, which the
   first of several ranks loads and probes on its CPU, computes as ever.
4. A type of models that Liger does not know is said once and left as it is.

Importing this module imports neither torch nor Liger.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import structlog
from quartet.config import ConfigError
from quartet.errors import QuartetError

if TYPE_CHECKING:
    from torch import Tensor

#: What is fused, by the names of Liger's own switches; every other switch is turned off.
FUSED = frozenset({"rms_norm", "layer_norm", "rope", "swiglu", "geglu"})
#: Those that fuse experts, too, in a model that has some.
GATED = frozenset({"swiglu", "geglu"})

log = structlog.get_logger()


def check(setting: str, device: str) -> None:
    """Refuse to be asked for what cannot be. Errors: ConfigError."""
    if setting == "on" and device == "cpu":
        raise ConfigError(
            'liger = "on", but the trainer computes on a CPU and Liger\'s kernels on CUDA; set liger = "auto"'
        )
    if setting == "on" and not _is_installed():
        raise ConfigError(
            'liger = "on", but liger-kernel is not installed; in the repository: '
            "pip install ./sdk './services/trainer[liger]', or set liger = \"auto\""
        )


def chosen(setting: str, device: str) -> bool:
    """Whether models use the kernels on such a device. Errors: ConfigError."""
    check(setting, device)
    uses = setting != "off" and device == "cuda" and _is_installed()
    log.info("layer_kernels", liger=uses, setting=setting, device=device, installed=_is_installed())
    return uses


def fuse(model: Any, logprobs: Callable[[int], Tensor], base_model: str) -> None:
    """Let a placed model use them; `logprobs` are the model's of the probe with a shift (probe.py).

    Errors: INVALID_CONFIG.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    from quartet_trainer.probe import tolerated

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        _say_unknown(kind)
        return
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[kind]
    has_experts = "router_logits" in (model.base_model._can_record_outputs or {})
    kernels = FUSED - GATED if has_experts else FUSED
    switches = inspect.signature(apply).parameters.keys() - {"model", "kwargs"}
    plain, others = logprobs(0), logprobs(1)
    with _for_cuda_alone(_modeling(model)):
        apply(model=model, **{switch: switch in kernels for switch in switches})
    difference, seen = (float((one - plain).abs().max()) for one in (logprobs(0), others))
    if not difference <= tolerated(seen):
        raise QuartetError(
            "INVALID_CONFIG",
            f"liger: {base_model} ({kind}) computes other log-probabilities with Liger's kernels, by "
            f'{difference:.3g}; set the trainer\'s liger = "off"',
            key="liger",
            value=kind,
            remedy='set the trainer\'s liger = "off"',
        )
    log.info("layers_fused", base_model=base_model, kernels=sorted(kernels & switches))


@dataclass(frozen=True, slots=True)
class _OnCuda:
    """A function of tensors that has a kernel for CUDA."""

    plain: Callable[..., Any]
    kernel: Callable[..., Any]

    def __call__(self, tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        return (self.kernel if tensor.is_cuda else self.plain)(tensor, *arguments, **options)


@contextmanager
def _for_cuda_alone(modeling: ModuleType) -> Iterator[None]:
    """Undo what Liger replaces in transformers' module besides the model: classes, and functions on a CPU."""
    before = dict(vars(modeling))
    yield
    for name, plain in before.items():
        kernel = getattr(modeling, name)
        if kernel is not plain:
            kept = isinstance(plain, (type, _OnCuda))
            setattr(modeling, name, plain if kept else _OnCuda(plain, kernel))


def _modeling(model: Any) -> ModuleType:
    # FSDP2 puts a class of its own before transformers'.
    names = (kind.__module__ for kind in type(model).__mro__)
    return sys.modules[next(name for name in names if name.startswith("transformers."))]


def _is_installed() -> bool:
    return find_spec("liger_kernel") is not None


@cache
def _say_unknown(model_type: str) -> None:
    log.info("liger_does_not_know", model_type=model_type)
