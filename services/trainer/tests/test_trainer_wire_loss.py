"""quartet_trainer.wire.loss: a loss that comes in every step is read once."""

from __future__ import annotations

import pytest
from quartet.errors import QuartetError
from quartet.v1 import trainer_service_pb2 as pb
from quartet_trainer.wire import loss_spec


def test_equal_messages_are_read_once_and_give_equal_losses() -> None:
    """wire/loss.py 1."""
    first, again = (
        loss_spec(pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT, clip_high=0.3)) for _ in range(2)
    )
    assert first is again
    other = loss_spec(pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT, clip_high=0.4))
    assert (first.clip_high, other.clip_high) == (0.3, 0.4)


def test_what_is_refused_is_refused_again() -> None:
    for _ in range(2):
        with pytest.raises(QuartetError, match="clip_high"):
            loss_spec(pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT, clip_high=-1.0))


def test_arguments_of_one_s_own_are_nobody_else_s() -> None:
    """wire/loss.py 2."""
    message = pb.LossSpec(kind=pb.LOSS_KIND_CUSTOM, custom="scaled", custom_args='{"tau": 0.5}')
    loss_spec(message).custom_args["tau"] = 2.0
    assert loss_spec(message).custom_args == {"tau": 0.5}
