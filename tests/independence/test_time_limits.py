"""How long tests may take: what is made for all of them is no test's own time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import MODEL_SECONDS, REPOSITORY

#: Tests whose model takes longer than each of them may, with the hook that the real ones have.
SLOWER_THAN_A_TEST = """
import time

import pytest
from tests import conftest

conftest.MODEL_SECONDS = 30
pytest_collection_modifyitems = conftest.pytest_collection_modifyitems


@pytest.fixture(scope="session")
def tiny_model():
    time.sleep(2)


@pytest.fixture(scope="module")
def finished(tiny_model):
    pass
"""
TESTS = """
import time

import pytest


def limit(request):
    return request.node.get_closest_marker("timeout").args[0]


def test_without_it(request):
    assert request.node.get_closest_marker("timeout") is None


@pytest.mark.timeout(1)
def test_the_first(request, finished):
    assert limit(request) == 31


@pytest.mark.timeout(1)
def test_the_second(request, tiny_model):
    assert limit(request) == 1
"""


def test_who_comes_first_has_the_time_that_the_model_takes_besides(tmp_path: Path) -> None:
    """On a loaded machine it takes longer than the tests may, whichever of them makes it or waits for it."""
    (tmp_path / "conftest.py").write_text(SLOWER_THAN_A_TEST)
    (tmp_path / "test_limits.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 20\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True, timeout=MODEL_SECONDS
    )
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr
