"""When traces are exported, by which variables, and what a collector that is away or slow costs.

What calls make of traces: test_kit_tracing.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from quartet.config import ConfigError
from quartet.kit import tracing
from span_collector import Collector, collecting_here, only_variables

CLOSED = "http://127.0.0.1:9"  # where nobody listens


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting_here(monkeypatch) as running:
        yield running


def start_python(text: str, **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", text]
    return subprocess.Popen(
        command, env={**environment, **variables}, cwd=Path(__file__).parent, text=True, **pipes
    )


def run_python(text: str, **variables: str) -> subprocess.CompletedProcess[str]:
    process = start_python(text, **variables)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


# -- when


@pytest.mark.parametrize(
    ("variables", "on"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "mine"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": CLOSED}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": CLOSED}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": CLOSED, "OTEL_SDK_DISABLED": "True"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": CLOSED, "OTEL_SDK_DISABLED": "false"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": CLOSED, "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": CLOSED, "OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": CLOSED, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True),
    ],
)
def test_the_standard_variables_say_whether(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], on: bool
) -> None:
    """tracing.py 1."""
    only_variables(monkeypatch, variables)
    assert tracing.asked() is on
    with tracing.exporting("test"):
        assert tracing.is_on() is on
    assert not tracing.is_on()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "console"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "-1"),
    ],
)
def test_what_is_not_spoken_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """tracing.py 2."""
    only_variables(monkeypatch, {"OTEL_EXPORTER_OTLP_ENDPOINT": CLOSED, name: value})
    with pytest.raises(ConfigError, match="refuse"), tracing.exporting("test"):
        pass


def test_packages_that_are_missing_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """tracing.py 2: before a service begins, as its preflight does."""
    only_variables(monkeypatch, {"OTEL_EXPORTER_OTLP_ENDPOINT": CLOSED})
    monkeypatch.delitem(sys.modules, "quartet.kit.otel", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"opentelemetry is not installed; .*pip install './sdk\[otel\]'"):
        tracing.check()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    tracing.check()


OFF = """
import asyncio, sys
from guinea_pig import ask, served
from quartet.kit import logs, tracing
from quartet.kit.call import unary

logs.configure("test")

async def call():
    async with served() as (pig, stub, _):
        with tracing.exporting("test"), tracing.span("work", root=True, run_id="run") as span:
            span.set(step=1)
            tracing.event("first")
            await unary(stub.GetManifest, ask("run"), timeout_s=20)

asyncio.run(call())
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""


def test_off_nothing_of_it_is_imported() -> None:
    """tracing.py 1."""
    done = run_python(OFF)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_the_variables_name_the_service(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=here")
    with tracing.exporting("test"), tracing.span("work"):
        pass
    (work,) = collector.spans
    assert (work.service, work.resource["deployment.environment.name"]) == ("mine", "here")


def test_the_variables_say_what_is_sampled(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    with tracing.exporting("test"), tracing.span("work"):
        assert tracing.carried().rpartition("-")[2] in ("00", "02")
    assert not collector.spans


# -- what it costs


def test_the_end_sends_what_is_left(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """tracing.py 3."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    with tracing.exporting("test"):
        for _ in range(700):
            with tracing.span("work"):
                pass
    assert len(collector.named("work")) == 700


def test_a_collector_that_is_away_costs_spans_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """tracing.py 3."""
    only_variables(monkeypatch, {"OTEL_EXPORTER_OTLP_ENDPOINT": CLOSED, "OTEL_BSP_SCHEDULE_DELAY": "50"})
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    joined, join = list[str](), threading.Thread.join
    with structlog.testing.capture_logs() as lines, tracing.exporting("test"):
        begun = time.monotonic()
        for _ in range(20_000):
            with tracing.span("work"):
                pass
        spans_s = time.monotonic() - begun
        while not tracing._spans._exporter.failing:  # type: ignore[union-attr]
            time.sleep(0.05)
        monkeypatch.setattr(
            threading.Thread, "join", lambda one, timeout=None: joined.append(one.name) or join(one, timeout)
        )
    said = [line for line in lines if line["event"] == "spans may be lost"]
    # On a busy machine the queue is full before anything was sent.
    assert len(said) == 1 and ("export" in said[0]["why"] or "Queue full" in said[0]["why"]), lines
    assert spans_s < 20, "to wait for the collector, a second for each batch, would take longer"
    assert "last-spans" not in joined, "nor is it waited for at the end"


def test_a_key_that_cannot_be_read_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """otel.py 2."""
    for ending in [one for one in threading.enumerate() if one.name == "last-spans"]:
        ending.join(30)  # of the test before: what it says would be the one line that is said
    headers = {"OTEL_EXPORTER_OTLP_HEADERS": "Authorization: Bearer the-key"}
    only_variables(monkeypatch, {"OTEL_EXPORTER_OTLP_ENDPOINT": CLOSED, **headers})
    with structlog.testing.capture_logs() as lines, tracing.exporting("test"):
        pass
    (said,) = (line["why"] for line in lines if line["event"] == "spans may be lost")
    assert "write name=value" in said and "the-key" not in said


def test_a_collector_that_is_slow_does_not_hold_the_end_up(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tracing.py 3."""
    collector.delay_s = 30.0
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "30")
    with tracing.exporting("test"):
        with tracing.span("work"):
            pass
        time.sleep(0.3)
        begun = time.monotonic()
    assert time.monotonic() - begun < 20  # of the 30 s that the collector takes


FOUND = """
import importlib.metadata

def not_installed(name):
    raise importlib.metadata.PackageNotFoundError(name)

importlib.metadata.version = not_installed
from quartet.kit import tracing
with tracing.exporting("test"), tracing.span("work"):
    pass
"""


def test_a_process_that_finds_the_sdk_by_its_path_alone_exports(collector: Collector) -> None:
    done = run_python(FOUND, **collector.variables)
    assert done.returncode == 0, done.stderr
    assert [one.name for one in collector.spans] == ["work"]


FORKED = """
import os, sys, time
from quartet.kit import tracing
with tracing.exporting("test"):
    with tracing.span("of the parent"):
        pid = os.fork()
        if pid == 0:
            with tracing.span("of the child"):
                pass
            sys.stdin.readline()
            os._exit(0)
        os.waitpid(pid, 0)
"""


def test_a_fork_exports_its_own_spans_and_no_others(collector: Collector) -> None:
    """tracing.py 4 has it that there is none; a library may make one all the same."""
    parent = start_python(FORKED, **collector.variables)
    try:
        collector.wait(lambda: collector.named("of the child"))
    finally:
        _, said = parent.communicate("go on\n", timeout=60)
    assert parent.returncode == 0, said
    assert sorted(one.name for one in collector.spans) == ["of the child", "of the parent"]
