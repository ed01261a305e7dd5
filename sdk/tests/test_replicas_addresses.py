"""Whom a client of replicas knows: addresses, names as they change, and the program of the documentation."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import structlog
from loopback import LOOPBACK
from quartet.config import ConfigError
from quartet.kit import health
from quartet.kit.channel import ClientSecurity
from quartet.replicas import Replicas, addresses, replica
from quartet.replicas.addresses import Addresses
from quartet.replicas.choice import ranking
from replica_fleet import QUICK, ask, check, fleet, home, until
from scripted_replica import NAME, ScriptedReplica, undisturbed

DOCUMENTATION = (Path(__file__).resolve().parents[2] / "docs/replicas.md").read_text()


async def test_the_program_in_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    program = DOCUMENTATION.split("```python\n")[1].split("```")[0]
    async with fleet(2) as (scripted, _):
        for number, one in enumerate(scripted):
            assert f"127.0.0.1:5005{number + 1}" in program
            program = program.replace(f"127.0.0.1:5005{number + 1}", one.address)
        namespace: dict[str, Any] = {}
        exec(program.replace("asyncio.run(main())", ""), namespace)
        await namespace["main"]()
    assert capsys.readouterr().out.count("(0, 4, 1)") == 8


async def test_a_name_is_followed_as_its_addresses_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """addresses.py 1 and 2, fleet.py 1."""
    first, second = ScriptedReplica(), ScriptedReplica()
    await first.begin("127.0.0.1:0")
    port = int(first.address.rpartition(":")[2])
    await second.begin(f"127.0.0.2:{port}")
    hosts = ["127.0.0.1"]
    lookups = 0

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        nonlocal lookups
        lookups += 1
        assert host == "localhost"
        if not hosts:
            raise socket.gaierror("no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in hosts]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    async with Replicas([f"dns:///localhost:{port}"], settings=QUICK) as replicas:
        await until(lambda: replicas.in_service == [first.address])
        hosts.append("127.0.0.2")
        await until(lambda: set(replicas.in_service) == {first.address, second.address})
        seen, hosts[:] = lookups, []
        await until(lambda: lookups > seen + 1)
        assert len(replicas.in_service) == 2, "an outage of the name takes no replica away"
        gate = asyncio.Event()
        first.before_piece = lambda _at: gate.wait()
        session = next(f"s{i}" for i in range(99) if home(f"s{i}", [first, second])[0] is first)
        slow = asyncio.create_task(replicas.complete(ask(session=session), 60))
        await until(lambda: first.running == 1)
        hosts[:] = ["127.0.0.2"]
        await until(lambda: replicas.in_service == [second.address])
        await replicas.complete(ask(session=session, max_tokens=1), 20)
        assert len(second.requests) == 1 and not slow.done()
        gate.set()
        check(await slow, "hello", undisturbed())
        assert not replicas.counts.carried_on, "what is in flight ends where it is"
    await first.end()
    await second.end()


async def test_a_name_that_is_looked_up_for_long_is_not_looked_up_twice_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """addresses.py 2: each holds one of the few threads of its loop, which others need."""
    monkeypatch.setattr(addresses, "LOOKUP_SECONDS", 0.05)
    resolved = threading.Event()
    threads = list[int]()

    def slow(*_: Any, **__: Any) -> list[Any]:
        threads.append(threading.get_ident())
        assert resolved.wait(30)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 5))]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    followed = Addresses(["dns:///inference:5"] * 2, ClientSecurity(insecure_ok_off_loopback=True))
    with structlog.testing.capture_logs() as told:
        for _ in range(3):
            assert await followed.now() == {}
    assert len(threads) == 1 and [one["why"] for one in told] == ["no answer within 0.05 s"]
    resolved.set()
    monkeypatch.setattr(addresses, "LOOKUP_SECONDS", 30.0)
    assert list(await followed.now()) == ["127.0.0.1:5"] and len(threads) == 1
    await followed.now()
    assert len(threads) == 2, "what is answered is asked again"


async def test_a_name_that_nobody_waits_for_any_more_fails_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of replicas that were named anew meanwhile, or left: nobody takes the answer."""
    monkeypatch.setattr(addresses, "LOOKUP_SECONDS", 0.01)
    resolved, told = threading.Event(), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    def slow(*_: Any, **__: Any) -> list[Any]:
        assert resolved.wait(30)
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    followed = Addresses(["dns:///inference:5"], ClientSecurity(insecure_ok_off_loopback=True))
    assert await followed.now() == {}
    (asked,) = followed._asked.values()
    resolved.set()
    await asyncio.wait({asked})
    del followed, asked
    gc.collect()
    assert told == []


async def test_whoever_accepts_and_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 7."""
    monkeypatch.setattr(replica, "ANSWER_SECONDS", 100.0)  # so long it says nothing, and counts for nothing
    with socket.create_server(("127.0.0.1", 0)) as silent:
        black_hole = f"127.0.0.1:{silent.getsockname()[1]}"
        one = ScriptedReplica()
        await one.begin()
        session = next(
            f"s{i}" for i in range(99) if ranking(f"s{i}", [black_hole, one.address])[0] == black_hole
        )
        async with Replicas([black_hole, one.address], settings=QUICK) as replicas:
            started = time.monotonic()
            await replicas.complete(ask(session=session, max_tokens=1), 60)
            assert time.monotonic() - started < 30
            assert replicas._fleet._settle_s(session, ()) <= 0, "its home is waited for once"
            await replicas.complete(ask(session=session, max_tokens=1), 60)
            assert len(one.requests) == 2
        await one.end()


async def test_a_replica_that_as_many_watch_as_may_is_asked_for_its_health(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """replica.py 1: each worker of each environment host watches, and they may be more."""
    monkeypatch.setattr(health, "MAX_WATCHERS", 1)
    monkeypatch.setattr(replica, "CHECK_SECONDS", 0.1)
    async with fleet(1) as (scripted, first), Replicas([scripted[0].address], settings=QUICK) as late:
        await until(lambda: late.in_service == first.in_service)
        check(await late.complete(ask(), timeout_s=20), "hello", undisturbed())
        scripted[0].health.set_not_ready(NAME, "its canary died")
        await until(lambda: not late.in_service)
        scripted[0].health.set_ready(NAME)
        await until(lambda: bool(late.in_service))
        await scripted[0].end()
        await until(lambda: not late.in_service)


async def test_names_are_checked_against_the_certificate_of_the_name() -> None:
    """addresses.py 3."""
    security = ClientSecurity(tls=True)
    found = await Addresses(["dns:///localhost:5", "10.0.0.9:5"], security).now()
    assert found.pop("10.0.0.9:5").server_name == ""
    assert found and all(one.server_name == "localhost" for one in found.values())
    named = ClientSecurity(tls=True, server_name="inference")
    found = await Addresses(["dns:///localhost:5"], named).now()
    assert {one.server_name for one in found.values()} == {"inference"}


@pytest.mark.parametrize(
    ("addresses", "text"),
    [
        ([], "0 addresses"),
        (["10.0.0.1:5"], "off loopback"),
        (["dns:///inference:5"], "'dns:///inference:5' is off loopback"),
        (["dns:///localhost"], "write dns:///name:port"),
        (["dns://8.8.8.8/localhost:5"], "write dns:///name:port"),
        (["dns:///localhost:\u00b2"], "write dns:///name:port"),
        (["dns:///inference..svc:5"], "'inference..svc' is no name"),
    ],
)
def test_addresses_that_cannot_be_used_are_refused(addresses: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Replicas(addresses)


async def test_addresses_can_be_replaced() -> None:
    async with fleet(2) as ((one, two), replicas):
        await replicas.follow([two.address])
        assert replicas.in_service == [two.address]
        await replicas.follow([one.address, two.address])
        await until(lambda: len(replicas.in_service) == 2)


async def test_addresses_replaced_twice_at_once_are_those_of_the_last_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first call's look-up ends last, and leaves neither its addresses nor a task behind."""
    answered = asyncio.Event()

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        if port == 1:
            await answered.wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (LOOPBACK, port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    async with fleet(1) as ((one,), replicas):
        port = one.address.rpartition(":")[2]
        calls = [asyncio.create_task(replicas.follow([f"dns:///localhost:{at}"])) for at in (1, port)]
        await asyncio.sleep(0.05)
        answered.set()
        await asyncio.gather(*calls)
        await until(lambda: replicas.in_service == [one.address])
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "follow replicas"]


async def test_the_old_names_are_followed_on_where_whoever_replaces_them_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(port)
        if port == 2:
            await asyncio.Event().wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    async with Replicas(["dns:///localhost:1"], settings=QUICK) as replicas:
        call = asyncio.create_task(replicas.follow(["dns:///localhost:2"]))
        await until(lambda: 2 in asked)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        looked = asked.count(1)
        await until(lambda: asked.count(1) > looked)


async def test_a_name_that_is_gone_is_told_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        raise OSError("no such name")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    names = Addresses(["dns:///gone:1", "dns:///away:1"], ClientSecurity(insecure_ok_off_loopback=True))
    with structlog.testing.capture_logs() as told:
        for _ in range(3):
            assert await names.now() == {}
    assert sorted(one["name"] for one in told if one["event"] == "name not found") == ["away", "gone"]
