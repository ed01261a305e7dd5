"""quartet_inference.vllm.forks: processes of a server that has vLLM's imports.

That the service starts it before its own imports: test_vllm_ends.py.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this interpreter (make install-vllm)")

from quartet_inference.vllm import environment, forks

TELL = (
    "import os, sys\n"
    "threads = len(os.listdir(f'/proc/{os.getppid()}/task'))\n"
    "told.send((dict(os.environ), os.getppid(), threads, 'vllm.v1.engine.core' in sys.modules))\n"
)


def told_by_a_fork() -> tuple[dict[str, str], int, int, bool]:
    """Its environment, its server, the threads of that; whether it has vLLM's imports."""
    context = forks.context()
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=exec, args=(TELL, {"told": writer}))
    process.start()
    writer.close()
    told: tuple[dict[str, str], int, int, bool] = reader.recv()
    process.join()
    assert process.exitcode == 0
    return told


@pytest.mark.skipif(not environment.is_cpu_build(), reason="on a GPU cores are spawned")
def test_a_fork_has_the_imports_and_the_environment_of_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """forks.py 1 to 3."""
    environment.prepare(threads=1)
    _, server, threads, has_imports = told_by_a_fork()
    assert threads == 1 and has_imports
    assert "imports of vLLM's cores" in Path(f"/proc/{server}/cmdline").read_text()
    monkeypatch.setenv("QUARTET_OF_THIS_TEST", "as it is now")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS")
    seen, same, _, _ = told_by_a_fork()
    assert same == server and seen == dict(os.environ)


def test_a_server_that_imports_ends_with_the_service() -> None:
    """tethered.py: no refusal waits for the imports, which take longer than this does."""
    code = (
        "from quartet_inference.vllm import environment, forks\n"
        "environment.prepare(threads=1)\n"
        "forks.begin()\n"
        "print('begun', flush=True)\n"
        "input()\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdin is not None and service.stdout is not None
        assert service.stdout.readline() == "begun\n"
        children = Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text().split()
        descriptors = [os.pidfd_open(int(one)) for one in children]
        assert len(descriptors) == 2, "the server, and what multiprocessing has beside it"
        print(file=service.stdin, flush=True)
        assert service.wait() == 0
    for descriptor in descriptors:
        ended, _, _ = select.select([descriptor], [], [], 5)
        os.close(descriptor)
        assert ended


@pytest.mark.parametrize(("cpu", "arguments", "forked"), [
    (True, {}, True), (True, {"numa_bind": False}, True), (True, {"numa_bind": True}, False),
    (False, {}, False),
])  # fmt: skip
def test_cores_that_cannot_be_forks_are_spawned(
    cpu: bool, arguments: dict[str, Any], forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """forks.py 4."""
    from vllm.v1.engine import utils

    monkeypatch.setattr(environment, "is_cpu_build", lambda: cpu)
    own = utils.get_mp_context
    with forks.cores(arguments):
        assert utils.get_mp_context is (forks.context if forked else own)
    assert utils.get_mp_context is own
