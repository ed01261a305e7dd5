"""A table that is off unless it says `enabled = true`.

One that says something else, and not whether it is on, is refused: it would be without effect, in silence.
"""

from __future__ import annotations

from quartet.config import Config
from quartet.config.model import rule


class SwitchedConfig(Config):
    """A table with a switch."""

    #: Whether the table is on.
    enabled: bool = False

    @rule
    def _says_whether_it_is_on(self) -> None:
        said = [name for name in type(self).model_fields if name in self.model_fields_set]
        if said and not self.enabled and "enabled" not in said:
            are, them = ("is", "it") if len(said) == 1 else ("are", "them")
            raise ValueError(
                f"{', '.join(said)} {are} set, and the table is off; write enabled = true beside {them}, or "
                f"remove {them}"
            )
