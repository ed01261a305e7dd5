"""Runs over several machines: who is where, who calls whom by which door, and what they tell each other."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from quartet.cli import node
from quartet.config import ConfigError
from quartet.local import others as others_module
from quartet.local import wiring
from quartet.local.deployment import write
from quartet.local.devices import as_seen
from quartet.local.hosts import HERE, Hosts, hosts_of, machines_of, unnamed
from quartet.local.others import Others
from quartet.local.plan import PLAN, Plan, Report, read_plan, read_report, write_plan, write_report
from quartet.local.supervisor import ServiceFailed, State, Status
from quartet.local.wiring import SERVICES, wire, wire_machines

LOOPBACKS = ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5")


def tables(**given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: given.get(name, {}) for name in SERVICES}


def placed(given: Mapping[str, dict[str, Any]], data: Path) -> list[dict[str, Any]]:
    hosts = hosts_of(given, LOOPBACKS[: machines_of(given)])
    return wire_machines("models/x", data, given, hosts)


def test_the_trainer_has_the_first_machines_and_inference_the_next(tmp_path: Path) -> None:
    """hosts.py 1, 2, 3."""
    given = tables(trainer={"nodes": 2, "ranks": 2}, inference={"nodes": 2, "replicas": 2})
    machines = placed(given, tmp_path / "data")
    assert [list(machine) for machine in machines] == [
        ["trainer", "envhost", "orchestrator"],
        ["trainer-2"],
        ["inference-1", "inference-2"],
        ["inference-3", "inference-4"],
    ]
    trainer, replicas = "127.0.0.2:19000", [f"127.0.0.{4 + n // 2}:{19002 + n}" for n in range(4)]
    first = machines[0]
    assert first["trainer"]["server"]["address"] == trainer
    assert first["orchestrator"]["trainer_address"] == trainer
    assert first["orchestrator"]["inference_addresses"] == first["envhost"]["inference_addresses"] == replicas
    assert first["orchestrator"]["envhost_addresses"] == [first["envhost"]["server"]["address"]]
    assert first["envhost"]["server"]["address"].startswith("127.0.0.1:")
    for machine in machines[2:]:
        for table in machine.values():
            assert table["weights_address"] == trainer and table["server"]["address"] in replicas
    assert all("nodes" not in table for machine in machines for table in machine.values())


def test_ranks_of_several_machines_are_torchruns_and_only_the_first_serves(tmp_path: Path) -> None:
    given = tables(trainer={"nodes": 2, "ranks": 2})
    hosts = hosts_of(given, LOOPBACKS[:2], 5000)
    machines = wire_machines("models/x", tmp_path / "data", given, hosts)
    assert "inference" in machines[0], "beside the trainer"
    for number, machine in enumerate(machines):
        specs = {one.name: one for one in write(machine, tmp_path, hosts, number)}
        spec = specs["trainer" if number == 0 else "trainer-2"]
        asked = (
            f"--nnodes 2 --node-rank {number} --nproc-per-node 2 --master-addr 127.0.0.2 --master-port 5001"
        )
        assert " ".join(spec.started_as[1:]).startswith(
            f"-m torch.distributed.run {asked} -m quartet_trainer @ "
        )
        assert list(spec.command[1:3]) == ["-m", "quartet_trainer"], "what looks at the config is one process"
        assert (spec.port_file is None) == (number == 1) and not spec.preload
    assert machines[0]["trainer"]["server"]["address"].startswith("127.0.0.1:"), "no machine calls it"


def test_doors_between_machines_ask_for_the_token_of_the_launch(tmp_path: Path) -> None:
    """wiring.py 3, on addresses that are not loopback's."""
    given = tables(inference={"nodes": 1})
    hosts = Hosts(("a.invalid", "b.invalid"), are_known=False)
    data = tmp_path / "data"
    machines = wire_machines("models/x", data, given, hosts)
    every = {name: table for machine in machines for name, table in machine.items()}
    shown = {"token_file": str(data / "token"), "insecure_ok_off_loopback": True}
    for name, key in (
        ("orchestrator", "security"),
        ("envhost", "inference_security"),
        ("inference", "weights_security"),
    ):
        assert every[name][key] == shown
    assert {name: table["server"]["token_file"] for name, table in every.items()} == dict.fromkeys(
        every, str(data / "token")
    )
    opened = {name for name, table in every.items() if "insecure_ok_off_loopback" in table["server"]}
    assert opened == {"trainer", "inference"}
    write(machines[0], tmp_path, hosts)
    token = (data / "token").read_text()
    write(machines[1], tmp_path, hosts, 1)
    assert (data / "token").read_text() == token, "the first machine makes it"


def test_tls_between_machines_is_the_users_on_both_sides(tmp_path: Path) -> None:
    server = {"tls": {"cert_file": "c", "key_file": "k"}, "token_file": "mine"}
    given = tables(inference={"nodes": 1, "server": server})
    with pytest.raises(
        ConfigError, match=r"inference\.server\.tls is set, and orchestrator\.security is not"
    ):
        placed(given, tmp_path)
    security = {"ca_file": "a", "token_file": "mine"}
    given["orchestrator"] = {"security": security}
    given["envhost"] = {"inference_security": security}
    machines = placed(given, tmp_path)
    assert machines[0]["orchestrator"]["security"] == security
    asked = machines[1]["inference"]["server"]
    assert asked["tls"] == server["tls"] and "insecure_ok_off_loopback" not in asked


def test_devices_are_those_of_each_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    machines = placed(tables(trainer={"nodes": 2, "gpus": 2}, inference={"nodes": 1, "gpus": 4}), tmp_path)
    assert machines[0]["trainer"]["gpus"] == ["5", "6"] and machines[0]["trainer"]["ranks"] == 2
    assert machines[1]["trainer-2"]["gpus"] == ["0", "1"], "by number: that machine knows its own"
    assert [table["gpus"] for table in machines[2].values()] == [["0"], ["1"], ["2"], ["3"]]
    beside = placed(tables(trainer={"nodes": 2, "gpus": 2}, inference={"gpus": 1}), tmp_path)
    assert (beside[0]["inference"]["gpus"], beside[0]["trainer"]["gpus"]) == (["5"], ["6", "7"])
    assert beside[1]["trainer-2"]["gpus"] == ["0", "1"]
    assert as_seen(["0", "2"], "a,b,c") == ["a", "c"] and as_seen(["0", "2"], None) == ["0", "2"]
    with pytest.raises(
        ConfigError, match=r"CUDA_VISIBLE_DEVICES=a,b leaves 2 devices .* device 2, counted from 0"
    ):
        as_seen(["0", "2"], "a,b")


@pytest.mark.parametrize(
    ("given", "names", "why"),
    [
        (tables(trainer={"nodes": 0}), None, r"trainer\.nodes = 0 is refused: give how many"),
        (tables(inference={"nodes": True}), None, r"inference\.nodes = True is refused"),
        (tables(trainer={"nodes": 65}), None, r"trainer\.nodes = 65 is refused"),
        (tables(trainer={"nodes": 2}), None, r"trainer\.nodes = 2 wants 2 machines; name them"),
        (
            tables(inference={"nodes": 1}),
            ("a",),
            r"names 1, and trainer\.nodes = 1 and inference\.nodes = 1 want 2",
        ),
        (tables(), ("a", "b"), r"--hosts names 2, and trainer\.nodes = 1 wants 1"),
        (tables(inference={"nodes": 1}), ("a", "a"), "--hosts names a twice"),
        (tables(inference={"nodes": 1}), ("a", ""), "'' is no name or address"),
        (tables(inference={"nodes": 1}), ("a", "b:22"), "'b:22' is no name .* without ports"),
    ],
)
def test_machines_that_do_not_fit_are_refused(
    given: dict[str, dict[str, Any]], names: tuple[str, ...] | None, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        hosts_of(given, names)


def test_a_first_port_leaves_room_for_the_others() -> None:
    given = tables(inference={"nodes": 1})
    for port in (80, 65530):
        with pytest.raises(ConfigError, match=f"--first-port {port} is refused: give one from 1024 to "):
            hosts_of(given, ("a", "b"), port)
    assert hosts_of(tables(), ("a",)) is HERE and unnamed(tables()) is HERE


def test_what_other_machines_call_is_where_the_hosts_say(tmp_path: Path) -> None:
    given = tables(inference={"nodes": 1, "server": {"address": "0.0.0.0:9000"}})
    with pytest.raises(
        ConfigError, match=r"inference\.server\.address = '0\.0\.0\.0:9000' is refused: other mach"
    ):
        placed(given, tmp_path)
    with pytest.raises(ConfigError, match=r"--hosts and --first-port: cannot listen on a\.invalid:19000"):
        wire_machines("m", tmp_path, tables(inference={"nodes": 1}), Hosts(("a.invalid", "b.invalid")))
    with pytest.raises(ConfigError, match=r"trainer\.nodes = 2 is refused: this runs on one machine"):
        wire("m", tmp_path, tables(trainer={"nodes": 2}))


def test_a_name_that_means_loopback_on_its_own_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian's installer writes /etc/hosts."""
    monkeypatch.setattr(wiring, "is_only_here", lambda host: host == "debian")
    with pytest.raises(ConfigError, match="debian is an address of loopback on that machine itself"):
        wiring.check_reached(("debian", "other"), 0)
    wiring.check_reached(("debian", "other"), 1)
    wiring.check_reached(("debian",), 0)


def test_ipv6_addresses_stand_in_brackets_before_ports() -> None:
    hosts = Hosts(("fd00::1", "fd00::2"))
    assert (hosts.address_of(0), hosts.address_of(1, 1)) == ("[fd00::1]:19000", "[fd00::2]:19002")


def plan_of(*names: str) -> Plan:
    return Plan.of(Hosts(names), [{} for _ in names])


def test_a_plan_and_reports_are_read_as_they_were_written(tmp_path: Path) -> None:
    """plan.py 1, 3, 4."""
    assert read_plan(tmp_path) is None
    machines = placed(tables(inference={"nodes": 1}), tmp_path / "data")
    plan = Plan.of(Hosts(LOOPBACKS[:2]), machines)
    write_plan(tmp_path, plan)
    assert read_plan(tmp_path) == plan and plan.launch != Plan.of(plan.hosts, machines).launch
    assert stat.S_IMODE((tmp_path / "machines" / PLAN).stat().st_mode) == 0o600, "a judge's key may be in it"
    status = Status("inference", "b:1", State.BACKOFF, restarts=2, pid=7)
    report = Report(launch=plan.launch, state="up", statuses=(status,))
    write_report(tmp_path, 1, report)
    assert read_report(tmp_path, 1, plan.launch) == report
    assert (
        read_report(tmp_path, 1, "another launch") is None and read_report(tmp_path, 2, plan.launch) is None
    )


def test_a_plan_of_somebody_else_or_of_another_release_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """plan.py 5."""
    write_plan(tmp_path, plan_of("a", "b"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(
            ConfigError, match="is not this user's own; start the run and its nodes as one user"
        ):
            read_plan(tmp_path)
    (tmp_path / "machines" / PLAN).write_text('{"launch": 1}')
    with pytest.raises(ConfigError, match="is of another release; install the same one on all machines"):
        read_plan(tmp_path)


async def test_a_machine_that_fails_fails_the_run_and_one_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """others.py 1, 2, 3."""
    monkeypatch.setattr(others_module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(others_module, "SILENT_SECONDS", 0.3)
    plan = plan_of("a", "b")
    others = Others(tmp_path, plan)
    others.begin()
    lines: list[str] = []
    naming = asyncio.create_task(others.name_missing(lines.append))
    up = asyncio.create_task(others.wait_up())

    async def told(count: int) -> str:
        async with asyncio.timeout(10):
            while True:
                if len(lines) >= count:
                    return lines[count - 1]
                await asyncio.sleep(0.01)

    assert await told(1) == f"waiting for b; start there: quartet node {tmp_path} --host b"
    assert not up.done()
    write_report(tmp_path, 1, Report(launch=plan.launch, state="up", statuses=(Status("inference", "b:1"),)))
    assert await told(2) == "b is there"
    await asyncio.wait_for(up, 10)
    assert [status.name for status in others.statuses] == ["inference"]
    assert (await told(3)).startswith("waiting for b;"), "nothing is heard of it"
    write_report(tmp_path, 1, Report(launch=plan.launch, state="up", beat=1))
    assert await told(4) == "b is there"
    write_report(tmp_path, 1, Report(launch=plan.launch, state="left"))
    assert (await told(5)).startswith("waiting for b;")
    naming.cancel()
    write_report(tmp_path, 1, Report(launch=plan.launch, state="failed", said="no such device"))
    with pytest.raises(ServiceFailed, match="on b: no such device"):
        await asyncio.wait_for(others.wait_failed(), 10)
    others.end()
    ended = read_plan(tmp_path)
    assert ended is not None and ended.ended and ended.launch == plan.launch


def test_where_there_is_one_machine_nothing_is_written(tmp_path: Path) -> None:
    others = Others(tmp_path, Plan.of(HERE, [{}]))
    others.begin()
    others.end()
    assert list(tmp_path.iterdir()) == [] and others.statuses == []


def test_a_node_knows_which_machine_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("a", "b", "c")
    assert node._machine(plan, "c") == 2
    monkeypatch.setattr(node, "_own_names", lambda: {"b", "b.net"})
    assert node._machine(plan, None) == 1
    with pytest.raises(ConfigError, match="--host d is none of a, b, c"):
        node._machine(plan, "d")
    with pytest.raises(ConfigError, match="a is the first machine, where 'quartet rl' runs"):
        node._machine(plan, "a")
    monkeypatch.setattr(node, "_own_names", lambda: {"e"})
    with pytest.raises(ConfigError, match="this machine is none of a, b, c; say which with --host"):
        node._machine(plan, None)
