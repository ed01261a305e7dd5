"""The deployment of one local run: configs of four services that point at each other, written to files,
checked before anything starts.

1. What the user wrote in [trainer], [orchestrator], [inference] and [envhost] wins over what the launcher
   would say, except for the port 0, which becomes a free port, and the port file.
2. Three keys are the launcher's own: `[inference] replicas = N` makes N processes of equal config, each with
   an address; `[inference] python` is the interpreter that runs them, for an engine that is not installed in
   this one (`[envhost] python`, the environments' interpreter, is the host's own); `gpus` in [trainer] and
   [inference] divides the machine's devices among the processes (devices.py).
3. `check` runs every service's own `--preflight` on the files it would be started with: whatever a
   service would refuse is refused here, in its own sentence, before any service runs. It runs in this process
   where the service would run with this interpreter, unless it is told to run apart.
4. Every service on loopback asks for the launch's token (quartet.kit.launched), which `write` makes, but
   where the user gave it a token or TLS of its own.
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
from quartet.kit.security import is_loopback
from quartet.local.child import ChildSpec, child_environment
from quartet.local.devices import shared_out
from quartet.local.fork_client import possible
from quartet.local.ports import AddressRefused, resolve
from quartet.local.ranks import rank_said
from quartet.local.toml_text import dumps

SERVICES = ("trainer", "inference", "envhost", "orchestrator")
ANY_PORT = "127.0.0.1:0"
VISIBLE = "CUDA_VISIBLE_DEVICES"
CUDA = "cuda"
#: Services whose imports take seconds. Each has a module `preload` for the fork server.
LARGE = ("trainer", "inference")
MAX_REPLICAS = 64  # of one machine; each is a process with the whole model
# Of another interpreter: a preflight imports pydantic and grpc only; more means a broken installation.
CHECK_SECONDS = 60.0

Table = dict[str, Any]


def wire(model: str, data: Path, tables: Mapping[str, Table]) -> dict[str, Table]:
    """The complete config table of each process of the services in `tables`, every address in it final."""
    tables = {name: _by_field(table) for name, table in tables.items()}
    for name, table in tables.items():
        if not isinstance(server := table.get("server", {}), dict):
            raise ConfigError(f"{name}.server = {server!r} is refused: should be a table")
        table["server"] = _by_field(server)
    processes = _processes(shared_out(tables, os.environ.get(VISIBLE)))
    servers = [dict(table.get("server", {})) for table in processes.values()]
    try:
        resolved = resolve([one.get("address", ANY_PORT) for one in servers])
    except AddressRefused as error:
        raise ConfigError(f"{service_of(list(processes)[error.at])}.server.address: {error}") from error
    addresses: dict[str, list[str]] = {name: [] for name in SERVICES}
    for name, address in zip(processes, resolved, strict=True):
        addresses[service_of(name)].append(address)
    trainer = next(iter(addresses["trainer"]), None)
    known: dict[str, Table] = {
        "trainer": {"state_dir": str(data / "trainer")},
        "inference": {"model": model, "weights_address": trainer},
        "envhost": {"inference_addresses": addresses["inference"]},
        "orchestrator": {
            "trainer_address": trainer,
            "envhost_addresses": addresses["envhost"],
            "inference_addresses": addresses["inference"],
            "data_dir": str(data / "orchestrator"),
        },
    }
    wired: dict[str, Table] = {}
    for (name, table), server, address in zip(processes.items(), servers, resolved, strict=True):
        if is_loopback(address) and not server.get("token_file") and not server.get("tls"):
            server["token_file"] = str(_token_file(data))
        server |= {"address": address, "port_file": str(data / f"{name}.port")}
        wired[name] = {**known[service_of(name)], **table, "server": server}
    return wired


def _token_file(data: Path) -> Path:
    return data.absolute() / "token"


def _by_field(table: Mapping[str, Any]) -> Table:
    """With `state_dir` for `state-dir`, which would else stand beside what is said of it here."""
    return {key.replace("-", "_"): value for key, value in table.items()}


def service_of(process: str) -> str:
    """The service that a process runs: "inference" for "inference-2"."""
    return process.partition("-")[0]


def _processes(tables: Mapping[str, Table]) -> dict[str, Table]:
    """The table of each process, by its name: a service's, or "inference-1", "inference-2", ..."""
    processes: dict[str, Table] = {}
    for name, table in tables.items():
        own = {key: value for key, value in table.items() if name != "inference" or key != "replicas"}
        count = table.get("replicas", 1) if name == "inference" else 1
        if type(count) is not int or not 1 <= count <= MAX_REPLICAS:
            raise ConfigError(f"inference.replicas = {count!r} is refused: give 1 to {MAX_REPLICAS}")
        metrics = str(own.get("server", {}).get("metrics_address", ""))
        if count > 1 and metrics and not metrics.endswith(":0"):
            raise ConfigError(
                f"inference.server.metrics_address = {metrics!r} is one port for {count} replicas; "
                "write port 0, or leave it out"
            )
        names = [name] if count == 1 else [f"{name}-{number}" for number in range(1, count + 1)]
        devices = own.get("gpus", [])
        share = len(devices) // count
        for number, process in enumerate(names):
            part = {"gpus": devices[number * share : (number + 1) * share]} if "gpus" in own else {}
            processes[process] = {**own, **part}
    return processes


def write(wired: Mapping[str, Table], root: Path) -> list[ChildSpec]:
    """Write the config files under root/config and say how each process is started."""
    folder = root / "config"
    folder.mkdir(parents=True, exist_ok=True)
    specs = []
    for name, table in wired.items():
        config_file = folder / f"{name}.toml"
        own = {key: value for key, value in table.items() if key not in _of_the_launcher(name)}
        config_file.touch(0o600)  # a judge's key may be in it
        config_file.write_text(dumps(own), encoding="utf-8")
        port_file = Path(table["server"]["port_file"])
        port_file.parent.mkdir(parents=True, exist_ok=True)
        token_file = _token_file(port_file.parent)
        token = token_file if table["server"].get("token_file") == str(token_file) else None
        python, module = _interpreter(name, table), f"quartet_{service_of(name)}"
        command = [python, "-m", module, "@", str(config_file)]
        log_file = root / "logs" / f"{name}.log"
        environment = {VISIBLE: ",".join(table["gpus"])} if "gpus" in table else {}
        preload = f"{module}.preload" if _by_fork(name, table, python) else ""
        specs.append(
            ChildSpec(
                name,
                command,
                table["server"]["address"],
                log_file,
                port_file,
                environment,
                preload,
                token,
                on_device=bool(table.get("gpus")) or CUDA in (table.get("device"), _embedded_device(table)),
            )
        )
    for file in {spec.token_file for spec in specs if spec.token_file is not None}:
        make_token(file)
    return specs


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
            "run of its own; unset both, and start it once. Ranks on this machine are trainer.ranks; those "
            "of a trainer on several machines are started by torchrun -m quartet_trainer, and its runs by "
            "'quartet submit' (docs/ranks.md)"
        )
    given = sorted({service_of(spec.name) for spec in specs if spec.environment.get(VISIBLE)})
    if of_machine and needs_gpus and given and not has_driver():
        raise ConfigError(
            f"{' and '.join(f'{service}.gpus' for service in given)} ask for GPUs, and this machine has none "
            "(no driver is loaded); leave gpus out of [trainer] and [inference], or set them to 0"
        )
    elsewhere = set() if needs_gpus else set(without_device(specs))

    def flag(spec: ChildSpec) -> str:
        return "--preflight" if of_machine and service_of(spec.name) not in elsewhere else "--dry-run"

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
    here = not apart and list(spec.command[:2]) == [sys.executable, "-m"]
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
