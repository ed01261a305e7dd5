"""A rollout's own folder on this machine, made when something looks for it.

Verifiers makes one for every rollout, and removes it in a thread. Rollouts that run in the worker hardly ever
use theirs, and it was a quarter of the CPU of one with a single turn (benchmarks/envhost.py).

1. Whoever reads `workdir` while the runtime lives finds a folder there; it is removed with the runtime.
2. Where nobody did there is none, neither then nor later: what still comes after the end fails.
3. Where none can be made at all, the rollout does not begin, and says which folder it was and who names it.
4. The file in which a tool server says its port, which Verifiers puts elsewhere and leaves there, is removed
   with the runtime.
5. The folder lies in that of its worker (own_folder.py), which the host removes where a worker is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from verifiers.v1 import runtimes
from verifiers.v1.mcp import launch
from verifiers.v1.runtimes import ProgramResult, SubprocessRuntime
from verifiers.v1.utils.paths import CACHE_DIR

from quartet_envhost.own_folder import name_of
from quartet_envhost.v1.tool_server import KEY_VARIABLE, soon


@dataclass(frozen=True)
class Started:
    """A tool server's process, and the file that has what it prints."""

    process: asyncio.subprocess.Process
    log: Path

    @property
    def name(self) -> str:
        """The server's, which Verifiers says here by the name of the file alone."""
        return self.log.stem.removeprefix("vf_tool_")


class LazyFolderRuntime(SubprocessRuntime):  # type: ignore[misc]
    """Verifiers' own subprocess runtime but for when its folder is made (verifiers 0.4.0)."""

    _folder: Path | None = None
    _made = False
    # Verifiers reads files in threads.
    _making = threading.Lock()
    _ports: tuple[Path, ...] = ()
    #: Servers, by the file in which each says its port.
    started: Mapping[str, Started] = {}
    #: Where one has answered (starts.py).
    answered: frozenset[str] = frozenset()

    @cached_property
    def tool_key(self) -> str:
        """What its tool servers ask for."""
        return secrets.token_urlsafe()

    @property
    def workdir(self) -> Path | None:
        """The folder; None before `start`."""
        if self._folder is not None and not self._made:
            with self._making:
                if not self._made:
                    self._folder.mkdir(parents=True)
                    self._made = True
        return self._folder

    @workdir.setter
    def workdir(self, folder: Path | None) -> None:
        self._folder, self._made = folder, folder is not None

    async def start(self) -> None:
        """Nothing is made yet but where it would be."""
        place = folder = CACHE_DIR / "runtimes" / "subprocess"
        with contextlib.suppress(OSError):  # of a sandbox whose kernel says less: nobody removes it there
            folder /= name_of(os.getpid())
        folder /= self.name
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            said = f"rollouts have their folders in {place}, which cannot be made: {error.strerror}"
            raise OSError(error.errno, f"{said}; start the host with a HOME that it can write") from error
        self._folder = folder
        self.info.id = str(folder)

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        """Run a program; but not Verifiers' probe of a server that has answered: one that ended since would
        be waited for, and each that did not costs a process."""
        if launch._PROBE in argv and argv[-1] in self.answered:
            return ProgramResult(exit_code=0, stdout="", stderr="")
        return await super().run(argv, env)

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        """Start a server, a tool server sooner and with a key (tool_server.py), and remember where it says
        its port."""
        port = env.get("MCP_PORT_FILE")
        if port:
            self._ports += (Path(port),)
            argv, env = soon(argv), {**env, KEY_VARIABLE: self.tool_key}
        await super().run_background(argv, env, log)
        if port:
            assert self.workdir is not None
            # Nothing else ran since it was put there.
            self.started = {**self.started, port: Started(self._background[-1], self.workdir / log)}

    async def teardown(self) -> None:
        """End what runs there."""
        unmade = self._unmade()
        await super().teardown()
        self._leave_unmade(unmade)
        self._remove_ports()

    def cleanup(self) -> None:
        """The same where no loop runs any more."""
        unmade = self._unmade()
        super().cleanup()
        self._leave_unmade(unmade)
        self._remove_ports()

    def _remove_ports(self) -> None:
        for port in self._ports:
            port.unlink(missing_ok=True)

    def _unmade(self) -> Path | None:
        """The folder that Verifiers need not remove, which it then does not see."""
        if self._made:
            return None
        folder, self._folder = self._folder, None
        return folder

    def _leave_unmade(self, folder: Path | None) -> None:
        # Not None: a program would then run where the worker does.
        if folder is not None:
            self.workdir = folder


def make_folders_when_used() -> None:
    """Every subprocess runtime of this process is a lazy one."""
    lazy: Any = runtimes
    lazy.SubprocessRuntime = LazyFolderRuntime
