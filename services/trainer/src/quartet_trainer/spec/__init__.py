"""What defines a run, a loss and their bounds, as values that are compared and saved. No torch, no proto.

1. Every default of the contract is filled in here, once, so that equal meanings are equal values.
2. Combinations that mean nothing are refused here, by name: what exists here can be computed.
3. `difference` names the first field in which two specs disagree; `extends` knows a run made longer.
"""

from quartet_trainer.spec.lora import LoraSpec
from quartet_trainer.spec.loss import (
    Aggregation,
    Correction,
    CorrectionMode,
    KlEstimator,
    LossKind,
    LossSpec,
    Ratio,
    RatioLevel,
    VespoKernel,
)
from quartet_trainer.spec.optimizer import OptimizerKind, OptimizerSpec, Schedule
from quartet_trainer.spec.reference import ReferenceSpec
from quartet_trainer.spec.run import DType, RunSpec, difference, extends
from quartet_trainer.spec.value import NAME_PATTERN, check_name

__all__ = [
    "NAME_PATTERN",
    "Aggregation",
    "Correction",
    "CorrectionMode",
    "DType",
    "KlEstimator",
    "LoraSpec",
    "LossKind",
    "LossSpec",
    "OptimizerKind",
    "OptimizerSpec",
    "Ratio",
    "RatioLevel",
    "ReferenceSpec",
    "RunSpec",
    "Schedule",
    "VespoKernel",
    "check_name",
    "difference",
    "extends",
]
