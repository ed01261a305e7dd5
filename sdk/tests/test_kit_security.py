"""Who may talk to whom (quartet.kit.security, invariants 1 to 3), over real TLS on loopback."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from certificates import needs_openssl
from quartet import unreachable
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.kit.call import unary
from quartet.kit.channel import ClientSecurity, connect
from quartet.kit.health import Health
from quartet.kit.security import ServerTls, TokenFile, check_client, check_server, host_port, is_loopback
from quartet.kit.server import ServerConfig, Service, check_here, start
from quartet.v1 import weights_pb2 as pb
from quartet.v1 import weights_pb2_grpc as rpc


class Open(rpc.WeightServiceServicer):
    async def GetManifest(self, request: Any, context: Any) -> Any:
        return pb.GetManifestResponse()


SERVICE = Service("quartet.v1.WeightService", rpc.add_WeightServiceServicer_to_server, Open())


async def ask(address: str, security: ClientSecurity, timeout_s: float = 20) -> str:
    """ "OK", or the reason of the refusal."""
    error = await refusal(address, security, timeout_s)
    return "OK" if error is None else error.reason


async def refusal(address: str, security: ClientSecurity, timeout_s: float = 20) -> QuartetError | None:
    """What a call is refused with."""
    async with connect(address, security=security) as channel:
        return await refusal_on(channel, timeout_s)


async def refusal_on(channel: grpc.aio.Channel, timeout_s: float = 20) -> QuartetError | None:
    """What a call is refused with."""
    try:
        method = rpc.WeightServiceStub(channel).GetManifest
        await unary(method, pb.GetManifestRequest(), timeout_s=timeout_s)
    except QuartetError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", True),
        ("127.8.9.1:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:/tmp/s", True),
        ("dns:///localhost:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("trainer:1", False),
        ("dns:///trainer.ns.svc:1", False),
        ("localhost.evil.example:1", False),
    ],
)
def test_what_is_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


def test_open_doors_off_loopback_are_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    token = TokenFile(tmp_path / "token")
    tls = ServerTls(cert_file=Path("c"), key_file=Path("k"))
    mutual = ServerTls(cert_file=Path("c"), key_file=Path("k"), client_ca_file=Path("ca"))
    for bad_tls, bad_token, says in ((None, token, "plaintext"), (tls, None, "lets everybody in")):
        with pytest.raises(ConfigError, match=says) as caught:
            check_server("0.0.0.0:1", bad_tls, bad_token, insecure_ok=False)
        assert "insecure_ok_off_loopback" in str(caught.value)
        check_server("0.0.0.0:1", bad_tls, bad_token, insecure_ok=True)
        check_server("127.0.0.1:1", bad_tls, bad_token, insecure_ok=False)
    check_server("0.0.0.0:1", tls, token, insecure_ok=False)
    check_server("0.0.0.0:1", mutual, None, insecure_ok=False)


@pytest.mark.parametrize("address", ["fd00::1:50051", "::1:50051", "::1"])
def test_an_ipv6_address_without_brackets_is_refused(address: str) -> None:
    """gRPC would take all of it for a host, and call port 443."""
    trusting = ClientSecurity(insecure_ok_off_loopback=True)
    with pytest.raises(ConfigError, match=r"IPv6 without brackets; write it as \[::1\]:50051"):
        check_client(address, trusting)
    with pytest.raises(ValueError, match="in brackets"):
        host_port(address)
    for good in ("[fd00::1]:50051", "dns:///[fd00::1]:50051", "ipv6:[::1]:50051", "cafe:50051"):
        check_client(good, trusting)


async def test_plaintext_clients_stay_on_this_machine() -> None:
    with pytest.raises(ConfigError, match="plaintext"):
        connect("trainer:50051")
    with pytest.raises(ConfigError, match="has no port"):
        connect("localhost")
    check_client("trainer:50051", ClientSecurity(insecure_ok_off_loopback=True))
    check_client("trainer:50051", ClientSecurity(tls=True))


@pytest.mark.parametrize(
    "security", [ClientSecurity(), ClientSecurity(tls=True), ClientSecurity(insecure_ok_off_loopback=True)]
)
def test_a_url_is_no_address_whoever_is_trusted(security: ClientSecurity) -> None:
    for address in ("http://trainer:50051", "https://localhost:50051"):
        with pytest.raises(ConfigError, match="is a URL; write host:port"):
            check_client(address, security)
    for good in ("unix:///run/trainer", "dns:///localhost:50051", "localhost:50051"):
        check_client(good, security)


def test_only_tls_has_a_port_of_its_own() -> None:
    with pytest.raises(ConfigError, match="'trainer' has no port; write host:port"):
        check_client("trainer", ClientSecurity(insecure_ok_off_loopback=True))
    check_client("trainer", ClientSecurity(tls=True))


def test_a_port_that_is_none_is_no_other_one() -> None:
    for address, security in (("127.0.0.1:65536", ClientSecurity()), ("t:99999", ClientSecurity(tls=True))):
        with pytest.raises(ConfigError, match="ports end at 65535"):
            check_client(address, security)


async def test_a_server_refuses_before_it_binds() -> None:
    with pytest.raises(ConfigError, match="plaintext"):
        await start([SERVICE], ServerConfig(address="0.0.0.0:0"), Health())


@pytest.mark.parametrize(
    "settings",
    [{"cert_file": "c", "ca_file": "a"}, {"cert_file": "c", "key_file": "k"}, {"server_name": "x"}],
)
def test_half_a_security_is_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"go together|need TLS"):
        ClientSecurity.model_validate(settings)


async def test_tokens_are_demanded_and_follow_their_file(tmp_path: Path) -> None:
    served, held, wrong = (tmp_path / name for name in ("served", "held", "wrong"))
    served.write_text("first\n")
    held.write_text("first")
    wrong.write_text("guess")
    running = await start([SERVICE], ServerConfig(token_file=served), Health())
    try:
        good = ClientSecurity(token_file=held)
        assert await ask(running.address, good) == "OK"
        assert await ask(running.address, ClientSecurity()) == "UNAUTHENTICATED"
        assert await ask(running.address, ClientSecurity(token_file=wrong)) == "UNAUTHENTICATED"
        async with connect(running.address) as channel:
            bare = rpc.WeightServiceStub(channel).GetManifest
            for metadata, says in (
                ((), "token is missing; send it as metadata 'authorization: Bearer TOKEN'"),
                ((("authorization", "first"),), "token is missing"),
                ((("authorization", "Bearer guess"),), "token is none of this service's"),
            ):
                with pytest.raises(grpc.RpcError, match=says):
                    await bare(pb.GetManifestRequest(), metadata=metadata, timeout=20)
        served.write_text("second-token")
        assert await ask(running.address, good) == "UNAUTHENTICATED"
        async with connect(running.address, security=good) as channel:
            held.write_text("second-token")
            method = rpc.WeightServiceStub(channel).GetManifest
            await unary(method, pb.GetManifestRequest(), timeout_s=20)
    finally:
        await running.stop(0)


def test_a_rotation_in_progress_locks_nobody_out(tmp_path: Path) -> None:
    """security.py 2: and whoever meant to revoke a token by that is told, once for each way."""
    path = tmp_path / "token"
    path.write_text("first")
    token = TokenFile(path)
    with structlog.testing.capture_logs() as told:
        path.write_text("")
        assert token.read() == token.read() == "first"
        path.unlink()
        assert token.read() == token.read() == "first"
    assert [one["why"] for one in told] == ["it holds no token", "No such file or directory"]
    assert all(one["path"] == str(path) and "first" not in str(one) for one in told)
    path.write_text("second")
    assert token.read() == "second" and not token.accepts("first") and not token.accepts("")
    assert not token.accepts("second\udcff"), "what is no text is no token, and no fault"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"a\nb", b"x" * 5000])
def test_what_is_no_token(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(ConfigError, match="holds no token") as caught:
        TokenFile(tmp_path / "token")
    assert "xxxx" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        TokenFile(tmp_path / "missing")


async def test_tokens_are_never_logged(tmp_path: Path) -> None:
    (tmp_path / "served").write_text("right-token")
    (tmp_path / "held").write_text("wrong-token")
    with structlog.testing.capture_logs() as logs:
        running = await start([SERVICE], ServerConfig(token_file=tmp_path / "served"), Health())
        await ask(running.address, ClientSecurity(token_file=tmp_path / "held"))
        await running.stop(0)
    assert logs and "-token" not in str(logs)


@needs_openssl
async def test_mutual_tls_lets_in_only_our_ca(pki: Path) -> None:
    tls = ServerTls(cert_file=pki / "server.crt", key_file=pki / "server.key", client_ca_file=pki / "ca.crt")
    running = await start([SERVICE], ServerConfig(tls=tls), Health())

    def client(name: str | None, ca: str = "ca") -> ClientSecurity:
        cert, key = (pki / f"{name}.crt", pki / f"{name}.key") if name else (None, None)
        return ClientSecurity(ca_file=pki / f"{ca}.crt", cert_file=cert, key_file=key)

    try:
        assert await ask(running.address, client("client")) == "OK"
        for refused in (client("stranger"), client(None), client("client", ca="other"), ClientSecurity()):
            assert await ask(running.address, refused, 3) in ("NOT_READY", "DEADLINE")
    finally:
        await running.stop(0)


@needs_openssl
async def test_a_handshake_that_fails_is_told_as_what_it_is(pki: Path) -> None:
    """unreachable.py 1 and 2: gRPC's own words are OpenSSL's."""
    cert, key, ca = pki / "server.crt", pki / "server.key", pki / "ca.crt"
    plain = await start([SERVICE], ServerConfig(), Health())
    tls = await start([SERVICE], ServerConfig(tls=ServerTls(cert_file=cert, key_file=key)), Health())
    mutual = ServerTls(cert_file=cert, key_file=key, client_ca_file=ca)
    asking = await start([SERVICE], ServerConfig(tls=mutual), Health())
    trusting = ClientSecurity(ca_file=ca)
    stranger = ClientSecurity(ca_file=ca, cert_file=pki / "stranger.crt", key_file=pki / "stranger.key")
    named = ClientSecurity(ca_file=ca, server_name="elsewhere")
    try:
        assert await unreachable.listens(tls.address)
        assert await unreachable.listens(tls.address.replace("127.0.0.1", "localhost"))
        for server, security, meaning, keys in (
            (plain, trusting, unreachable.PLAINTEXT_THERE, ("tls", "ca_file")),
            (tls, ClientSecurity(), unreachable.CLOSED, ("ca_file", "cert_file", "key_file")),
            (tls, ClientSecurity(ca_file=pki / "other.crt"), unreachable.UNKNOWN_AUTHORITY, ("ca_file",)),
            (tls, named, unreachable.ANOTHER_NAME, ("server_name",)),
            (asking, trusting, unreachable.CLOSED, ("cert_file", "key_file")),
            (asking, stranger, unreachable.CLOSED, ("cert_file", "key_file")),
        ):
            error = await refusal(server.address, security)
            assert error is not None and error.reason == "NOT_READY"
            told, found, _ = error.message.partition(" (failed to connect to all addresses; ")
            assert found and meaning in told and "TLS" in told and unreachable.is_of_tls(error.message)
            assert all(key in ClientSecurity.model_fields and key in told for key in keys)
            assert error.metadata == {"grpc_code": "UNAVAILABLE"}
    finally:
        for server in (plain, tls, asking):
            await server.stop(0)
    assert not await unreachable.listens(plain.address)
    gone = await refusal(plain.address, trusting)
    assert gone is not None and gone.message.endswith("Connection refused")
    assert not unreachable.is_of_tls(gone.message)
    assert unreachable.explained("Socket closed") == "Socket closed", "of one that stood"


@needs_openssl
async def test_certificates_follow_their_files(pki: Path, tmp_path: Path) -> None:
    for end in ("crt", "key"):
        shutil.copy(pki / f"server.{end}", tmp_path / f"s.{end}")
    tls = ServerTls(cert_file=tmp_path / "s.crt", key_file=tmp_path / "s.key")
    running = await start([SERVICE], ServerConfig(tls=tls), Health())
    ours, others = ClientSecurity(ca_file=pki / "ca.crt"), ClientSecurity(ca_file=pki / "other.crt")
    try:
        assert await ask(running.address, ours) == "OK"
        await asyncio.to_thread(shutil.copy, pki / "stranger.crt", tmp_path / "s.crt")
        with structlog.testing.capture_logs() as logged:
            for _ in range(2):
                assert await ask(running.address, ours) == "OK", "the pair that was whole"
        (told,) = (one for one in logged if one["event"] == "certificate_stays")
        assert "do not belong together" in told["why"]
        await asyncio.to_thread(shutil.copy, pki / "stranger.key", tmp_path / "s.key")
        assert await ask(running.address, others) == "OK"
    finally:
        await running.stop(0)


@needs_openssl
async def test_a_certificate_and_the_key_of_another_are_named(pki: Path, tmp_path: Path) -> None:
    """server.py 2: also by who only looks, and at a client. A half replaced pair leaves the one in use."""
    cert, key = pki / "server.crt", pki / "stranger.key"
    told = rf"server\.tls\.cert_file = '{cert}' and server\.tls\.key_file = '{key}' do not belong together; "
    config = ServerConfig(tls=ServerTls(cert_file=cert, key_file=key))
    with pytest.raises(ConfigError, match=told):
        check_here(config)
    with pytest.raises(ConfigError, match=told):
        await start([SERVICE], config, Health())
    with pytest.raises(ConfigError, match=rf"^cert_file = '{cert}' and key_file = .* do not belong together"):
        connect("127.0.0.1:1", security=ClientSecurity(ca_file=pki / "ca.crt", cert_file=cert, key_file=key))
    with pytest.raises(ConfigError, match=r"key_file = .* are no pair"):
        check_here(ServerConfig(tls=ServerTls(cert_file=cert, key_file=cert)))
    for end in ("crt", "key"):
        shutil.copy(pki / f"server.{end}", tmp_path / f"s.{end}")
    tls = ServerTls(cert_file=tmp_path / "s.crt", key_file=tmp_path / "s.key")
    running = await start([SERVICE], ServerConfig(tls=tls), Health())
    try:
        await asyncio.to_thread(shutil.copy, key, tmp_path / "s.key")
        assert await ask(running.address, ClientSecurity(ca_file=pki / "ca.crt")) == "OK"
    finally:
        await running.stop(0)


async def test_unreadable_certificates_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "junk").write_text("junk")
    for name, says in (("missing", "cannot be read"), ("junk", "is not PEM")):
        tls = ServerTls(cert_file=tmp_path / name, key_file=tmp_path / name)
        with pytest.raises(ConfigError, match=says):
            await start([SERVICE], ServerConfig(tls=tls), Health())


@needs_openssl
@pytest.mark.parametrize("inside", ["nothing", "rubbish", "key", "torn"])
async def test_authorities_that_are_none_are_refused_at_the_start(
    pki: Path, tmp_path: Path, inside: str
) -> None:
    """server.py 2: PEM in name only, with which every handshake would fail; at a server and at a client."""
    good, bad = (pki / "ca.crt").read_text(), tmp_path / "ca.crt"
    begin, end = good.splitlines()[0], good.splitlines()[-1]
    contents = {
        "nothing": f"{begin}\n{end}\n",
        "rubbish": f"{begin}\nbm90IGEgY2VydGlmaWNhdGU=\n{end}\n",
        "key": (pki / "server.key").read_text(),
        "torn": good[: len(good) // 2],
    }
    bad.write_text(contents[inside])
    config = ServerConfig(
        tls=ServerTls(cert_file=pki / "server.crt", key_file=pki / "server.key", client_ca_file=bad)
    )
    told = rf"= '{bad}' holds no certificate that can be read.*; name a PEM file of the certificates"
    with pytest.raises(ConfigError, match=rf"^server\.tls\.client_ca_file {told}"):
        check_here(config)
    with pytest.raises(ConfigError, match=rf"^server\.tls\.client_ca_file {told}"):
        await start([SERVICE], config, Health())
    with pytest.raises(ConfigError, match=rf"^ca_file {told}"):
        connect("127.0.0.1:1", security=ClientSecurity(ca_file=bad))
    bad.write_text(good + (pki / "other.crt").read_text())
    check_here(config)
