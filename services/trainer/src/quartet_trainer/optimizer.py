"""AdamW, Muon and SGD with clipping, whose whole state can be taken out and put back bit for bit.

1. Masters and moments are float32.
2. Weight decay acts on matrices only; norms, biases and rates of state spaces, also those of two dimensions,
   are not pulled towards zero. AdamW and Muon decouple it from the gradient, SGD adds it to the gradient.
3. Muon (Nesterov momentum, five Newton-Schulz steps, the update scaled by 0.2 * sqrt(max(rows, columns)) so
   that rates made for AdamW suit it; Liu et al., arXiv 2502.16982) moves the matrices of the blocks. AdamW
   moves the rest: vectors, embeddings and head, stacks of matrices, and of adapters those of whole stacks.
4. A rate given for a step is that of the spec's learning_rate; the rate of Muon's AdamW part keeps its
   proportion to it.
5. Where moments are offloaded they rest in host memory between steps; bits are the same (offload.py).

The arithmetic is torch.optim's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from quartet.errors import QuartetError
from torch import Tensor, nn

from quartet_trainer.offload import Named, brought, buckets
from quartet_trainer.ranks.layout import host_like, is_whole, like, whole
from quartet_trainer.spec.optimizer import OptimizerKind, OptimizerSpec
from quartet_trainer.wire.refusal import config

SGD_MOMENTUM = 0.9
MUON_MOMENTUM = 0.95
#: What torch keeps for a parameter, and how its name begins in a saved state.
STEMS = {"exp_avg": "first.", "exp_avg_sq": "second.", "momentum_buffer": "momentum."}


class Optimizer:
    """One of the kinds over named parameters."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        spec: OptimizerSpec,
        apart: Collection[str] = (),
        offloaded: bool = False,
    ) -> None:
        """`apart` names the parameters among them that are no matrices of blocks, whatever their shape."""
        self._spec = spec
        self._offloaded = offloaded
        self._parameters = dict(parameters)
        #: Each of torch's optimizers, and its rate as a multiple of the step's.
        self._parts = [
            mover
            for bucket in (buckets(self._parameters) if offloaded else [self._parameters])
            for mover in _movers(bucket, spec, apart)
        ]

    def gradient_norm(self) -> float:
        """Norm of all gradients since the last step. Errors: INVALID_REQUEST where there are none."""
        gradients = [one.grad for one in self._parameters.values() if one.grad is not None]
        if not gradients:
            raise QuartetError(
                "INVALID_REQUEST",
                "there are no gradients to apply; send a ForwardBackward first",
                field="seq_id",
                remedy="send ForwardBackward first",
            )
        return float(whole(torch.nn.utils.get_total_norm(gradients)))

    def step(self, rate: float, norm: float) -> None:
        """Clip by the norm, step and clear."""
        if 0.0 < self._spec.max_grad_norm < norm:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(self._spec.max_grad_norm / norm)
        for part, share in self._parts:
            for group in part.param_groups:
                group["lr"] = rate * share
            with brought(part, STEMS) if self._offloaded else nullcontext():
                part.step()
        self.clear()

    def clear(self) -> None:
        """Drop the gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def moments(self) -> dict[str, Tensor]:
        """What is kept of earlier gradients, by parameter name; empty before the first step."""
        taken: dict[str, Tensor] = {}
        for name, parameter, part in self._moved():
            state = part.state.get(parameter, {})
            taken |= {stem + name: state[key] for key, stem in STEMS.items() if state.get(key) is not None}
        return taken

    def check(self, moments: Mapping[str, Tensor]) -> None:
        """Whether moments are of what moves each parameter here: an earlier release's Muon moved learned
        positions, biases of stacked experts, norms of heads and rates of state spaces, too.

        Errors: INVALID_CONFIG.
        """
        for name, _, part in self._moved():
            of_adamw = isinstance(part, torch.optim.AdamW)
            other = next((stem for key, stem in STEMS.items() if (key == "momentum_buffer") == of_adamw), "")
            if other + name in moments:
                raise config(
                    "optimizer.kind",
                    self._spec.kind.value,
                    f"of {name} the state has moments that this release's {type(part).__name__}, which moves "
                    "it, does not know; go on with the release that wrote it, or export its model and begin "
                    "a new run with that as base_model",
                )

    def restore(self, moments: Mapping[str, Tensor], steps: int) -> None:
        """Put moments back as they were after `steps` steps."""
        for name, parameter, part in self._moved():
            part.state.pop(parameter, None)
            state: dict[str, Any] = {
                key: (host_like if self._offloaded else like)(moments[stem + name], parameter)
                for key, stem in STEMS.items()
                if stem + name in moments
            }
            if "exp_avg" in state:
                state["step"] = torch.tensor(float(steps), dtype=torch.float32, device=parameter.device)
            if state:
                part.state[parameter] = state

    def _moved(self) -> Iterator[tuple[str, nn.Parameter, torch.optim.Optimizer]]:
        """Each parameter and what moves it, in the order of the parameters."""
        movers = {
            id(one): part for part, _ in self._parts for group in part.param_groups for one in group["params"]
        }
        for name, parameter in self._parameters.items():
            yield name, parameter, movers[id(parameter)]


def _movers(
    parameters: Named, spec: OptimizerSpec, apart: Collection[str]
) -> list[tuple[torch.optim.Optimizer, float]]:
    """What moves them, each with its rate as a multiple of the step's."""
    vectors = {name: one for name, one in parameters.items() if one.ndim < 2 or _is_stacked_vector(name)}
    matrices = {name: one for name, one in parameters.items() if name not in vectors}
    if spec.kind is OptimizerKind.ADAMW:
        return [(_adamw(spec, matrices, vectors), 1.0)]
    if spec.kind is OptimizerKind.SGD:
        return [(_sgd(spec, matrices, vectors), 1.0)]
    movers: list[tuple[torch.optim.Optimizer, float]] = []
    blocks = {name: one for name, one in matrices.items() if one.ndim == 2 and name not in apart}
    others = {name: one for name, one in matrices.items() if name not in blocks}
    if blocks:
        movers.append((_muon(spec, blocks), 1.0))
    if others or vectors:
        rate = spec.learning_rate if spec.adamw_learning_rate is None else spec.adamw_learning_rate
        share = rate / spec.learning_rate if spec.learning_rate else 1.0
        movers.append((_adamw(spec, others, vectors), share))
    return movers


def _is_stacked_vector(name: str) -> bool:
    """Biases of experts that lie in one tensor (gpt-oss), norms with weights for each head (Cohere), Mamba's
    rates for each channel."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    return name.endswith(("bias", "A_log")) or "norm" in module


def _adamw(spec: OptimizerSpec, matrices: Named, vectors: Named) -> torch.optim.Optimizer:
    groups, betas = _groups(spec, matrices, vectors), (spec.beta1, spec.beta2)
    return torch.optim.AdamW(groups, lr=spec.learning_rate, betas=betas, eps=spec.eps, fused=True)


def _sgd(spec: OptimizerSpec, matrices: Named, vectors: Named) -> torch.optim.Optimizer:
    momentum = SGD_MOMENTUM if spec.momentum is None else spec.momentum
    return torch.optim.SGD(_groups(spec, matrices, vectors), lr=spec.learning_rate, momentum=momentum)


def _muon(spec: OptimizerSpec, blocks: Named) -> torch.optim.Optimizer:
    kind = torch.optim.Muon
    if not all(is_whole(one) for one in blocks.values()):
        from quartet_trainer.ranks.muon import WholeMuon as kind
    return kind(
        list(blocks.values()),
        lr=spec.learning_rate,
        weight_decay=spec.weight_decay,
        momentum=MUON_MOMENTUM if spec.momentum is None else spec.momentum,
        adjust_lr_fn="match_rms_adamw",
    )


def _groups(spec: OptimizerSpec, matrices: Named, vectors: Named) -> list[dict[str, Any]]:
    groups = (
        {"params": list(matrices.values()), "weight_decay": spec.weight_decay},
        {"params": list(vectors.values()), "weight_decay": 0.0},
    )
    return [group for group in groups if group["params"]]
