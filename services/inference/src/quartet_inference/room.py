"""How many completions may wait in an engine."""

from __future__ import annotations

from quartet.errors import QuartetError, refused
from quartet.inference import TOO_MANY


def check_room(waiting: int, more: int, most: int) -> None:
    """Whether so many more completions may wait beside those that do. Errors: OVERLOADED, or INVALID_REQUEST
    where they never could."""
    if more > most:
        raise refused(
            TOO_MANY, more, f"at most {most} completions wait here (max_waiting); ask for fewer at a time"
        )
    if waiting + more > most:
        raise QuartetError("OVERLOADED", f"{waiting} completions wait already", retry_after_ms=500)
