"""Each test has a world of its own: the fakes of orch_fakes.py, served as orch_world.py says."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

# What these files share (orch_*.py): unique names, so they stay modules of their own.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from orch_world import World


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    await world.serve("trainer")
    await world.serve("host")
    yield world
    await world.close()
