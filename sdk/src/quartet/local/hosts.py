"""The machines of a run that has several: how many it wants, which of its services are on which, and where
those are reached.

1. The trainer has the first `[trainer] nodes` machines (default 1), inference the next `[inference] nodes`.
   Without any of its own (default 0) it is on the first one, where orchestrator and envhost are.
2. `gpus`, `ranks` and `replicas` are of each machine.
3. Nobody here knows which ports are free on another machine, so they are counted from `first_port`: the
   trainer's, the one where its ranks meet, then those of inference's replicas. No two are equal, also where
   two names mean one machine.
4. What is reached from another machine listens at the name that its machine has here, all else on loopback.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address
from typing import Any, Final

from quartet.config import ConfigError
from quartet.local.ports import LAST_PORT

Table = dict[str, Any]

NODES: Final = "nodes"
#: Below those that local services get (ports.py).
FIRST_PORT: Final = 19_000
#: Of one machine; each is a process with the whole model.
MAX_REPLICAS: Final = 64
#: Of a run.
MAX_MACHINES: Final = 64
#: After each there is room for all ports of a run: two of the trainer, and those of all replicas.
FIRST_PORTS: Final = range(1024, LAST_PORT - MAX_MACHINES * MAX_REPLICAS)
#: The services that can have machines of their own, and how many they have at the least.
LEAST: Final = {"trainer": 1, "inference": 0}
#: A name, or an address but for IPv6.
NAME: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")
#: Addresses that are no machine's.
ANYWHERE: Final = ("0.0.0.0", "::")


@dataclass(frozen=True)
class Hosts:
    """The machines of a run, by the names by which they reach each other."""

    names: tuple[str, ...]
    #: How many of them, from the first one, have ranks of the trainer; the rest is inference's.
    trainers: int = 1
    first_port: int = FIRST_PORT
    #: Whether they are these, or stand for some that nobody knows yet.
    are_known: bool = True

    @property
    def are_several(self) -> bool:
        """Whether anything is reached from another machine."""
        return len(self.names) > 1

    def services_of(self, machine: int) -> tuple[str, ...]:
        """The services that have processes on it."""
        if machine:
            return ("trainer",) if machine < self.trainers else ("inference",)
        inference = () if len(self.names) > self.trainers else ("inference",)
        return ("trainer", *inference, "envhost", "orchestrator")

    def is_reached(self, service: str, machine: int) -> bool:
        """Whether other machines call the service's processes on this one: for weights, for samples."""
        if service == "trainer":
            return machine == 0 and len(self.names) > self.trainers
        return service == "inference" and machine > 0

    def address_of(self, machine: int, replica: int | None = None) -> str:
        """Of the trainer, or of a replica of inference; these count from 1."""
        return f"{bracketed(self.names[machine])}:{self.first_port + (0 if replica is None else 1 + replica)}"

    @property
    def all_kinds(self) -> tuple[int, ...]:
        """The first and the last: each of those between has the same processes as one of them."""
        return (0, len(self.names) - 1) if self.are_several else (0,)

    @property
    def meeting(self) -> tuple[str, int]:
        """Where the trainer's ranks meet, if they are on several machines."""
        return self.names[0], self.first_port + 1

    def torchrun(self, machine: int, ranks: int) -> list[str]:
        """Arguments of an interpreter that starts so many of the trainer's ranks, before `-m MODULE`."""
        host, port = self.meeting
        meeting = ["--master-addr", host, "--master-port", str(port)]
        of_all = ["--nnodes", str(self.trainers), "--node-rank", str(machine)]
        return ["-m", "torch.distributed.run", *of_all, "--nproc-per-node", str(ranks), *meeting]


#: This machine alone: nothing is reached from outside.
HERE: Final = Hosts(("localhost",))


def nodes_of(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """How many machines each service has. Raises ConfigError."""
    nodes = {}
    for service, least in LEAST.items():
        given = tables.get(service, {}).get(NODES, least)
        if type(given) is not int or not least <= given <= MAX_MACHINES:
            raise ConfigError(
                f"{service}.{NODES} = {given!r} is refused: give how many machines it has, {least} to "
                f"{MAX_MACHINES}"
            )
        nodes[service] = given
    if sum(nodes.values()) > MAX_MACHINES:
        raise ConfigError(
            f"trainer.{NODES} = {nodes['trainer']} and inference.{NODES} = {nodes['inference']} are more "
            f"than {MAX_MACHINES} machines together; set them to fewer"
        )
    return nodes


def machines_of(tables: Mapping[str, Mapping[str, Any]]) -> int:
    """How many machines the run wants. Raises ConfigError."""
    return sum(nodes_of(tables).values())


def hosts_of(
    tables: Mapping[str, Mapping[str, Any]], names: Sequence[str] | None, first_port: int = FIRST_PORT
) -> Hosts:
    """The machines, as they were named. Raises ConfigError."""
    nodes = nodes_of(tables)
    machines = sum(nodes.values())
    given = [f"{service}.{NODES} = {count}" for service, count in nodes.items() if count]
    wanted = f"{' and '.join(given)} {'want' if len(given) > 1 else 'wants'} {machines}"
    if names is None:
        if machines == 1:
            return HERE
        raise ConfigError(
            f"{wanted} machines; name them, this one first (--hosts A,B,...), or hand the run to SLURM "
            "(quartet slurm)"
        )
    _check_names(names)
    if len(names) != machines:
        raise ConfigError(
            f"--hosts names {len(names)}, and {wanted}; name as many machines, or set {NODES} in [trainer] "
            "and [inference]"
        )
    if machines == 1:
        return HERE
    if first_port not in FIRST_PORTS:
        raise ConfigError(
            f"--first-port {first_port} is refused: give one from {FIRST_PORTS[0]} to {FIRST_PORTS[-1]}"
        )
    return Hosts(tuple(names), nodes["trainer"], first_port)


def unnamed(tables: Mapping[str, Mapping[str, Any]]) -> Hosts:
    """What stands for machines that nobody knows yet, to check what is said of them. Raises ConfigError."""
    nodes = nodes_of(tables)
    if sum(nodes.values()) == 1:
        return HERE
    return Hosts(("127.0.0.1",) * sum(nodes.values()), nodes["trainer"], are_known=False)


def check_alone(tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Where everything runs on one machine. Raises ConfigError."""
    for service, count in nodes_of(tables).items():
        if count > LEAST[service]:
            raise ConfigError(
                f"{service}.{NODES} = {count} is refused: this runs on one machine, and several are for "
                "'quartet rl --hosts' and 'quartet slurm'; leave it out"
            )


def bracketed(host: str) -> str:
    """As it stands before a port."""
    return f"[{host}]" if ":" in host else host


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if (not NAME.fullmatch(name) and not _is_ipv6(name)) or name in ANYWHERE:
            raise ConfigError(
                f"--hosts {','.join(names)} is refused: {name!r} is no name or address of a machine; give "
                "them as they reach each other, without ports"
            )
    known = [name.lower() for name in names]
    if twice := next((name for name in known if known.count(name) > 1), ""):
        raise ConfigError(f"--hosts names {twice} twice; give each machine once")


def _is_ipv6(name: str) -> bool:
    """Whether it is an address of IPv6."""
    try:
        IPv6Address(name)
    except ValueError:
        return False
    return True
