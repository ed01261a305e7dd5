"""What defines a run, a loss and their bounds, as values that are compared and saved. No torch, no proto.

1. Every default of the contract is filled in here, once, so that equal meanings are equal values.
2. Combinations that mean nothing are refused here, by name: what exists here can be computed.
3. `difference` names the first field in which two specs disagree.
"""

from quartet_trainer.spec.loss import LossSpec, Ratio
from quartet_trainer.spec.optimizer import OptimizerSpec, Schedule
from quartet_trainer.spec.run import DType, RunSpec, difference
from quartet_trainer.spec.value import NAME_PATTERN, check_name

__all__ = [
    "NAME_PATTERN",
    "DType",
    "LossSpec",
    "OptimizerSpec",
    "Ratio",
    "RunSpec",
    "Schedule",
    "check_name",
    "difference",
]
