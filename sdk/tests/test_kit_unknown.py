"""What a peer of a newer release says that this one does not know is refused, never passed over."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from guinea_pig import NAME, raw, served
from quartet.cli.progress import phase_name
from quartet.errors import from_rpc
from quartet.kit.unknown import enum_name, newer_field, unknown_field
from quartet.v1 import journal_pb2 as jpb
from quartet.v1 import orchestrator_service_pb2 as opb
from quartet.v1 import rollout_pb2 as rpb
from quartet.v1 import trainer_service_pb2 as tpb
from quartet.v1 import weights_pb2 as pb

# Field 999, a varint: 1. What a release to come writes for a switch that it has.
SWITCH = b"\xb8\x3e\x01"


def with_switch(message: Message) -> Message:
    """The message as it comes from a peer that knows one field more."""
    return type(message).FromString(message.SerializeToString() + SWITCH)


def found(message: Message) -> str | None:
    raw = message.SerializeToString()
    return unknown_field(type(message).FromString(raw), raw)


def test_an_unknown_field_is_found_wherever_it_stands() -> None:
    """unknown.py 1"""
    loss = tpb.LossSpec(kind=tpb.LOSS_KIND_CROSS_ENTROPY)
    start = tpb.ForwardBackwardStart(run_id="r", seq_id=1, loss=loss, normalizer=2)
    assert found(tpb.ForwardBackwardRequest(start=start)) is None
    start.loss.CopyFrom(with_switch(loss))
    assert found(tpb.ForwardBackwardRequest(start=start)) == "LossSpec, field 999"
    samples = [tpb.TrainingSample(sample=rpb.Sample(token_ids=[1, 2, 3])) for _ in range(3)]
    batch = tpb.ForwardBackwardRequest(batch=tpb.SampleBatch(samples=samples))
    assert found(batch) is None
    batch.batch.samples[1].sample.MergeFrom(with_switch(rpb.Sample()))
    assert found(batch) == "Sample, field 999"
    assert found(with_switch(tpb.ForwardBackwardRequest())) == "ForwardBackwardRequest, field 999"
    numbers = opb.StepEvent(metrics={"train/loss": 0.5})
    assert found(numbers) is None
    assert found(with_switch(numbers)) == "StepEvent, field 999"


def test_other_encoders_say_the_same_in_more_bytes() -> None:
    """unknown.py 2: a default that is written out, a varint with padding, numbers that are not packed."""
    for encoded, known in (
        (b"\x0a\x01r" + b"\x10\x00", tpb.OptimStepRequest),
        (b"\x0a\x81\x00r", pb.GetManifestRequest),
        (b"\x08\x01\x08\x02\x08\x03", rpb.Sample),
    ):
        message = known.FromString(encoded)
        assert message.ByteSize() != len(encoded) and unknown_field(message, encoded) is None
        message = known.FromString(encoded + SWITCH)
        assert unknown_field(message, encoded + SWITCH) == f"{known.DESCRIPTOR.name}, field 999"


def test_a_messages_own_fields_are_told_from_those_in_it() -> None:
    inner = with_switch(tpb.LossSpec())
    assert newer_field(tpb.ForwardBackwardStart(loss=inner)) is None
    assert newer_field(inner) == "LossSpec, field 999"


def test_an_enum_value_of_a_newer_release_is_told_by_its_number() -> None:
    """unknown.py 1: an environment host fails in a way that is new, a run has a phase that is."""
    assert enum_name(rpb.FailureKind, rpb.FAILURE_KIND_TIMEOUT) == "TIMEOUT"
    assert enum_name(rpb.FailureKind, 99) == "99"
    assert phase_name(opb.RUN_PHASE_TRAINING) == "training" and phase_name(99) == "99"


def test_what_was_taken_out_of_the_contract_is_not_newer() -> None:
    removed = jpb.BatchClosed.FromString(b"\x08\x01" + b"\x18\x01")
    assert len(UnknownFieldSet(removed)) == 1 and newer_field(removed) is None


@pytest.mark.parametrize("method", ["GetManifest", "Watch"])
async def test_a_request_of_a_newer_caller_never_reaches_the_handler(method: str) -> None:
    """intercept.py 5"""
    async with served() as (pig, _stub, running), raw(running) as channel:
        request, path = pb.GetManifestRequest(run_id="r").SerializeToString(), f"/{NAME}/{method}"
        unary = method == "GetManifest"
        call = (channel.unary_unary if unary else channel.unary_stream)(path)(request + SWITCH, timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call if unary else call.read())
        error = from_rpc(caught.value)
        assert error.reason == "NOT_IMPLEMENTED" and caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert error.metadata["field"] == f"{method}Request, field 999" and error.metadata["rpc"] == path
        assert "upgrade this service" in error.message
        assert pig.calls == 0 and not pig.left.is_set()
        if unary:
            assert await channel.unary_unary(path)(request, timeout=20) == b""
