"""Logs: one JSON object per line on stderr, with the service's name, the id of the request being handled, and
the ids of the trace and the span that it is in, where traces are on.

Third-party loggers go through the same line format. Get a logger with `structlog.get_logger()`; modules of
the SDK, which programs use that configure none of this, with `own_log.get_logger()`.

A line that cannot be written (the disk that it goes to is full) is lost, and what was being done goes on.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any, Final, TextIO

import structlog

from quartet.kit.tracing import name_trace

LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}

# Libraries that speak at info level for every request.
_NOISY: Final = ("httpx", "urllib3", "filelock", "asyncio")


class _Lossy:
    """A stream that says nothing of what it could not write, as logging's own handlers do."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def configure(service: str, level: str = "info", *, others: bool = True) -> None:
    """Set up logging of this process. Called once, before the first line is logged.

    `others`: third-party loggers, too; else they stay as they are.
    """
    threshold = LEVELS[level]

    def name_service(
        _logger: Any, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event["service"] = service
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        name_service,
        name_trace,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
    ]
    render = structlog.processors.JSONRenderer(default=str)
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(_Lossy(sys.stderr)),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,  # a line below the level then costs a quarter
    )
    if not others:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    logging.basicConfig(level=threshold, handlers=[handler], force=True)
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(threshold, logging.WARNING))
