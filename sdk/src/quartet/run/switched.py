"""A table that is off unless it says `enabled = true`.

1. One that says something else, and not whether it is on, is refused: it would be without effect, in silence.
2. So is an option, or a later file, that says something of one that files switch off, as the file of a run
   that was written down does with every such table: what they say by `enabled` is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quartet.config import Config
from quartet.config.keys import model_at
from quartet.config.model import rule


class SwitchedConfig(Config):
    """A table with a switch."""

    #: Whether the table is on.
    enabled: bool = False

    @rule
    def _says_whether_it_is_on(self) -> None:
        said = [name for name in type(self).model_fields if name in self.model_fields_set]
        if said and not self.enabled and "enabled" not in said:
            said = [name for name in said if getattr(self, name) != self._usual(name)] or said
            are, them = ("is", "it") if len(said) == 1 else ("are", "them")
            raise ValueError(
                f"{', '.join(said)} {are} set, and the table is off; write enabled = true beside {them}, or "
                "remove the table"
            )

    def _usual(self, name: str) -> Any:
        return type(self).model_fields[name].get_default(call_default_factory=True)


def outdone_by_a_key_of_it(model: type[Config], key: str, before: Mapping[str, Any]) -> tuple[str, ...]:
    """What files say by the switch, where another key of a table that is off is said after them."""
    table, _, own = key.partition(".")
    kind, said = model_at(model, (table,)), before.get(table)
    if kind is None or not issubclass(kind, SwitchedConfig) or own in ("", "enabled"):
        return ()
    is_off = isinstance(said, Mapping) and said.get("enabled") is False
    return (f"{table}.enabled",) if is_off else ()
