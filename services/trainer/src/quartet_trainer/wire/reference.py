"""ReferenceSpec of the contract to ReferenceSpec of the domain."""

from __future__ import annotations

import pydantic
from quartet.v1 import trainer_service_pb2 as pb

from quartet_trainer.spec import ReferenceSpec
from quartet_trainer.wire.refusal import config, first, given


def reference_spec(spec: pb.ReferenceSpec) -> ReferenceSpec:
    """A reference model. Errors: INVALID_CONFIG."""
    try:
        return ReferenceSpec(model=spec.model, sync_steps=spec.sync_steps, **given(spec, "mixup_alpha"))
    except pydantic.ValidationError as error:
        raise config(*first(error, "reference")) from None
