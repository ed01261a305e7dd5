"""`quartet node`: which machine this is, what it runs there, and what it tells the first."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from quartet.cli import exits, node
from quartet.config import ConfigError
from quartet.local import ports
from quartet.local.child import ChildSpec
from quartet.local.hosts import Hosts
from quartet.local.plan import Beat, Plan, Report, read_report, write_beat, write_plan
from quartet.local.supervisor import ServiceFailed, State, Status

HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


class Keeping:
    """In the place of a Supervisor: its services are up, until it is told that one is given up."""

    given_up = ""

    def __init__(self, specs: list[ChildSpec]) -> None:
        self.statuses = [Status(spec.name, spec.address, State.UP) for spec in specs]
        self.configs = [tomllib.loads(Path(spec.command[-1]).read_text()) for spec in specs]
        self.environments = [dict(spec.environment) for spec in specs]
        self.started = self.stopped = False
        kept.append(self)

    def start(self) -> None:
        self.started = True

    async def wait_failed(self) -> None:
        while True:
            if self.given_up:
                raise ServiceFailed(self.given_up)
            await asyncio.sleep(0.01)

    async def stop(self, drain_s: float) -> None:
        self.stopped = True


kept: list[Keeping] = []


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def check(specs: object) -> None:
        """Nothing: other tests do."""

    kept.clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(node, "Supervisor", Keeping)
    monkeypatch.setattr(node, "check", check)
    monkeypatch.setattr(node, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(node, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(node, "GONE_SECONDS", 0.3)


def launched(folder: Path, **inference: Any) -> Plan:
    table = {"server": {"address": "127.0.0.3:1", "port_file": str(folder / "data" / "inference.port")}}
    plan = Plan.of(Hosts(HOSTS[:2]), [{}, {"inference": {**table, **inference}}])
    write_plan(folder, plan)
    return plan


async def started(folder: Path) -> asyncio.Task[int]:
    """A node that has seen what is there."""
    serving = asyncio.create_task(node._serve(folder, HOSTS[1]))
    await asyncio.sleep(0.1)
    return serving


async def reported(folder: Path, plan: Plan, **expected: object) -> Report:
    """What the machine says once it says this."""
    async with asyncio.timeout(30):
        while True:
            report = read_report(folder, 1, plan.launch)
            if report and all(getattr(report, key) == value for key, value in expected.items()):
                return report
            await asyncio.sleep(0.01)


async def test_a_machine_does_its_part_until_the_launch_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """node.py 1, 3."""
    # Its log takes no more words.
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True))
    folder, home = tmp_path / "run", tmp_path / "home"
    home.mkdir()
    serving = await started(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b,c")
    plan = launched(folder, gpus=["2"], model="here")
    monkeypatch.chdir(home)
    first = await reported(folder, plan, state="up")
    assert Path.cwd() == tmp_path, "where it was launched"
    assert kept[0].environments == [{"CUDA_VISIBLE_DEVICES": "c"}] and kept[0].configs[0]["model"] == "here"
    async with asyncio.timeout(30):
        while (await reported(folder, plan)).beat < first.beat + 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    again = launched(folder)
    await reported(folder, again, state="up")
    assert kept[0].stopped and not kept[1].stopped, "the newest launch is the one"
    write_plan(folder, again.model_copy(update={"ended": True}))
    assert await asyncio.wait_for(serving, 30) == exits.DONE and kept[1].stopped


async def test_a_second_node_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    """node.py 2."""
    serving = await started(tmp_path)
    before = launched(tmp_path)
    await reported(tmp_path, before, state="up")
    (tmp_path / "machines").rename(tmp_path / "overwritten")
    plan = launched(tmp_path)
    await reported(tmp_path, plan, state="up")
    refused = r"another 'quartet node' does the part of 127\.0\.0\.3 in .* already; end"
    second = await started(tmp_path)
    write_beat(tmp_path, Beat(launch=plan.launch, beat=1))
    with pytest.raises(ConfigError, match=refused):
        await asyncio.wait_for(second, 30)
    await reported(tmp_path, plan, state="up")
    assert not serving.done() and not kept[1].stopped
    write_plan(tmp_path, plan.model_copy(update={"ended": True}))
    assert await asyncio.wait_for(serving, 30) == exits.DONE


async def test_a_service_that_is_given_up_and_a_machine_that_is_stopped_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Keeping, "given_up", "inference did not start")
    serving = await started(tmp_path)
    plan = launched(tmp_path)
    with pytest.raises(ServiceFailed, match="inference did not start"):
        await asyncio.wait_for(serving, 30)
    await reported(tmp_path, plan, state="failed", said="inference did not start")
    monkeypatch.setattr(Keeping, "given_up", "")
    serving = await started(tmp_path)
    write_beat(tmp_path, Beat(launch=plan.launch, beat=1))
    await reported(tmp_path, plan, state="up")
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(serving, 30) == exits.INTERRUPTED
    assert [one.name for one in (await reported(tmp_path, plan, state="left")).statuses] == ["inference"]


async def test_a_launch_that_nobody_stands_behind_is_left_alone_and_a_launcher_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """node.py 1, 3."""
    monkeypatch.setattr(node, "LOST_SECONDS", 0.3)
    killed = launched(tmp_path)
    serving = await started(tmp_path)
    assert read_report(tmp_path, 1, killed.launch) is None and not kept
    write_beat(tmp_path, Beat(launch=killed.launch, beat=1))
    await reported(tmp_path, killed, state="left")
    assert kept[0].stopped and not serving.done(), "it is lost"
    monkeypatch.setattr(node, "LOST_SECONDS", 60.0)
    write_beat(tmp_path, Beat(launch=killed.launch, beat=2))
    await reported(tmp_path, killed, state="up")
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(serving, 30) == exits.INTERRUPTED


@pytest.mark.parametrize("is_ignored", [False, True])
async def test_a_terminal_that_is_closed_ends_a_node_that_is_not_to_outlive_it(
    tmp_path: Path, is_ignored: bool
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        serving = await started(tmp_path)
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.wait({serving}, timeout=0.3 if is_ignored else 30)
        assert serving.done() is not is_ignored
        if is_ignored:
            os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(serving, 30) == exits.INTERRUPTED
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_ranks_begin_once_all_machines_are_there(tmp_path: Path) -> None:
    serving = await started(tmp_path)
    server = {"address": "127.0.0.1:0"}
    plan = Plan.of(Hosts(HOSTS[:2], trainers=2), [{}, {"trainer-2": {"server": server}}])
    write_plan(tmp_path, plan)
    write_beat(tmp_path, Beat(launch=plan.launch, beat=1))
    await reported(tmp_path, plan)
    await asyncio.sleep(0.1)
    assert not kept[0].started
    write_beat(tmp_path, Beat(launch=plan.launch, beat=1, goes=True))
    async with asyncio.timeout(30):
        while True:
            if kept[0].started:
                break
            await asyncio.sleep(0.01)
    write_plan(tmp_path, plan.model_copy(update={"ended": True}))
    assert await asyncio.wait_for(serving, 30) == exits.DONE


async def test_who_waits_for_nothing_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def shown(folder: Path) -> str:
        serving = await started(folder)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(serving, 30) == exits.INTERRUPTED
        return capsys.readouterr().out

    assert "(there is no such folder here yet)" in await shown(tmp_path / "frist")
    assert "(there is none yet)" in await shown(tmp_path)
    (tmp_path / "run.json").touch()
    assert "(the one there is of a single machine)" in await shown(tmp_path)
    plan = launched(tmp_path)
    said = await shown(tmp_path)
    assert "(looking whether the last one goes on)" in said and "no sign of life" not in said
    monkeypatch.setattr(node, "SILENT_SECONDS", 0.0)
    assert "(the last one shows no sign of life)" in await shown(tmp_path)
    write_plan(tmp_path, plan.model_copy(update={"ended": True}))
    assert "(the last one ended)" in await shown(tmp_path)


async def test_a_machine_whose_run_is_gone_ends(tmp_path: Path) -> None:
    serving = await started(tmp_path / "run")
    plan = launched(tmp_path / "run")
    await reported(tmp_path / "run", plan, state="up")
    (tmp_path / "run" / "machines" / "plan.json").unlink()
    with pytest.raises(ConfigError, match="has no run any more; start this again once it is launched again"):
        await asyncio.wait_for(serving, 30)
    assert kept[0].stopped


async def test_what_a_machine_lacks_is_told_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    serving = await started(tmp_path / "run")
    with monkeypatch.context() as there:
        there.chdir(folder)
        plan = Plan.of(Hosts(HOSTS[:2]), [{}, {"inference": {"server": {"address": "127.0.0.3:1"}}}])
    folder.rmdir()
    write_plan(tmp_path / "run", plan)
    with pytest.raises(ConfigError, match=r"was launched in .*elsewhere, which is not here \(No such file"):
        await asyncio.wait_for(serving, 30)
    await reported(tmp_path / "run", plan, state="failed")
    monkeypatch.setattr(ports, "is_only_here", lambda host: host == HOSTS[1])
    serving = await started(tmp_path / "run")
    launched(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"127\.0\.0\.3 is an address of loopback on that machine itself"):
        await asyncio.wait_for(serving, 30)


def test_a_node_knows_which_machine_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.of(Hosts(("a", "b", "c")), [{}, {"trainer-2": {"x": 1}}, {"inference": {"x": 1}}])
    assert node._machine(plan, "c") == 2
    monkeypatch.setattr(node, "_own_names", lambda: {"b", "b.net"})
    assert node._machine(plan, None) == 1
    with pytest.raises(ConfigError, match="--host d is none of a, b, c"):
        node._machine(plan, "d")
    with pytest.raises(ConfigError, match="a is the first machine, where 'quartet rl' runs"):
        node._machine(plan, "a")
    monkeypatch.setattr(node, "_own_names", lambda: {"e"})
    monkeypatch.setattr(node, "is_of_this_machine", lambda name: name == "b")
    assert node._machine(plan, None) == 1, "whatever it is called itself"
    monkeypatch.setattr(node, "is_of_this_machine", lambda name: False)
    with pytest.raises(ConfigError, match="this machine is none of a, b, c; say which with --host"):
        node._machine(plan, None)
