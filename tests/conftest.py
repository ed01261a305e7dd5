"""What end-to-end and fault tests share: one tiny model, made once by the real command; the launcher, and
what it leaves.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.forked_services import Forks

REPOSITORY = Path(__file__).resolve().parent.parent
QUARTET = [sys.executable, "-m", "quartet.cli"]
SHARED_FOLDER = "QUARTET_TESTS_SHARE"
MODEL_SECONDS = 600  # a loaded machine takes up to ten times the usual 40 s


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The first test with the model makes it, or waits for it, within its own time: it has so much more."""
    for item in items:
        if isinstance(item, pytest.Function) and "tiny_model" in item.fixturenames:
            own = item.get_closest_marker("timeout")
            seconds = float(own.args[0] if own else config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(seconds + MODEL_SECONDS), append=False)
            return


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model, trained through the trainer service by `quartet model tiny`; for reading alone.

    `make test` names a folder in which the lanes share it: the first that needs it makes it, others wait.
    """
    shared = os.environ.get(SHARED_FOLDER)
    folder = (Path(shared) if shared else tmp_path_factory.mktemp("tiny")) / "model"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            command = [*QUARTET, "model", "tiny", str(folder), "--seed", "0"]
            done = subprocess.run(
                command, cwd=REPOSITORY, capture_output=True, text=True, timeout=MODEL_SECONDS
            )
            assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Starts trainers and replicas without importing torch for each."""
    forks = Forks(tmp_path_factory.mktemp("forks"))
    yield forks
    forks.close()


def summary_of(output: Path) -> dict[str, Any]:
    """What a run that has ended left in its folder."""
    loaded: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return loaded
