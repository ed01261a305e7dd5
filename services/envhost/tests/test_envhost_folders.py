"""A rollout's own folder on this machine (v1/folders.py): made when it is used, removed with its runtime."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

SCRIPT = """
import asyncio, json
from pathlib import Path
from quartet_envhost.v1.folders import make_folders_when_used
from verifiers.v1.runtimes import SubprocessConfig, make_runtime

make_folders_when_used()

async def unused(runtime): pass
async def written(runtime): await runtime.write("made/by/a/tool", b"text")
async def ran(runtime): assert (await runtime.run(["pwd"], {})).stdout.strip() == runtime.info.id
async def read(runtime): runtime.workdir

async def there(use, way):
    runtime = make_runtime(SubprocessConfig(), name=f"{use.__name__}-{way}")
    assert runtime.workdir is None
    await runtime.start()
    folder = Path(runtime.info.id)
    before = folder.exists()
    await use(runtime)
    after = folder.exists()
    await runtime.stop() if way == "stop" else runtime.cleanup()
    return before, after, folder.exists(), folder.parent.exists()

for use in (unused, written, ran, read):
    for way in ("stop", "cleanup"):
        print(json.dumps([use.__name__, *asyncio.run(there(use, way))]))
"""


def test_a_folder_is_there_for_whoever_uses_it_and_for_nobody_else(envs_python: str, tmp_path: Path) -> None:
    """Promises 1 and 2; `runtime.stop` is what ends a rollout, `cleanup` what ends a process."""
    run = subprocess.run(
        [envs_python, "-c", SCRIPT],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert found[:2] == [["unused", False, False, False, False]] * 2
    used = [name for name in ("written", "ran", "read") for _ in range(2)]
    assert found[2:] == [[name, False, True, False, True] for name in used]
