"""Where the ranks of one machine meet: memory without a name, which only processes of this user can open.

1. Nothing of it listens. torchrun's own places (`--standalone`) are ports of every interface that ask nobody
   who he is, and what torchrun finds there it unpickles: whoever reached one ran code as the trainer.
2. What the ranks say to each other over gloo stays on this machine, unless GLOO_SOCKET_IFNAME says otherwise.
3. It ends with torchrun and its ranks, however they end: no file is left behind.

Ranks that torchrun was started for by hand, on one machine or on several, meet as it was told.
Imports no torch.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from typing import Final

#: Names the ranks' own place, in their environment. torchrun has another.
MEETING: Final = "QUARTET_RANKS_MEETING"
#: torchrun writes to its place every so many seconds that it lives, which nobody reads who is alone, and what
#: is written there stays.
ALIVE_SECONDS: Final = 24 * 3600
#: Of torchrun: it opens no place of its own for the ranks.
_NO_PORT: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def torchrun(ranks: int, arguments: Sequence[str]) -> list[str]:
    """Arguments of an interpreter that this process is to become, as it is: it holds the places open."""
    os.environ[MEETING] = _place("quartet-ranks")
    os.environ[_NO_PORT] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", _place("quartet-torchrun")]
    settings = ["--rdzv-conf", f"store_type=file,keep_alive_interval={ALIVE_SECONDS}"]
    command = ["-m", "quartet_trainer.ranks.agent", *meeting, *settings, "--rdzv-id", str(uuid.uuid4())]
    return [*command, "--nproc-per-node", str(ranks), "-m", "quartet_trainer", *arguments]


def torchrun_pid() -> int:
    """Of the torchrun that started this rank. One that was started by hand says it to nobody: it is taken for
    whoever is the parent now."""
    return int(os.environ[MEETING].split("/")[2]) if MEETING in os.environ else os.getppid()


def _place(name: str) -> str:
    # Without MFD_CLOEXEC: torchrun inherits it, and its children find it by torchrun's id, which is ours.
    return f"/proc/{os.getpid()}/fd/{os.memfd_create(name, 0)}"
