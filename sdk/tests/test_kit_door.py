"""The door of an HTTP server follows its certificates (quartet.kit.door 2), on both event loops."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
import uvloop
from certificates import needs_openssl
from quartet.config import ConfigError
from quartet.kit.door import tls_context
from quartet.kit.security import ServerTls

Work = Callable[[], Coroutine[Any, Any, None]]
pytestmark = needs_openssl


@asynccontextmanager
async def listening(context: ssl.SSLContext) -> AsyncIterator[int]:
    """Greets whoever is let in, and repeats what it hears; yields the port."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        while heard := await reader.read(5):
            writer.write(heard)
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def greeted(
    port: int, ca: Path, own: str | None = None, host: str = "127.0.0.1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that was let in. Raises OSError where it was not, or the server is not of that CA."""
    context = ssl.create_default_context(cafile=ca)
    if own is not None:
        context.load_cert_chain(ca.with_name(f"{own}.crt"), ca.with_name(f"{own}.key"))
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=host)
    try:
        assert await reader.readexactly(5) == b"hello"
    except asyncio.IncompleteReadError:
        raise ConnectionResetError("closed without a word") from None
    return reader, writer


async def put(pki: Path, name: str, folder: Path, *ends: str) -> None:
    for end in ends:
        await asyncio.to_thread(shutil.copy, pki / f"{name}.{end}", folder / f"s.{end}")


async def refused(*args: Any) -> None:
    with pytest.raises(OSError, match=r"certificate|closed|reset|unknown"):
        await greeted(*args)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_door_shows_the_pair_that_is_whole(pki: Path, tmp_path: Path, run: Any) -> None:
    async def rotate() -> None:
        await put(pki, "server", tmp_path, "crt", "key")
        context = tls_context(ServerTls(cert_file=tmp_path / "s.crt", key_file=tmp_path / "s.key"), "door.")
        ours, others = pki / "ca.crt", pki / "other.crt"
        async with listening(context) as port:
            old = await greeted(port, ours)
            await refused(port, others)
            await put(pki, "stranger", tmp_path, "crt")
            with structlog.testing.capture_logs() as logged:
                (await greeted(port, ours))[1].close()
                (await greeted(port, ours))[1].close()
            (told,) = (one for one in logged if one["event"] == "certificate_stays")
            assert told["why"].startswith(
                f"door.tls.cert_file = '{tmp_path / 's.crt'}' and door.tls.key_file"
            )
            assert "do not belong together" in told["why"]
            await put(pki, "stranger", tmp_path, "key")
            for host in ("127.0.0.1", "localhost"):  # the first names no host in its handshake
                (await greeted(port, others, None, host))[1].close()
            await refused(port, ours)
            old[1].write(b"still")
            assert await old[0].readexactly(5) == b"still", "a connection goes on"
            old[1].close()

    run(rotate())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_whom_a_door_lets_in_follows_its_authorities(pki: Path, tmp_path: Path, run: Any) -> None:
    """Also whom it lets in no more."""

    async def rotate() -> None:
        await put(pki, "server", tmp_path, "crt", "key")
        trusted = tmp_path / "trusted.crt"
        shutil.copy(pki / "ca.crt", trusted)
        tls = ServerTls(cert_file=tmp_path / "s.crt", key_file=tmp_path / "s.key", client_ca_file=trusted)
        ours = pki / "ca.crt"
        async with listening(tls_context(tls)) as port:
            (await greeted(port, ours, "client"))[1].close()
            await refused(port, ours, "stranger")
            await refused(port, ours)
            await asyncio.to_thread(shutil.copy, pki / "other.crt", trusted)
            (await greeted(port, ours, "stranger"))[1].close()
            await refused(port, ours, "client")
            await refused(port, ours)
            await asyncio.to_thread(trusted.write_text, "torn")
            (await greeted(port, ours, "stranger"))[1].close()

    run(rotate())


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_no_session_outlives_the_authority_of_its_certificate(
    pki: Path, version: ssl.TLSVersion
) -> None:
    """One that is taken up again shows none: so it is not."""
    files = {
        "cert_file": pki / "server.crt",
        "key_file": pki / "server.key",
        "client_ca_file": pki / "ca.crt",
    }
    client = ssl.create_default_context(cafile=pki / "ca.crt")
    client.load_cert_chain(pki / "client.crt", pki / "client.key")
    client.maximum_version = version

    def call(port: int, session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool | None]:
        with (
            socket.create_connection(("127.0.0.1", port)) as bare,
            client.wrap_socket(bare, server_hostname="127.0.0.1", session=session) as connection,
        ):
            assert connection.recv(5) == b"hello"
            return connection.session, connection.session_reused

    async with listening(tls_context(ServerTls.model_validate(files))) as port:
        session, _ = await asyncio.to_thread(call, port, None)
        assert not (await asyncio.to_thread(call, port, session))[1]


def test_files_that_cannot_be_used_are_named_with_their_keys(pki: Path, tmp_path: Path) -> None:
    good = {"cert_file": pki / "server.crt", "key_file": pki / "server.key"}
    (tmp_path / "junk").write_text("junk")
    for wrong, told in (
        ({"key_file": pki / "client.key"}, "openai.tls.cert_file = .* do not belong together"),
        ({"cert_file": tmp_path / "none"}, "openai.tls.cert_file = .* cannot be read: No such file"),
        ({"cert_file": tmp_path / "junk"}, "openai.tls.cert_file = .* is not PEM"),
        ({"client_ca_file": pki / "server.key"}, "openai.tls.client_ca_file = .* holds no certificate"),
    ):
        with pytest.raises(ConfigError, match=told):
            tls_context(ServerTls.model_validate({**good, **wrong}), "openai.")
