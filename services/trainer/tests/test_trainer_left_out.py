"""What the trainer takes for what a run leaves out is what the SDK says that it takes: by that it tells runs
that are one from others (quartet/run/written_out.py)."""

from __future__ import annotations

import pytest
from quartet.run import written_out
from quartet_trainer.entropy_control import ENTROPY_COEF_DELTA
from quartet_trainer.optimizer import MUON_MOMENTUM, SGD_MOMENTUM
from quartet_trainer.spec.loss import LossSpec, Ratio, VespoKernel
from quartet_trainer.spec.reference import ReferenceSpec


@pytest.mark.parametrize("loss", written_out.OF_LOSSES)
def test_a_loss_without_bounds_has_those_that_are_written_out(loss: str) -> None:
    said = dict(written_out.OF_LOSSES[loss])
    if "kernel" in said:
        assert said["kernel"].model_dump() == VespoKernel().model_dump()
        return
    left_out, written = LossSpec(ratio=Ratio(loss)), LossSpec(ratio=Ratio(loss), **said)
    assert (left_out.clip_bounds, left_out.taus) == (written.clip_bounds, written.taus)
    for key, value in said.items():  # and each of them is read
        other = LossSpec(ratio=Ratio(loss), **{**said, key: value / 2})
        assert (other.clip_bounds, other.taus) != (written.clip_bounds, written.taus)


def test_so_have_optimizers_references_and_the_entropy() -> None:
    assert written_out.MOMENTUM == {"muon": MUON_MOMENTUM, "sgd": SGD_MOMENTUM}
    assert written_out.ENTROPY_COEF_DELTA == ENTROPY_COEF_DELTA
    assert ReferenceSpec(sync_steps=1).share == written_out.MIXUP_ALPHA
