"""What an environment consists of, as it was loaded: digests that change when its code or its data does.

1. Equal arguments, versions and contents have equal digests: whatever machine, time or folder they are loaded
   at, in whatever order the arguments come, from a wheel or a checkout.
2. Its files are those of its package, and of one that `args.env` names: what a wheel lists, else what the
   folder holds (links to folders are followed, once each), of a single module that one; and modules that it
   imports and nobody installed. What running leaves there (caches, compiled code, logs, databases, folders of
   results) is none of them.
3. Its examples are told by their keys, wherever they come from: EXAMPLES of each split, evenly spread.
4. Reading is bounded: MAX_FILES files, MAX_READ_BYTES of them whole. Of a larger one its size and both ends
   count, of what is beyond MAX_READ_BYTES the size alone.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import xxhash
from quartet.v1 import envhost_service_pb2

from quartet_envhost.config import canonical_id

# As of a build (quartet.kit.build): what differs is told apart, and a person can read it out.
DIGITS: Final = 12
# A package has tens; one with more has its data in them, and another set of data differs in the first ones.
MAX_FILES: Final = 2_000
# Entries of its folder that are looked at for that; a data set of a file for each example has more.
MAX_WALKED: Final = 20_000
# About 50 ms, once for each worker that loads.
MAX_READ_BYTES: Final = 128 * 1024 * 1024
MAX_WHOLE_BYTES: Final = 8 * 1024 * 1024
END_BYTES: Final = 64 * 1024
# Told one by one, so that a person reads which changed: with long names some 20 kB, kept with each run.
MAX_TOLD: Final = 256
EXAMPLES: Final = 64

_CODE: Final = ".py"
_LEFT_OUT: Final = {"__pycache__", "node_modules"}
_LEFT_OUT_ENDS: Final = (
    *(".pyc", ".pyo", ".so", ".pyd", ".dylib", ".dll", ".o", ".a"),
    *(".db", ".sqlite", ".sqlite3", "-wal", "-shm", "-journal"),
    *(".log", ".tmp", ".lock", ".swp", ".bak", ".partial", "~"),
    *(".egg-info", ".dist-info"),
)
# Where running leaves its results: only code counts there.
_RESULTS: Final = {
    *("build", "cache", "caches", "checkpoints", "dist", "logs", "outputs"),
    *("results", "runs", "temp", "tmp", "wandb"),
}
_SPLITS: Final = (envhost_service_pb2.SPLIT_TRAIN, envhost_service_pb2.SPLIT_EVAL)

Tasks = Callable[[envhost_service_pb2.GetTasksRequest], Awaitable[envhost_service_pb2.GetTasksResponse]]


async def tell(
    info: envhost_service_pb2.EnvironmentInfo,
    args: Mapping[str, Any],
    own: Callable[[str], bool],
    tasks: Tasks,
) -> None:
    """Adds the digests to the description of an environment that is loaded. `own` knows its code by the path
    of a file, `tasks` answers for its examples."""
    files = digests(files_of(packages(info.id, args), own))
    info.examples_digest = "" if info.infinite else await of_examples(info, tasks)
    written = json.dumps(args, sort_keys=True)
    parts = [written, info.version, info.verifiers_version, info.examples_digest]
    info.digest = digest_of(*parts, *(f"{name}\0{digest}" for name, digest in files.items()))
    for name in list(files)[:MAX_TOLD]:
        # A name may be no UTF-8, as which it is sent.
        info.files[os.fsencode(name).decode(errors="replace")] = files[name]


def packages(env_id: str, args: Mapping[str, Any]) -> list[str]:
    """The packages that are an environment's own, as they are imported."""
    over = args.get("env")
    named = [env_id, over] if isinstance(over, str) else [env_id]
    return [one for one in dict.fromkeys(map(canonical_id, named)) if one in sys.modules]


def files_of(names: Collection[str], own: Callable[[str], bool]) -> dict[str, Path]:
    """The files of packages that are imported, and of other own modules, by their names; code first."""
    found: dict[str, Path] = {}
    for name in names:
        for place in [Path(place).absolute() for place in getattr(sys.modules[name], "__path__", ())]:
            inside = _listed(name, place) or _walked(place)
            found.update({f"{name}/{path.relative_to(place).as_posix()}": path for path in inside})
    for module, file in _imported():
        if module in names or own(str(file)):
            end = "/__init__.py" if file.name == "__init__.py" else _CODE
            found.setdefault(module.replace(".", "/") + end, file)
    return dict(sorted(found.items(), key=lambda one: (not one[0].endswith(_CODE), one[0]))[:MAX_FILES])


def digests(files: Mapping[str, Path]) -> dict[str, str]:
    """Of each file by its name; nothing of one that cannot be read."""
    found, left = {}, MAX_READ_BYTES
    for name, path in files.items():
        try:
            size = path.stat().st_size
            if size <= min(MAX_WHOLE_BYTES, left):
                found[name] = digest_of(path.read_bytes())
                left -= size
            else:
                found[name] = digest_of(str(size), *_ends(path, size) if left > 0 else ())
                left -= 2 * END_BYTES
        except OSError:  # removed meanwhile, or for others alone
            continue
    return found


def _listed(package: str, place: Path) -> list[Path]:
    """What the wheel that a package was installed from has in its folder; nothing of what was not."""
    try:
        installed = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return []
    if installed.read_text("RECORD") is None:  # else it lists what somebody built once
        return []
    paths = [Path(os.path.abspath(str(installed.locate_file(file)))) for file in installed.files or ()]
    inside = [path for path in paths if path.is_relative_to(place)]
    return [path for path in inside if _counts(path.relative_to(place))]


def _walked(place: Path) -> list[Path]:
    found: list[Path] = []
    been: set[str] = set()  # a link may lead to where it lies
    walked = 0
    for folder, folders, names in os.walk(place, followlinks=True):
        real = os.path.realpath(folder)
        if real in been:
            folders.clear()
            continue
        been.add(real)
        inside = [name for name in folders if not _is_left_out(name)]
        # What is the package's own before what it shares with others.
        folders[:] = sorted(inside, key=lambda name: (os.path.islink(os.path.join(folder, name)), name))
        for name in ("", *sorted(names)):  # the folder itself is an entry, too
            walked += 1
            if walked > MAX_WALKED:
                return found
            path = Path(folder, name)
            if _counts(path.relative_to(place)) and path.is_file():
                found.append(path)
    return found


def _counts(path: Path) -> bool:
    """Whether a file, by its path in the package, is one that somebody wrote for it."""
    if any(map(_is_left_out, path.parts)):
        return False
    return path.suffix == _CODE or not _RESULTS.intersection(path.parts[:-1])


def _is_left_out(name: str) -> bool:
    return name.startswith(".") or name in _LEFT_OUT or name.endswith(_LEFT_OUT_ENDS)


def _imported() -> Iterator[tuple[str, Path]]:
    """Python modules that are imported, with their files, by name."""
    for name, module in sorted(sys.modules.items()):
        file = getattr(getattr(module, "__spec__", None), "origin", None)
        if isinstance(file, str) and file.endswith(_CODE) and os.path.isabs(file):
            yield name, Path(file)


async def of_examples(info: envhost_service_pb2.EnvironmentInfo, tasks: Tasks) -> str:
    """A digest of the examples of an environment, by its sizes (3)."""
    parts: list[str] = []
    for split, size in zip(_SPLITS, (info.train_size, info.eval_size), strict=True):
        parts.append(str(size))
        starts = (number * size // min(EXAMPLES, size) for number in range(min(EXAMPLES, size)))
        asked = (envhost_service_pb2.GetTasksRequest(split=split, start=one, count=1) for one in starts)
        # At once: where they come from may be far away.
        for answer in await asyncio.gather(*map(tasks, asked)):
            parts += [task.key for task in answer.tasks]
    return digest_of(*parts)


def _ends(path: Path, size: int) -> tuple[bytes, bytes]:
    with path.open("rb") as file:
        first = file.read(END_BYTES)
        file.seek(max(0, size - END_BYTES))
        return first, file.read(END_BYTES)


def digest_of(*parts: str | bytes) -> str:
    """As short as a person reads it out."""
    digest = xxhash.xxh3_64()
    for part in parts:
        content = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        digest.update(f"{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:DIGITS]
