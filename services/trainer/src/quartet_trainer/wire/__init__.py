"""Protobuf <-> domain, and nothing else. What the contract leaves open is refused here by name. No torch.

Fields that this build does not serve are refused, never ignored.
"""

from quartet_trainer.wire.loss import custom_args, loss_spec
from quartet_trainer.wire.run import run_spec
from quartet_trainer.wire.sample import training_sample

__all__ = ["custom_args", "loss_spec", "run_spec", "training_sample"]
