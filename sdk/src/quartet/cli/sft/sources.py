"""The files that a key of data names: a file, those of a folder, or those of a pattern.

1. They come in the order of their names, whoever lists them: rows have one order, which a fine-tuning that
   goes on counts on.
2. Of a folder they are the files of data that are right in it, by the end of their names; of one that the
   library datasets saved, those that it lists. Files of several sets (train-..., test-...) are not mixed, and
   a folder of folders is not guessed at: both are refused with what names one set, that of the key where it
   is among them.
3. Their contents have one digest, which of a single file is the file's own.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import xxhash

from quartet.config import ConfigError

KINDS: Final = (".jsonl", ".json", ".parquet", ".arrow")
COMPRESSED: Final = (".gz", ".zst", ".xz", ".bz2")
TRAIN: Final = "train"
#: What a key names, where it is not that.
SET_OF: Final = {"validation": "validation"}
#: Words in the names of files, by the set that they are of; those of no set are for training, too.
SETS: Final = {
    "validation": frozenset({"validation", "valid", "val", "dev"}),
    "test": frozenset({"test", "testing", "eval", "evaluation"}),
}
#: Of the library datasets: what a folder of one set has, and one of several.
STATE, SPLITS = "state.json", "dataset_dict.json"
#: Of files, parts and sets in a refusal.
MAX_NAMED = 3
#: Read at a time for a digest.
BLOCK_BYTES = 1 << 20


def files_of(named: Path, key: str) -> Sequence[Path]:
    """The files that the key names, of one at least. Raises ConfigError, which begins with both."""
    what = f"{key} = {str(named)!r}"
    if named.is_dir():
        return _of_folder(named, what, SET_OF.get(key, TRAIN))
    if named.exists():
        return (named,)
    if not glob.has_magic(str(named)):
        raise ConfigError(f"{what} cannot be read: No such file or directory{_of_a_hub(named)}")
    found = sorted(path for path in map(Path, glob.glob(str(named), recursive=True)) if path.is_file())
    if not found:
        raise ConfigError(f"{what} is a pattern that no file has; '*' is any name, '**' any folders between")
    return found


def digest_of(named: Path, key: str) -> str:
    """Of all that the files hold. Raises ConfigError, OSError."""
    files = files_of(named, key)
    if len(files) == 1:
        return _digest(files[0])
    return xxhash.xxh3_128_hexdigest("\n".join(map(_digest, files)).encode())


def _digest(file: Path) -> str:
    hashed = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while block := opened.read(BLOCK_BYTES):
            hashed.update(block)
    digest: str = hashed.hexdigest()
    return digest


def _of_a_hub(named: Path) -> str:
    """What is said of a name that may be of a set on a hub."""
    if named.is_absolute() or len(named.parts) != 2 or named.suffix in (*KINDS, *COMPRESSED):
        return ""
    return f"; no hub is asked: hf download --repo-type dataset {named} --local-dir DIR, and name its files"


def _of_folder(folder: Path, what: str, of_key: str) -> Sequence[Path]:
    if (folder / SPLITS).is_file():
        splits = sorted(one.parent.name for one in folder.glob(f"*/{STATE}"))
        raise ConfigError(f"{what} holds the sets {_some(splits)}; name the folder of one")
    if (folder / STATE).is_file():
        return _saved(folder, what)
    found = sorted(path for path in folder.iterdir() if _is_data(path) and path.is_file())
    if not found:
        raise ConfigError(f"{what} is a folder without files of data ({', '.join(KINDS)}){_deeper(folder)}")
    sets = {_set_of(path) for path in found}
    if len(sets) > 1:
        told = of_key if of_key in sets else min(sets)
        first = next(path for path in found if _set_of(path) == told)
        raise ConfigError(
            f"{what} is a folder with files of several sets ({', '.join(sorted(sets))}); name those of one "
            f"by a pattern, such as {str(folder / _pattern(first))!r}"
        )
    return found


def _saved(folder: Path, what: str) -> Sequence[Path]:
    """The parts of a set that the library datasets saved, in the order in which it lists them."""
    try:
        state: Any = json.loads((folder / STATE).read_text(encoding="utf-8"))
        parts = tuple(folder / str(part["filename"]) for part in state["_data_files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{what}: {STATE} in it lists no parts ({error!r})") from error
    if not parts:
        raise ConfigError(f"{what}: the data set that was saved there has no rows")
    return parts


def _is_data(path: Path) -> bool:
    name = path.name
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return name.endswith(KINDS) and not name.startswith((".", "_", "dataset_info"))


def _set_of(path: Path) -> str:
    words = set(re.split(r"[^a-z]+", path.name.lower()))
    return next((name for name, those in SETS.items() if words & those), TRAIN)


def _pattern(path: Path) -> str:
    """Names like that of this file, whose parts are numbered."""
    return re.sub(r"[-_.]?\d[\d\-_]*(?:of[-_]\d+)?", "*", path.name, count=1)


def _deeper(folder: Path) -> str:
    """Where there are some further down, in words."""
    below = next(iter(sorted(path for path in folder.glob("*/*") if _is_data(path))), None)
    if below is None:
        return ""
    return f"; name one that has some, such as {str(below.parent)!r}, or all by '{folder}/**/*{below.suffix}'"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")
