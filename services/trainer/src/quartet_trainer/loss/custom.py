"""Losses of one's own: functions that the trainer's operator named in its configuration, `losses.<name> =
"module:function"`. A caller may only choose among them by name: nobody sends code over the wire.

A function gets the LossSpec and the Tokens of one micro-batch, and returns the loss of each token:

    def my_loss(spec: LossSpec, tokens: Tokens) -> Tensor:      # [K]
        return -tokens.advantages_K * tokens.logp_K

1. One that cannot be imported, or not be called with the two, keeps the trainer from starting. A run that
   asks for one that is not named is refused before it is created (CheckRun).
2. What it returns is checked at every call: one finite number for each covered token, depending on logp_K
   where there is something to learn. Anything else is INVALID_REQUEST, and the batch is not applied. (Where
   the model itself gave no finite number, the loss may have none: the step is skipped, as for any loss.)
3. Divergence, entropy, aggregation and normalizer are applied to it like to any other loss.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from quartet.errors import QuartetError
from torch import Tensor

from quartet_trainer.loss.tokens import Tokens
from quartet_trainer.spec import LossSpec

Function = Callable[[LossSpec, Tokens], Tensor]


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """A named function, checked."""

    name: str
    function: Function

    def __call__(self, spec: LossSpec, tokens: Tokens) -> Tensor:
        """The loss of each token. Errors: INVALID_REQUEST."""
        try:
            losses_K = self.function(spec, tokens)
        except Exception as error:
            raise self._refused(f"it raised {type(error).__name__}: {error}") from error
        if not isinstance(losses_K, Tensor):
            raise self._refused(f"it returned {type(losses_K).__name__}, not a tensor")
        if losses_K.shape != tokens.logp_K.shape:
            shape, wanted = tuple(losses_K.shape), tuple(tokens.logp_K.shape)
            raise self._refused(f"it returned shape {shape} for {wanted[0]} covered tokens")
        if not losses_K.is_floating_point():
            raise self._refused(f"it returned {losses_K.dtype}, not floating-point numbers")
        bad = int((torch.isfinite(tokens.logp_K) & ~torch.isfinite(losses_K.detach())).sum())
        if bad:
            raise self._refused(f"it returned {bad} values that are no finite numbers")
        if torch.is_grad_enabled() and not losses_K.requires_grad:
            raise self._refused("what it returned does not depend on tokens.logp_K, so nothing is learned")
        return losses_K

    def _refused(self, what: str) -> QuartetError:
        remedy = "mend the function; it returns one finite loss for each covered token"
        return QuartetError(
            "INVALID_REQUEST",
            f"losses.{self.name}: {what}; {remedy}",
            field="loss.custom",
            value=self.name,
            remedy=remedy,
        )


def load_losses(paths: Mapping[str, str]) -> dict[str, CustomLoss]:
    """Import the functions. Errors: ValueError, in one sentence."""
    return {name: CustomLoss(name, _load(name, path)) for name, path in paths.items()}


def _load(name: str, path: str) -> Function:
    module, colon, attribute = path.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f'losses.{name} = {path!r} is no import path; write "module:function"')
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module of one's own may raise anything
        why = str(error) if isinstance(error, (ImportError, AttributeError)) else repr(error)
        raise ValueError(f"losses.{name} = {path!r} cannot be imported: {why}") from error
    if not callable(function):
        raise ValueError(f"losses.{name} = {path!r} is {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ValueError(
            f"losses.{name} = {path!r} cannot be called as function(spec, tokens): {error}"
        ) from error
    except ValueError:
        pass  # written in C: it does not say what it takes
    loaded: Function = function
    return loaded
