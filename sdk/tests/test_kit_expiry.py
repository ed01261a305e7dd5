"""When a certificate ends, and that it is told (quartet.kit.expiry); as openssl, which makes it, says it."""

from __future__ import annotations

import asyncio
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import structlog
from certificates import needs_openssl, write_pair
from quartet.kit import expiry, probe
from quartet.kit.health import LIVENESS, Health
from quartet.kit.security import ServerTls
from quartet.kit.server import ServerConfig, start

PAST = ("20200101000000Z", "20200203040506Z")
DAY = 86_400


def at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y%m%d%H%M%SZ")


def told_by(path: Path) -> str:
    """As openssl tells it."""
    command = ["openssl", "x509", "-in", str(path), "-noout", "-enddate", "-dateopt", "iso_8601"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@needs_openssl
@pytest.mark.parametrize(
    "dates", [PAST, ("19990101000000Z", "20491231235959Z"), ("20200101000000Z", "20620203040506Z"), None]
)
def test_the_end_of_a_certificate_is_what_openssl_says(tmp_path: Path, dates: tuple[str, str] | None) -> None:
    """Years of two digits and of four; before it there may be another thing."""
    write_pair(tmp_path, "own", "ca", dates)
    pem = (tmp_path / "own.crt").read_bytes()
    found = expiry.validity_of((tmp_path / "own.key").read_bytes() + b"whose it is\n" + pem)
    assert found is not None
    assert told_by(tmp_path / "own.crt") == f"notAfter={found.end.replace(' UTC', 'Z')}"
    assert found.has_expired is (dates == PAST)
    if dates is not None:
        assert (at(found.begin_s), at(found.end_s)) == dates


@needs_openssl
def test_of_a_chain_the_first_end_counts(tmp_path: Path) -> None:
    write_pair(tmp_path, "long", "ca")
    write_pair(tmp_path, "short", "ca", PAST)
    ends = [expiry.validity_of((tmp_path / f"{name}.crt").read_bytes()) for name in ("long", "short")]
    both = (tmp_path / "long.crt").read_bytes() + (tmp_path / "short.crt").read_bytes()
    assert expiry.validity_of(both) == ends[1] != ends[0]
    assert expiry.validity_of((tmp_path / "long.key").read_bytes()) is None


@pytest.mark.parametrize(("life_days", "near_days"), [(1, 0.1), (90, 9), (140, 14), (3650, 14)])
def test_what_is_near(life_days: float, near_days: float) -> None:
    validity = expiry.Validity(1e9, 1e9 + life_days * DAY)
    assert validity.end_s - validity.near_s == pytest.approx(near_days * DAY)


@needs_openssl
def test_an_end_is_told_when_it_is_near_and_when_it_is_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """expiry.py 2."""
    now = time.time()
    write_pair(tmp_path, "own", "ca", (at(now - 10 * DAY), at(now + 90 * DAY)))
    path = tmp_path / "own.crt"
    watched = expiry.watched(path)
    assert watched is expiry.watched(path), "one for all who show it"
    with structlog.testing.capture_logs() as told:
        watched.read(path.read_bytes())
        assert not told
        for days in (81, 85, 91, 92):
            monkeypatch.setattr(time, "time", lambda days=days: now + days * DAY)
            watched.look()
            watched.look()
        assert [one["event"] for one in told] == ["certificate_expires_soon", "certificate_expired"]
        assert all(one["cert_file"] == str(path) and one["log_level"] == "warning" for one in told)
        assert watched.validity is not None and told[0]["ends"] == watched.validity.end
        write_pair(tmp_path, "own", "ca", PAST)
        watched.read(path.read_bytes())
        assert [one["event"] for one in told][2:] == ["certificate_expired"], "another one"


@needs_openssl
async def test_a_server_whose_certificate_has_expired_says_so_when_it_starts(tmp_path: Path) -> None:
    write_pair(tmp_path, "own", "ca", PAST)
    tls = ServerTls(cert_file=tmp_path / "own.crt", key_file=tmp_path / "own.key")
    with structlog.testing.capture_logs() as told:
        running = await start([], ServerConfig(tls=tls), Health())
        await running.stop(0)
    (one,) = (line for line in told if line["event"] == "certificate_expired")
    assert one["ends"] == "2020-02-03 04:05:06 UTC"


@needs_openssl
async def test_a_probe_does_not_end_a_process_for_a_certificate_that_has_expired(tmp_path: Path) -> None:
    """It goes on upon the connections that stand, and a restart brings no other pair; nor is it ready."""
    files = {f"{kind}_file": tmp_path / name for kind, name in (("cert", "own.crt"), ("key", "own.key"))}
    write_pair(tmp_path, "own", "ca", PAST)
    tls = ServerTls(**files, client_ca_file=tmp_path / "ca.crt")
    running = await start([], ServerConfig(tls=tls), Health())
    shown = ["--ca-file", str(tls.client_ca_file), "--cert-file", str(tls.cert_file)]
    argv = ["--address", running.address, *shown, "--key-file", str(tls.key_file), "--service"]
    try:
        assert await asyncio.to_thread(probe.main, [*argv, LIVENESS]) == 0
        assert await asyncio.to_thread(probe.main, [*argv, ""]) == 1
        write_pair(tmp_path, "own", "ca")
        assert await asyncio.to_thread(probe.main, [*argv, LIVENESS]) == 0
    finally:
        await running.stop(0)
    for validity in ((), (PAST,)):
        write_pair(tmp_path, "own", "ca", *validity)
        assert await asyncio.to_thread(probe.main, [*argv, LIVENESS]) == 1, "nobody is there"
