"""Losses of one's own: functions that the trainer's operator named in its configuration, `losses.<name> =
"module:function"`, beside those that every trainer has by name (SHIPPED). A caller may only choose among them
by name: nobody sends code over the wire.

A function gets the LossSpec and the Tokens of one micro-batch, and by name what the run gives it
(`LossSpec.custom_args`). It returns the loss of each token, or that and metrics of its own (own_metrics.py):

    def my_loss(spec: LossSpec, tokens: Tokens, tau: float = 0.1) -> Tensor:      # [K]
        return -tokens.advantages_K * tokens.logp_K

1. One that cannot be imported, or not be called with the two, keeps the trainer from starting. A run that
   asks for one that is not named, or does not take its arguments, is refused before it is created (CheckRun).
2. What it returns is checked at every call: one finite number for each covered token, depending on logp_K
   where there is something to learn. Anything else is INVALID_REQUEST, and the batch is not applied. (Where
   the model itself gave no finite number, the loss may have none: the step is skipped, as for any loss.)
3. Divergence, entropy, aggregation and normalizer are applied to it like to any other loss.
4. What it raises is INVALID_REQUEST with its place, and in the log with its traceback.
5. Equal tokens get equal losses: ranks that share sequences each compute the loss of all their tokens, so one
   that draws at random has to draw the same in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import structlog
import torch
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.kit.own_function import OwnFunction, load
from torch import Tensor

from quartet_trainer.loss.own_metrics import OwnMetrics
from quartet_trainer.loss.tokens import Tokens
from quartet_trainer.spec import LossSpec

#: Those of quartet.run.algorithm.SHIPPED_LOSSES.
SHIPPED: Final[Mapping[str, str]] = {
    "prime_rl_dppo": "quartet_trainer.loss.prime_rl:dppo",
    "prime_rl_ipo": "quartet_trainer.loss.prime_rl:ipo",
}
# What a function is called with.
TAKES = ("spec", "tokens")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """A named function, checked."""

    name: str
    function: OwnFunction

    def refuses(self, args: Mapping[str, object]) -> str:
        """Why it cannot be called with these by name; empty where nothing is known."""
        return self.function.refuses(TAKES, args)

    def __call__(self, spec: LossSpec, tokens: Tokens, own: OwnMetrics | None = None) -> Tensor:
        """The loss of each token; `own` gets what it reports. Errors: INVALID_REQUEST."""
        try:
            returned = self.function(spec, tokens, **spec.custom_args)
        except (Exception, SystemExit) as error:  # its sys.exit() would end more than this call
            # Whoever reads the refusal gets one sentence.
            log.error("loss_raised", loss=self.name, exc_info=error)
            raise self._refused(
                f"it raised at {self.function.told(error)} (this trainer's log has the traceback)"
            ) from error
        losses_K, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        if not isinstance(losses_K, Tensor):
            raise self._refused(f"it returned {type(losses_K).__name__}, not a tensor")
        if losses_K.shape != tokens.logp_K.shape:
            shape, wanted = tuple(losses_K.shape), tuple(tokens.logp_K.shape)
            raise self._refused(f"it returned shape {shape} for {wanted[0]} covered tokens")
        if not losses_K.is_floating_point():
            raise self._refused(f"it returned {losses_K.dtype}, not floating-point numbers")
        bad = int((~torch.isfinite(losses_K.detach())).sum())
        # Of whole samples the loss of each token has all of them in it.
        if bad and bool(torch.isfinite(tokens.logp_K).all()):
            raise self._refused(f"it returned {bad} values that are no finite numbers")
        if torch.is_grad_enabled() and not losses_K.requires_grad:
            raise self._refused("what it returned does not depend on tokens.logp_K, so nothing is learned")
        if wrong := (own or OwnMetrics()).report(metrics, len(tokens.logp_K)):
            raise self._refused(wrong)
        return losses_K

    def _refused(self, what: str) -> QuartetError:
        remedy = (
            "mend the function, which returns one finite loss for each token, and start the trainer again"
        )
        return QuartetError(
            "INVALID_REQUEST",
            f"losses.{self.name}: {what}; {remedy}",
            field="loss.custom",
            value=self.name,
            remedy=remedy,
        )


def load_losses(paths: Mapping[str, str]) -> dict[str, CustomLoss]:
    """Import the functions, and the shipped ones. Errors: ConfigError, in one sentence."""
    named = {**SHIPPED, **paths}
    try:
        loaded = {name: load(f"losses.{name}", path, TAKES, more=True) for name, path in named.items()}
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return {name: CustomLoss(name, function) for name, function in loaded.items()}
