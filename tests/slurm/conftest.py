"""A SLURM of the tests' own, and how its jobs' scripts are made."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, cluster, missing

NODES = 3
#: From SIGTERM to SIGKILL; SLURM's default is half a minute.
KILL_SECONDS = 20


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """Three nodes, called by addresses of loopback; skipped where SLURM is not installed."""
    if why := missing():
        pytest.skip(why)
    # Not pytest's own: the paths of sockets are short.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        with cluster(folder / "cluster", NODES, KILL_SECONDS) as it:
            yield it
    finally:
        shutil.rmtree(folder)
