"""Invariant 10: what crosses the wire is protobuf, and inside it weights as safetensors; no other bytes."""

from __future__ import annotations

import pickle
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import quartet.v1
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from quartet.kit.channel import connect
from quartet.v1 import trainer_service_pb2 as tpb
from quartet.v1 import weights_pb2 as wpb
from quartet.v1.trainer_service_pb2_grpc import TrainerServiceStub
from quartet.v1.weights_pb2_grpc import WeightServiceStub

FETCH = "/quartet.v1.WeightService/Fetch"
# Every field of the contract that could carry anything but numbers, texts and messages.
DIGESTS = {
    "GetModelResponse.weights_digest",
    "ChatIdentity.template_digest",
    "ChatIdentity.tokenizer_digest",
    "ServedAdapter.weights_digest",
    "PublishWeightsResponse.digest",
    "WeightManifest.digest",
    "WeightManifest.base_digest",
    "WeightEnd.payload_digest",
    "VersionAnnounced.digest",
    "GetManifestRequest.base_digest",
    "FetchRequest.base_digest",
    "ModelFile.digest",
    "ModelManifest.digest",
    "ModelPlace.digest",
}
TOKENS = {"SharedPayload.token"}
SAFETENSORS = {"WeightChunk.data"}
# Of a model's folder: weights as safetensors, beside them the texts of a tokenizer and of configurations.
FILES = {"ModelChunk.data"}
# Of one byte or two each, as their message says: packed varints would be twice as long above 127.
NUMBERS = {"RoutedExperts.numbers"}


def messages() -> Iterator[Descriptor]:
    for module in pkgutil.iter_modules(quartet.v1.__path__):
        if module.name.endswith("_pb2"):
            waiting = list(
                import_module(f"quartet.v1.{module.name}").DESCRIPTOR.message_types_by_name.values()
            )
            while waiting:
                message = waiting.pop()
                waiting += message.nested_types
                yield message


def test_invariant_10_no_field_of_the_contract_carries_bytes_that_are_not_known() -> None:
    """A new field of bytes has to say here what is in it."""
    fields = [field for message in messages() for field in message.fields]
    opaque = {
        field.full_name.removeprefix("quartet.v1.")
        for field in fields
        if field.type == FieldDescriptor.TYPE_BYTES
    }
    assert opaque == DIGESTS | TOKENS | SAFETENSORS | FILES | NUMBERS
    foreign = {
        field.message_type.full_name
        for field in fields
        if field.message_type is not None and field.message_type.file.package != "quartet.v1"
    }
    assert not foreign, "an Any could carry anything"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_qwen3: Any) -> Path:
    tiny = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tiny |= {"head_dim": 8, "intermediate_size": 32, "max_position_embeddings": 64}
    made: Path = write_qwen3(tmp_path_factory.mktemp("wire") / "model", seed=3, **tiny)
    return made


async def test_invariant_10_a_version_travels_as_safetensors_in_protobuf(
    folder: Path, tmp_path: Path, serving_trainer: Any
) -> None:
    """Read off the raw bytes of the stream, by libraries that are not ours."""
    import safetensors.torch
    import torch

    async with serving_trainer(tmp_path / "states") as address, connect(address) as channel:
        trainer = TrainerServiceStub(channel)  # type: ignore[no-untyped-call]
        spec = tpb.RunSpec(base_model=str(folder), optimizer=tpb.OptimizerSpec(learning_rate=1e-3))
        await trainer.CreateRun(tpb.CreateRunRequest(run_id="run", spec=spec))
        await trainer.PublishWeights(tpb.PublishWeightsRequest(run_id="run", seq_id=1))
        weights = WeightServiceStub(channel)  # type: ignore[no-untyped-call]
        manifest = (await weights.GetManifest(wpb.GetManifestRequest(run_id="run"))).manifest
        raw = channel.unary_stream(FETCH, request_serializer=wpb.FetchRequest.SerializeToString)
        payload, ends = b"", 0
        async for frame in raw(wpb.FetchRequest(run_id="run", version=0)):
            parsed = wpb.FetchResponse.FromString(frame)
            assert parsed.SerializeToString() == frame, "nothing beside the message"
            payload += parsed.chunk.data
            ends += parsed.HasField("end")
    assert ends == 1 and len(payload) == parsed.end.payload_bytes
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(payload)
    sent = safetensors.torch.load(payload)
    base = safetensors.torch.load_file(folder / "model.safetensors")
    assert set(sent) == {tensor.name for tensor in manifest.tensors} >= set(base)
    assert all(torch.equal(sent[name], tensor.to(sent[name].dtype)) for name, tensor in base.items())
