"""Which interpreter of this machine has an environment.

1. What the `[envhost]` table says is taken: `environments."id".python` for one, `python` for all. Where it
   says nothing, the interpreter is the first that has the package: that of `quartet env install`, those of
   `make install` and `make classic`, those that `quartet env install` made for others (`--into` one of them),
   this one.
2. An environment that is in none is refused before anything starts, with what to do.
3. One that is built into the host is in all of them: it runs on the host's own, where no other is said.
"""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quartet.config import ConfigError
from quartet.run.hosted import BUILT_IN

# A program for another interpreter, without this folder on its path: in a folder of projects, each looks like
# the package that it holds.
ALONE = ("-P", "-c")
FIND_SECONDS = 60.0  # a find_spec takes milliseconds; more means a broken interpreter
# Exit code 0 if the package of argv[1] is there; else the names of the environments that are.
FIND = """
import importlib.metadata, importlib.util, sys
if importlib.util.find_spec(sys.argv[1]) is None:
    for one in importlib.metadata.distributions():
        if any(need.startswith("verifiers") and "extra ==" not in need for need in one.requires or ()):
            print(one.metadata["Name"])
    sys.exit(1)
"""
# Where `make install` and `make classic` put environments.
ENVIRONMENTS_PYTHON, CLASSIC_PYTHON = ".venv-envs/bin/python", ".venv-envs-classic/bin/python"
# `quartet env init` writes a folder for each environment here.
OWN = Path("environments")
# `quartet env install` makes a folder for each environment here.
INSTALLED = Path(".quartet/envs")
# Lies in such a folder until its interpreter is whole.
UNFINISHED = "unfinished"
# What SubmitRun, DescribeEnvironment and GetTasks say of what can never run as written.
REFUSALS = frozenset({"INVALID_CONFIG", "ENVIRONMENT_UNKNOWN"})


def module_of(env_id: str) -> str:
    """The name under which Verifiers imports "owner/my-env@1.0": my_env."""
    return env_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def own_python(env_id: str) -> Path:
    """The interpreter that `quartet env install` makes for an environment."""
    return INSTALLED / module_of(env_id) / "bin" / "python"


def with_interpreters(envhost: dict[str, Any], env_ids: Sequence[str]) -> dict[str, Any]:
    """The `[envhost]` table with the interpreter of each environment in it. Raises ConfigError."""
    own = envhost.get("environments", {})
    tables = [envhost, *own.values()] if isinstance(own, dict) else [own]
    if not all(isinstance(one, dict) and isinstance(one.get("python", ""), str) for one in tables):
        return dict(envhost)  # which the host refuses
    table = {**envhost, "environments": {**own}}
    entries = table["environments"]
    for env_id in env_ids:
        module = module_of(env_id)
        name = next((known for known in entries if module_of(known) == module), env_id)
        said = entries.get(name, {}).get("python") or envhost.get("python")
        if module in BUILT_IN:
            if not said:
                entries.setdefault(name, {})
        elif said:
            _check(env_id, module, said)
        else:
            entries[name] = {**entries.get(name, {}), "python": os.path.abspath(interpreter_of(env_id))}
    if not entries:
        del table["environments"]
    return table


def python_of(envhost: dict[str, Any], env_id: str) -> str:
    """The interpreter of an environment, by the `[envhost]` table. Raises ConfigError."""
    table = with_interpreters(envhost, [env_id])
    entries, module = table.get("environments", {}), module_of(env_id)
    own: dict[str, Any] = next((one for name, one in entries.items() if module_of(name) == module), {})
    return str(own.get("python") or table.get("python") or sys.executable)


def interpreter_of(env_id: str) -> str:
    """The first interpreter that has the environment. Raises ConfigError."""
    module = module_of(env_id)
    if module in BUILT_IN:
        return sys.executable
    known = [str(python) for python in candidates(env_id)]
    for python in known:
        if find(module, python)[0]:
            return python
    default = known[0] if known[0] != sys.executable or len(known) == 1 else known[1]
    meant = (str(own_python(env_id)), ENVIRONMENTS_PYTHON, CLASSIC_PYTHON)
    raise ConfigError(
        f"env.id = {env_id!r}: no package {module!r} in {', '.join(known)}; "
        f"{_remedy(module, default, find(module, default)[1], for_this=default in meant)}"
    )


def candidates(env_id: str) -> list[Path]:
    """The interpreters of this machine that may have it, in the order in which they are looked at."""
    own = own_python(env_id)
    others = (python for python in made() if python != own)
    here = [own, Path(ENVIRONMENTS_PYTHON), Path(CLASSIC_PYTHON), *others]
    return [*filter(_whole, here), Path(sys.executable)]


def made() -> list[Path]:
    """The interpreters that `quartet env install` made."""
    return [python for python in sorted(INSTALLED.glob("*/bin/python")) if _whole(python)]


def _whole(python: Path) -> bool:
    return python.exists() and not (python.parent.parent / UNFINISHED).exists()


def find(module: str, python: str) -> tuple[bool, list[str]]:
    """Whether an interpreter has an environment; else those that it has. Raises ConfigError."""
    done = run_in(python, FIND, module)
    return done.returncode == 0, done.stdout.split()


def run_in(python: str, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a short program in another interpreter to its end. Raises ConfigError where that cannot be."""
    command = [python, *ALONE, program, *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=FIND_SECONDS, check=False)
    except OSError as error:
        raise ConfigError(
            f"the interpreter {python!r} cannot be run: {error.strerror}; name another one"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the interpreter {python!r} said nothing for {FIND_SECONDS:.0f} s; name another one"
        ) from None


def _check(env_id: str, module: str, python: str) -> None:
    found, installed = find(module, python)
    if not found:
        raise ConfigError(
            f"env.id = {env_id!r}: no package {module!r} in {python}; "
            f"{_remedy(module, python, installed, for_this=True)}"
        )


def _remedy(module: str, python: str, installed: Sequence[str], *, for_this: bool) -> str:
    """What to do about an environment that is not installed, naming only what exists; `for_this`: the
    interpreter is meant for it, not one of the command's own or of another environment."""
    for other in (str(own_python(module)), ENVIRONMENTS_PYTHON):
        if other != python and _whole(Path(other)) and find(module, other)[0]:
            return f"{other} has it: name no envhost.python, or add --envhost.python {other}"
    folders = [file.parent for file in OWN.glob("*/pyproject.toml")]
    if here := next((folder for folder in folders if folder.name == module), None):
        own = f"give it an interpreter: quartet env install {here}"
        if for_this:
            there = f"install it there: {python} -m pip install -e {here}"
            return f"{own} (and name no envhost.python), or {there}"
        return own
    known = {name.replace("_", "-").lower() for name in (*installed, *(folder.name for folder in folders))}
    if close := difflib.get_close_matches(module.replace("_", "-"), sorted(known), n=1):
        return f"did you mean {close[0]!r}?"
    return (
        "give it an interpreter with quartet env install FOLDER_OR_NAME, or name one that has it: "
        "--envhost.python PATH" + (f"; known here: {', '.join(sorted(known))}" if known else "")
    )
