"""Why a process of vLLM failed: the first fault that it logged, in a file where the service finds it.

vLLM tells whoever started it that something failed, and what only in the log.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

#: Tells the processes that vLLM starts where it is written.
FILE = "QUARTET_VLLM_FAULT"
#: Of one line of a log.
MOST_CHARACTERS = 1000
LOGGER = "vllm"


class _FirstFault(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Write the fault down, unless there is one."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return
        try:
            with open(os.environ[FILE], "x") as file:
                file.write(_line(error))
        except OSError:
            return  # an earlier one is its cause; or the service is gone, with its folder


def _line(error: BaseException) -> str:
    """What happened, without the way there: vLLM puts the output of processes into messages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if len(lines) > 1 else f"{type(error).__name__}: {error}"
    return text[:MOST_CHARACTERS]


def keep(file: Path) -> None:
    """In the service: have the first fault from now on written here."""
    os.environ[FILE] = str(file)
    forget()
    write()


def forget() -> None:
    """What was logged so far was no end of anything."""
    Path(os.environ[FILE]).unlink(missing_ok=True)


def write() -> None:
    """In any process of vLLM: write down the first fault that it logs."""
    logger = logging.getLogger(LOGGER)
    if FILE in os.environ and not any(isinstance(one, _FirstFault) for one in logger.handlers):
        logger.addHandler(_FirstFault(logging.ERROR))


def first() -> str:
    """The first fault since `keep`; empty where none was logged."""
    try:
        return Path(os.environ[FILE]).read_text()
    except (KeyError, OSError):
        return ""
