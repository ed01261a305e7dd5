"""The endpoint of metrics asks nobody who he is, and stands what anybody does: quartet.kit.metrics 4."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest
from quartet.config import ConfigError
from quartet.kit import metrics
from quartet.kit.metrics import MetricsServer, start_metrics


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = start_metrics("127.0.0.1:0")
    yield server
    server.close()


def began(server: MetricsServer) -> socket.socket:
    """A scrape that never says what it wants."""
    silent = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    silent.sendall(b"GET /metrics HTTP/1.1\r\n")
    return silent


def scraped(server: MetricsServer) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
        return str(answer.read(), "utf-8")


def test_connections_hold_no_more_threads_than_there_is_room_for(
    server: MetricsServer,
) -> None:
    before = set(threading.enumerate())  # of which some may end meanwhile

    def more() -> int:
        return len(set(threading.enumerate()) - before)

    held = [began(server) for _ in range(metrics.MAX_SCRAPES + 20)]
    # Those beyond are closed without a word.
    assert all(one.recv(1) == b"" for one in held[metrics.MAX_SCRAPES :])
    assert more() == metrics.MAX_SCRAPES
    for one in held:
        one.close()
    deadline = time.monotonic() + 30
    while more() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "quartet_loop_lag_seconds" in scraped(server)


def test_no_name_is_looked_up_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A nameserver that does not answer holds no service up."""

    def wait(*_: object) -> str:
        raise AssertionError("it may take ten seconds")

    monkeypatch.setattr(socket, "getfqdn", wait)
    server = start_metrics("127.0.0.1:0")
    assert "quartet_loop_lag_seconds" in scraped(server)
    server.close()


def test_silence_holds_no_place(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as impatient:
        impatient.setattr(metrics._Scrape, "timeout", 0.1)
        with began(server) as silent:
            assert silent.recv(1) == b"", "closed by the server"
    assert "quartet_loop_lag_seconds" in scraped(server)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("address", ["9090x", "no-such-host.invalid:9090", "inference..svc:9090"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=f"server.metrics_address = '{address}' "):
        metrics.check_metrics(address)
