"""`quartet env install`: an interpreter for an environment, with the Verifiers that it was written for.

1. The package is put in first without what it needs, and read: what imports `verifiers.v1` or asks for
   Verifiers 0.4 is a v1 package, any other a classic one.
2. An interpreter that could not be finished is removed again, and one that is under way, or whose install
   was killed, is nobody's: half of one would be taken for the environment's own.
3. The one that it was to replace is put back then, or by the next install where this one was killed. It is
   kept beside, and the new one made in its place: a virtual environment cannot be moved elsewhere.
"""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from quartet.cli.addresses import without_user
from quartet.cli.env.installed import INSTALLED, UNFINISHED, find, module_of, own_python, run_in
from quartet.cli.env.package import Package
from quartet.cli.held import held
from quartet.config import ConfigError

#: The extra of quartet-envhost that brings each generation's Verifiers.
EXTRAS: Final = {"v1": "verifiers", "classic": "verifiers-classic"}
#: Verifiers brings half a gigabyte; a slow line takes a while.
INSTALL_SECONDS = 1800.0
# What is being replaced, a folder for each environment; no module has this name.
REPLACED = INSTALLED / ".replaced"
# "v1" or "classic", for the package of argv[1] whose distribution is argv[2].
READ = """
import importlib.metadata, importlib.util, pathlib, re, sys
spec = importlib.util.find_spec(sys.argv[1])
if spec is None:
    sys.exit(1)
files = [pathlib.Path(spec.origin)]
if spec.submodule_search_locations:
    files = [file for root in spec.submodule_search_locations for file in pathlib.Path(root).rglob("*.py")]
# An editor's lock is a link to nowhere; of other encodings than Python's own this much is read all the same.
sources = (file.read_text("utf-8", "replace") for file in files if file.is_file())
needs = importlib.metadata.requires(sys.argv[2]) or ()
asked = [need for need in needs if re.match(r"verifiers\\b(?!-)", need)]
v1 = any(re.search(r"[>=~]=\\s*0\\.([4-9]|[1-9][0-9])", need) for need in asked)
v1 = v1 or any(re.search(r"verifiers\\.v1|from verifiers import v1", source) for source in sources)
print("v1" if v1 else "classic")
"""


def install(package: Package, generation: str | None, into: Path | None) -> Path:
    """The environment's interpreter. Raises ConfigError."""
    name = package.name
    if into is not None:
        if not into.exists():
            raise ConfigError(f"--into {into}: there is no such interpreter")
        python = into.absolute()
        _fill(python, package, generation)
        return python
    python = own_python(name).absolute()
    folder = python.parent.parent
    refusal = f"another quartet env install of {name} is under way; wait for its end"
    with held(beside := (REPLACED / folder.name).absolute(), refusal), _replacing(folder, beside):
        folder.mkdir(parents=True)
        (folder / UNFINISHED).touch()
        venv.create(folder, with_pip=True)
        _fill(python, package, generation)
        (folder / UNFINISHED).unlink()
    return python


@contextmanager
def _replacing(folder: Path, beside: Path) -> Iterator[None]:
    """Inside, the folder is made; what it was is gone where that succeeds, else it is there again."""
    before = beside / "before"

    def put_back() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if before.exists():
            _move(before, folder)

    if before.exists():  # of an install that was killed
        put_back()
    if folder.exists():
        _move(folder, before)
    try:
        yield
    except BaseException:
        put_back()
        raise
    if before.exists():
        outdated = Path(tempfile.mkdtemp(prefix="outdated-", dir=beside))
        before.rename(outdated / "before")  # at once, so that no half of it is ever put back
    for outdated in beside.glob("outdated-*"):
        shutil.rmtree(outdated, ignore_errors=True)  # what may not be deleted is in nobody's way


def _move(source: Path, target: Path) -> None:
    """Rename it; what is on another file system, or in the layer of an image, is copied whole first."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        part = target.with_name(f"{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(source, part, symlinks=True)
        part.rename(target)
        shutil.rmtree(source, ignore_errors=True)


def _fill(python: Path, package: Package, generation: str | None) -> None:
    name, what = package.name, package.what
    module = module_of(name)
    _pip(python, ["--no-deps", *what], package.own_index)
    read = run_in(str(python), READ, module, name)
    if read.returncode != 0:
        raise ConfigError(
            f"{name} installs no package {module!r}, under which Verifiers would look for it; "
            "rename one of the two"
        )
    generation = generation or read.stdout.strip()
    print(f"{name}: a {generation} package; installing it with its Verifiers may take minutes", flush=True)
    ours = (*_ours("quartet", ""), *_ours("quartet-envhost", f"[{EXTRAS[generation]}]"))
    _pip(python, [*ours, *what], package.indexes)
    if not find(module, str(python))[0]:
        raise ConfigError(f"{name} is installed in {python}, and cannot be found there")


def _ours(package: str, extra: str) -> list[str]:
    """How pip is asked for a package of Quartet: the source tree that runs now, where there is one."""
    try:
        origin = importlib.metadata.distribution(package).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"{package} is not installed for {sys.executable}; pip install it there") from None
    url = json.loads(origin)["url"] if origin else ""
    if url.startswith("file://"):
        return ["-e", unquote(url.removeprefix("file://")) + extra]
    return [f"{package}{extra}=={importlib.metadata.version(package)}"]


def _pip(python: Path, what: Sequence[str], indexes: Sequence[str]) -> None:
    """Install into an interpreter, by uv where there is one: pip takes minutes for Verifiers. Compiled, as by
    pip: where Python was told to keep no bytecode, each start of the environment would compile all of it.
    """
    asked = without_user(" ".join(one for one in what if not one.startswith("-")))
    commands = [[str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]]
    # That of the command's own interpreter first, whose folder no `.venv/bin/quartet` has on its PATH.
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    if uv := shutil.which("uv", path=places):
        commands.insert(0, [uv, "pip", "install", "-q", "--compile-bytecode", "--python", str(python)])
    for command in commands:
        try:
            done = subprocess.run(
                [*command, *indexes, *what],
                capture_output=True,
                text=True,
                timeout=INSTALL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"installing {asked} took longer than {INSTALL_SECONDS:.0f} s") from None
        if done.returncode == 0:
            return
    said = done.stderr.splitlines() or ["pip failed"]
    first = next((line for line in said if line.startswith("ERROR")), said[0]).strip()
    raise ConfigError(f"{asked} cannot be installed: {without_user(first)}")
