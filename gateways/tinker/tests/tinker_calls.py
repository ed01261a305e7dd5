"""Scripts' calls and what the tests read beside them: data, clients, single HTTP requests."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import grpc
import numpy as np
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1 import trainer_service_pb2_grpc as rpc
from quartet_tinker import tinker_wire_pb2 as wire

from .tinker_stack import Stack

MODEL = "tiny/random"
TEXT = list(b"the quick brown fox")


def datum(tinker: Any, tokens: list[int] = TEXT, **inputs: Any) -> Any:
    """A supervised datum, or one with these arrays instead."""
    given = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1), **inputs}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            name: np.array(values, dtype=np.int64 if name == "target_tokens" else np.float32)
            for name, values in given.items()
            if values is not None
        },
    )


def lora(client: Any, seed: int = 1, **more: Any) -> Any:
    return client.create_lora_training_client(MODEL, rank=4, seed=seed, **more).result(120)


def post(address: str, path: str, body: Any, key: str = "tml-x") -> tuple[int, Any]:
    """One request as the SDK sends it, and no repetition of it."""
    is_proto = isinstance(body, bytes)
    request = urllib.request.Request(
        f"http://{address}/api/v1/{path}",
        data=body if is_proto else json.dumps(body).encode(),
        headers={
            "Content-Type": "application/x-protobuf" if is_proto else "application/json",
            "X-API-Key": key,
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            raw = response.read()
            return response.status, json.loads(raw) if raw[:1] == b"{" else raw
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def gradients(model_id: str, seq_id: int) -> bytes:
    """A forward_backward as the SDK sends it."""
    tensor = wire.Tensor(
        dense=np.array(TEXT[1:], dtype=np.int64).tobytes(), dtype=wire.DTYPE_INT64, shape=[len(TEXT) - 1]
    )
    one = wire.Datum(loss_fn_inputs={"target_tokens": tensor})
    one.model_input.add().encoded_text.tokens = np.array(TEXT[:-1], dtype=np.int32).tobytes()
    request = wire.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, data=[one], loss_fn="cross_entropy"
    )
    return request.SerializeToString()


def state_of(services: Stack, training: Any) -> Any:
    """The run of a client, as the trainer holds it."""
    with grpc.insecure_channel(services.trainer) as channel:
        stub: Any = rpc.TrainerServiceStub(channel)
        request = pb.GetRunRequest(run_id=training.model_id.replace(":", "."))
        return stub.GetRun(request, timeout=20).run
