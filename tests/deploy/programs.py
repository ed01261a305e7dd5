"""The programs of the services, each imported once: imports are most of what a `--dry-run` costs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

#: It has imported a service's program, and runs it in a fork, again and again.
FORKS = """
import importlib, json, os, runpy, signal, sys

name = "quartet_" + sys.argv[1]
importlib.import_module(name + ".__main__")
for line in sys.stdin:
    here, said, arguments = json.loads(line)
    if not (pid := os.fork()):
        signal.alarm(60)
        os.chdir(here)
        for number, file in enumerate(said, 1):
            os.dup2(os.open(file, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
        sys.argv[1:] = arguments
        del sys.modules[name + ".__main__"]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Services:
    """Each call is a process of its own, that ends by itself."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        """What they say goes through the folder; none is imported yet."""
        self._folder, self._opened = folder, opened
        self._imported: dict[str, subprocess.Popen[str]] = {}

    def run(self, name: str, arguments: Sequence[str], here: Path) -> subprocess.CompletedProcess[str]:
        """`python -m quartet_NAME ARGUMENTS` in the folder `here`."""
        if name not in self._imported:
            command = [sys.executable, "-c", FORKS, name]
            process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._imported[name] = self._opened.enter_context(process)
        imported = self._imported[name]
        assert imported.stdin is not None and imported.stdout is not None
        said = [self._folder / "stdout", self._folder / "stderr"]
        asked = [str(here), [str(file) for file in said], list(arguments)]
        print(json.dumps(asked), file=imported.stdin, flush=True)
        code = imported.stdout.readline()
        assert code and int(code) != -signal.SIGALRM, f"{name} {arguments} did not end: {said[1].read_text()}"
        return subprocess.CompletedProcess(list(arguments), int(code), *(file.read_text() for file in said))
