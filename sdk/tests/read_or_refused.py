"""What holds of every file in another trainer's dialect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quartet.config import ConfigError
from quartet.config.load import validate
from quartet.run.config import RunConfig
from quartet.run.dialect import Translation


def is_read_or_refused(translate: Callable[..., Translation], given: dict[str, Any], engine: Any) -> None:
    """It is a run, or refused in sentences; and its tables stay as they are."""
    before = repr(given)
    try:
        run = translate(given, engine)
        validate(RunConfig, run.tables)
        told = "; ".join(run.without_effect)
    except ConfigError as error:
        told = str(error)
        assert any(words in told for words in ("is refused", "is not set", "unknown key", "needs")), told
    assert all(line.startswith("  ") for line in told.split("\n")[1:]), "a line for each thing"
    assert repr(given) == before, "a file's tables are not changed"
