"""Hosts and replicas behind a name that gains and loses addresses, as a tier of Kubernetes does."""

from __future__ import annotations

import asyncio
import socket

import grpc
import pytest
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.kit.channel import ClientSecurity
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import rollout_pb2 as rpb
from quartet.v1.envhost_service_pb2_grpc import EnvHostServiceServicer, add_EnvHostServiceServicer_to_server
from quartet_orchestrator import peers
from quartet_orchestrator.envhosts import EnvHosts
from quartet_orchestrator.policies import Policies

PRIVATE = ClientSecurity(insecure_ok_off_loopback=True)


class Host(EnvHostServiceServicer):
    """Ends the first member at once and the others when it is let."""

    def __init__(self):
        self.asked = 0
        self.let = asyncio.Event()

    async def RunRollouts(self, request, context):
        self.asked += 1
        for member in request.members:
            yield epb.RunRolloutsResponse(rollout=rpb.Rollout(member=member))
            if len(request.members) > 1:
                await self.let.wait()


@pytest.fixture
async def named(monkeypatch):
    """Two hosts of one port, the addresses that the name has, and the name."""
    monkeypatch.setattr(peers, "LOOKUP_S", 0.0)
    hosts, servers, port = [Host(), Host()], [], 0
    for number, host in enumerate(hosts, start=1):
        config = ServerConfig(address=f"127.0.0.{number}:{port}")
        service = Service("host", add_EnvHostServiceServicer_to_server, host)
        servers.append(await start([service], config, Health()))
        port = int(servers[0].address.rpartition(":")[2])
    addresses: list[str] = []

    async def look_up(name, of, **_):
        assert (name, of) == ("hosts", port)
        if not addresses:
            raise socket.gaierror("not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    yield hosts, addresses, f"dns:///hosts:{port}"
    for server in servers:
        await server.stop(0)


async def run(client, *members):
    request = epb.RunRolloutsRequest(request_id="r", members=members, timeout_ms=5000)
    return [rollout.member async for rollout in client.run(request)]


async def test_groups_go_to_the_hosts_that_a_name_has_at_the_time(named):
    """peers.py 1, envhosts.py 1"""
    (first, second), addresses, name = named
    client = EnvHosts([name], PRIVATE)
    with pytest.raises(QuartetError, match="has no address yet") as caught:
        await run(client, 0)
    assert caught.value.reason == "NOT_READY"
    addresses.append("127.0.0.1")
    assert await run(client, 0) == [0] and (first.asked, second.asked) == (1, 0)
    addresses.append("127.0.0.2")
    groups = []
    for asked in range(2, 6):
        groups.append(asyncio.create_task(run(client, 0, 1)))
        while first.asked + second.asked < asked:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert (first.asked, second.asked) == (3, 2)
    addresses.clear()
    assert await run(client, 0) == [0], "a name that cannot be looked up keeps what it had"
    for host in (first, second):
        host.let.set()
    await asyncio.gather(*groups)
    await client.close()


async def test_a_host_that_left_the_name_ends_what_it_has_and_gets_nothing_new(named):
    """peers.py 2"""
    (first, second), addresses, name = named
    addresses.append("127.0.0.1")
    client = EnvHosts([name], PRIVATE)
    group = asyncio.create_task(run(client, 0, 1))
    while not first.asked:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    addresses[:] = ["127.0.0.2"]
    for _ in range(3):
        assert await run(client, 0) == [0]
    assert (first.asked, second.asked) == (1, 3)
    first.let.set()
    assert await group == [0, 1]
    (left,) = client._hosts._left
    await run(client, 0)
    assert client._hosts._left == []
    assert left.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    await client.close()


async def test_who_was_told_of_a_host_that_leaves_can_still_call_it(named):
    """peers.py 2: what two do at once."""
    _, addresses, name = named
    addresses.append("127.0.0.1")
    client = EnvHosts([name], PRIVATE)
    (told,) = await client.here()
    addresses[:] = ["127.0.0.2"]
    await client.here()
    request = epb.RunRolloutsRequest(request_id="r", members=[0], timeout_ms=5000)
    assert [frame.rollout.member async for frame in told.stub.RunRollouts(request)] == [0]
    await client.here()
    assert told.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    await client.close()


async def test_every_replica_that_a_name_has_is_asked_what_it_serves(named):
    """peers.py 1"""
    _, addresses, name = named
    addresses += ["127.0.0.1", "127.0.0.2"]
    policies = Policies([name], PRIVATE)
    with pytest.raises(QuartetError, match=r"127\.0\.0\.1:.*127\.0\.0\.2:"):
        await policies.serving("run", 0)
    await policies.close()


async def test_a_host_whose_certificate_is_half_rotated_is_away_for_now(named, monkeypatch):
    """And no fault of the orchestrator's, which would end a run."""
    hosts, addresses, name = named
    addresses[:] = ["127.0.0.1"]
    client = EnvHosts([name], PRIVATE)

    def mismatched(address, security):
        raise ConfigError("cert_file and key_file do not belong together")

    try:
        with monkeypatch.context() as rotating:
            rotating.setattr(peers, "connect", mismatched)
            with pytest.raises(QuartetError, match=r"NOT_READY: .* cannot be called: cert_file and key_file"):
                await run(client, 7)
        assert await run(client, 7) == [7] and hosts[0].asked == 1
        with monkeypatch.context() as rotating:
            rotating.setattr(peers, "connect", mismatched)
            addresses[:] = ["127.0.0.2"]
            with pytest.raises(QuartetError, match=r"NOT_READY: .*2:\d+ cannot be called"):
                await run(client, 7)
        addresses[:] = ["127.0.0.1"]
        assert await run(client, 7) == [7] and hosts[0].asked == 2, "nobody took it for one that had left"
    finally:
        await client.close()
