"""The tokenized data of a fine-tuning, kept in its folder: one that goes on need not tokenize them again.

1. A file has the name of all that its samples follow from (`name_of`): what is in the data, the tokenizer
   and the template of the model, the keys that say what is learned and what is cut, and the code that reads,
   renders and tokenizes. So none is read that would come out otherwise.
2. It is written whole or not at all, and ends with the digest of all before: one that was damaged counts as
   none, and the data are tokenized.
3. Of no set more than MAX_BYTES of samples are kept; a larger one is tokenized each time. Files that nobody
   will read any more are removed, and with the fine-tuning's folder all of them.
4. They are readable by their owner alone, as the data may be.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Mapping
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import IO, Any, Final

import xxhash

from quartet.cli.context import positions_of
from quartet.cli.outputs import PRIVATE
from quartet.cli.sft.chats import Chats
from quartet.cli.sft.line import Form
from quartet.cli.sft.shelf import Shelf
from quartet.cli.sft.sources import BLOCK_BYTES, digest_of
from quartet.cli.sft.special_tokens import OLDER, SETTINGS
from quartet.kit.build import build_of
from quartet.run.sft import LessonsConfig

#: In the folder of a fine-tuning.
FOLDER: Final = "tokenized"
#: A billion tokens and more: to read as many again takes hours, and to read this file seconds.
MAX_BYTES: Final = 1 << 32
#: Another for every change of how the files are written.
LAYOUT: Final = 1
#: Of a model folder, what tokens follow from.
OF_MODEL: Final = ("tokenizer.json", SETTINGS, OLDER, "chat_template.jinja")
#: Keys that say what becomes of a row.
KEYS: Final = ("roles", "learns", "learn_prompts", "max_tokens", "overlong")
#: Of what tokenizes and renders, beside Quartet's own build.
LIBRARIES: Final = ("tokenizers", "jinja2")
DIGEST_BYTES: Final = 16
#: Of a file here, also of one that was not written whole; others are not ours.
NAME: Final = re.compile(r"[0-9a-f]{32}(\.partial)?")


def name_of(config: LessonsConfig, contents: str) -> str:
    """Of what becomes of data that have this digest. Raises ConfigError, OSError."""
    model = Path(config.model)
    files = {name: model / name for name in OF_MODEL}
    said = {
        "layout": (LAYOUT, sys.byteorder),
        "contents": contents,
        "model": {name: digest_of(file, name) for name, file in files.items() if file.is_file()},
        "positions": positions_of(model),
        "keys": config.model_dump(mode="json", include=set(KEYS)),
        "build": build_of().text,
        "libraries": {name: version(name) for name in LIBRARIES},
    }
    name: str = xxhash.xxh3_128_hexdigest(json.dumps(said, sort_keys=True).encode())
    return name


def kept(folder: Path, name: str) -> Chats | None:
    """What the folder keeps by this name; None where that is nothing, or damaged."""
    try:
        return _read((folder / name).open("rb"))
    except OSError:
        return None


def keep(folder: Path, found: Mapping[str, Chats | None]) -> None:
    """Keep these by their names, of which None is kept already, and nothing else. Raises OSError where there
    is no room for them: nothing is kept in part."""
    if folder.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
    folder.mkdir(exist_ok=True)
    for one in folder.iterdir():
        if one.name not in found and NAME.fullmatch(one.name) and one.is_file():
            one.unlink()
    for name, chats in found.items():
        if chats is not None and chats.samples.size_bytes <= MAX_BYTES:
            staged = folder / f"{name}.partial"
            try:
                staged.touch(PRIVATE)
                with staged.open("wb") as file:
                    _write(file, chats)
                staged.replace(folder / name)
            except OSError:
                staged.unlink(missing_ok=True)
                raise


def _write(file: IO[bytes], chats: Chats) -> None:
    """A line of JSON, what the shelf has, and the digest of both."""
    header: dict[str, Any] = {
        "left_out": chats.left_out,
        "notices": list(chats.notices),
        "form": chats.form.name,
        "lines": chats.lines,
        "covered": chats.covered,
        "samples": len(chats.samples),
    }
    hashed = xxhash.xxh3_128()
    for block in chain([json.dumps(header).encode() + b"\n"], chats.samples.blocks(BLOCK_BYTES)):
        hashed.update(block)
        file.write(block)
    file.write(hashed.digest())


def _read(file: IO[bytes]) -> Chats | None:
    """What was written; None where the digest is another. The file goes with it. Raises OSError."""
    hashed, left = xxhash.xxh3_128(), file.seek(0, os.SEEK_END) - DIGEST_BYTES
    file.seek(0)
    while left > 0 and (block := file.read(min(left, BLOCK_BYTES))):
        hashed.update(block)
        left -= len(block)
    if file.read() != hashed.digest():
        return None
    file.seek(0)
    header = json.loads(file.readline())
    return Chats(
        Shelf.of(file, header["samples"]),
        header["left_out"],
        header["notices"],
        Form[header["form"]],
        header["lines"],
        header["covered"],
    )
