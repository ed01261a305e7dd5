"""Push over real gRPC: committed whole or not at all, whatever the stream does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import xxhash
from push_taker import Taker, frames, model, offer, serve, take, until_under_way
from quartet.errors import QuartetError, refused
from quartet.kit.channel import connect
from quartet.v1 import weights_pb2 as pb
from quartet.weights import manifest, payload, push
from quartet.weights.delta import make_delta
from quartet.weights.fetch import fetch_version
from quartet.weights.fetched import Fetched
from quartet.weights.manifest import build_manifest, layout_signature, sealed, weights_digest
from quartet.weights.payload import CHUNK_BYTES, full_payload
from quartet.weights.push import push_version
from quartet.weights.service import WeightServicer
from quartet.weights.store import WeightStore


async def test_a_pushed_version_is_held_as_it_was_sent(taker: Taker) -> None:
    canary = pb.Canary(token_ids=[1, 2], logprobs=[-1.5])
    made = await push_version(taker.channel, "r", 3, model(), canary=canary, adapter_config="{}")
    held = taker.store.get("r", 3)
    assert held.tensors == model() and held.manifest == made.manifest
    assert held.manifest.canary == canary and held.manifest.adapter_config == "{}"
    # Again: accepted at once, and nothing changes.
    await push_version(taker.channel, "r", 3, model(), canary=canary, adapter_config="{}")
    assert taker.store.get("r", 3) is held


async def test_neither_event_loop_hashes_what_passes(taker: Taker, monkeypatch: pytest.MonkeyPatch) -> None:
    """What push.py promises under 6; both loops are this test's."""
    hashing: set[int] = set()

    def noted(function: Callable[..., object]) -> Callable[..., object]:
        def note(*data: bytes) -> object:
            if not data or len(data[0]) > 4096:  # a state, or more than a manifest
                hashing.add(threading.get_ident())
            return function(*data)

        return note

    for name in ("xxh3_64", "xxh3_64_intdigest", "xxh3_128_digest"):
        monkeypatch.setattr(xxhash, name, noted(getattr(xxhash, name)))
    first = await push_version(taker.channel, "r", 1, model())
    await push_version(taker.channel, "r", 2, model(1), base=first)
    assert hashing and threading.get_ident() not in hashing


async def test_neither_event_loop_goes_through_the_tensors(
    taker: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What push.py and fetch.py promise under 6: there may be 50,000 of them."""
    going = threading.local()
    gone: set[str] = set()

    def noted(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def note(*given: object) -> object:
            assert not hasattr(going, "loop"), name
            gone.add(name)
            return function(*given)

        return note

    going.loop = True
    for module, name in ((manifest, "weights_digest"), (manifest, "header_of"), (payload, "header_of")):
        monkeypatch.setattr(module, name, noted(f"{module.__name__}.{name}", getattr(module, name)))
    monkeypatch.setattr(taker.servicer._pushes, "_fits", noted("fits", take))
    first = await push_version(taker.channel, "r", 1, model())
    await push_version(taker.channel, "r", 2, model() | {"norm": model(1)["norm"]}, base=first)
    fetched = await fetch_version(taker.channel, "r", 2, first)
    assert fetched.deltas and len(gone) == 4
    await push_version(taker.channel, "r", 2, fetched.tensors)  # held: confirmed


async def test_the_next_version_is_pushed_as_a_delta_or_whole_where_its_base_is_gone(taker: Taker) -> None:
    first = await push_version(taker.channel, "r", 1, model())
    changed = model() | {"norm": model(1)["norm"]}
    second = await push_version(taker.channel, "r", 2, changed, base=first)
    assert taker.store.get("r", 2).tensors == changed
    assert taker.store.get("r", 2).manifest == second.manifest
    # The delta that came is handed on as it is.
    base = (1, bytes(first.manifest.digest))
    assert taker.store.payload("r", 2, base).size < 10_000
    lost = Fetched(build_manifest("r", 0, model(5)), model(5))
    await push_version(taker.channel, "r", 3, model(3), base=lost)
    assert taker.store.get("r", 3).tensors == model(3)


async def test_a_base_that_is_held_with_other_weights_is_no_base(taker: Taker) -> None:
    await push_version(taker.channel, "r", 1, model())
    other = Fetched(build_manifest("r", 1, model(5)), model(5))
    delta = make_delta(other, Fetched(build_manifest("r", 2, model(2)), model(2)))
    # Before its bytes: the manifest alone would be a torn stream.
    with pytest.raises(QuartetError, match="VERSION_UNKNOWN: version 1 is held with other weights"):
        await taker.send(iter([pb.PushRequest(manifest=delta.manifest)]))
    await push_version(taker.channel, "r", 2, model(2), base=other)
    assert taker.store.get("r", 2).tensors == model(2)


async def test_other_weights_under_a_committed_number_are_refused(taker: Taker) -> None:
    await push_version(taker.channel, "r", 1, model())
    with pytest.raises(QuartetError, match="SEQUENCE_CONFLICT"):
        await push_version(taker.channel, "r", 1, model(1))
    assert taker.store.get("r", 1).tensors == model()
    # Before its bytes (push.py 7): the manifest alone would be a torn stream.
    with pytest.raises(QuartetError, match="SEQUENCE_CONFLICT"):
        await taker.send(iter(frames(seed=1)[:1]))


async def test_whoever_takes_no_pushes_says_so() -> None:
    for generated in (False, True):
        server = await serve(WeightStore(keep=1), accept=False, generated=generated)
        async with connect(server.address, bulk=True) as channel:
            with pytest.raises(QuartetError, match="NOT_IMPLEMENTED"):
                await push_version(channel, "r", 1, model())
        await server.stop(0)


async def test_the_generated_registration_takes_the_same_streams() -> None:
    store = WeightStore(keep=1)
    server = await serve(store, generated=True)
    async with connect(server.address, bulk=True) as channel:
        await push_version(channel, "r", 1, model())
    assert store.get("r", 1).tensors == model()
    await server.stop(0)


def _without_commit(sent: list[pb.PushRequest]) -> None:
    sent.pop()


def _truncated(sent: list[pb.PushRequest]) -> None:
    del sent[2:]


def _nothing(sent: list[pb.PushRequest]) -> None:
    sent.clear()


def _early_commit(sent: list[pb.PushRequest]) -> None:
    del sent[2:-1]


def _swapped(sent: list[pb.PushRequest]) -> None:
    sent[1], sent[2] = sent[2], sent[1]


def _twice(sent: list[pb.PushRequest]) -> None:
    sent.insert(1, sent[1])


def _two_manifests(sent: list[pb.PushRequest]) -> None:
    sent.insert(2, sent[0])


def _no_manifest(sent: list[pb.PushRequest]) -> None:
    sent.pop(0)


def _no_frame(sent: list[pb.PushRequest]) -> None:
    sent.insert(1, pb.PushRequest())


def _no_run(sent: list[pb.PushRequest]) -> None:
    sent[0].manifest.run_id = ""
    sealed(sent[0].manifest)


def _folder_above(sent: list[pb.PushRequest]) -> None:
    sent[0].manifest.run_id = ".."
    sealed(sent[0].manifest)


def _large_chunk(sent: list[pb.PushRequest]) -> None:
    both = sent[1].chunk.data + sent[2].chunk.data
    sent[1:3] = [pb.PushRequest(chunk=pb.WeightChunk(data=both, checksum=xxhash.xxh3_64_intdigest(both)))]


def _one_chunk_more(sent: list[pb.PushRequest]) -> None:
    last = sent[-2].chunk
    more = pb.WeightChunk(offset=last.offset + len(last.data), data=b"x")
    more.checksum = xxhash.xxh3_64_intdigest(more.data)
    sent.insert(-1, pb.PushRequest(chunk=more))


def _another_version(sent: list[pb.PushRequest]) -> None:
    sent[0].manifest.version = 2


def _flipped(sent: list[pb.PushRequest]) -> None:
    data = bytearray(sent[2].chunk.data)
    data[5] ^= 4
    sent[2].chunk.data = bytes(data)


def _other_tensor(sent: list[pb.PushRequest]) -> None:
    other = frames(seed=1)
    sent[1:] = other[1:]


def _lying_manifest(sent: list[pb.PushRequest]) -> None:
    sent[0].manifest.tensors[0].digest ^= 1


def _wrong_commit(sent: list[pb.PushRequest]) -> None:
    sent[-1].commit.payload_digest = bytes(16)


def _unknown_base(sent: list[pb.PushRequest]) -> None:
    sent[0].manifest.base_version = 7
    sent[0].manifest.base_digest = bytes(16)
    sealed(sent[0].manifest)


def _described_anew(manifest: pb.WeightManifest) -> None:
    """As by a client that is wrong about nothing else."""
    manifest.digest = weights_digest(manifest.tensors)
    manifest.layout_signature = layout_signature(manifest.tensors)
    sealed(manifest)


def _unsorted(sent: list[pb.PushRequest]) -> None:
    infos = list(sent[0].manifest.tensors)
    del sent[0].manifest.tensors[:]
    sent[0].manifest.tensors.extend([infos[1], infos[0], *infos[2:]])
    _described_anew(sent[0].manifest)


def _name_of_safetensors(sent: list[pb.PushRequest]) -> None:
    sent[0].manifest.tensors[0].name = "__metadata__"
    _described_anew(sent[0].manifest)


def _name_of_safetensors_in_a_delta(sent: list[pb.PushRequest]) -> None:
    _unknown_base(sent)
    _name_of_safetensors(sent)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_without_commit, "STREAM_TORN"),
        (_truncated, "STREAM_TORN"),
        (_nothing, "STREAM_TORN"),
        (_early_commit, "CHECKSUM_MISMATCH"),
        (_swapped, "INVALID_REQUEST"),
        (_twice, "INVALID_REQUEST"),
        (_one_chunk_more, "CHECKSUM_MISMATCH"),
        (_flipped, "CHECKSUM_MISMATCH"),
        (_other_tensor, "CHECKSUM_MISMATCH"),
        (_lying_manifest, "CHECKSUM_MISMATCH"),
        (_wrong_commit, "CHECKSUM_MISMATCH"),
        (_another_version, "CHECKSUM_MISMATCH"),
        (_two_manifests, "INVALID_REQUEST"),
        (_no_manifest, "INVALID_REQUEST"),
        (_no_frame, "INVALID_REQUEST"),
        (_no_run, "INVALID_REQUEST"),
        (_folder_above, "INVALID_REQUEST"),
        (_large_chunk, "INVALID_REQUEST"),
        (_unknown_base, "RUN_UNKNOWN"),
        (_unsorted, "INVALID_REQUEST"),
        (_name_of_safetensors, "INVALID_REQUEST"),
        (_name_of_safetensors_in_a_delta, "INVALID_REQUEST"),
    ],
)
async def test_a_stream_that_is_not_whole_commits_nothing(
    taker: Taker, damage: Callable[[list[pb.PushRequest]], None], reason: str
) -> None:
    """Invariant 3."""
    sent = frames()
    assert len(sent) >= 4
    damage(sent)
    with pytest.raises(QuartetError) as caught:
        await taker.send(iter(sent))
    assert caught.value.reason == reason
    assert taker.versions() == []
    await taker.send(iter(frames()))
    assert taker.store.get("r", 1).tensors == model()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_no_run, "manifest.run_id = empty is refused; use 1 to 64 of"),
        (_large_chunk, r"chunk.data = \d+ bytes is refused; send 1 to 1048576 bytes in a chunk"),
        (_swapped, r"chunk.offset = \d+ is refused; the next chunk begins at 0"),
        (_unsorted, r"manifest.tensors = embed after layer is refused; list the tensors ascending by name"),
        (_name_of_safetensors, r"manifest.tensors = __metadata__ is refused; give the tensor another name"),
        (_early_commit, r"size of the payload .*declared: \d+, by the contents: \d+"),
        (
            _flipped,
            "checksum of the chunk at 1048576 .*declared: [0-9a-f]{16}, by the contents: [0-9a-f]",
        ),
        (_wrong_commit, "digest of the payload .*declared: 0{32}, by the contents: [0-9a-f]{32}"),
        (
            _another_version,
            "checksum of the manifest .*declared: [0-9a-f]{16}, by the contents: [0-9a-f]",
        ),
    ],
)
async def test_a_refusal_says_what_came_and_what_was_due(
    taker: Taker, damage: Callable[[list[pb.PushRequest]], None], said: str
) -> None:
    """Who writes a client in another language has nothing else to find the mistake by."""
    sent = frames()
    damage(sent)
    with pytest.raises(QuartetError, match=said):
        await taker.send(iter(sent))


async def test_a_number_below_one_that_is_held_is_refused(taker: Taker) -> None:
    """What push.py promises under 7: it would be confirmed, and never served."""
    for version in (1, 5, 6):
        await push_version(taker.channel, "r", version, model(version))
    with pytest.raises(QuartetError, match="SEQUENCE_CONFLICT: version 2 of run r comes after 6"):
        await push_version(taker.channel, "r", 2, model(2))
    assert taker.versions() == [5, 6]
    await push_version(taker.channel, "r", 5, model(5))  # held: confirmed
    await push_version(taker.channel, "other", 2, model(2))


async def test_an_upload_that_a_larger_number_overtakes_is_refused(taker: Taker) -> None:
    """By a client that waits for no answer; committed last, it would be the newest where one is kept."""
    overtaken = threading.Event()

    def slow() -> Iterator[pb.PushRequest]:
        *before, commit = frames(5, 5)
        yield from before
        assert overtaken.wait(20)
        yield commit

    sending = asyncio.create_task(taker.send(slow()))
    await until_under_way(taker.servicer, 1)
    await push_version(taker.channel, "r", 6, model(6))
    overtaken.set()
    with pytest.raises(QuartetError, match="SEQUENCE_CONFLICT: version 5 of run r comes after 6"):
        await sending
    assert taker.versions() == [6]


async def test_what_does_not_fit_is_refused_before_its_bytes() -> None:
    """What push.py promises under 7."""

    def none_fits(manifest: pb.WeightManifest) -> None:
        raise refused("tensors", manifest.tensors[0].name, "send others")

    store = WeightStore(keep=1)
    server = await offer(WeightServicer(store, accept_push=none_fits))
    async with connect(server.address) as channel:
        # Waits for the go-ahead, then would read the payload: there is none to read.
        with pytest.raises(QuartetError, match="tensors = embed is refused"):
            await push_version(channel, "r", 1, model())
    assert store.latest() is None
    await server.stop(0)


async def test_the_confirmation_of_another_version_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Confused(WeightServicer):
        async def push_encoded(self, messages: Any, context: Any) -> pb.PushResponse:
            await super().push_encoded(messages, context)
            return pb.PushResponse(version=2)

    monkeypatch.setattr(push, "MAX_TRIES", 1)
    server = await offer(Confused(WeightStore(keep=1), accept_push=take))
    async with connect(server.address, bulk=True) as channel:
        with pytest.raises(QuartetError, match="CHECKSUM_MISMATCH: version 2 in the answer to a push of 1"):
            await push_version(channel, "r", 1, model())
    await server.stop(0)


def test_a_model_is_several_chunks() -> None:
    assert full_payload(model()).size > 2 * CHUNK_BYTES
