"""The deployment of one local run: the services' config files, and a look at them before anything starts.

1. What is in them is wired before (wiring.py). Keys of the launcher's own stay out: `gpus`, and of inference
   `python`, the interpreter that runs it, for an engine that is not installed in this one (`[envhost]
   python`, the environments' interpreter, is the host's own).
2. `check` runs every service's own `--preflight` on the files it would be started with: whatever a
   service would refuse is refused here, in its own sentence, before any service runs. It runs in this process
   where the service would run with this interpreter, unless it is told to run apart.
3. Every launch has a token of its own, which the first machine makes.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import runpy
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quartet.config import ConfigError
from quartet.config.refusals import ALSO, together
from quartet.kit.accelerator import has_driver
from quartet.kit.launched import make_token
from quartet.local.child import ChildSpec, child_environment
from quartet.local.context_parallel import check_context
from quartet.local.fork_client import possible
from quartet.local.hosts import HERE, Hosts
from quartet.local.ranks import rank_said
from quartet.local.toml_text import dumps
from quartet.local.wiring import VISIBLE, Table, service_of, token_file

CUDA = "cuda"
#: Services whose imports take seconds. Each has a module `preload` for the fork server.
LARGE = ("trainer", "inference")
#: Keys that are of one start: options of its command, and not in the file, with which somebody may start
#: the service by hand later.
OF_A_START = ("goes_on_with",)
#: Keys of services, each a table of functions of the user's.
OWN_FUNCTIONS = ("losses", "advantages")
# Of another process: a preflight imports pydantic and grpc only; for a loss of the user's torch, too, which
# takes a minute from a cold disk.
CHECK_SECONDS = 180.0


def write(wired: Mapping[str, Table], root: Path, hosts: Hosts = HERE, machine: int = 0) -> list[ChildSpec]:
    """Write the config files of a machine's processes under root/config and say how each is started.

    Raises ConfigError, OSError.
    """
    if "trainer" in wired:
        _check_ranks(wired["trainer"], hosts)
    folder = root / "config"
    folder.mkdir(parents=True, exist_ok=True)
    specs = []
    for name, table in wired.items():
        config_file = folder / f"{name}.toml"
        own = {
            key: value for key, value in table.items() if key not in (*_of_the_launcher(name), *OF_A_START)
        }
        config_file.touch(0o600)  # a judge's key may be in it
        try:
            config_file.write_text(dumps(own), encoding="utf-8")
        except OSError as error:  # a full disk names no file
            error.filename = str(config_file)
            raise
        server = table["server"]
        port_file = Path(server["port_file"]) if "port_file" in server else None
        if port_file is not None:
            port_file.parent.mkdir(parents=True, exist_ok=True)
        # Of the first machine's launcher, which announces it there.
        token = token_file(root / "data") if machine == 0 else None
        python, module = _interpreter(name, table), f"quartet_{service_of(name)}"
        command = [python, "-m", module, "@", str(config_file)]
        command += [f"--{key}={table[key]}" for key in OF_A_START if key in table]
        log_file = root / "logs" / f"{name}.log"
        environment = {VISIBLE: ",".join(table["gpus"])} if "gpus" in table else {}
        torchrun = _torchrun(name, table, hosts, machine)
        preload = f"{module}.preload" if not torchrun and _by_fork(name, table, python) else ""
        specs.append(
            ChildSpec(
                name,
                command,
                server["address"],
                log_file,
                port_file,
                environment,
                preload,
                token if server.get("token_file") == str(token) else None,
                on_device=bool(table.get("gpus")) or CUDA in (table.get("device"), _embedded_device(table)),
                imports_own=any(table.get(functions) for functions in OWN_FUNCTIONS),
                torchrun=torchrun,
            )
        )
    for file in {spec.token_file for spec in specs if spec.token_file is not None}:
        make_token(file)
    return specs


def _torchrun(process: str, table: Table, hosts: Hosts, machine: int) -> list[str]:
    """What starts ranks that have others on other machines; of one machine the trainer starts them itself."""
    if service_of(process) != "trainer" or hosts.trainers == 1:
        return []
    return hosts.torchrun(machine, table.get("ranks", 1))


def _check_ranks(trainer: Table, hosts: Hosts) -> None:
    """Those of all machines, of which each machine's trainer knows its own alone."""
    ranks, context = trainer.get("ranks", 1), trainer.get("context_parallel", 1)
    # What is no such number the trainer refuses.
    if isinstance(context, int) and isinstance(ranks, int) and min(context, ranks) > 0:
        try:
            check_context(context, hosts.trainers * ranks)
        except ConfigError as error:
            raise ConfigError(f"[trainer] {error}") from error


def _by_fork(process: str, table: Table, python: str) -> bool:
    """Whether the process may be a fork of one that has its imports."""
    return (
        service_of(process) in LARGE
        and python == sys.executable
        and table.get("engine") != "vllm"
        # Ranks are processes of torchrun.
        and table.get("ranks", 1) == 1
        # An import may initialise the driver, and no fork can use it then.
        and not has_driver()
        and possible()
    )


def _embedded_device(table: Table) -> Any:
    embedded = table.get("embedded")
    return embedded.get("device") if isinstance(embedded, dict) else None


def _of_the_launcher(process: str) -> tuple[str, ...]:
    return ("gpus", "python") if service_of(process) == "inference" else ("gpus",)


def _interpreter(process: str, table: Table) -> str:
    """What runs a process."""
    if service_of(process) != "inference" or "python" not in table:
        return sys.executable
    python = table["python"]
    found = shutil.which(os.path.expanduser(python)) if isinstance(python, str) else None
    if found is None:
        raise ConfigError(f"inference.python = {python!r} is refused: there is no such interpreter")
    return os.path.abspath(found)


async def check(
    specs: Sequence[ChildSpec], *, apart: bool = False, of_machine: bool = True, needs_gpus: bool = True
) -> None:
    """Let every service look at its config, and unless told otherwise at the machine; `apart` never in this
    process. Without `needs_gpus` one that wants a device which is not here looks at its config alone. Raises
    ConfigError with every refusal.
    """
    services = {service_of(spec.name) for spec in specs}
    if of_machine and "trainer" in services and (ranks := rank_said(os.environ)) is not None:
        raise ConfigError(
            f"this is rank {ranks[0]} of {ranks[1]} (RANK, WORLD_SIZE), and each would start services and a "
            "run of its own; unset both, and start it once. Ranks on this machine are trainer.ranks, and "
            "those on others trainer.nodes, with --hosts (docs/deploy.md)"
        )
    given = sorted({service_of(spec.name) for spec in specs if spec.environment.get(VISIBLE)})
    if of_machine and needs_gpus and given and not has_driver():
        raise ConfigError(
            f"{' and '.join(f'{service}.gpus' for service in given)} ask for GPUs, and this machine has none "
            "(no driver is loaded); leave gpus out of [trainer] and [inference], or set them to 0"
        )
    elsewhere = set() if needs_gpus else set(without_device(specs))

    def flag(spec: ChildSpec) -> str:
        # Ranks that follow the first one leave its folder and its address alone.
        looks = of_machine and spec.port_file is not None and service_of(spec.name) not in elsewhere
        return "--preflight" if looks else "--dry-run"

    said = await asyncio.gather(*(_refusal(spec, apart, flag(spec)) for spec in specs))
    refusals = [
        ConfigError(f"[{service_of(spec.name)}] {one}")
        for spec, refusal in zip(specs, said, strict=True)
        for one in refusal.split(ALSO)
        if one
    ]
    if refusals:
        raise together(refusals)


def without_device(specs: Sequence[ChildSpec]) -> list[str]:
    """The services that compute on GPUs or not at all, where this machine has none."""
    return [] if has_driver() else sorted({service_of(spec.name) for spec in specs if spec.on_device})


async def _refusal(spec: ChildSpec, apart: bool, flag: str) -> str:
    """What the service says against its config; empty where it accepts it."""
    # Nobody's functions are imported into this process.
    here = not (apart or spec.imports_own) and list(spec.command[:2]) == [sys.executable, "-m"]
    code, said = _preflight_here(spec, flag) if here else await _preflight_apart(spec, flag)
    if code == 0:
        return ""
    lines = said.strip().splitlines()
    # A refusal may have several lines.
    begins = max((number for number, line in enumerate(lines) if line.startswith("error: ")), default=-1)
    last = "\n".join(lines[begins:]) if lines else f"exit code {code}"
    module = spec.command[2]
    if f"No module named {module}" in last:
        return f"{module} is not installed for {spec.command[0]}; pip install the service {spec.name} there"
    # Where the key stands in the generated file is no news to whoever wrote another one, whose options have
    # the service's name in front.
    said = last.removeprefix("error: ").replace(f" (in {spec.command[-1]})", "")
    return re.sub(r"'--(?=[\w.]+ VALUE')", f"'--{service_of(spec.name)}.", said)


def _preflight_here(spec: ChildSpec, flag: str) -> tuple[object, str]:
    """Exit code and stderr. What a service imports to look at its config is mostly imported here already: a
    process of its own would take half a second of CPU time more."""
    _, _, module, *arguments = spec.command
    said, own_arguments = io.StringIO(), sys.argv
    sys.argv = [module, *arguments, flag]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            runpy.run_module(module, run_name="__main__")
    except SystemExit as ended:
        return ended.code or 0, said.getvalue()
    except Exception as error:  # noqa: BLE001 - as the last line of a process that dies of it
        return 1, f"{type(error).__name__}: {error}"
    finally:
        sys.argv = own_arguments
    return 0, ""


async def _preflight_apart(spec: ChildSpec, flag: str) -> tuple[object, str]:
    """Exit code and stderr, of an interpreter that may have other packages."""
    process = await asyncio.create_subprocess_exec(
        *spec.command, flag,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        env=child_environment(spec.environment),
    )  # fmt: skip
    try:
        _, stderr = await asyncio.wait_for(process.communicate(), CHECK_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
        return 1, f"did not check its config within {CHECK_SECONDS:.0f} s: {' '.join(spec.command)}"
    return process.returncode, stderr.decode(errors="replace")
