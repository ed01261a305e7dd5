"""How the thin clients reach an orchestrator: its address, a token, certificates; and what is said if not."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from certificates import needs_openssl, write_pair
from forked_command import quartet
from kept_runs import Orchestrator, serving
from quartet.cli import clients, reaching
from quartet.cli.__main__ import main
from quartet.errors import QuartetError
from quartet.kit.security import ServerTls
from quartet.kit.server import ServerConfig
from quartet.v1 import orchestrator_service_pb2 as pb


@pytest.fixture
async def orchestrator() -> AsyncIterator[tuple[Orchestrator, str]]:
    servicer = Orchestrator()
    async with serving(servicer) as address:
        yield servicer, address


async def test_the_environment_may_say_where_the_orchestrator_is(
    orchestrator: tuple[Orchestrator, str], tmp_path: Path
) -> None:
    """variables.py 1 and 2."""
    _, address = orchestrator
    nothing = (0, "there is no run: none was submitted yet, or all were deleted\n")
    assert await quartet("runs", QUARTET_ORCHESTRATOR=address) == nothing
    other = {"QUARTET_ORCHESTRATOR": "10.0.0.5:1", "QUARTET_TOKEN_FILE": tmp_path / "absent"}
    assert await quartet("runs", "--orchestrator", address, **other) == nothing, "a token of another one"


@pytest.mark.parametrize(
    ("arguments", "variables", "told"),
    [
        ([], {"ORCHESTRATOR": ""}, "give --orchestrator HOST:PORT, or set QUARTET_ORCHESTRATOR to it"),
        ([], {"ORCHESTRATOR": "10.0.0.5:1"}, "QUARTET_ORCHESTRATOR: address '10.0.0.5:1' is off loopback"),
        (["--orchestrator", "127.0.0.1:1"], {"KEY_FILE": "k"}, "cert_file and QUARTET_KEY_FILE go together"),
        (["--orchestrator", "127.0.0.1:1"], {"TOKEN_FILE": "/absent"}, "error: QUARTET_TOKEN_FILE"),
        (
            [],
            {"ORCHESTRATOR": "127.0.0.1:1", "TOKEN_FILE": "/absent/orchestrator/token_file"},
            "error: QUARTET_TOKEN_FILE = '/absent/orchestrator/token_file'",
        ),
    ],
)
def test_what_is_wrong_with_a_variable_is_told_by_its_name(
    arguments: list[str],
    variables: dict[str, str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """variables.py 3."""
    for name, value in variables.items():
        monkeypatch.setenv(f"QUARTET_{name}", value)
    assert main(["runs", *arguments]) == 2
    assert told in capsys.readouterr().err


class Slow(Orchestrator):
    """Takes a call, and does not come to its end."""

    async def StopRun(self, request: pb.StopRunRequest, context: object) -> pb.StopRunResponse:
        await asyncio.sleep(60)
        return pb.StopRunResponse()


async def test_a_slow_orchestrator_is_no_failed_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    """unreachable.py 2: it took the connection, and the call."""
    monkeypatch.setattr(clients, "CALL_SECONDS", 0.5)
    parser = argparse.ArgumentParser()
    reaching.add_arguments(parser, takes_run=True)
    async with serving(Slow()) as address:
        stop = parser.parse_args(["r", "--orchestrator", address])
        with pytest.raises(QuartetError) as caught:
            await asyncio.to_thread(reaching.run, clients.stop, stop, [])
    assert caught.value.reason == "DEADLINE"
    assert caught.value.message.startswith(f"no orchestrator answers at {address} (")
    assert "handshake" not in caught.value.message and "--ca-file" not in caught.value.message


def test_who_has_a_name_without_an_address_is_not_looked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system may know an address where gRPC finds none, and may take long to say that it does not."""

    async def listens(address: str) -> bool:
        return True

    monkeypatch.setattr(reaching, "listens", listens)
    assert main(["runs", "--orchestrator", "no..name:1", "--insecure-ok-off-loopback"]) == 1
    told = capsys.readouterr().err
    assert "no orchestrator answers at no..name:1 (errors resolving " in told and "somebody" not in told


@needs_openssl
async def test_an_orchestrator_that_asks_for_a_certificate_is_shown_one(pki: Path) -> None:
    tls = ServerTls(cert_file=pki / "server.crt", key_file=pki / "server.key", client_ca_file=pki / "ca.crt")
    async with serving(Orchestrator(), ServerConfig(address="127.0.0.1:0", tls=tls)) as address:
        at = [
            "--orchestrator",
            address.replace("127.0.0.1", "localhost"),
            "--ca-file",
            str(pki / "ca.crt"),
        ]
        own = ["--cert-file", str(pki / "client.crt"), "--key-file", str(pki / "client.key")]
        assert await quartet("runs", *at, *own) == (
            0,
            "there is no run: none was submitted yet, or all were deleted\n",
        )
        code, printed = await quartet("runs", *at)
        # Of the two addresses of localhost gRPC tells the error of either.
        assert code == 1 and "if it has TLS, give --cert-file and --key-file" in printed
        assert "TLS wants ca_file" not in printed
        renamed = [
            at[0],
            at[1].replace("localhost", "127.0.0.1"),
            "--ca-file",
            str(pki / "other.crt"),
        ]
        code, printed = await quartet("runs", *renamed)
        assert code == 1 and "is trusted here; give --ca-file the one that signed it" in printed
        assert "ca_file is to name" not in printed
        code, printed = await quartet("runs", *at, *own[:2])
        assert code == 2 and "cert_file and key_file go together" in printed


@needs_openssl
async def test_a_certificate_that_is_refused_is_named_with_what_may_be_wrong_with_it(
    pki: Path, tmp_path: Path
) -> None:
    tls = ServerTls(cert_file=pki / "server.crt", key_file=pki / "server.key", client_ca_file=pki / "ca.crt")
    write_pair(tmp_path, "old", "ca", ("20200101000000Z", "20200203040506Z"))
    async with serving(Orchestrator(), ServerConfig(address="127.0.0.1:0", tls=tls)) as address:
        at = ["--orchestrator", address, "--ca-file", str(pki / "ca.crt")]
        expired = {"cert": tmp_path / "old.crt", "key": tmp_path / "old.key"}
        stranger = {"cert": pki / "stranger.crt", "key": pki / "stranger.key"}
        for pair, told in (
            (
                expired,
                "it takes no certificate that has expired, as that of {} has at 2020-02-03 04:05:06 UTC",
            ),
            (stranger, "the certificate of {} may be of an authority that its client_ca_file does not name"),
        ):
            options = [f"--{name}-file={path}" for name, path in pair.items()]
            code, printed = await quartet("runs", *at, *options)
            assert code == 1 and f"if it has TLS, {told.format('--cert-file')}" in printed
            assert "give --cert-file" not in printed, "it is given"
            variables = {f"QUARTET_{name.upper()}_FILE": path for name, path in pair.items()}
            code, printed = await quartet("runs", *at, **variables)
            assert code == 1 and told.format("QUARTET_CERT_FILE") in printed


@needs_openssl
async def test_tls_on_one_side_alone_is_told_with_what_to_write(
    pki: Path, orchestrator: tuple[Orchestrator, str]
) -> None:
    _, plain = orchestrator
    code, printed = await quartet("runs", "--orchestrator", plain, "--ca-file", str(pki / "ca.crt"))
    assert code == 1 and "it speaks plaintext, and was called with TLS; leave --ca-file out" in printed
    assert "leave tls" not in printed, "a key, which these commands do not have"
    tls = ServerTls(cert_file=pki / "server.crt", key_file=pki / "server.key")
    (pki / "token").write_text("secret")
    config = ServerConfig(address="127.0.0.1:0", tls=tls, token_file=pki / "token")
    async with serving(Orchestrator(), config) as address:
        code, printed = await quartet("runs", "--orchestrator", address)
        assert code == 1 and "if it has TLS, give --ca-file" in printed
        at = {"QUARTET_ORCHESTRATOR": address, "QUARTET_CA_FILE": pki / "ca.crt"}
        (pki / "other").write_text("another secret")
        code, printed = await quartet("runs", **at, QUARTET_TOKEN_FILE=pki / "other")
        assert code == 1 and "QUARTET_TOKEN_FILE of the environment)" in printed
