"""What `quartet env install` is asked for, and how pip is asked for it: a folder, a name on the package
index, a direct reference (`my-env @ git+https://...`), or an id with its owner (`owner/my-env`) on an index.

1. What is named with its owner comes from the index that is given and from no other: on another one its name
   might be somebody else's package. What it needs may come from all of them.
2. What a URL says of a user is shown to nobody (addresses.py).
3. A plain name is that of the folder that `quartet env init` wrote for it, where there is one and no index is
   given, as to `vf-install`: on the index it might be somebody else's package.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quartet.cli.addresses import without_user
from quartet.cli.env.installed import OWN, module_of
from quartet.config import ConfigError
from quartet.config.load import read_toml

_NAME: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
#: A distribution's name, which becomes that of a folder here.
NAME: Final = re.compile(_NAME)
#: PEP 508's, as pip reads it.
_DIRECT: Final = re.compile(rf"(?P<name>{_NAME})\s*(\[[^\]]*\])?\s*@\s*[a-z][a-z0-9+.-]*://\S+")
#: The version may be left out, or "latest".
_OWNED: Final = re.compile(rf"[A-Za-z0-9_.-]+/(?P<name>{_NAME})(@(?P<version>[A-Za-z0-9.+!_-]+))?")


@dataclass(frozen=True)
class Package:
    """One, with the options and arguments of pip."""

    name: str
    what: tuple[str, ...]
    #: Where the package itself comes from, and what it needs.
    own_index: tuple[str, ...] = ()
    indexes: tuple[str, ...] = ()


def package(target: str, index_url: str | None = None, extra_index_urls: Sequence[str] = ()) -> Package:
    """What is asked for. Raises ConfigError."""
    first = () if index_url is None else ("--index-url", index_url)
    extra = tuple(word for url in extra_index_urls for word in ("--extra-index-url", url))
    folder = Path(target)
    own = OWN / module_of(target)
    if not first + extra and NAME.fullmatch(target) and (own / "pyproject.toml").is_file():
        folder = own
    if (folder / "pyproject.toml").is_file():
        return Package(_named_in(folder), ("-e", str(folder.absolute())), first + extra, first + extra)
    if folder.exists():
        raise ConfigError(f"{target} has no pyproject.toml; name the folder of a package")
    if found := _DIRECT.fullmatch(target):
        return Package(found["name"], (target,), first + extra, first + extra)
    if "://" in target:
        raise ConfigError(f"{without_user(target)!r} has no name; write 'NAME @ {without_user(target)}'")
    if "/" in target:
        return _owned(target, first, extra)
    name = re.split(r"[\[=<>~! ]", target, maxsplit=1)[0]
    if not NAME.fullmatch(name):
        raise ConfigError(f"{target!r} is neither a folder nor the name of a package")
    return Package(name, (target,), first + extra, first + extra)


def _named_in(folder: Path) -> str:
    project = read_toml(folder / "pyproject.toml").get("project", {})
    if not NAME.fullmatch(name := str(project.get("name", "") if isinstance(project, dict) else "")):
        raise ConfigError(f"{folder / 'pyproject.toml'} gives no name of a package under [project]: {name!r}")
    return name


def _owned(target: str, first: tuple[str, ...], extra: tuple[str, ...]) -> Package:
    if not (indexes := first + extra):
        raise ConfigError(
            f"{target!r} is no folder here; give the index that has it (--index-url URL, or "
            "--extra-index-url URL beside your own), or fetch the package and name its folder"
        )
    if (found := _OWNED.fullmatch(target)) is None:
        raise ConfigError(
            f"{target!r} is neither a folder nor an id; write OWNER/NAME, or OWNER/NAME@VERSION"
        )
    version = "" if found["version"] in (None, "latest") else f"=={found['version']}"
    # Of several the first: it is the one that was given for this package.
    return Package(found["name"], (found["name"] + version,), ("--index-url", indexes[1]), indexes)
