"""10,000 mutated weight streams: none is accepted, none crashes, the old version serves throughout.

The streams are those of the real servicer, as serialized messages, and are read by the real `fetch_version`
and the real Push; only the sockets are missing, so that ten thousand fit into a minute. Each case gives the
reader one stream with one mutation, after which the publisher is gone: whatever is returned would have been
accepted on the strength of that stream.

Repeat a run with QUARTET_SEED=<the seed that it printed>.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import numpy as np
import pytest
import structlog
from quartet.errors import QuartetError
from quartet.v1 import weights_pb2 as pb
from quartet.weights import fetch, payload, push, receipt
from quartet.weights.delta import make_delta
from quartet.weights.fetch import fetch_version
from quartet.weights.fetched import Fetched
from quartet.weights.frames import PUSH_CHUNK
from quartet.weights.manifest import build_manifest, layout_signature, sealed, weights_digest
from quartet.weights.payload import Payload, full_payload
from quartet.weights.push import Pushes
from quartet.weights.service import WeightServicer
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor

SEED = int(os.environ.get("QUARTET_SEED", random.SystemRandom().randrange(2**32)))
STREAMS = 10_000
#: Instead of 1 MiB, so that a payload of 20 KiB has several chunks.
SMALL_CHUNK_BYTES = 1024
SECONDS = 60

#: A stream as it goes over the wire: the answer to GetManifest (or the frame with the manifest), then frames.
Stream = list[bytes]


class OneStream:
    """A call whose frames are told beforehand; None: the publisher is gone."""

    def __init__(self, frames: Stream | None) -> None:
        self._frames = frames

    async def read(self) -> Any:
        if self._frames is None:
            raise QuartetError("NOT_READY", "the publisher is gone")
        return self._frames.pop(0) if self._frames else grpc.aio.EOF

    def cancel(self) -> None:
        """Nothing is under way."""


class GoneAfterOneStream:
    """A channel to a publisher that answers GetManifest and Fetch once, as told, and is gone then."""

    def __init__(self, stream: Stream) -> None:
        self._manifest: bytes | None = stream[0]
        self._frames: Stream | None = stream[1:]

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        async def call(request: Any, **options: Any) -> Any:
            answer, self._manifest = self._manifest, None
            if answer is None:
                raise QuartetError("NOT_READY", "the publisher is gone")
            try:
                return response_deserializer(answer)
            except Exception:  # noqa: BLE001 - what gRPC makes of any failure of a deserializer
                raise QuartetError("INTERNAL", "the message could not be read") from None

        return call

    def unary_stream(self, path: str, request_serializer: Any = None, **_: Any) -> Any:
        def call(request: Any) -> OneStream:
            frames, self._frames = self._frames, None
            return OneStream(frames)

        return call

    stream_unary = stream_stream = unary_stream


def weights(seed: int) -> dict[str, Tensor]:
    """bf16, f32, empty and scalar; a later seed moves some values of the earlier."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 60_000, (64, 96), np.uint16)
    floats = rng.standard_normal((11, 13), np.float32)
    later = np.random.default_rng(seed)
    if seed:
        bits = bits + (later.random(bits.shape) < 0.3) * later.integers(1, 9000, bits.shape, np.uint16)
        floats = floats * np.float32(1 + 1e-3 * seed)
    return {
        "embed": Tensor("BF16", bits.shape, np.ascontiguousarray(bits, np.uint16).data),
        "empty": Tensor("F16", (0, 4), b""),
        "norm": Tensor("F32", floats.shape, np.ascontiguousarray(floats, np.float32).data),
        "scalar": Tensor("I64", (), seed.to_bytes(8, "little")),
    }


def made(version: int, seed: int) -> Fetched:
    return Fetched(build_manifest("r", version, weights(seed)), weights(seed))


OLD, NEW, OTHER = made(1, 1), made(2, 2), made(1, 3)
DELTA, WRONG_DELTA = make_delta(OLD, NEW), make_delta(OTHER, NEW)
WHOLE = full_payload(NEW.tensors)


def fetch_stream(manifest: pb.WeightManifest, body: Payload) -> Stream:
    end = pb.FetchResponse(end=body.end()).SerializeToString()
    answer = pb.GetManifestResponse(manifest=manifest).SerializeToString()
    return [answer, *body.encoded_chunks(0), end]


def push_stream(manifest: pb.WeightManifest, body: Payload) -> Stream:
    commit = pb.PushRequest(commit=body.end()).SerializeToString()
    first = pb.PushRequest(manifest=manifest).SerializeToString()
    return [first, *body.encoded_chunks(0, PUSH_CHUNK), commit]


#: Of each kind of stream: its manifest, its payload, and how they become one.
CLEAN = {
    "full": (NEW.manifest, WHOLE, fetch_stream),
    "delta": (DELTA.manifest, DELTA.payload, fetch_stream),
    "push": (NEW.manifest, WHOLE, push_stream),
    "push of a delta": (DELTA.manifest, DELTA.payload, push_stream),
}

# The mutations. Each makes a stream say something else than it did.


def truncated(stream: Stream, rng: random.Random) -> None:
    del stream[rng.randrange(1, len(stream)) :]


def cut_within_a_message(stream: Stream, rng: random.Random) -> None:
    at = rng.randrange(len(stream))
    stream[at] = stream[at][: rng.randrange(len(stream[at]))]


def reordered(stream: Stream, rng: random.Random) -> None:
    first, second = rng.sample(range(1, len(stream)), 2)
    stream[first], stream[second] = stream[second], stream[first]


def duplicated(stream: Stream, rng: random.Random) -> None:
    at = rng.randrange(1, len(stream) - 1)
    stream.insert(at, stream[at])


def dropped(stream: Stream, rng: random.Random) -> None:
    del stream[rng.randrange(1, len(stream))]


def bit_flipped(stream: Stream, rng: random.Random) -> None:
    at = rng.randrange(len(stream))
    damaged = bytearray(stream[at])
    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    stream[at] = bytes(damaged)


def spliced(stream: Stream, rng: random.Random) -> None:
    """A piece of one message overwrites one of another."""
    at, source = rng.randrange(len(stream)), rng.choice(stream)
    begin, size = rng.randrange(len(stream[at])), rng.randrange(1, 65)
    start = rng.randrange(len(source))
    piece = source[start : start + min(size, len(stream[at]) - begin)]
    stream[at] = stream[at][:begin] + piece + stream[at][begin + len(piece) :]


MUTATIONS: list[Callable[[Stream, random.Random], None]] = [
    truncated,
    cut_within_a_message,
    reordered,
    duplicated,
    dropped,
    bit_flipped,
    bit_flipped,
    bit_flipped,
    spliced,
]


def wrong_digest(manifest: pb.WeightManifest, rng: random.Random) -> pb.WeightManifest:
    """A manifest that is consistent in itself, of weights that are not in the payload."""
    lying = pb.WeightManifest()
    lying.CopyFrom(manifest)
    match rng.randrange(5):
        case 0:
            rng.choice(lying.tensors).digest ^= 1 << rng.randrange(64)
        case 1:
            lying.tensors[0].dtype = "F16"
        case 2:
            lying.tensors[2].shape[:] = [13, 11]
        case 3:
            lying.tensors[0].name = "a"
        case 4:
            lying.adapter_config = "{}"
            lying.tensors[0].digest ^= 1
    lying.digest = weights_digest(lying.tensors, lying.adapter_config)
    lying.layout_signature = layout_signature(lying.tensors)
    return sealed(lying)


def wrong_base(rng: random.Random) -> tuple[pb.WeightManifest, Payload]:
    """A delta from a version that the reader does not hold; often it claims to be from the one it has."""
    manifest = pb.WeightManifest()
    manifest.CopyFrom(WRONG_DELTA.manifest)
    if rng.random() < 0.5:
        manifest.base_digest = OLD.manifest.digest
    return sealed(manifest), WRONG_DELTA.payload


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (payload, receipt, push):
        monkeypatch.setattr(module, "CHUNK_BYTES", SMALL_CHUNK_BYTES)
    monkeypatch.setattr(fetch, "MAX_BARREN_TRIES", 1)
    monkeypatch.setattr(fetch, "BACKOFF_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(receipt, "MAX_REFETCHES", 0)
    # Ten thousand refusals are as many lines.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))


def a_case(kind: str, rng: random.Random) -> tuple[str, Stream]:
    """A mutated stream, and what was done to it."""
    manifest, body, as_stream = CLEAN[kind]
    choice = rng.randrange(len(MUTATIONS) + 2)
    if choice == len(MUTATIONS):
        return "wrong digest", as_stream(wrong_digest(manifest, rng), body)
    if choice == len(MUTATIONS) + 1:
        return "wrong base", as_stream(*wrong_base(rng))
    clean = as_stream(manifest, body)
    while True:
        stream = list(clean)
        MUTATIONS[choice](stream, rng)
        if stream != clean:
            return MUTATIONS[choice].__name__, stream


async def accepted(kind: str, stream: Stream, serving: WeightStore) -> bool:
    """Whether a replica that serves OLD takes anything from the stream."""
    if kind.startswith("push"):

        async def messages() -> AsyncIterator[bytes]:
            for message in stream:
                yield message

        async def go_ahead() -> None:
            """The messages come anyway."""

        await Pushes(serving, lambda manifest: None).receive(messages(), go_ahead)
        return True
    base = OLD if kind == "delta" else None
    fetched = await fetch_version(GoneAfterOneStream(stream), "r", 2, base)  # type: ignore[arg-type]
    serving.hold(fetched)
    return True


@pytest.mark.timeout(4 * SECONDS)
async def test_no_mutated_stream_is_accepted_and_the_old_version_serves_throughout() -> None:
    """Invariant 3: a version never lies."""
    print(f"QUARTET_SEED={SEED}")
    serving = WeightStore(keep=2)
    serving.commit(OLD)
    old = serving.get("r")
    counts: Counter[tuple[str, str]] = Counter()
    for index in range(STREAMS):
        rng = random.Random(SEED + index)
        kind = rng.choice(list(CLEAN))
        what, stream = a_case(kind, rng)
        try:
            taken = await accepted(kind, stream, serving)
        except QuartetError as error:
            taken = False
            counts[what, error.reason] += 1
        assert not taken, f"stream {index} of QUARTET_SEED={SEED}, {kind} {what}, was accepted"
        assert serving.get("r") is old, f"stream {index} of QUARTET_SEED={SEED}, {kind} {what}"
    assert dict(old.tensors) == weights(1)
    print(*sorted(counts.items()), sep="\n")
    assert {what for what, _ in counts} == {"wrong digest", "wrong base"} | {
        mutation.__name__ for mutation in MUTATIONS
    }


@pytest.mark.parametrize("kind", CLEAN)
async def test_the_same_streams_unmutated_are_accepted(kind: str) -> None:
    """Otherwise the test above would prove nothing."""
    serving = WeightStore(keep=2)
    serving.commit(OLD)
    manifest, body, as_stream = CLEAN[kind]
    stream = as_stream(manifest, body)
    assert len(stream) > 4
    assert await accepted(kind, stream, serving)
    assert dict(serving.get("r", 2).tensors) == weights(2)


async def test_the_streams_are_those_of_the_real_servicer() -> None:
    store = WeightStore(keep=2)
    store.commit(OLD)
    store.commit(NEW)
    servicer = WeightServicer(store)
    for kind in ("full", "delta"):
        asked = pb.GetManifestRequest(run_id="r", version=2)
        request = pb.FetchRequest(run_id="r", version=2)
        if kind == "delta":
            asked.base_version = request.base_version = 1
            asked.base_digest = request.base_digest = OLD.manifest.digest
        answer = await servicer.GetManifest(asked, None)
        payload = store.at_hand("r", 2, (1, OLD.manifest.digest) if kind == "delta" else None)
        payload.digests()  # so that no sign of life comes first
        sent = [message async for message in servicer.fetch_encoded(request, None)]
        manifest, body, as_stream = CLEAN[kind]
        assert [answer.SerializeToString(), *sent] == as_stream(manifest, body)
