"""Saved states on disk: whole or not there, and known to be unharmed before they are used.

1. A state is a folder `<root>/<run_id>/<name>@<seq_id>`. It is written beside its place, completed with a
   mark (mark.py), flushed and only then renamed into place (placing.py): a kill at any moment, or a power
   cut, leaves it whole or absent.
2. A state is read only after every digest was checked; `newest_sound` skips what is harmed, saying so in the
   log. The exported model beside it is no part of it: of that whoever fetches it checks the digests.
3. Tensors are safetensors (content.py), the rest is JSON. Nothing is pickled.
4. After each save those states go that do not stay (retention.py): the newest do, and those that were saved
   to be kept, which their marks say. Newest means saved or loaded last: a state that a run returned to is the
   one it restarts from. One whose ORDER is lost stands behind those whose sequences end before its own.
5. A state that another release wrote in another form is refused, and not passed over like a harmed one: what
   is saved next would take its place.
6. An equal name is replaced: the older state of that name goes after the newer one is in place, also where
   both have one seq_id. One of another seq_id that was saved to be kept stays beside it; the name means the
   newer one.
7. A disk that is full or away is NOT_READY, whether it is written or read: no state is lost or passed over by
   it, and the same call succeeds once it is there or has room. What cannot be deleted the next save deletes,
   and the state that was to take its place is saved all the same.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog
from quartet.errors import QuartetError
from safetensors import SafetensorError

from quartet_trainer.content import Content, TensorFiles
from quartet_trainer.disk import AWAY, FULL, flush, growing, on_disk
from quartet_trainer.mark import MARK, read_mark, write_mark
from quartet_trainer.placing import discard, is_place, put, sweep, writing_place
from quartet_trainer.retention import MAX_STATES, Retention
from quartet_trainer.whole_files import WholeFiles

#: Raised with every change of what run.json or the tensors mean.
FORMAT = 3
#: Outside the digests, because returning to a state changes it.
ORDER = "ORDER"
#: What it says begins with 1.
ORDER_LOST = 0
META = "run.json"
MODEL_FOLDER = "model"
#: At states that come and go meanwhile.
MAX_LOOKS = 5

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class StateInfo:
    """A complete state; its digests are checked when it is read."""

    name: str
    seq_id: int
    policy_version: int
    size_bytes: int
    path: Path
    model_path: Path | None
    order: int
    #: Saved to stay, whatever is saved later.
    kept: bool = False


def listed(states: Sequence[StateInfo]) -> str:
    """States as a person chooses among them."""
    names = [info.name for info in states]
    told = ((one.name if names.count(one.name) == 1 else one.path.name, one) for one in states)
    return ", ".join(f"{name} (version {one.policy_version})" for name, one in told) or "none"


class StateStore:
    """The saved states of all runs below one root. One process at a time, and one thread that writes."""

    def __init__(
        self,
        root: Path,
        keep_last: int,
        files: TensorFiles | None = None,
        progress: Callable[[], None] = lambda: None,
        max_states: int = MAX_STATES,
    ) -> None:
        """`progress` is called while files are written, hashed and flushed, by several threads: that may take
        many minutes."""
        self._root = root.absolute()
        self._retention = Retention(keep_last, max_states)
        self._files = files or WholeFiles()
        self._progress = progress

    def save(
        self,
        run_id: str,
        name: str,
        seq_id: int,
        policy_version: int,
        content: Content,
        export: Callable[[Path], None] | None = None,
        *,
        kept: bool = False,
        keep_last: int = 0,
    ) -> StateInfo:
        """Write a state, which stays if it is `kept`; `export` fills its model folder, which must not exist
        yet. Then as many of the newest stay as the run says, 0 for nothing. Errors: NOT_READY."""
        with on_disk(f"state {name} of run {run_id} cannot be written to {self._root}", FULL):
            saved = self._save(run_id, name, seq_id, policy_version, content, export, kept)
        try:
            self._prune(run_id, saved, keep_last)
        except (
            OSError,
            QuartetError,
        ) as error:  # the state is there: that older ones are, too, is no failure
            log.warning("states_not_pruned", run_id=run_id, why=str(error))
        return saved

    def _save(
        self,
        run_id: str,
        name: str,
        seq_id: int,
        policy_version: int,
        content: Content,
        export: Callable[[Path], None] | None,
        kept: bool,
    ) -> StateInfo:
        folder = self._root / run_id
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            flush(self._root)
        sweep(folder)
        target = folder / f"{name}@{seq_id}"
        writing = writing_place(target)
        try:
            writing.mkdir()
            with growing(writing, self._progress):
                self._files.write(writing, content)
                meta = json.dumps(content.meta, indent=1, sort_keys=True)
                (writing / META).write_text(meta, encoding="utf-8")
                if export is not None:
                    export(writing / MODEL_FOLDER)
            # The disk writes while it is hashed; the second flush finds little but the mark.
            with ThreadPoolExecutor(1, "flushing") as beside:
                flushed = beside.submit(self._flush, list(writing.rglob("*")))
                self._complete(writing, name, seq_id, policy_version, kept)
                flushed.result()
            (writing / ORDER).write_text(str(self._next_order(run_id)), encoding="ascii")
            self._flush([*writing.rglob("*"), writing])
            put(writing, target)
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise
        found = state_at(target)
        assert found is not None, "written just now"
        return found

    def list(self, run_id: str) -> list[StateInfo]:
        """Complete states, oldest first. Errors: NOT_READY."""
        folder = self._root / run_id
        with on_disk(f"the states in {folder} cannot be read", AWAY):
            found = _states_in(folder) if folder.is_dir() else []
        return _in_order(found)

    def find(self, run_id: str, name: str) -> StateInfo:
        """The newest state of a name, or that of NAME@SEQ_ID. Errors: RESOURCE_UNKNOWN, NOT_READY."""
        states = self.list(run_id)
        match = next((info for info in reversed(states) if name in (info.name, info.path.name)), None)
        if match is None:
            raise QuartetError(
                "RESOURCE_UNKNOWN",
                f"run {run_id} has no complete state {name!r}; it has: {listed(states)}",
                name=name,
            )
        return match

    def read(self, info: StateInfo) -> Content:
        """The content, after every digest agreed. Errors: CHECKSUM_MISMATCH, INVALID_CONFIG, NOT_READY."""
        with on_disk(f"state {info.name} in {info.path} cannot be read", AWAY):
            return self._read(info)

    def _read(self, info: StateInfo) -> Content:
        mark = read_mark(info.path)
        if mark is None:
            raise _harmed(info, MARK)
        if mark.get("format") != FORMAT:
            remedy = "use the release that wrote it, or an empty state_dir"
            raise QuartetError(
                "INVALID_CONFIG",
                f"state {info.name} in {info.path} has format {mark.get('format')}, and this trainer reads "
                f"{FORMAT}; {remedy}",
                key="state_dir",
                value=info.path,
                remedy=remedy,
            )
        own = {
            path: entry for path, entry in mark["files"].items() if not path.startswith(f"{MODEL_FOLDER}/")
        }
        there = [relative for relative in own if (info.path / relative).is_file()]
        found = self._files.digests(info.path, there, self._progress)
        for relative, entry in own.items():
            if found.get(relative) != entry["xxh3_128"]:
                raise _harmed(info, relative)
        try:
            meta = json.loads((info.path / META).read_text(encoding="utf-8"))
            tensors = self._files.read(info.path)
        except (ValueError, SafetensorError) as error:
            raise _harmed(info, str(error)) from error
        return Content(meta, tensors, info.path)

    def newest_sound(self, run_id: str) -> tuple[StateInfo, Content] | None:
        """The newest state that is unharmed; harmed ones are logged and passed over.

        Errors: INVALID_CONFIG for one that another release wrote, NOT_READY for one that cannot be read now.
        That is no harm, and what is saved next must not take its place.
        """
        for info in reversed(self.list(run_id)):
            try:
                return info, self.read(info)
            except QuartetError as error:
                if error.reason != "CHECKSUM_MISMATCH":
                    raise
                log.error(
                    "state_harmed", run_id=run_id, state=info.name, path=str(info.path), error=str(error)
                )
        return None

    def touch(self, run_id: str, info: StateInfo) -> None:
        """Make a state the newest: the run returned to it. Errors: NOT_READY."""
        staged = info.path / f"{ORDER}.new"
        with on_disk(f"state {info.name} in {info.path} cannot be made the newest", FULL):
            staged.write_text(str(self._next_order(run_id)), encoding="ascii")
            flush(staged)
            staged.replace(info.path / ORDER)
            flush(info.path)

    def _next_order(self, run_id: str) -> int:
        return max((info.order for info in self.list(run_id)), default=0) + 1

    def _complete(self, folder: Path, name: str, seq_id: int, policy_version: int, kept: bool) -> None:
        written = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        sizes = {file.relative_to(folder).as_posix(): file.stat().st_size for file in written}
        digests = self._files.digests(folder, list(sizes), self._progress)
        files = {name: {"bytes": size, "xxh3_128": digests[name]} for name, size in sizes.items()}
        body = {
            "format": FORMAT,
            "name": name,
            "seq_id": seq_id,
            "policy_version": policy_version,
            "files": files,
            # As earlier releases have it, where it says nothing.
            **({"kept": True} if kept else {}),
        }
        write_mark(folder, body)

    def _flush(self, paths: Sequence[Path]) -> None:
        for path in paths:
            flush(path, self._progress)

    def _prune(self, run_id: str, saved: StateInfo, keep_last: int) -> None:
        states = self.list(run_id)
        same = (info for info in states if info.name == saved.name and info.path != saved.path)
        # One of this very call may stand in the place beside (placing.py 2), where an earlier try ended.
        replaced = [info for info in same if not info.kept or info.seq_id == saved.seq_id]
        rest = [info for info in states if info not in replaced]
        staying = self._retention.staying(rest, keep_last)
        for info in states:
            if info in staying:
                continue
            if info.kept:
                log.warning("kept_state_goes", run_id=run_id, state=info.name, why="max_states")
            discard(info.path)


def _states_in(folder: Path) -> list[StateInfo]:
    found: list[StateInfo | None] = []
    for _ in range(MAX_LOOKS):
        try:
            places = [path for path in folder.iterdir() if is_place(path)]
        except FileNotFoundError:  # all of them were deleted meanwhile
            return []
        found = [state_at(path) for path in places]
        # What went meanwhile, by the thread that saves, made way for another one.
        if all(path.exists() for path in places):
            break
    return [info for info in found if info is not None]


def _in_order(states: Sequence[StateInfo]) -> list[StateInfo]:
    """Oldest first. One that lost its order stands behind all whose sequence ends before its own."""

    def place(info: StateInfo) -> tuple[int, int, int]:
        before = (one.order for one in states if one.seq_id <= info.seq_id)
        lost = info.order == ORDER_LOST
        return max(before, default=0) if lost else info.order, lost, info.seq_id

    return sorted(states, key=place)


def state_at(path: Path) -> StateInfo | None:
    """The state in a folder; None where there is none, or an incomplete one, which the log says."""
    mark = read_mark(path)
    if mark is None:
        if path.exists():
            log.error("state_incomplete", path=str(path))
        return None
    try:
        order = int((path / ORDER).read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        log.warning("state_order_lost", path=str(path))
        order = ORDER_LOST
    model = path / MODEL_FOLDER
    size = sum(entry["bytes"] for entry in mark["files"].values())
    return StateInfo(
        mark["name"],
        mark["seq_id"],
        mark["policy_version"],
        size,
        path,
        model if model.is_dir() else None,
        order,
        mark.get("kept", False),
    )


def _harmed(info: StateInfo, what: str) -> QuartetError:
    return QuartetError(
        "CHECKSUM_MISMATCH",
        f"state {info.name} is harmed: {what} disagrees with its digest; nothing was loaded",
        what=f"{info.path}/{what}",
    )
