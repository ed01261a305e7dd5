"""`quartet env init`: a package that passes `quartet env check` as it is written, for its author to change.

1. Its shape is that of Verifiers' documentation (a v1 taskset exported through `__all__`), and beside it an
   oracle, by which `check` knows that the right answer earns the full reward.
2. templates/ has one folder for each kind, of an environment that is called my-env; what is beside the
   folders is in every package. Files of Python and TOML end in .txt so that no tool takes them for part of
   this package.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import keyword
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from quartet.config import ConfigError

NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
#: Packages that every environment imports.
NEEDED = {"verifiers", "pydantic"}
#: What of an environment each kind shows, the simplest first.
KINDS = {
    "single": "one question, one answer",
    "tool": "tools that the model calls before it answers",
    "turns": "several turns, each answered by the environment",
}
_TEMPLATES = importlib.resources.files(__package__) / "templates"
_SUFFIX = ".txt"


def write_package(name: str, parent: Path, kind: str = "single") -> Path:
    """The package's folder. Raises ConfigError."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name of a package; use a-z, 0-9 and single dashes, such as my-env")
    module = name.replace("-", "_")
    if keyword.iskeyword(module) or module in sys.stdlib_module_names | NEEDED:
        raise ConfigError(f"{name!r} is no name of a package: Python has a module or a word of that name")
    found = importlib.util.find_spec(module)
    if found is not None and found.origin is not None:  # a folder here may have any name
        raise ConfigError(f"{name!r} is the name of a package that is installed; choose another")
    folder = parent / module
    if folder.exists():
        raise ConfigError(f"{folder} exists; choose another name, or another --path")
    words = {
        "environments/my_env": shlex.quote(str(folder)),
        "my-env": name.replace("_", "-"),
        "my_env": module,
        "MyEnv": "".join(part.capitalize() for part in module.split("_")),
    }
    named = re.compile("|".join(words))
    for path, text in _files(module, kind):
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(named.sub(lambda found: words[found[0]], text), encoding="utf-8")
    return folder


def _files(module: str, kind: str) -> Iterator[tuple[str, str]]:
    """Paths in the package's folder, and the templates of what is there."""
    for parent in (_TEMPLATES, _TEMPLATES / kind):
        for source in parent.iterdir():
            if source.is_file():
                path = source.name.removesuffix(_SUFFIX)
                yield f"{module}/{path}" if path.endswith(".py") else path, source.read_text(encoding="utf-8")
