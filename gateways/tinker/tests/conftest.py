"""The services once for this folder, and the SDK pointed at them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from .tinker_stack import Stack, stack

KEY = "tml-anything"
FINISHED = pytest.StashKey[int]()
"""What pytest found, for its process to end with."""


@pytest.fixture(scope="session")
def tinker() -> Any:
    """The SDK, unmodified."""
    # Before it is imported; events about errors would be sent to the gateway, which keeps none.
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    os.environ["TINKER_API_KEY"] = KEY
    return pytest.importorskip("tinker", reason="the Tinker SDK is not installed: pip install tinker==0.38.0")


@pytest.fixture(scope="session")
def services(tinker: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Trainer, inference and gateway as processes."""
    with stack(tmp_path_factory.mktemp("tinker")) as running:
        yield running


@pytest.fixture
def client(tinker: Any, services: Stack) -> Iterator[Any]:
    """A ServiceClient of its own for each test; its runs are closed afterwards."""
    one = tinker.ServiceClient(base_url=f"http://{services.gateway}")
    yield one
    one.close("success").result(60)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[FINISHED] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the process here: threads of the SDK's HTTP client (pyqwest) outlive its `close` and ask for the
    interpreter's lock while it ends, which aborts one process in twenty after every test has passed."""
    if "tinker" in sys.modules and FINISHED in config.stash:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[FINISHED])
