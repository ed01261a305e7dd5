"""FetchModel: what was exported is sent as it lies on the disk, from any byte on, and nothing else is."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import xxhash
from quartet.errors import QuartetError, from_rpc
from quartet.exported.manifest import check_manifest
from quartet.v1 import model_pb2 as mpb
from quartet.v1 import trainer_service_pb2 as pb
from quartet_trainer import exported
from quartet_trainer.exported import ExportedModels
from quartet_trainer.states import StateStore

from .conftest import run_spec

SMALL = 5000


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that files of the test's model have several."""
    monkeypatch.setattr(exported, "CHUNK_BYTES", SMALL)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


async def fetched(stub: Any, **request: Any) -> tuple[mpb.ModelManifest, list[mpb.ModelChunk]]:
    frames = [frame async for frame in stub.FetchModel(pb.FetchModelRequest(**{"run_id": "r", **request}))]
    assert [frame.WhichOneof("frame") for frame in frames] == ["manifest", *["chunk"] * (len(frames) - 1)]
    return frames[0].manifest, [frame.chunk for frame in frames[1:]]


async def refused(stub: Any, reason: str, **request: Any) -> QuartetError:
    with pytest.raises(grpc.RpcError) as raised:
        await fetched(stub, **request)
    error = from_rpc(raised.value)
    assert error.reason == reason, error
    return error


def joined(chunks: list[mpb.ModelChunk]) -> dict[str, bytes]:
    """The files, of chunks that follow each other."""
    files: dict[str, bytes] = {}
    for chunk in chunks:
        assert chunk.offset == len(files.get(chunk.path, b"")) and 0 < len(chunk.data) <= SMALL
        assert chunk.checksum == xxhash.xxh3_64_intdigest(chunk.data)
        files[chunk.path] = files.get(chunk.path, b"") + chunk.data
    return files


@pytest.fixture
def saved(folder: Path, serve_trainer: Any, make_samples: Any) -> Callable[..., Awaitable[Path]]:
    """A run that is over: states "plain", "old" and "new", the last two with models. Their folder."""

    async def make(**spec: Any) -> Path:
        async with serve_trainer(keep_last=3) as trainer:
            await trainer.create(base_model=str(folder), **spec)
            await trainer.save(1, "plain")
            await trainer.one_step(2, make_samples())
            await trainer.save(5, "old", export=True)
            await trainer.one_step(6, make_samples(seed=1))
            await trainer.save(9, "new", export=True)
            await trainer.stub.CloseRun(pb.CloseRunRequest(run_id="r"))
            manifest, _ = await fetched(trainer.stub)
            assert manifest.state == "new", "also in the process that closed it"
            return Path(trainer.state_dir) / "r"

    return make


async def test_a_run_that_is_over_is_served_by_another_process_as_it_was_exported(
    saved: Any, serve_trainer: Any
) -> None:
    """exported.py 1 and 3."""
    run = await saved()
    async with serve_trainer() as trainer:
        for asked, name, version in (("", "new@9", 2), ("old", "old@5", 1)):
            manifest, chunks = await fetched(trainer.stub, state=asked)
            model = contents(run / name / "model")
            check_manifest(manifest)
            assert (manifest.state, manifest.policy_version) == (name.partition("@")[0], version)
            assert {file.path: file.size_bytes for file in manifest.files} == {
                path: len(data) for path, data in model.items()
            }
            assert [file.digest for file in manifest.files] == [
                xxhash.xxh3_128_digest(model[path]) for path in sorted(model)
            ]
            assert joined(chunks) == model and len(chunks) > len(model)
        error = await refused(trainer.stub, "RESOURCE_UNKNOWN", adapter=True)
        assert "run r has no LoRA" in error.message


async def test_it_goes_on_from_any_byte(saved: Any, serve_trainer: Any) -> None:
    run = await saved()
    async with serve_trainer() as trainer:
        manifest, _ = await fetched(trainer.stub)
        model = contents(run / "new@9" / "model")
        paths = sorted(model)
        for path, offset in (
            (paths[0], 0),
            ("model.safetensors", 1),
            ("model.safetensors", SMALL),
            ("model.safetensors", len(model["model.safetensors"])),
            (paths[-1], len(model[paths[-1]])),
        ):
            resume = mpb.ModelPlace(digest=manifest.digest, path=path, offset=offset)
            again, chunks = await fetched(trainer.stub, resume=resume)
            assert again == manifest
            behind = {one: model[one] for one in paths[paths.index(path) + 1 :]}
            got: dict[str, bytes] = {path: model[path][:offset]}
            for chunk in chunks:
                assert chunk.offset == len(got.setdefault(chunk.path, b""))
                got[chunk.path] += chunk.data
            assert got == {path: model[path], **behind}
        size = len(model[paths[0]])
        place = mpb.ModelPlace(digest=manifest.digest, path=paths[0], offset=size + 1)
        error = await refused(trainer.stub, "OFFSET_OUT_OF_RANGE", resume=place)
        assert error.metadata == {"offset": str(size + 1), "size": str(size)}
        for place in (
            mpb.ModelPlace(digest=b"x" * 16, path=paths[0]),
            mpb.ModelPlace(digest=manifest.digest, path="../run.json"),
            mpb.ModelPlace(path=paths[0]),
        ):
            assert "begin anew" in (await refused(trainer.stub, "RESOURCE_UNKNOWN", resume=place)).message
        error = await refused(
            trainer.stub, "RESOURCE_UNKNOWN", state="old", resume=mpb.ModelPlace(digest=manifest.digest)
        )


async def test_an_adapter_comes_alone_where_that_is_asked_for(saved: Any, serve_trainer: Any) -> None:
    run = await saved(lora=pb.LoraSpec(rank=3, alpha=5.0))
    async with serve_trainer() as trainer:
        manifest, chunks = await fetched(trainer.stub, adapter=True)
        check_manifest(manifest)
        adapter = contents(run / "new@9" / "model" / "adapter")
        assert joined(chunks) == adapter
        assert sorted(adapter) == ["adapter_config.json", "adapter_model.safetensors"]
        whole, chunks = await fetched(trainer.stub)
        assert joined(chunks) == contents(run / "new@9" / "model") and whole.digest != manifest.digest


async def test_what_is_not_there_is_refused_with_what_to_do(saved: Any, serve_trainer: Any) -> None:
    run = await saved()
    async with serve_trainer() as trainer:
        error = await refused(trainer.stub, "RESOURCE_UNKNOWN", run_id="other")
        assert "run other has no saved state here; SaveState with export_model leaves one" in error.message
        error = await refused(trainer.stub, "RESOURCE_UNKNOWN", state="none")
        assert "it has: plain (version 0), old (version 1), new (version 2)" in error.message
        error = await refused(trainer.stub, "RESOURCE_UNKNOWN", state="plain")
        assert "saved without its model (with one: old (version 1), new (version 2))" in error.message
        assert "SaveState with export_model saves it" in error.message
        assert f"quartet export {run / 'plain@1'} TARGET" in error.message
        error = await refused(trainer.stub, "INVALID_REQUEST", run_id="..")
        assert error.message == "run_id '..' is not 1-64 of [A-Za-z0-9_.-], or is dots alone"
        for bad in ("", "..", "../r", "r/new@9", "@lock", "x" * 65):
            await refused(trainer.stub, "INVALID_REQUEST", run_id=bad)
            if bad:
                await refused(trainer.stub, "INVALID_REQUEST", state=bad)
        shutil.rmtree(run / "old@5")
        shutil.rmtree(run / "new@9")
        error = await refused(trainer.stub, "RESOURCE_UNKNOWN")
        assert error.message.startswith("state plain of run r was saved without its model (with one: none)")


async def test_a_state_of_another_run_of_that_name_is_refused(
    saved: Any, serve_trainer: Any, folder: Path
) -> None:
    """exported.py 5, whose.py 1."""
    run = await saved()
    async with serve_trainer() as trainer:
        own = run_spec(base_model=str(folder))
        manifest, _ = await fetched(trainer.stub, spec=own)
        assert manifest.state == "new"
        longer = pb.RunSpec.FromString(own.SerializeToString())
        longer.optimizer.earlier_total_steps.append(own.optimizer.total_steps)
        longer.optimizer.total_steps += 5
        assert (await fetched(trainer.stub, spec=longer))[0] == manifest, "of the run before it was extended"
        other = pb.RunSpec.FromString(own.SerializeToString())
        other.seed = 7
        for state in ("", "old"):
            error = await refused(trainer.stub, "RUN_CONFLICT", spec=other, state=state)
            assert error.message == (
                f"state {state or 'new'} of run r is of another run of that name: it was saved with seed = "
                "0, not 7; those of this run are not here any more"
            )
            assert (error.metadata["field"], error.metadata["run_id"]) == ("seed", "r")
        assert (await fetched(trainer.stub))[0] == manifest, "whatever is there, where nobody says whose"
        await refused(trainer.stub, "INVALID_CONFIG", spec=pb.RunSpec(base_model="m", compute_dtype="int4"))
        meta = run / "new@9" / "run.json"
        meta.write_text(meta.read_text().replace('"seed"', '"sead"'))
        error = await refused(trainer.stub, "CHECKSUM_MISMATCH", spec=own)
        assert "run.json" in error.message


@pytest.mark.parametrize("place", ["r", "r/new@9/COMPLETE.json", "r/new@9/run.json"])
async def test_a_disk_that_cannot_be_read_is_told_as_that(
    place: str, saved: Any, serve_trainer: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """exported.py 1: where the states are looked for, too."""
    run = await saved()
    broken = run.parent / place

    def failing(method: Any) -> Any:
        def call(path: Path, *arguments: Any, **more: Any) -> Any:
            if path == broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return method(path, *arguments, **more)

        return call

    async with serve_trainer() as trainer:
        for name in ("iterdir", "read_text", "read_bytes"):
            monkeypatch.setattr(Path, name, failing(getattr(Path, name)))
        error = await refused(trainer.stub, "NOT_READY", spec=run_spec(base_model=str(folder)))
        assert "cannot be read: Input/output error; mend the disk and call again" in error.message


async def test_only_files_of_that_folder_are_read(saved: Any, serve_trainer: Any, tmp_path: Path) -> None:
    """exported.py 2."""
    run = await saved(lora=pb.LoraSpec(rank=3, alpha=5.0))
    model, secret = run / "new@9" / "model", tmp_path / "secret"
    config = (model / "config.json").read_bytes()
    secret.write_bytes(config)  # of the size that is declared
    kept = shutil.copytree(model, tmp_path / "kept")

    def link_to_file() -> None:
        (model / "config.json").unlink()
        (model / "config.json").symlink_to(secret)

    def link_to_folder() -> None:
        shutil.rmtree(model / "adapter")
        (model / "adapter").symlink_to(kept / "adapter")

    def link_to_all() -> None:
        shutil.rmtree(model)
        model.symlink_to(kept)

    def pipe() -> None:
        (model / "config.json").unlink()
        os.mkfifo(model / "config.json")

    def longer() -> None:
        (model / "config.json").write_bytes(config + b" ")

    def gone() -> None:
        (model / "config.json").unlink()

    async with serve_trainer() as trainer:
        for change in (link_to_file, link_to_folder, link_to_all, pipe, longer, gone):
            change()
            error = await refused(trainer.stub, "CHECKSUM_MISMATCH")
            assert "is not that of a sound model; take another state" in error.message, change
            model.unlink() if model.is_symlink() else shutil.rmtree(model)
            shutil.copytree(kept, model)
        await fetched(trainer.stub)


@asynccontextmanager
async def begun(models: ExportedModels) -> AsyncIterator[Any]:
    """A fetch that has got its manifest."""
    pieces = models.pieces("r", "", adapter=False, resume=None)
    try:
        assert isinstance(await anext(pieces), mpb.ModelManifest)
        yield pieces
    finally:
        await pieces.aclose()


async def test_a_state_that_is_pruned_meanwhile_is_said_to_be(saved: Any) -> None:
    """exported.py 3."""
    run = await saved()
    models = ExportedModels(StateStore(run.parent, keep_last=3))
    async with begun(models) as pieces:
        await anext(pieces)
        shutil.rmtree(run / "new@9")
        with pytest.raises(QuartetError, match="state new was replaced or pruned meanwhile") as raised:
            await anext(pieces)
        assert raised.value.reason == "RESOURCE_UNKNOWN"


async def test_fetches_are_bounded_and_give_their_places_back(
    saved: Any, serve_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """exported.py 4."""
    await saved()
    monkeypatch.setattr(exported, "MAX_FETCHES", 2)
    async with serve_trainer() as trainer:
        calls = [trainer.stub.FetchModel(pb.FetchModelRequest(run_id="r")) for _ in range(2)]
        gate = asyncio.Event()
        original = ExportedModels._in_thread

        async def held(models: ExportedModels, work: Any) -> Any:
            found = await original(models, work)
            if isinstance(found, mpb.ModelChunk):
                await gate.wait()
            return found

        monkeypatch.setattr(ExportedModels, "_in_thread", held)
        for call in calls:
            assert (await call.read()).HasField("manifest")
        error = await refused(trainer.stub, "OVERLOADED")
        assert "2 fetches of models are under way" in error.message and error.retry_after_ms
        calls[0].cancel()
        gate.set()
        while True:
            try:
                await fetched(trainer.stub)
                break
            except grpc.RpcError as raised:
                assert from_rpc(raised).reason == "OVERLOADED"
                await asyncio.sleep(0.01)
        while (frame := await calls[1].read()) is not grpc.aio.EOF:
            assert frame.HasField("chunk"), "the other one was not disturbed"


async def test_a_call_under_way_is_not_waited_for(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """exported.py 4: beside the worker."""
    import threading

    from quartet_trainer.run import Run

    working, done = threading.Event(), threading.Event()
    original = Run.optim_step

    def slow(run: Run, rate: float | None) -> Any:
        working.set()
        assert done.wait(30)
        return original(run, rate)

    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        await trainer.one_step(1, make_samples())
        state = await trainer.save(4, "s", export=True)
        await trainer.forward_backward(5, make_samples(seed=1))
        monkeypatch.setattr(Run, "optim_step", slow)
        stepping = asyncio.ensure_future(trainer.optim_step(6))
        await asyncio.to_thread(working.wait, 30)
        _, chunks = await fetched(trainer.stub)
        assert joined(chunks) == contents(Path(state.model_path)) and not stepping.done()
        done.set()
        await stepping
