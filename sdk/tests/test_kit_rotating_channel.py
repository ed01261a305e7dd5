"""A channel follows its certificates (quartet.kit.rotating_channel), to servers with mutual TLS, and finds a
peer that gRPC looks for ever more rarely.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from certificates import needs_openssl, write_pair
from quartet.errors import QuartetError
from quartet.kit import rotating_channel
from quartet.kit.build import ask
from quartet.kit.call import unary
from quartet.kit.certificates import Followed
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.rotating_channel import AGAIN_SECONDS, RotatingChannel
from quartet.kit.security import ClientSecurity, ServerTls
from quartet.kit.server import RunningServer, ServerConfig, Service, start
from quartet.v1 import weights_pb2 as pb
from quartet.v1 import weights_pb2_grpc as rpc

#: A new connection stands within that, on a loaded machine.
SECONDS = 30.0


class Asking(rpc.WeightServiceServicer):
    """Says whose certificate it was shown; its stream does so at once, and each time that it is `pushed`."""

    def __init__(self) -> None:
        self.pushed = asyncio.Semaphore(0)

    async def GetManifest(self, request: Any, context: Any) -> pb.GetManifestResponse:
        return pb.GetManifestResponse(manifest=pb.WeightManifest(layout_signature=_shown(context)))

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[pb.WatchResponse]:
        while True:
            yield pb.WatchResponse(announced=pb.VersionAnnounced(run_id=_shown(context)))
            await self.pushed.acquire()


def _shown(context: Any) -> str:
    (name,) = context.auth_context()["x509_common_name"]
    return str(name.decode())


class Place:
    """A folder with the files of a client and of a server."""

    def __init__(self, pki: Path, folder: Path) -> None:
        self.pki, self.folder = pki, folder
        self.own = ClientSecurity(
            ca_file=self.put("ca.crt", "ca"),
            cert_file=self.put("client.crt", "own.crt"),
            key_file=self.put("client.key", "own.key"),
        )
        self.trusted = self.put("ca.crt", "trusted")
        self.asking = Asking()

    def put(self, name: str, there: str) -> Path:
        return Path(shutil.copy(self.pki / name, self.folder / there))

    def show(self, name: str) -> None:
        """The client's pair from now on."""
        for end in ("crt", "key"):
            self.put(f"{name}.{end}", f"own.{end}")

    def trust_all(self) -> None:
        """The server takes clients of either authority."""
        both = [(self.pki / f"{name}.crt").read_text() for name in ("ca", "other")]
        self.trusted.write_text("".join(both))

    async def start(self, name: str = "server", address: str = "127.0.0.1:0") -> RunningServer:
        files = {"cert_file": self.pki / f"{name}.crt", "key_file": self.pki / f"{name}.key"}
        tls = ServerTls.model_validate({**files, "client_ca_file": self.trusted})
        asked = Service("quartet.v1.WeightService", rpc.add_WeightServiceServicer_to_server, self.asking)
        return await start([asked], ServerConfig(address=address, tls=tls), Health())


@pytest.fixture
def place(pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(rotating_channel, "LOOK_SECONDS", 0.0)
    return Place(pki, tmp_path)


async def shown(method: Any) -> str:
    """Whose certificate the server saw in a call."""
    answer = await unary(method, pb.GetManifestRequest(), timeout_s=SECONDS)
    return str(answer.manifest.layout_signature)


async def asked(method: Any) -> str:
    """The same of a call that may fail; empty then."""
    try:
        return await shown(method)
    except QuartetError as error:
        assert error.reason == "NOT_READY"
        return ""


async def comes(method: Any, name: str) -> None:
    """Call until the server sees that certificate; none of the calls fails."""
    until = time.monotonic() + SECONDS
    while await shown(method) != name:
        assert time.monotonic() < until, f"{name} was never shown"


def inner(channel: Any) -> RotatingChannel:
    assert isinstance(channel._inner, RotatingChannel)
    return channel._inner


@needs_openssl
async def test_calls_show_the_pair_of_now_and_those_under_way_go_on(place: Place) -> None:
    """rotating_channel.py 1 and 2: by stubs that were made before."""
    place.trust_all()
    running = await place.start()
    try:
        async with connect(running.address, security=place.own) as channel:
            stub = rpc.WeightServiceStub(channel)
            assert await shown(stub.GetManifest) == "client"
            before = inner(channel)._now.channel
            stream = stub.Watch(pb.WatchRequest())
            assert (await stream.read()).announced.run_id == "client"
            place.show("stranger")
            await comes(stub.GetManifest, "stranger")
            assert inner(channel)._now.channel is not before
            place.asking.pushed.release()
            assert (await stream.read()).announced.run_id == "client", "on the connection that it began on"
            assert before.get_state() is grpc.ChannelConnectivity.READY
            stream.cancel()
            async with asyncio.timeout(SECONDS):
                while before.get_state() is not grpc.ChannelConnectivity.SHUTDOWN:
                    await shown(stub.GetManifest)
            assert await shown(stub.GetManifest) == "stranger"
            assert not inner(channel)._old
    finally:
        await running.stop(0)


@needs_openssl
async def test_an_expired_pair_is_told_and_the_next_one_needs_no_restart(place: Place) -> None:
    write_pair(place.folder, "own", "old", ("20200101000000Z", "20200203040506Z"))
    place.trusted.write_text((place.folder / "old.crt").read_text() + place.trusted.read_text())
    running = await place.start()
    try:
        with structlog.testing.capture_logs() as told:
            async with connect(running.address, security=place.own) as channel:
                method = rpc.WeightServiceStub(channel).GetManifest
                with pytest.raises(QuartetError) as caught:
                    await unary(method, pb.GetManifestRequest(), timeout_s=SECONDS)
                assert caught.value.reason == "NOT_READY"
                (one,) = (line for line in told if line["event"] == "certificate_expired")
                assert one["cert_file"] == str(place.own.cert_file)
                assert one["ends"] == "2020-02-03 04:05:06 UTC"
                place.show("client")
                assert await shown(method) == "client"
    finally:
        await running.stop(0)


@needs_openssl
async def test_half_a_pair_leaves_the_one_in_use(place: Place) -> None:
    """rotating_channel.py 1, certificates.py 2: told once."""
    place.trust_all()
    running = await place.start()
    try:
        async with connect(running.address, security=place.own) as channel:
            method = rpc.WeightServiceStub(channel).GetManifest
            before = inner(channel)._now
            with structlog.testing.capture_logs() as logged:
                place.put("stranger.crt", "own.crt")
                for _ in range(3):
                    assert await shown(method) == "client"
                (place.folder / "own.key").unlink()
                assert await shown(method) == "client"
            told = [one["why"] for one in logged if one["event"] == "certificate_stays"]
            assert len(told) == 2 and "do not belong together" in told[0]
            assert told[1].startswith(f"key_file = '{place.own.key_file}' cannot be read")
            assert inner(channel)._now is before and inner(channel)._next is None
            place.put("stranger.key", "own.key")
            await comes(method, "stranger")
    finally:
        await running.stop(0)


@needs_openssl
async def test_a_connection_that_stands_is_not_given_up_for_one_that_is_refused(place: Place) -> None:
    """rotating_channel.py 3: the client's side is rotated before the server's."""
    running = await place.start()
    try:
        async with connect(running.address, security=place.own) as channel:
            method = rpc.WeightServiceStub(channel).GetManifest
            assert await shown(method) == "client"
            place.show("stranger")
            await shown(method)
            coming = inner(channel)._next
            assert coming is not None
            async with asyncio.timeout(SECONDS):
                while coming.channel.get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    assert await shown(method) == "client"
            assert await shown(method) == "client"
            await running.stop(0)
            running = await place.start(address=running.address)
            async with asyncio.timeout(SECONDS):  # gRPC makes it again, later and later
                while await asked(method) != "client":
                    assert inner(channel)._next is coming, "it was not taken, and is not now"
            place.trust_all()
            await comes(method, "stranger")
    finally:
        await running.stop(0)


@needs_openssl
async def test_authorities_of_a_client_follow_their_file(place: Place) -> None:
    """The server comes back with a certificate of another one."""
    running = await place.start()
    async with connect(running.address, security=place.own) as channel:
        method = rpc.WeightServiceStub(channel).GetManifest
        assert await shown(method) == "client"
        await running.stop(0)
        running = await place.start("stranger", running.address)
        try:
            place.put("other.crt", "ca")
            assert await shown(method) == "client"
        finally:
            await running.stop(0)


@needs_openssl
async def test_old_channels_are_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """rotating_channel.py 4: and all of them close with the channel."""
    monkeypatch.setattr(rotating_channel, "MAX_OLD", 2)
    place.trust_all()
    running = await place.start()
    try:
        channel = connect(running.address, security=place.own)
        stub = rpc.WeightServiceStub(channel)
        streams = []
        for name in ("stranger", "client", "stranger"):
            streams.append(stub.Watch(pb.WatchRequest()))
            await asyncio.wait_for(streams[-1].read(), SECONDS)
            place.show(name)
            if len(inner(channel)._old) < 2:
                await comes(stub.GetManifest, name)
        assert await shown(stub.GetManifest) == "client", "two have calls, the third stays"
        streams[0].cancel()
        await comes(stub.GetManifest, "stranger")
        lines = [inner(channel)._now, *inner(channel)._old]
        await channel.close()
        assert len(lines) == 3
        assert all(line.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN for line in lines)
        place.show("client")
        with pytest.raises(grpc.experimental.aio.UsageError):
            await stub.GetManifest(pb.GetManifestRequest())
        assert lines[0] is inner(channel)._now, "and looks no more"
    finally:
        await running.stop(0)


@needs_openssl
async def test_files_are_looked_at_when_a_call_begins_and_at_most_so_often(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rotating_channel.py 1."""
    now_s = 1000.0
    monkeypatch.setattr(rotating_channel, "LOOK_SECONDS", 1.0)
    monkeypatch.setattr(rotating_channel, "monotonic", lambda: now_s)
    async with connect("127.0.0.1:1", security=place.own) as channel:
        method = rpc.WeightServiceStub(channel).GetManifest
        before = inner(channel)._now
        place.show("stranger")
        for later_s, rotated in ((0.9, False), (1.1, True)):
            now_s = 1000.0 + later_s
            call = method(pb.GetManifestRequest())
            assert (inner(channel)._now is not before) is rotated
            call.cancel()


async def test_a_peer_that_is_not_reached_is_dialled_again_until_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """rotating_channel.py 5: by a channel of its own, which looks the name up at once."""
    now_s = 1000.0
    monkeypatch.setattr(rotating_channel, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(rotating_channel, "monotonic", lambda: now_s)
    running = await start([], ServerConfig(), Health())
    found, dialled = "127.0.0.1:1", list[grpc.aio.Channel]()

    def dial(_: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        dialled.append(grpc.aio.insecure_channel(found))
        return dialled[-1]

    try:
        async with RotatingChannel(Followed({}, lambda: None), dial) as channel, asyncio.timeout(SECONDS):
            while dialled[0].get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                assert (await ask(channel, SECONDS)).error
            for tries in (2, 3):
                assert (await ask(channel, SECONDS)).error
                assert len(dialled) == tries - 1, "not so soon"
                now_s += AGAIN_SECONDS
                assert (await ask(channel, SECONDS)).error
                assert len(dialled) == tries
            while dialled[1].get_state() is not grpc.ChannelConnectivity.SHUTDOWN:
                assert (await ask(channel, SECONDS)).error
            assert channel._now.channel is dialled[0], "which fails at once"
            found = running.address
            now_s += AGAIN_SECONDS
            while (await ask(channel, SECONDS)).error:
                pass
            assert channel._now.channel is dialled[3]
    finally:
        await running.stop(0)


@needs_openssl
async def test_only_channels_of_files_and_of_names_are_wrapped(place: Place) -> None:
    private = ClientSecurity(insecure_ok_off_loopback=True)
    for address in ("trainer:50051", "dns:///trainer:50051"):
        async with connect(address, security=private) as channel:
            assert inner(channel)
    for address in ("127.0.0.1:1", "localhost:1", "[fd00::1]:1", "10.0.0.1:1", "unix:/tmp/none"):
        for security in (private, ClientSecurity(tls=True)):
            async with connect(address, security=security) as channel:
                assert not isinstance(channel._inner, RotatingChannel)  # type: ignore[attr-defined]
