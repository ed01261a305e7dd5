"""What end-to-end and fault tests share: one tiny model, made once by the real command; the launcher, and
what it leaves; the imports of trainer and inference, made once.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from quartet.local.fork_client import possible
from quartet.local.tether import tethered

from tests.forked_services import IMPORTED, PRELOADS, Forks, with_imports_of
from tests.imported.handover import OF_WORKERS, of_interpreter

REPOSITORY = Path(__file__).resolve().parent.parent
QUARTET = [sys.executable, "-m", "quartet.cli"]
#: The interpreter of environments.
ENVIRONMENTS = REPOSITORY / ".venv-envs/bin/python"
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
def importer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a process that has made the imports of trainer and inference (imported/once.py), beside it
    one with those of environments; empty where launchers use no fork server."""
    if not possible():
        yield ""
        return
    address = str(tmp_path_factory.mktemp("imported") / "socket")
    with ExitStack() as processes:
        processes.enter_context(importing(sys.executable, address, PRELOADS))
        if ENVIRONMENTS.exists():
            own = address + of_interpreter(str(ENVIRONMENTS.parent.parent))
            processes.enter_context(importing(str(ENVIRONMENTS), own, OF_WORKERS))
        yield address


@contextmanager
def importing(python: str, address: str, modules: Sequence[str]) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        command = [python, str(IMPORTED / "once.py"), str(listener.fileno()), *modules]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(tethered(command), pass_fds=[listener.fileno()], env=environment)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def imported_once(importer: str) -> Iterator[None]:
    """For a file whose launches take the imports from `importer`, where they cost more than what is tested.
    All else is started as by anybody; launches of other files import what they need themselves.

    `make test`, which runs whole files, fails where none has taken them: nothing else would tell.
    """

    def counted(how: str) -> int:
        return sum(file.stat().st_size for file in Path(importer).parent.glob(f"*.{how}"))

    before = counted("taken")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in with_imports_of(importer).items():
            patch.setenv(name, value)
        yield
    if importer and SHARED_FOLDER in os.environ:
        assert counted("taken") > before, "no launch has taken the imports"
        assert not counted("left"), "some were left to import"


@pytest.fixture(scope="session")
def forks(importer: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Starts trainers and replicas without importing torch for each."""
    forks = Forks(tmp_path_factory.mktemp("forks"), importer)
    yield forks
    forks.close()


@contextmanager
def under_way(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A launcher whose end the block waits for, or it is killed; what it printed last is shown."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        print(f"--- {log.name}", log.read_text()[-4000:], sep="\n")


def summary_of(output: Path) -> dict[str, Any]:
    """What a run that has ended left in its folder."""
    loaded: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return loaded
