"""The log of what a program of somebody else's uses of the SDK. A module has `log = own_log.get_logger()`.

1. A program that configured structlog, as services do (logs.py), has its lines there.
2. Elsewhere they are of the standard library's logger "quartet.sdk": where nothing was configured, warnings
   on stderr, and never a line on stdout, which is the program's own.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import structlog

NAME: Final = "quartet.sdk"


class _Log:
    """As a structlog logger; which one is looked up with each line, because modules are imported before a
    program configures anything."""

    def __init__(self) -> None:
        self._configured = structlog.get_logger()
        self._plain = structlog.wrap_logger(
            logging.getLogger(NAME),
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.contextvars.merge_contextvars,
                structlog.processors.format_exc_info,
                structlog.dev.ConsoleRenderer(
                    colors=False, pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
                ),
            ],
            wrapper_class=structlog.stdlib.BoundLogger,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._configured if structlog.is_configured() else self._plain, name)


_LOG: Final = _Log()


def get_logger() -> Any:
    """The logger of a module of the SDK."""
    return _LOG
