"""Every enum of a request: an unknown number is refused, by name, and 0 is what the contract says it is.

A value that is misspelt is 0 where proto-loader of Node sends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from quartet.errors import QuartetError
from quartet.v1 import envhost_service_pb2, inference_service_pb2, orchestrator_service_pb2
from quartet.v1 import trainer_service_pb2 as tpb
from quartet.v1 import weights_pb2 as wpb
from quartet.weights.manifest import check_manifest, layout_signature, sealed, weights_digest
from quartet_envhost import service
from quartet_trainer.wire.loss import loss_spec
from quartet_trainer.wire.optimizer import optimizer_spec

SERVICES = (envhost_service_pb2, inference_service_pb2, orchestrator_service_pb2, tpb, wpb)
UNKNOWN = 99


def loss(**fields: Any) -> Any:
    given = {"kind": tpb.LOSS_KIND_POLICY_GRADIENT, "kl_coef": 0.1, **fields}
    return loss_spec(tpb.LossSpec(**given))


def corrected(**fields: Any) -> Any:
    given = {"mode": tpb.CORRECTION_MODE_MASK, "cap": 3.0, **fields}
    return loss(proximal_version=0, correction=tpb.MismatchCorrection(**given))


def optimizer(**fields: Any) -> Any:
    return optimizer_spec(tpb.OptimizerSpec(learning_rate=0.1, **fields))


def pushed(encoding: int) -> None:
    manifest = wpb.WeightManifest(run_id="r", version=1, payload_bytes=100)
    manifest.tensors.add(name="w", dtype="F32", shape=[1], encoding=encoding)
    manifest.digest = weights_digest(manifest.tensors)
    manifest.layout_signature = layout_signature(manifest.tensors)
    check_manifest(sealed(manifest))


def split(split: int) -> None:
    service._check_split(split)


#: What takes the field, and what 0 is: another value of it; None where 0 is refused.
FIELDS: dict[tuple[str, str], tuple[Callable[..., Any], int | None]] = {
    ("LossSpec", "kind"): (loss, None),
    ("LossSpec", "ratio"): (loss, tpb.RATIO_TREATMENT_CISPO),
    ("LossSpec", "ratio_level"): (loss, tpb.RATIO_LEVEL_TOKEN),
    ("LossSpec", "aggregation"): (loss, tpb.AGGREGATION_TOKEN),
    ("LossSpec", "kl_estimator"): (loss, tpb.KL_ESTIMATOR_K3),
    ("MismatchCorrection", "mode"): (corrected, None),
    ("MismatchCorrection", "level"): (corrected, tpb.RATIO_LEVEL_TOKEN),
    ("OptimizerSpec", "kind"): (optimizer, tpb.OPTIMIZER_KIND_ADAMW),
    ("OptimizerSpec", "schedule"): (optimizer, tpb.SCHEDULE_CONSTANT),
    ("TensorInfo", "encoding"): (pushed, None),
    ("GetTasksRequest", "split"): (split, envhost_service_pb2.SPLIT_TRAIN),
    ("RunRolloutsRequest", "split"): (split, envhost_service_pb2.SPLIT_TRAIN),
}


def test_the_table_is_complete() -> None:
    seen: set[str] = set()

    def enums(message: Descriptor) -> Iterator[tuple[str, str]]:
        if message.full_name in seen:
            return
        seen.add(message.full_name)
        for field in message.fields:
            if field.enum_type is not None:
                yield message.name, field.name
            if field.message_type is not None:
                yield from enums(field.message_type)

    services = [one for module in SERVICES for one in module.DESCRIPTOR.services_by_name.values()]
    assert {found for one in services for rpc in one.methods for found in enums(rpc.input_type)} == set(
        FIELDS
    )


@pytest.mark.parametrize("place", FIELDS)
def test_an_unknown_number_is_refused(place: tuple[str, str]) -> None:
    take, _ = FIELDS[place]
    with pytest.raises(QuartetError) as refused:
        take(**{place[1]: UNKNOWN})
    assert refused.value.reason in ("INVALID_REQUEST", "INVALID_CONFIG", "CHECKSUM_MISMATCH")
    assert place[1] in str(refused.value)


@pytest.mark.parametrize("place", FIELDS)
def test_what_is_left_out_is_what_the_contract_says_or_refused(place: tuple[str, str]) -> None:
    (take, means), name = FIELDS[place], place[1]
    if means is not None:
        assert take(**{name: 0}) == take(**{name: means})
        return
    with pytest.raises(QuartetError) as refused:
        take(**{name: 0})
    assert name in str(refused.value)


def test_a_correction_that_says_nothing_is_refused() -> None:
    """`correction: {mode: 'CORRECTION_MODE_MSK'}` of a client that misspells."""
    empty: Message = tpb.MismatchCorrection()
    with pytest.raises(QuartetError, match="choose TRUNCATE or MASK, or leave correction out"):
        loss(proximal_version=0, correction=empty)
