"""Runs over several machines: who is where, who calls whom by which door, and what they tell each other."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import re
import socket
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quartet.config import ConfigError
from quartet.kit.folder import lock_file
from quartet.local import others as others_module
from quartet.local import ports
from quartet.local.deployment import check, write
from quartet.local.devices import as_seen
from quartet.local.hosts import FIRST_PORTS, HERE, Hosts, hosts_of, machines_of, unnamed
from quartet.local.others import Others
from quartet.local.plan import PLAN, Plan, Report, read_beat, read_plan, read_report, write_plan, write_report
from quartet.local.ports import LAST_PORT
from quartet.local.supervisor import ServiceFailed, State, Status
from quartet.local.wiring import SERVICES, wire, wire_machines

LOOPBACKS = ("127.0.7.2", "127.0.7.3", "127.0.7.4", "127.0.7.5")


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
    trainer, replicas = "127.0.7.2:19000", [f"127.0.7.{4 + n // 2}:{19002 + n}" for n in range(4)]
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
            f"--nnodes 2 --node-rank {number} --nproc-per-node 2 --master-addr 127.0.7.2 --master-port 5001"
        )
        assert " ".join(spec.started_as[1:]).startswith(
            f"-m torch.distributed.run {asked} -m quartet_trainer @ "
        )
        assert list(spec.command[1:3]) == ["-m", "quartet_trainer"], "what looks at the config is one process"
        assert (spec.port_file is None) == (number == 1) and not spec.preload
    assert machines[0]["trainer"]["server"]["address"].startswith("127.0.0.1:"), "no machine calls it"


@pytest.mark.parametrize(
    ("nodes", "context", "refusal"),
    [(1, 2, ""), (2, 4, ""), (1, 4, "4 does not divide the 2"), (2, 3, "3 does not divide the 4")],
)
def test_ranks_of_all_machines_share_sequences(
    tmp_path: Path, nodes: int, context: int, refusal: str
) -> None:
    given = tables(trainer={"nodes": nodes, "ranks": 2, "context_parallel": context})
    hosts = hosts_of(given, LOOPBACKS[:nodes] if nodes > 1 else None, 5000)
    machines = wire_machines("models/x", tmp_path / "data", given, hosts)
    if not refusal:
        write(machines[0], tmp_path / "run", hosts, 0)
        assert f"context_parallel = {context}" in (tmp_path / "run/config/trainer.toml").read_text()
        return
    with pytest.raises(ConfigError, match=rf"\[trainer\] context_parallel = {refusal}"):
        write(machines[0], tmp_path / "run", hosts, 0)


async def test_ranks_that_follow_look_at_nothing_that_the_first_one_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder of states is locked, also where it is frozen."""
    hosts = hosts_of(tables(trainer={"nodes": 2}), LOOPBACKS[:2], 5000)
    machines = wire_machines("models/x", tmp_path / "data", tables(trainer={"nodes": 2}), hosts)
    states = tmp_path / "data" / "trainer"
    states.mkdir(parents=True)
    (following,) = write(machines[1], tmp_path, hosts, 1)
    first = next(one for one in write(machines[0], tmp_path, hosts) if one.name == "trainer")
    with lock_file(states / "@lock"):
        await check([following], apart=True)
        with pytest.raises(ConfigError, match="belongs to a trainer that is running"):
            await check([first], apart=True)


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


def test_doors_between_machines_are_all_the_launchers_or_all_the_users(tmp_path: Path) -> None:
    """wiring.py 3."""
    server = {"tls": {"cert_file": "c", "key_file": "k"}, "token_file": "mine"}
    security = {"ca_file": "a", "token_file": "mine"}
    own: dict[str, dict[str, Any]] = {
        "trainer": {"server": server},
        "inference": {"server": server, "weights_security": security},
        "envhost": {"server": {"token_file": "mine"}, "inference_security": security},
        "orchestrator": {"security": security},
    }
    for service, table in own.items():
        for key in table:
            given = {
                name: {k: v for k, v in its.items() if (name, k) != (service, key)}
                for name, its in own.items()
            }
            given["inference"]["nodes"] = 1
            lacking = f"{service}.{key}"
            with pytest.raises(
                ConfigError, match=rf" is set, and {re.escape(lacking)}\S* .*set those, too, or none"
            ):
                placed(given, tmp_path)
    machines = placed({**own, "inference": {**own["inference"], "nodes": 1}}, tmp_path)
    assert machines[0]["orchestrator"]["security"] == security
    assert machines[0]["envhost"]["inference_security"] == security
    replica = machines[1]["inference"]
    assert replica["weights_security"] == security
    assert replica["server"]["tls"] == server["tls"] and "insecure_ok_off_loopback" not in replica["server"]


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
        (tables(inference={"nodes": 1}), ("a", "-b"), "'-b' is no name or address"),
        (tables(inference={"nodes": 1}), ("0.0.0.0", "b"), "'0.0.0.0' is no name or address"),
        (tables(inference={"nodes": 1}), ("a", "::"), "'::' is no name or address"),
        (tables(inference={"nodes": 1}), ("a", "A"), "--hosts names a twice"),
        (tables(trainer={"nodes": 33}, inference={"nodes": 32}), None, "are more than 64 machines together"),
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
    with pytest.raises(ConfigError, match=r"--hosts: this machine does not know a\.invalid \("):
        wire_machines("m", tmp_path, tables(inference={"nodes": 1}), Hosts(("a.invalid", "b.invalid")))
    with pytest.raises(ConfigError, match=r"trainer\.nodes = 2 is refused: this runs on one machine"):
        wire("m", tmp_path, tables(trainer={"nodes": 2}))


def test_a_name_that_means_loopback_on_its_own_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian's installer writes /etc/hosts."""
    monkeypatch.setattr(ports, "is_only_here", lambda host: host == "debian")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    refused = "debian is an address of loopback on that machine itself"
    with pytest.raises(ConfigError, match=refused):
        ports.check_reached(("debian", "other"), 0)
    ports.check_reached(("debian", "other"), 1)
    ports.check_reached(("debian",), 0)
    with pytest.raises(ConfigError, match=refused):
        wire_machines("m", tmp_path, tables(inference={"nodes": 1}), Hosts(("debian", "other")))


def test_a_machine_knows_itself_by_addresses_that_others_reach() -> None:
    """Whatever its name means: Debian's installer has it mean loopback."""
    for host in ("127.0.0.1", "::1", "203.0.113.7", "a.invalid"):
        assert not ports.is_of_this_machine(host), host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("203.0.113.7", 9))  # sends nothing
        except OSError:
            return  # a machine without a network
        assert ports.is_of_this_machine(asked.getsockname()[0])


def test_ipv6_addresses_stand_in_brackets_before_ports() -> None:
    hosts = Hosts(("fd00::1", "fd00::2"))
    assert (hosts.address_of(0), hosts.address_of(1, 1)) == ("[fd00::1]:19000", "[fd00::2]:19002")


@given(
    st.integers(1, 32),
    st.integers(0, 32),
    st.integers(1, 64),
    st.sampled_from([FIRST_PORTS[0], FIRST_PORTS[-1]]),
)
def test_no_two_ports_of_a_run_are_equal(trainers: int, inference: int, replicas: int, first: int) -> None:
    """hosts.py 3."""
    names = [f"host-{number}" for number in range(trainers + inference)]
    hosts = hosts_of(tables(trainer={"nodes": trainers}, inference={"nodes": inference}), names, first)
    count = inference * replicas
    addresses = [hosts.address_of(trainers, number) for number in range(1, count + 1)] if count else []
    given = [address.rpartition(":")[2] for address in (hosts.address_of(0), *addresses)]
    every = [int(port) for port in given] + ([hosts.meeting[1]] if hosts.are_several else [])
    assert len(set(every)) == len(every) and max(every) <= LAST_PORT


def plan_of(*names: str) -> Plan:
    return Plan.of(Hosts(names), [{"inference": {"of": name}} for name in names])


def test_a_plan_and_reports_are_read_as_they_were_written(tmp_path: Path) -> None:
    """plan.py 1, 3, 4."""
    assert read_plan(tmp_path) is None
    machines = placed(tables(inference={"nodes": 1}), tmp_path / "data")
    plan = Plan.of(Hosts(LOOPBACKS[:2]), machines)
    write_plan(tmp_path, plan)
    assert read_plan(tmp_path) == plan and plan.launch != Plan.of(plan.hosts, machines).launch
    for torn in ((), ({}, {})):
        with pytest.raises(ValueError, match="each of the other machines has processes"):
            Plan(launch="x", folder="/", hosts=plan.hosts, machines=torn)
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
    later = plan_of("a", "b").model_dump_json().removesuffix("}") + ', "later": 1}'
    (tmp_path / "machines" / PLAN).write_text(later)
    with pytest.raises(ConfigError, match="cannot be read as what this release writes; install the same"):
        read_plan(tmp_path)


async def test_a_machine_that_fails_fails_the_run_and_one_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """others.py 1, 2, 3."""
    monkeypatch.setattr(others_module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(others_module, "POLL_SECONDS", 0.01)
    plan = plan_of("a", "b")
    others = Others(tmp_path, plan)
    others.begin()
    lines: list[str] = []
    tasks = [asyncio.create_task(one) for one in (others.name_missing(lines.append), others.wait_there())]
    naming, there = tasks
    up = asyncio.create_task(others.wait_up())
    failed = asyncio.create_task(others.wait_failed())

    async def told(count: int) -> str:
        async with asyncio.timeout(30):
            while True:
                if len(lines) >= count:
                    return lines[count - 1]
                await asyncio.sleep(0.01)

    assert await told(1) == f"waiting for b; start there: quartet node {tmp_path} --host b"
    assert not there.done()
    replica = Status("inference", "b:1", restarts=2)
    write_report(tmp_path, 1, Report(launch=plan.launch, state="starting", statuses=(replica,)))
    await asyncio.wait_for(there, 30)
    assert await told(2) == "b is there" and not up.done()
    write_report(tmp_path, 1, Report(launch=plan.launch, state="up", statuses=(replica,)))
    await asyncio.wait_for(up, 30)
    assert [status.name for status in others.statuses] == ["inference"] and others.restarts == {
        "inference": 2
    }
    monkeypatch.setattr(others_module, "SILENT_SECONDS", 0.05)
    assert (await told(3)).startswith("waiting for b;"), "nothing is heard of it"
    monkeypatch.setattr(others_module, "SILENT_SECONDS", 60.0)
    replica.restarts = 1
    write_report(tmp_path, 1, Report(launch=plan.launch, state="up", beat=1, statuses=(replica,)))
    assert await told(4) == "b is there"
    assert others.restarts == {"inference": 3}, "it counts from the beginning, and the run does not"
    write_report(tmp_path, 1, Report(launch=plan.launch, state="left"))
    assert (await told(5)).startswith("waiting for b;")
    naming.cancel()
    write_report(tmp_path, 1, Report(launch=plan.launch, state="failed", said="no such device"))
    with pytest.raises(ServiceFailed, match="on b: no such device"):
        await asyncio.wait_for(failed, 30)
    assert others.end() == ""
    ended = read_plan(tmp_path)
    assert ended is not None and ended.ended and ended.launch == plan.launch


def test_where_there_is_one_machine_nothing_is_written_but_the_end_of_a_launch_over_several(
    tmp_path: Path,
) -> None:
    others = Others(tmp_path, Plan.of(HERE, [{}]))
    others.begin()
    assert others.end() == ""
    assert list(tmp_path.iterdir()) == [] and others.statuses == []
    killed = plan_of("a", "b")
    write_plan(tmp_path, killed)
    others.begin()
    assert read_plan(tmp_path) == killed.model_copy(update={"ended": True})


async def test_a_launcher_shows_that_it_lives_and_reads_what_others_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """plan.py 2, 5."""
    monkeypatch.setattr(others_module, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(others_module, "POLL_SECONDS", 0.01)
    plan = plan_of("a", "b")
    others = Others(tmp_path, plan)
    others.begin()
    (tmp_path / "machines" / "2.json").write_text("garbage")
    listening = asyncio.create_task(others.wait_failed())
    async with asyncio.timeout(30):
        while True:
            beat = read_beat(tmp_path)
            if beat is not None and beat.beat >= 2:
                break
            await asyncio.sleep(0.01)
    assert beat.launch == plan.launch and not listening.done() and others.statuses == []
    listening.cancel()


def test_what_is_no_file_is_told_and_never_waited_for(tmp_path: Path) -> None:
    (tmp_path / "machines").mkdir()
    os.mkfifo(tmp_path / "machines" / PLAN)
    with pytest.raises(ConfigError, match="is not this user's own"):
        read_plan(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be read: Not a directory; name the run's folder"):
        read_plan(tmp_path / "file")
    with pytest.raises(OSError, match="No such file"):
        write_report(tmp_path / "gone", 1, Report(launch="x", state="up"))
    assert not (tmp_path / "gone").exists(), "nobody but the launcher makes it"


def test_a_port_where_ranks_meet_is_looked_at(tmp_path: Path) -> None:
    given = tables(trainer={"nodes": 2})
    with socket.create_server(("127.0.7.2", 0)) as taken:
        hosts = hosts_of(given, LOOPBACKS[:2], taken.getsockname()[1] - 1)
        refused = r"--hosts and --first-port: cannot listen on 127\.0\.7\.2:\d+: .* in use; the first of"
        with pytest.raises(ConfigError, match=refused):
            wire_machines("m", tmp_path, given, hosts)


def test_devices_of_a_machine_that_nobody_knows_yet_are_not_those_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    given = tables(trainer={"gpus": 2}, inference={"nodes": 1, "gpus": 1})
    machines = wire_machines("m", tmp_path, given, unnamed(given))
    assert machines[0]["trainer"]["gpus"] == ["0", "1"]


def test_a_plan_has_numbers_as_toml_has_them_and_nothing_of_the_first_machine(tmp_path: Path) -> None:
    key = {"env": {"key": "a judge's"}}
    plan = Plan.of(Hosts(("a", "b")), [{"envhost": key}, {"inference": {"x": math.inf, "y": math.nan}}])
    write_plan(tmp_path, plan)
    read = read_plan(tmp_path)
    assert read is not None and read.machines[0] == {} and read.folder == str(Path.cwd())
    assert read.machines[1]["inference"]["x"] == math.inf and math.isnan(read.machines[1]["inference"]["y"])


def test_who_reads_while_somebody_writes_finds_one_of_the_two(tmp_path: Path) -> None:
    """plan.py 4."""
    plan = plan_of("a", "b")
    write_plan(tmp_path, plan)
    long = plan.model_copy(update={"machines": ({}, {"inference": {"text": "x" * 100_000}})})
    over = threading.Event()

    def write_on() -> None:
        while not over.is_set():
            write_plan(tmp_path, long)
            write_plan(tmp_path, plan)

    writer = threading.Thread(target=write_on)
    writer.start()
    try:
        assert all(read_plan(tmp_path) in (plan, long) for _ in range(300))
    finally:
        over.set()
        writer.join()


def test_a_folder_that_is_away_for_a_moment_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plan(tmp_path, plan_of("a", "b"))

    def stale(*_: object, **__: object) -> object:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "open", stale)
    assert read_plan(tmp_path) is None


def test_a_launcher_whose_disk_is_full_says_whom_it_could_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(others_module, "write_plan", full)
    said = Others(tmp_path, plan_of("a", "b", "c")).end()
    assert said == "b, c could not be told of the end (No space left on device); end 'quartet node' there"
