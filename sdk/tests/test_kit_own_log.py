"""Where the lines of the SDK go in a program of somebody else's: never to its stdout (own_log.py)."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: A client of replicas that are not there, as docs/replicas.md has it.
PROGRAM = """
import asyncio
{configured}
from quartet.errors import QuartetError
from quartet.replicas import Replicas
from quartet.v1 import inference_service_pb2 as pb
{later}

async def main():
    async with Replicas(["127.0.0.1:1"]) as replicas:
        try:
            await replicas.complete(pb.GenerateRequest(session_id="s"), timeout_s=0.5)
        except QuartetError as error:
            print(error.reason)

from quartet.kit.own_log import get_logger
asyncio.run(main())
get_logger().info("an info", of=1)
get_logger().warning("a warning", of="some one")
try:
    raise RuntimeError("broken")
except RuntimeError as error:
    get_logger().error("an error", exc_info=error)
"""
STRUCTLOG = "import structlog, sys; structlog.configure(logger_factory=structlog.PrintLoggerFactory({where}))"
STANDARD = "import logging; logging.basicConfig(level={level}, format='%(levelname)s %(name)s: %(message)s')"


def told(configured: str = "", later: str = "") -> tuple[list[str], str]:
    """Lines of stdout, and what is on stderr."""
    text = PROGRAM.format(configured=configured, later=later)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_a_program_that_configures_nothing_has_its_stdout_for_itself() -> None:
    """own_log.py 2"""
    out, err = told()
    assert out in (["NOT_READY"], ["DEADLINE"])
    assert "a warning of='some one'\n" in err and "RuntimeError: broken" in err and "an info" not in err


@pytest.mark.parametrize("level", ["logging.INFO", "logging.ERROR"])
def test_one_that_configured_the_standard_librarys_has_the_lines_there(level: str) -> None:
    out, err = told(STANDARD.format(level=level))
    assert len(out) == 1 and "ERROR quartet.sdk: an error" in err
    assert ("INFO quartet.sdk: an info of=1" in err) == (level == "logging.INFO")
    assert ("WARNING quartet.sdk: a warning" in err) == (level == "logging.INFO")


@pytest.mark.parametrize("when", ["configured", "later"])
def test_one_that_configured_structlog_has_them_where_it_says(when: str) -> None:
    """own_log.py 1: before the SDK was imported, or after."""
    out, err = told(**{when: STRUCTLOG.format(where="sys.stdout")})
    assert any("an info" in line for line in out) and "an info" not in err
    out, err = told(**{when: STRUCTLOG.format(where="sys.stderr")})
    assert len(out) == 1 and "an info" in err
