"""`quartet init [FOLDER]`: configurations to begin with, and where environments of one's own go.

1. Nothing that is there is changed: a file of that name, whatever is in it, is left alone, and told.
2. What is written comes with the package, and every file of it is read by its command as it stands.
"""

from __future__ import annotations

import argparse
import importlib.resources
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

from quartet.config import ConfigError

DESCRIPTION = """\
Write a workspace: configurations for the six environments, and a folder for environments of your own.

  quartet init                  here
  quartet init my-project       in a folder, which is made
  quartet init --vf-rl          also configs/vf-rl, in the dialect of vf-rl

Files that are there already are left alone.
"""
VF_RL = PurePosixPath("configs/vf-rl")
# Under its own name git would apply it to the package's source.
GITIGNORE = "gitignore"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), help="the workspace (default: here)")
    parser.add_argument("--vf-rl", action="store_true", help="also files in the dialect of vf-rl")


def run(options: argparse.Namespace) -> int:
    """The command."""
    written, left = write_workspace(options.folder, vf_rl=options.vf_rl)
    where = options.folder if options.folder != Path() else "here"
    print(f"written, in {options.folder.absolute()}:" if written else f"nothing is new {where}")
    print(*(f"  {path}" for path in written), sep="\n", end="\n" if written else "")
    if left:
        print(f"left alone, as they were there already: {', '.join(map(str, left))}")
    if PurePosixPath("README.md") in written:
        print("README.md says what to do next")
    return 0


def write_workspace(folder: Path, *, vf_rl: bool) -> tuple[list[PurePosixPath], list[PurePosixPath]]:
    """The paths that were written, and those that were there. Raises ConfigError."""
    written: list[PurePosixPath] = []
    left: list[PurePosixPath] = []
    for path, source in workspace_files(vf_rl=vf_rl):
        target = folder / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _write(target, source.read_bytes())
        except FileExistsError:
            if not target.parent.is_dir():
                raise ConfigError(f"{target.parent} is a file, and would be a folder; name another") from None
            left.append(path)
        except NotADirectoryError:
            raise ConfigError(f"{target}: a part of that path is a file; name another folder") from None
        else:
            written.append(path)
    return written, left


def _write(target: Path, content: bytes) -> None:
    """A file that is not there, whole or not at all: half of one would be left alone from then on."""
    file = target.open("xb")
    try:
        with file:
            file.write(content)
    except OSError as error:
        target.unlink()
        error.filename = str(target)
        raise


def workspace_files(*, vf_rl: bool) -> Iterator[tuple[PurePosixPath, Traversable]]:
    """Every file of a workspace with its path there."""
    for path, source in _below(importlib.resources.files(__package__) / "files", PurePosixPath()):
        if vf_rl or path.parent != VF_RL:
            yield path, source


def _below(folder: Traversable, path: PurePosixPath) -> Iterator[tuple[PurePosixPath, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda one: one.name):
        if entry.is_dir():
            yield from _below(entry, path / entry.name)
        else:
            yield path / (".gitignore" if entry.name == GITIGNORE else entry.name), entry
