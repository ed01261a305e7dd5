"""Router replay: the tokens of a mixture of experts go to the experts that took them when they were sampled.

Where sampler and trainer round otherwise, routers decide otherwise about tokens that are nearly balanced, and
log-probabilities jump (R3, arXiv 2510.11370). What is replayed is the choice alone: the weights of the chosen
experts are the live router's, by its own formula, and so are its gradients.

1. A token whose experts are told goes to these, in the forward pass and where a layer is computed anew in the
   backward pass; any other to those that its router chooses.
2. A model is replayed only if each of its routers chooses by one `topk` over all experts, as transformers'
   do; batches for another, or with experts that the model does not have, are refused.
3. Without experts nothing changes.

Shapes: T tokens of a micro-batch, N routers, E experts, k of them that take a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from quartet.errors import QuartetError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quartet_trainer.packing import MicroBatch
from quartet_trainer.routing import routers_of
from quartet_trainer.sample import Sample


@dataclass(frozen=True)
class Shape:
    """What the routers of a model choose from, and how many: of each token, in each of `layers`."""

    layers: int
    experts: int
    slots: int


class Replay:
    """The routers of a model, told what to choose."""

    def __init__(self, model: Any) -> None:
        self._model, self._routers = model, routers_of(model)

    @cached_property
    def shape(self) -> Shape | None:
        """None where routers cannot be told."""
        return _shape_of(self._model.config, self._routers)

    def check(self, samples: Sequence[Sample]) -> None:
        """Whether the experts of samples are of this model. Errors: INVALID_REQUEST."""
        for index, sample in enumerate(samples):
            if sample.experts_TNk is None:
                continue
            _, layers, slots = sample.experts_TNk.shape
            if self.shape is None:
                name = type(self._model).__name__
                raise _refused(index, "given", f"the routers of {name} cannot be told; leave them out")
            if (layers, slots) != (self.shape.layers, self.shape.slots):
                ours = f"{self.shape.slots} in each of {self.shape.layers} layers"
                raise _refused(index, f"{slots} in each of {layers} layers", f"this model's are {ours}")
            highest = int(sample.experts_TNk.max(initial=0))
            if highest >= self.shape.experts:
                raise _refused(index, f"{highest}", f"this model has {self.shape.experts}, counted from 0")

    @contextmanager
    def replaying(self, batch: MicroBatch, device: torch.device) -> Iterator[None]:
        """Routers choose as the micro-batch says, in all passes inside."""
        if batch.routes is None:
            yield
            return
        assert self.shape is not None, "checked with the batch"
        told_TNk = torch.from_numpy(batch.routes.experts_TNk.astype("int64")).to(device)
        is_told_T = torch.from_numpy(batch.routes.told_T).to(device)
        for number, router in enumerate(self._routers):
            choice = _Choice(told_TNk[:, number], is_told_T, self.shape.experts)
            plain: Any = router.forward
            router.forward = partial(_within, choice, plain)
        try:
            yield
        finally:
            for router in self._routers:
                del router.forward


def replayed_share(samples: Sequence[Sample]) -> float:
    """The share of the covered tokens before which the experts of all tokens were told."""
    told = sum(
        int((sample.covered_K <= len(sample.experts_TNk)).sum())
        for sample in samples
        if sample.experts_TNk is not None
    )
    return told / max(1, sum(len(sample.covered_K) for sample in samples))


def _within(choice: _Choice, forward: Any, *args: Any, **kwargs: Any) -> Any:
    choice.times = 0
    with choice:
        answer = forward(*args, **kwargs)
    assert choice.times == 1, "a router that Replay.shape knows ranks its experts once"
    return answer


class _Choice(TorchFunctionMode):
    """Replaces what a router's `topk` over all experts finds."""

    def __init__(self, told_Tk: Tensor, is_told_T: Tensor, experts: int) -> None:
        super().__init__()
        self._told_Tk, self._is_told_T, self._experts = told_Tk, is_told_T[:, None], experts
        #: So often it chose.
        self.times = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        scores = _ranked(func, args, kwargs)
        if scores is None or scores.shape[-1] != self._experts or out.indices.shape != self._told_Tk.shape:
            return out
        self.times += 1
        indices = torch.where(self._is_told_T, self._told_Tk, out.indices)
        return torch.return_types.topk((scores.gather(-1, indices), indices))


class _Seen(TorchFunctionMode):
    """Counts what a router ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.ranked: list[tuple[int, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        scores = _ranked(func, args, kwargs)
        if scores is not None and scores.ndim == 2:
            self.ranked.append((int(scores.shape[-1]), int(out.indices.shape[-1])))
        return out


def _ranked(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """What is ranked, where the call is a `topk`."""
    if func not in (torch.topk, Tensor.topk):
        return None
    scores: Tensor = args[0] if args else kwargs["input"]
    return scores


def _shape_of(config: Any, routers: Sequence[nn.Module]) -> Shape | None:
    """By a router of each kind without weights, that no rank has to gather any for."""
    shapes = set()
    hidden = int(config.get_text_config().hidden_size)
    for kind in {type(router) for router in routers}:
        seen = _Seen()
        try:
            with torch.device("meta"), torch.no_grad():
                router = kind(config.get_text_config())
                with seen:
                    answer = router(torch.zeros(1, hidden))
            experts, slots = answer[0].shape[-1], answer[2].shape[-1]
        except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError):
            return None
        if seen.ranked.count((experts, slots)) != 1:
            return None
        shapes.add(Shape(len(routers), experts, slots))
    return shapes.pop() if len(shapes) == 1 else None


def _refused(index: int, value: str, remedy: str) -> QuartetError:
    return QuartetError(
        "INVALID_REQUEST",
        f"sample {index}: its experts are {value}; {remedy}",
        field=f"samples[{index}].sample.experts",
        value=value,
        remedy=remedy,
    )
