"""The losses, as sums over covered tokens, and what is worth knowing about them: objective.py first."""

from quartet_trainer.loss.diagnostics import diagnostics
from quartet_trainer.loss.objective import token_losses
from quartet_trainer.loss.tokens import Tokens

__all__ = ["Tokens", "diagnostics", "token_losses"]
