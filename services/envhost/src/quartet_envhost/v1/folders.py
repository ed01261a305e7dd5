"""A rollout's own folder on this machine, made when something looks for it.

Verifiers makes one for every rollout, and removes it in a thread. Rollouts that run in the worker hardly ever
use theirs, and it was a quarter of the CPU of one with a single turn (benchmarks/envhost.py).

1. Whoever reads `workdir` finds a folder there; it is removed with the runtime.
2. Where nobody did there is none, neither then nor later.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verifiers.v1 import runtimes
from verifiers.v1.runtimes import SubprocessRuntime
from verifiers.v1.utils.paths import CACHE_DIR


class LazyFolderRuntime(SubprocessRuntime):  # type: ignore[misc]
    """Verifiers' own subprocess runtime but for when its folder is made (verifiers 0.4.0)."""

    _folder: Path | None = None
    _made = False

    @property
    def workdir(self) -> Path | None:
        """The folder; None before `start`."""
        if self._folder is not None and not self._made:
            self._folder.mkdir(parents=True)
            self._made = True
        return self._folder

    @workdir.setter
    def workdir(self, folder: Path | None) -> None:
        self._folder, self._made = folder, folder is not None

    async def start(self) -> None:
        """Nothing is made yet."""
        self._folder = CACHE_DIR / "runtimes" / "subprocess" / self.name
        self.info.id = str(self._folder)

    async def teardown(self) -> None:
        """End what runs there."""
        self._forget_unmade()
        await super().teardown()

    def cleanup(self) -> None:
        """The same where no loop runs any more."""
        self._forget_unmade()
        super().cleanup()

    def _forget_unmade(self) -> None:
        if not self._made:
            self._folder = None


def make_folders_when_used() -> None:
    """Every subprocess runtime of this process is a lazy one."""
    lazy: Any = runtimes
    lazy.SubprocessRuntime = LazyFolderRuntime
