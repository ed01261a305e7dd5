"""What the log of an HTTP server says of bytes that cannot be read, as a request or as its body: one line.

1. It says what is wrong, and of what is no request from where it came, as a warning; nothing of the bytes is
   quoted: it may be a key.
2. A fault of the server's own has its traceback as ever.

For servers by aiohttp, which they bring.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from aiohttp.http_exceptions import HttpProcessingError, InvalidURLError, TransferEncodingError
from aiohttp.web import RequestPayloadError

#: What the library quotes of the bytes is the last thing that it says, but for a pointer below it. Other
#: quotes are its own: "can't", and 'Host' of a known header.
_QUOTED: Final = re.compile(r"""[\s:]+(?:bytearray\()?b?(['"]).*\1\)?\.?[\s^]*$""", re.DOTALL)
#: Of these it may say the bytes alone, without a quote.
_BARE: Final[Mapping[type[HttpProcessingError], str]] = MappingProxyType(
    {InvalidURLError: "Invalid URL", TransferEncodingError: "Invalid transfer encoding"}
)


def connection_log(name: str) -> logging.Logger:
    """A logger by this name, for aiohttp to log what becomes of a server's connections."""
    logger = logging.getLogger(name)
    logger.addFilter(_in_one_line)  # once, however often it is asked for
    return logger


def why(error: HttpProcessingError | RequestPayloadError) -> str:
    """What is wrong with the bytes, in one line without them."""
    if isinstance(error, RequestPayloadError):
        cause = error.__cause__
        return why(cause) if isinstance(cause, HttpProcessingError) else type(cause).__name__
    return _BARE.get(type(error)) or " ".join(_QUOTED.sub("", error.message).split())


def _in_one_line(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | RequestPayloadError):
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {why(error)}", (), None
        # It may be less: at debug level are those who take the port for another kind.
        record.levelno = min(record.levelno, logging.WARNING)
        record.levelname = logging.getLevelName(record.levelno)
    return True
