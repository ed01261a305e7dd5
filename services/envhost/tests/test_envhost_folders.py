"""A rollout's own folder on this machine: removed with it, whoever removes it (harness.py, `cleanup`)."""

from __future__ import annotations

import subprocess
from pathlib import Path

SCRIPT = """
import asyncio
from types import SimpleNamespace
from quartet_envhost.v1.harness import InProcessHarness
from verifiers.v1 import HarnessConfig
from verifiers.v1.runtimes import SubprocessConfig, SubprocessRuntime, make_runtime

async def left(name, owner, *files):
    runtime = make_runtime(SubprocessConfig(), name=name)
    await runtime.start()
    folder = runtime.workdir
    for file in files:
        await runtime.write(file, b"text")
    await InProcessHarness(HarnessConfig()).cleanup(SimpleNamespace(id=owner), runtime)
    there = folder.exists()
    await runtime.stop()
    return there, folder.exists()

print(asyncio.run(left("one", "one")))
print(asyncio.run(left("two", "two", "made/by/a/tool")))
print(asyncio.run(left("shared", "three")))
"""


def test_only_an_empty_folder_of_the_rollouts_own_is_removed_before_its_runtime_ends(
    envs_python: str, tmp_path: Path
) -> None:
    run = subprocess.run(
        [envs_python, "-c", SCRIPT], env={"HOME": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    empty, used, borrowed = run.stdout.splitlines()
    assert empty == "(False, False)"
    # What another still uses, or what holds something, is left to the runtime.
    assert used == borrowed == "(True, False)"
