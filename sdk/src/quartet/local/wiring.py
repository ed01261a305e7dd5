"""The config tables of a run's processes, so that its services find each other and nobody else finds them.

1. What the user wrote in [trainer], [orchestrator], [inference] and [envhost] wins over what is said here,
   except for the port 0, which becomes a free port, and the port file. An address that other machines call is
   refused: it follows from their names.
2. Some keys are the launcher's own: `[inference] replicas = N` makes N processes of equal config, each with
   an address; `gpus` in [trainer] and [inference] divides a machine's devices among the processes
   (devices.py); `nodes` says which machines they are on (hosts.py). `[inference] python` is read later
   (deployment.py).
3. Every service asks for the launch's token (quartet.kit.launched), but where the user gave it a token or TLS
   of its own, or has it listen off loopback; those that the launcher calls (CALLED), always. Between machines
   it is shown in plaintext; there the user gives all doors or none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quartet.config import ConfigError
from quartet.kit.security import is_loopback
from quartet.local.devices import shared_out
from quartet.local.hosts import HERE, MAX_REPLICAS, NODES, Hosts, bracketed, check_alone
from quartet.local.ports import AddressRefused, check_known, check_reached, resolve

SERVICES = ("trainer", "inference", "envhost", "orchestrator")
ANY_PORT = "127.0.0.1:0"
VISIBLE = "CUDA_VISIBLE_DEVICES"
#: How each service calls others: the key, and whom.
CALLS: Final = {
    "orchestrator": ("security", ("trainer", "inference", "envhost")),
    "envhost": ("inference_security", ("inference",)),
    "inference": ("weights_security", ("trainer", "inference")),
}
#: Whom the launcher itself calls: the orchestrator; where there is none, either of the others.
CALLED: Final = ("orchestrator", "trainer", "envhost")
#: Of [server]: either keeps strangers out.
DOORS: Final = ("tls", "token_file")

Table = dict[str, Any]


@dataclass(frozen=True)
class _Process:
    """A process that is to be."""

    name: str
    service: str
    machine: int
    table: Table
    #: Of inference, from 1 on, over all machines.
    replica: int | None = None

    @property
    def serves(self) -> bool:
        """Whether anybody calls it: of the trainer's ranks only the first does."""
        return self.service != "trainer" or self.machine == 0


def wire(model: str, data: Path, tables: Mapping[str, Table]) -> dict[str, Table]:
    """The complete config table of each process of the services in `tables`, every address in it final."""
    check_alone(tables)
    (here,) = wire_machines(model, data, tables, HERE)
    return here


def wire_machines(
    model: str,
    data: Path,
    tables: Mapping[str, Table],
    hosts: Hosts,
    goes_on_with: str = "",
    teacher: str | None = None,
) -> list[dict[str, Table]]:
    """The same for each machine. Its devices are numbers, but for those of the first one, where this runs.
    The orchestrator is told the run that is gone on with, and the address of the run's teacher, where there
    is one: the file that names it is that of whoever launches it."""
    tables = {name: _by_field(table) for name, table in tables.items()}
    for name, table in tables.items():
        if not isinstance(server := table.get("server", {}), dict):
            raise ConfigError(f"{name}.server = {server!r} is refused: should be a table")
        table["server"] = _by_field(server)
        table.pop(NODES, None)
    processes = list(_processes(tables, hosts))
    addresses = _addresses(processes, hosts)
    of_service: dict[str, list[str]] = {name: [] for name in SERVICES}
    called = CALLED[:1] if CALLED[0] in tables else CALLED[1:]
    for process, address in zip(processes, addresses, strict=True):
        if process.service in called:
            _check_called_here(process, address)
        if process.serves:
            of_service[process.service].append(address)
    trainer = next(iter(of_service["trainer"]), None)
    known: dict[str, Table] = {
        "trainer": {"state_dir": str(data / "trainer")},
        "inference": {"model": model, "weights_address": trainer},
        "envhost": {"inference_addresses": of_service["inference"]},
        "orchestrator": {
            "trainer_address": trainer,
            "envhost_addresses": of_service["envhost"],
            "inference_addresses": of_service["inference"],
            "data_dir": str(data / "orchestrator"),
            **({"goes_on_with": goes_on_with} if goes_on_with else {}),
            **({"teacher_addresses": [teacher]} if teacher else {}),
        },
    }
    if hosts.are_several:
        for service, security in _doors(tables, data).items():
            known[service] |= security
    wired: list[dict[str, Table]] = [{} for _ in hosts.names]
    for process, address in zip(processes, addresses, strict=True):
        server = {**process.table["server"], "address": address} if process.serves else {"address": ANY_PORT}
        if not server.get("token_file") and not server.get("tls"):
            if hosts.is_reached(process.service, process.machine):
                server |= {"token_file": str(token_file(data)), "insecure_ok_off_loopback": True}
            elif is_loopback(address):
                server["token_file"] = str(token_file(data))
        if process.serves:
            server["port_file"] = str(data / f"{process.name}.port")
        wired[process.machine][process.name] = {**known[process.service], **process.table, "server": server}
    return wired


def _check_called_here(process: _Process, address: str) -> None:
    """Whoever starts it calls it, by no other door than the launch's. Raises ConfigError."""
    server = process.table["server"]
    own = [key for key in DOORS if server.get(key)] + ([] if is_loopback(address) else ["address"])
    if own:
        raise ConfigError(
            f"{process.service}.server.{own[0]} = {server[own[0]]!r} is refused: what starts it calls it on "
            "loopback, by the token of the launch; leave it out, and reach it from elsewhere by a tunnel, "
            "with a copy of that token (docs/deploy.md)"
        )


def token_file(data: Path) -> Path:
    """Where the launch's token is."""
    return data.absolute() / "token"


def service_of(process: str) -> str:
    """The service that a process runs: "inference" for "inference-2"."""
    return process.partition("-")[0]


def _by_field(table: Mapping[str, Any]) -> Table:
    """With `state_dir` for `state-dir`, which would else stand beside what is said of it here."""
    return {key.replace("-", "_"): value for key, value in table.items()}


def _processes(tables: Mapping[str, Table], hosts: Hosts) -> Iterator[_Process]:
    """A service's is called after it; "inference-1", "inference-2", ... where there are several, and
    "trainer-2" on the second machine."""
    visible = os.environ.get(VISIBLE)
    shares = []
    for machine in range(len(hosts.names)):
        there = {name: tables[name] for name in hosts.services_of(machine) if name in tables}
        here = machine == 0 and hosts.are_known
        shares.append(shared_out(there, visible if here else None))
    replicas = [_replicas(share["inference"]) if "inference" in share else 0 for share in shares]
    numbered = 0
    for machine, share in enumerate(shares):
        for service, table in share.items():
            if service != "inference":
                name = service if machine == 0 else f"{service}-{machine + 1}"
                yield _Process(name, service, machine, table)
                continue
            own = {key: value for key, value in table.items() if key != "replicas"}
            devices = own.get("gpus", [])
            span = len(devices) // replicas[machine]
            for number in range(replicas[machine]):
                numbered += 1
                part = {"gpus": devices[number * span : (number + 1) * span]} if "gpus" in own else {}
                name = service if sum(replicas) == 1 else f"{service}-{numbered}"
                yield _Process(name, service, machine, {**own, **part}, numbered)


def _replicas(inference: Table) -> int:
    """How many there are on a machine. Raises ConfigError."""
    count = inference.get("replicas", 1)
    if type(count) is not int or not 1 <= count <= MAX_REPLICAS:
        raise ConfigError(f"inference.replicas = {count!r} is refused: give 1 to {MAX_REPLICAS}")
    front = inference.get("openai")
    fixed = {
        "server.metrics_address": inference["server"].get("metrics_address"),
        "openai.address": front.get("address") if isinstance(front, dict) else None,
    }
    for key, address in fixed.items():
        if count > 1 and address and not str(address).endswith(":0"):
            raise ConfigError(
                f"inference.{key} = {address!r} is one port for {count} replicas; write port 0, or leave it "
                "out"
            )
    return count


def _addresses(processes: list[_Process], hosts: Hosts) -> list[str]:
    """Where each listens. Raises ConfigError where one of this machine cannot."""
    asked: dict[int, object] = {}  # of this machine, by its place among the processes
    found: list[str] = []
    for at, process in enumerate(processes):
        server = process.table["server"]
        if not hosts.is_reached(process.service, process.machine):
            found.append(ANY_PORT)
            if process.machine == 0:
                asked[at] = server.get("address", ANY_PORT)
            continue
        if "address" in server:
            raise ConfigError(
                f"{process.service}.server.address = {server['address']!r} is refused: other machines reach "
                "it by the names of --hosts, at ports from --first-port on; leave it out"
            )
        found.append(hosts.address_of(process.machine, process.replica))
        if process.machine == 0 and hosts.are_known:
            asked[at] = found[-1]
    meeting = []
    if hosts.are_several and hosts.are_known:
        check_known(hosts.names)
        check_reached(hosts.names, 0)
        # Ranks bind it later; nobody here is to be given it meanwhile.
        meeting = [f"{bracketed(hosts.meeting[0])}:{hosts.meeting[1]}"] if hosts.trainers > 1 else []
    try:
        resolved = resolve([*asked.values(), *meeting])
    except AddressRefused as error:
        refused = processes[list(asked)[error.at]] if error.at < len(asked) else None
        if refused is None or hosts.is_reached(refused.service, refused.machine):
            raise ConfigError(
                f"--hosts and --first-port: {error.why}; the first of the hosts is this machine, by a name "
                "or an address of its own, and the port is a free one"
            ) from error
        raise ConfigError(f"{refused.service}.server.address: {error}") from error
    for at, address in zip(asked, resolved, strict=False):
        found[at] = address
    return found


def _doors(tables: Mapping[str, Table], data: Path) -> dict[str, Table]:
    """How services call each other over several machines: as the launch says, or by the user's own doors, all
    of them. Raises ConfigError where some are missing."""
    served = sorted({one for _, called in CALLS.values() for one in called} & tables.keys())
    own = {
        f"{service}.server.{DOORS[0]} or {DOORS[1]}": any(tables[service]["server"].get(key) for key in DOORS)
        for service in served
    }
    own |= {f"{name}.{key}": key in tables[name] for name, (key, _) in CALLS.items() if name in tables}
    given = [key for key, is_given in own.items() if is_given]
    lacking = [key for key, is_given in own.items() if not is_given]
    if given and lacking:
        raise ConfigError(
            f"{given[0]} is set, and {', '.join(lacking)} not: over several machines services have doors by "
            "the launcher or by you; set those, too, or none"
        )
    if given:
        return {}
    shown = {"token_file": str(token_file(data)), "insecure_ok_off_loopback": True}
    return {name: {key: shown} for name, (key, _) in CALLS.items()}
