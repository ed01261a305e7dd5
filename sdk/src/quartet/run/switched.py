"""A table that is off unless it says `enabled = true`.

One that says something else, and not whether it is on, is refused: it would be without effect, in silence.
"""

from __future__ import annotations

from typing import Self

import pydantic

from quartet.config import Config


class SwitchedConfig(Config):
    """A table with a switch."""

    enabled: bool = False

    @pydantic.model_validator(mode="after")
    def _says_whether_it_is_on(self) -> Self:
        said = [name for name in type(self).model_fields if name in self.model_fields_set]
        if said and not self.enabled and "enabled" not in said:
            raise ValueError(
                f"{said[0]} is set, and the table is off; write enabled = true beside it, or enabled = false"
            )
        return self
