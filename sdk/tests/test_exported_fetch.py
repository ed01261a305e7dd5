"""A model's folder from a peer that tears, damages and lies: whole in its place, or not there."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from quartet.errors import QuartetError
from quartet.exported import fetch
from quartet.exported.arriving import Arriving
from quartet.exported.fetch import fetch_model
from quartet.exported.manifest import check_manifest, digest_of, is_inside
from quartet.kit.call import RetryBudget
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import model_pb2 as mpb
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1.common_pb2 import Heartbeat
from quartet.v1.trainer_service_pb2_grpc import (
    TrainerServiceServicer,
    TrainerServiceStub,
    add_TrainerServiceServicer_to_server,
)

FILES = {
    "adapter/adapter_model.safetensors": b"abc" * 7,
    "config.json": b"{}",
    "empty.txt": b"",
    "model.safetensors": bytes(range(100)),
    "zero": b"",
}
PIECE = 8
Script = Callable[[list[pb.FetchModelResponse]], Iterator[pb.FetchModelResponse | QuartetError]]


def manifest_of(files: dict[str, bytes]) -> mpb.ModelManifest:
    described = [
        mpb.ModelFile(path=path, size_bytes=len(data), digest=xxhash.xxh3_128_digest(data))
        for path, data in sorted(files.items())
    ]
    return mpb.ModelManifest(run_id="r", state="final", files=described, digest=digest_of(described))


def chunks_of(files: dict[str, bytes], resume: mpb.ModelPlace | None = None) -> Iterator[mpb.ModelChunk]:
    for path, data in sorted(files.items()):
        if resume is not None and path < resume.path:
            continue
        begin = resume.offset if resume is not None and path == resume.path else 0
        for at in range(begin, len(data), PIECE):
            piece = data[at : at + PIECE]
            yield mpb.ModelChunk(path=path, offset=at, data=piece, checksum=xxhash.xxh3_64_intdigest(piece))


class Peer(TrainerServiceServicer):  # type: ignore[misc]
    """Sends FILES; each call as the next script changes it, and when there are no more as it should be."""

    def __init__(self) -> None:
        self.files = FILES
        self.scripts: list[Script] = []
        self.asked: list[pb.FetchModelRequest] = []

    async def FetchModel(
        self, request: pb.FetchModelRequest, context: object
    ) -> AsyncIterator[pb.FetchModelResponse]:
        self.asked.append(request)
        resume = request.resume if request.HasField("resume") else None
        frames = [pb.FetchModelResponse(manifest=manifest_of(self.files))]
        frames += [pb.FetchModelResponse(chunk=chunk) for chunk in chunks_of(self.files, resume)]
        for frame in self.scripts.pop(0)(frames) if self.scripts else iter(frames):
            if isinstance(frame, QuartetError):
                raise frame
            yield frame


class Told:
    """What a fetch said."""

    def __init__(self) -> None:
        self.begun: list[mpb.ModelManifest] = []
        self.torn: list[str] = []

    def begins(self, manifest: mpb.ModelManifest) -> None:
        self.begun.append(manifest)

    def tore(self, why: QuartetError, place: mpb.ModelPlace) -> None:
        self.torn.append(f"{place.path}:{place.offset} {why.reason}")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "PATIENCE", RetryBudget(max_attempts=4, initial_backoff_s=0.001))
    monkeypatch.setattr(fetch, "FIRST", RetryBudget(max_attempts=2, initial_backoff_s=0.001))


@pytest.fixture
async def peer() -> AsyncIterator[tuple[Peer, Callable[[Path, Told], Any]]]:
    """The peer, and `await get(target, told)`."""
    servicer = Peer()
    service = Service("quartet.v1.TrainerService", add_TrainerServiceServicer_to_server, servicer)
    server = await start([service], ServerConfig(), Health())
    async with connect(server.address) as channel:
        stub = TrainerServiceStub(channel)  # type: ignore[no-untyped-call]

        async def get(target: Path, told: Told) -> None:
            def begin(resume: mpb.ModelPlace | None) -> Any:
                return stub.FetchModel(pb.FetchModelRequest(run_id="r", resume=resume))

            await asyncio.wait_for(fetch_model(begin, target, told), 30)

        yield servicer, get
    await server.stop(0)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def names(folder: Path) -> list[str]:
    return [one.name for one in folder.iterdir()]


async def test_a_model_is_in_its_place_whole(peer: Any, tmp_path: Path) -> None:
    servicer, get = peer
    told, target = Told(), tmp_path / "some" / "where"
    await get(target, told)
    assert contents(target) == FILES and not told.torn and told.begun == [manifest_of(FILES)]
    assert names(target.parent) == ["where"]
    assert target.stat().st_mode == (target / "adapter").stat().st_mode, "as the umask says"
    with pytest.raises(QuartetError, match="it exists and is no empty folder") as raised:
        await get(target, told)
    assert raised.value.reason == "INVALID_REQUEST" and len(servicer.asked) == 1
    (empty := tmp_path / "empty").mkdir()
    await get(empty, told)
    assert contents(empty) == FILES
    (link := tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(QuartetError, match="it exists"):
        await get(link, told)


async def test_it_is_written_beside_its_place_whose_folders_are_made(peer: Any, tmp_path: Path) -> None:
    """fetch.py 1: a name on the same disk, so that a model takes its place at once."""
    servicer, get = peer
    servicer.files = FILES | {"a/b/c": b"deep"}
    parent, beside = tmp_path / "not" / "there" / "yet", list[str]()

    def looking(sent: list[pb.FetchModelResponse]) -> Iterator[pb.FetchModelResponse]:
        for frame in sent:
            beside.extend(names(parent))
            yield frame

    servicer.scripts = [looking]
    await get(parent / "model", Told())
    assert contents(parent / "model") == servicer.files
    assert len(set(beside)) == 1 and beside[0].startswith(".model."), beside


async def test_what_is_in_the_way_stays_as_it_is(peer: Any, tmp_path: Path) -> None:
    """fetch.py 1: at the beginning, and at the end."""
    servicer, get = peer
    (file := tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (link := tmp_path / "link").symlink_to(tmp_path / "empty")
    for taken in (file, link):
        with pytest.raises(QuartetError, match="it exists and is no empty folder") as raised:
            await get(taken, Told())
        assert raised.value.reason == "INVALID_REQUEST" and not servicer.asked
    assert file.read_text() == "mine" and link.is_symlink()
    target = tmp_path / "target"

    def written_meanwhile(sent: list[pb.FetchModelResponse]) -> Iterator[pb.FetchModelResponse]:
        target.mkdir()
        (target / "config.json").write_text("mine")
        return iter(sent)

    servicer.scripts = [written_meanwhile]
    with pytest.raises(QuartetError, match="it was written meanwhile; name another folder") as raised:
        await get(target, Told())
    assert raised.value.reason == "INVALID_REQUEST" and contents(target) == {"config.json": b"mine"}
    assert sorted(names(tmp_path)) == ["empty", "file", "link", "target"], "nothing is left beside it"


def torn_after(frames: int, reason: str = "NOT_READY") -> Script:
    return lambda sent: iter([*sent[:frames], QuartetError(reason, "gone")])


async def test_a_disk_that_is_full_is_told_by_the_target(
    peer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not as if it were the trainer's; nothing is left."""
    _, get = peer
    monkeypatch.setattr(Arriving, "_opened", lambda *_: open("/dev/full", "wb"))  # noqa: SIM115 - it closes it
    with pytest.raises(OSError, match="No space left on device") as refused:
        await get(tmp_path / "model", Told())
    assert refused.value.filename == str(tmp_path / "model") and names(tmp_path) == []


async def test_it_goes_on_where_it_tore_wherever_that_is(peer: Any, tmp_path: Path) -> None:
    """fetch.py 2: at every frame of every file; nothing that was written is asked for again."""
    servicer, get = peer
    told = Told()
    # One frame more each time, over the manifest that every stream begins with.
    servicer.scripts = [torn_after(1), *(torn_after(2) for _ in chunks_of(FILES))]
    await get(tmp_path / "model", told)
    assert contents(tmp_path / "model") == FILES and len(told.begun) == 1
    places = [(one.resume.path, one.resume.offset) for one in servicer.asked[1:]]
    assert places == [(one.path, one.offset) for one in chunks_of(FILES)]
    assert {one.resume.digest for one in servicer.asked[1:]} == {manifest_of(FILES).digest}


async def test_a_damaged_chunk_and_an_end_that_comes_early_are_mended(peer: Any, tmp_path: Path) -> None:
    servicer, get = peer

    def damaged(sent: list[pb.FetchModelResponse]) -> Iterator[pb.FetchModelResponse]:
        sent[3].chunk.data = b"x" * len(sent[3].chunk.data)
        return iter(sent)

    servicer.scripts = [damaged, lambda sent: iter(sent[:2]), lambda sent: iter([*sent[:1], beat, *sent[1:]])]
    beat = pb.FetchModelResponse(heartbeat=Heartbeat())
    told = Told()
    await get(tmp_path / "model", told)
    assert contents(tmp_path / "model") == FILES
    adapter = "adapter/adapter_model.safetensors"
    assert told.torn == [f"{adapter}:16 NOT_READY", "config.json:0 NOT_READY"]


async def test_tries_that_bring_nothing_are_bounded(peer: Any, tmp_path: Path) -> None:
    """fetch.py 2 and 3."""
    servicer, get = peer
    for scripts, asked in (
        ([torn_after(0)] * 9, 2),
        ([torn_after(4), *[torn_after(0)] * 9], 1 + 4),
        ([torn_after(4), torn_after(1, "RESOURCE_UNKNOWN")], 2),
        ([torn_after(0, "UNAUTHENTICATED")], 1),
    ):
        servicer.scripts, servicer.asked = list(scripts), []
        with pytest.raises(QuartetError, match="gone"):
            await get(tmp_path / "model", Told())
        assert len(servicer.asked) == asked
    assert names(tmp_path) == []


async def test_a_peer_that_is_alive_and_brings_nothing_is_given_up(
    peer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fetch.py 2: a disk that hangs; signs of life with bytes between them are no end."""
    servicer, get = peer
    monkeypatch.setattr(fetch, "MAX_SIGNS", 3)
    beats = [pb.FetchModelResponse(heartbeat=Heartbeat())] * 3
    servicer.scripts = [lambda sent: iter(itertools.chain.from_iterable([one, *beats] for one in sent))]
    await get(tmp_path / "slow", told := Told())
    assert contents(tmp_path / "slow") == FILES and not told.torn
    servicer.scripts = [lambda sent: iter([sent[0], *beats, beats[0], *sent[1:]])] * 9
    with pytest.raises(QuartetError, match="4 signs of life, and no byte") as raised:
        await get(tmp_path / "hangs", Told())
    assert raised.value.reason == "DEADLINE" and raised.value.metadata["waited_for"] == "chunk"


async def test_another_model_in_the_middle_is_not_mixed_with_the_first(peer: Any, tmp_path: Path) -> None:
    servicer, get = peer

    def replaced(sent: list[pb.FetchModelResponse]) -> Iterator[pb.FetchModelResponse | QuartetError]:
        servicer.files = FILES | {"config.json": b"[]"}
        return torn_after(3)(sent)

    servicer.scripts = [replaced]
    with pytest.raises(QuartetError, match="another model than the one that was begun"):
        await get(tmp_path / "model", Told())
    assert names(tmp_path) == []


BAD_PATHS = (
    "", ".", "..", "/etc/passwd", "a//b", "a/", "../a", "a/../../b", "a/./b", "a\\b", "C:x", "a\0b", "a\nb",
    "x" * 513,
)  # fmt: skip


@pytest.mark.parametrize("path", BAD_PATHS)
def test_no_name_leads_out_of_the_folder(path: str, tmp_path: Path) -> None:
    """manifest.py 1."""
    assert not is_inside(path)
    arriving = Arriving(tmp_path / "model")
    with pytest.raises(QuartetError, match="is not that of a sound model") as raised:
        arriving.begin(manifest_of({path: b"x"}))
    assert raised.value.reason == "CHECKSUM_MISMATCH" and list(tmp_path.iterdir()) == []


def test_manifests_that_disagree_with_themselves_are_refused() -> None:
    """manifest.py 1 and 2."""
    check_manifest(manifest_of(FILES))
    changes: list[Callable[[mpb.ModelManifest], Any]] = [
        lambda one: one.files.reverse(),
        lambda one: one.files.append(one.files[-1]),
        lambda one: setattr(one.files[0], "size_bytes", 9),
        lambda one: setattr(one.files[0], "digest", b"x" * 16),
        lambda one: setattr(one.files[0], "digest", b""),
        lambda one: one.ClearField("files"),
        lambda one: setattr(one.files[0], "size_bytes", 1 << 60),
        lambda one: setattr(one, "digest", b""),
    ]
    for number, change in enumerate(changes):
        manifest = manifest_of(FILES)
        change(manifest)
        if number < 2:  # consistent but for that
            manifest.digest = digest_of(manifest.files)
        with pytest.raises(QuartetError):
            check_manifest(manifest)
    with pytest.raises(QuartetError):
        check_manifest(manifest_of({"a": b"", "a/b": b""}))


def of_data(chunk: mpb.ModelChunk, data: bytes) -> mpb.ModelChunk:
    """Other data in the same place, undamaged."""
    checksum = xxhash.xxh3_64_intdigest(data)
    return mpb.ModelChunk(path=chunk.path, offset=chunk.offset, data=data, checksum=checksum)


def test_chunks_that_do_not_follow_change_nothing(tmp_path: Path) -> None:
    """arriving.py 2."""
    arriving = Arriving(tmp_path / "model")
    first, second, *_ = chunks_of(FILES)
    with pytest.raises(QuartetError, match="at this point"):
        arriving.accept(first)
    arriving.begin(manifest_of(FILES))
    arriving.accept(first)
    place = arriving.place
    others = [
        first,
        next(chunk for chunk in chunks_of(FILES) if chunk.path == "config.json"),
        mpb.ModelChunk(path=second.path, offset=second.offset),
        mpb.ModelChunk(path=second.path, offset=second.offset, data=b"x" * 100),
        of_data(second, b"x" * (21 - PIECE + 1)),  # by one byte more than the file has left
    ]
    for chunk in others:
        with pytest.raises(QuartetError) as raised:
            arriving.accept(chunk)
        assert raised.value.reason == "CHECKSUM_MISMATCH" and arriving.place == place
    for chunk in itertools.islice(chunks_of(FILES), 1, None):
        arriving.accept(chunk)
    assert arriving.complete and arriving.place is None
    with pytest.raises(QuartetError, match="at this point"):
        arriving.accept(first)
    assert contents(tmp_path / "model") == FILES


def test_a_file_whose_contents_are_others_is_refused(tmp_path: Path) -> None:
    """arriving.py 1: harmed on the disk of the trainer, so that every chunk is right."""
    arriving = Arriving(tmp_path / "model")
    arriving.begin(manifest_of(FILES))
    harmed = FILES | {"adapter/adapter_model.safetensors": b"abd" * 7}
    with pytest.raises(QuartetError, match=r"the contents of 'adapter/adapter_model\.safetensors'"):
        for chunk in chunks_of(harmed):
            arriving.accept(chunk)
    arriving.close()
