"""Exported models as they are sent away: found on the disk, described, and read piece by piece.

1. What is sent is what the mark of a state says of the files in its model folder (mark.py 1). Sizes and
   digests were taken when it was written: to describe a model reads none of it.
2. Only regular files inside that folder are read, opened without following a link at any step of the way. Any
   other thing in their place, or another size, is CHECKSUM_MISMATCH.
3. The disk alone is asked, so the run may be closed, and this process another. States are only read; one that
   is replaced or pruned meanwhile is RESOURCE_UNKNOWN.
4. A disk that hangs holds up nobody else: it is read in threads of its own, by MAX_FETCHES at once, each of
   which has one chunk in memory.
5. Where the caller says which run it means, a state that another of its name saved is not sent (whose.py).
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import xxhash
from quartet.errors import QuartetError
from quartet.exported.manifest import CHUNK_BYTES, check_manifest, digest_of, mismatch
from quartet.v1 import model_pb2 as pb

from quartet_trainer.disk import AWAY, on_disk
from quartet_trainer.mark import read_mark
from quartet_trainer.model import ADAPTER_FOLDER
from quartet_trainer.spec import RunSpec, check_name
from quartet_trainer.states import MODEL_FOLDER, StateInfo, StateStore, listed
from quartet_trainer.whose import check_is_of, held_spec, meta_of

T = TypeVar("T")

#: Whoever does not read on keeps his place: the other calls of the trainer are not to run out of theirs.
MAX_FETCHES = 8
#: A disk gives no more to many than to a few.
READERS = 2
#: Neither a link nor a pipe without a writer is waited for, or followed.
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """A model, or the adapter in it."""

    info: StateInfo
    #: From the state's folder to that of the files.
    folder: tuple[str, ...]
    manifest: pb.ModelManifest

    def spans(self, first: int, offset: int) -> Iterator[tuple[pb.ModelFile, int, int]]:
        """File, begin and end of each chunk from a byte of a file on."""
        for file in self.manifest.files[first:]:
            for begin in range(offset, file.size_bytes, CHUNK_BYTES):
                yield file, begin, min(begin + CHUNK_BYTES, file.size_bytes)
            offset = 0

    def place(self, resume: pb.ModelPlace | None) -> tuple[int, int]:
        """Which file to begin with, and where in it. Errors: RESOURCE_UNKNOWN, OFFSET_OUT_OF_RANGE."""
        if resume is None:
            return 0, 0
        paths = [file.path for file in self.manifest.files]
        if resume.digest != self.manifest.digest or resume.path not in paths:
            raise QuartetError(
                "RESOURCE_UNKNOWN",
                f"the model of state {self.info.name} is not the one that was begun, or has no file "
                f"{resume.path!r}; begin anew",
                name=self.info.name,
            )
        first = paths.index(resume.path)
        if resume.offset > (size := self.manifest.files[first].size_bytes):
            raise QuartetError(
                "OFFSET_OUT_OF_RANGE",
                f"offset {resume.offset} lies past the {size} bytes of {resume.path!r}; begin at 0",
                offset=resume.offset,
                size=size,
            )
        return first, resume.offset

    def chunk(self, file: pb.ModelFile, begin: int, end: int) -> pb.ModelChunk:
        """A piece of a file. Errors: RESOURCE_UNKNOWN, CHECKSUM_MISMATCH, NOT_READY."""
        with self._refusing(file.path):
            data = self._read(file, begin, end)
        return pb.ModelChunk(path=file.path, offset=begin, data=data, checksum=xxhash.xxh3_64_intdigest(data))

    def _read(self, file: pb.ModelFile, begin: int, end: int) -> bytes:
        *folders, name = (*self.folder, *file.path.split("/"))
        with ExitStack() as opened:

            def open_at(name: str, within: int | None, more: int = 0) -> int:
                descriptor = os.open(name, _OPEN | more, dir_fd=within)
                opened.callback(os.close, descriptor)
                return descriptor

            at = open_at(str(self.info.path), None, os.O_DIRECTORY)
            for folder in folders:
                at = open_at(folder, at, os.O_DIRECTORY)
            descriptor = open_at(name, at)
            found = os.fstat(descriptor)
            is_file = stat.S_ISREG(found.st_mode) and found.st_size == file.size_bytes
            data = os.pread(descriptor, end - begin, begin) if is_file else b""
        if len(data) != end - begin:
            raise mismatch(f"{file.path!r} of state {self.info.name}")
        return data

    @contextmanager
    def _refusing(self, path: str) -> Iterator[None]:
        """What the disk says, as the contract has it."""
        try:
            yield
        except OSError as error:
            if not self.info.path.exists():
                raise _gone(self.info) from error
            if isinstance(error, FileNotFoundError | NotADirectoryError) or error.errno == errno.ELOOP:
                raise mismatch(f"{path!r} of state {self.info.name}") from error
            raise QuartetError(
                "NOT_READY",
                f"{self.info.path} cannot be read: {error.strerror}; mend the disk and call again",
            ) from error


class ExportedModels:
    """Those of all runs."""

    def __init__(self, states: StateStore) -> None:
        self._states = states
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="exported-models")
        self._under_way = 0

    async def pieces(
        self,
        run_id: str,
        state: str,
        *,
        adapter: bool,
        resume: pb.ModelPlace | None,
        spec: RunSpec | None = None,
    ) -> AsyncGenerator[pb.ModelManifest | pb.ModelChunk, None]:
        """The manifest, then the chunks from a place on; of the newest state that has a model where none is
        named; of no other run than that of the spec. Errors: INVALID_REQUEST, and those of FetchModel."""
        check_name("run_id", run_id)
        if state:
            check_name("state", state.partition("@")[0])
        with self._admitted():
            model = await self._in_thread(partial(self.find, run_id, state, adapter=adapter, spec=spec))
            first, offset = model.place(resume)
            yield model.manifest
            for span in model.spans(first, offset):
                yield await self._in_thread(partial(model.chunk, *span))

    def find(self, run_id: str, state: str, *, adapter: bool, spec: RunSpec | None = None) -> ExportedModel:
        """One model on the disk. Errors: RESOURCE_UNKNOWN, RUN_CONFLICT, INVALID_CONFIG, CHECKSUM_MISMATCH,
        NOT_READY."""
        with on_disk(f"the states of run {run_id} cannot be read", AWAY):
            return self._find(run_id, state, adapter, spec)

    def _find(self, run_id: str, state: str, adapter: bool, spec: RunSpec | None) -> ExportedModel:
        info = self._states.find(run_id, state) if state else self._newest(run_id)
        if info.model_path is None:
            raise _not_exported(run_id, info, self._states.list(run_id))
        mark = read_mark(info.path)
        if mark is None:
            raise _gone(info)
        if spec is not None:
            try:
                meta = meta_of(info, mark)
            except FileNotFoundError:
                raise _gone(info) from None
            check_is_of(run_id, info, held_spec(info, meta), spec)
        folder = (MODEL_FOLDER, ADAPTER_FOLDER) if adapter else (MODEL_FOLDER,)
        within = "/".join(folder) + "/"
        files = [
            pb.ModelFile(
                path=path.removeprefix(within),
                size_bytes=entry["bytes"],
                digest=bytes.fromhex(entry["xxh3_128"]),
            )
            for path, entry in sorted(mark["files"].items())
            if path.startswith(within)
        ]
        if adapter and not files:
            raise QuartetError(
                "RESOURCE_UNKNOWN",
                f"the model of state {info.name} has no adapter: run {run_id} has no LoRA; ask for all of it",
                name=info.name,
            )
        manifest = pb.ModelManifest(
            run_id=run_id,
            state=info.name,
            policy_version=info.policy_version,
            files=files,
            digest=digest_of(files),
        )
        check_manifest(manifest)
        return ExportedModel(info, folder, manifest)

    def _newest(self, run_id: str) -> StateInfo:
        states = self._states.list(run_id)
        if not states:
            raise QuartetError(
                "RESOURCE_UNKNOWN",
                f"run {run_id} has no saved state here; SaveState with export_model leaves one with its "
                "model. A run of the orchestrator has a state after every ckpt.interval steps, and its model "
                "at its end",
                name=run_id,
            )
        with_model = [info for info in states if info.model_path is not None]
        if not with_model:
            raise _not_exported(run_id, states[-1], states)
        return with_model[-1]

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        if self._under_way >= MAX_FETCHES:
            raise QuartetError(
                "OVERLOADED", f"{MAX_FETCHES} fetches of models are under way; come back later"
            )
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)


def _not_exported(run_id: str, info: StateInfo, states: list[StateInfo]) -> QuartetError:
    have = listed([one for one in states if one.model_path is not None])
    return QuartetError(
        "RESOURCE_UNKNOWN",
        f"state {info.name} of run {run_id} was saved without its model (with one: {have}); SaveState with "
        "export_model saves it, as the end of a run of the orchestrator does; or on the trainer's machine: "
        f"quartet export {info.path} TARGET",
        name=info.name,
    )


def _gone(info: StateInfo) -> QuartetError:
    return QuartetError(
        "RESOURCE_UNKNOWN",
        f"state {info.name} was replaced or pruned meanwhile; begin anew",
        name=info.name,
    )
