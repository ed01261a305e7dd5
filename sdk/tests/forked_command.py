"""The `quartet` command as processes that are forks of one, which has its imports: nearly all that a client
costs.

1. Each call is a process of its own, with its exit code, its environment, and what it prints; several may be
   under way at once. No channel is open where it is forked.
2. The one that has the imports ends with the process whose calls it takes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

CALL_SECONDS = 60
LOOK_SECONDS = 0.02
#: Between it and each call is one that waits for the call, so that it hears of the next meanwhile.
FORKS = """
import json, os, signal, sys
from quartet.cli import __main__ as command

command.build_parser()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    if os.fork():
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    asked = json.loads(line)
    if not (pid := os.fork()):
        signal.alarm(asked["seconds"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (1, 2):
            os.dup2(os.open(asked["said"], os.O_CREAT | os.O_APPEND | os.O_WRONLY), number)
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.argv[1:] = asked["arguments"]
        sys.exit(command.main())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with open(asked["ended"] + ".new", "w") as file:
        file.write(str(code))
    os.rename(file.name, asked["ended"])
    os._exit(0)
"""


@cache
def _forks() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", FORKS], text=True, stdin=subprocess.PIPE)


async def quartet(*arguments: str, **variables: object) -> tuple[int, str]:
    """Exit code and everything printed, with these variables in the environment."""
    with tempfile.TemporaryDirectory() as folder:
        said, ended = Path(folder) / "said", Path(folder) / "ended"
        environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        asked = {"arguments": arguments, "environment": environment, "seconds": CALL_SECONDS}
        process = _forks()
        assert process.stdin is not None and process.poll() is None
        print(json.dumps({**asked, "said": str(said), "ended": str(ended)}), file=process.stdin, flush=True)
        async with asyncio.timeout(CALL_SECONDS + 10):  # the call's own clock comes first
            while not ended.exists():
                assert process.poll() is None, "who has the imports has ended"
                await asyncio.sleep(LOOK_SECONDS)
        code = int(ended.read_text())
        assert code != -signal.SIGALRM, f"not done after {CALL_SECONDS} s: {said.read_text()}"
        return code, said.read_text()
