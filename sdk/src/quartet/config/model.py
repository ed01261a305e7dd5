"""The base of every configuration model.

1. Unknown keys are refused, values are frozen, and `max-steps` means `max_steps` wherever a key is written.
2. TOML has types, so nothing is coerced across them: `true` is not 1 and `"3"` is not 3.
3. A configuration that cannot be used is a `ConfigError`, whose text is one sentence for the person who
   wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pydantic

from quartet.config.keys import alternatives


class ConfigError(Exception):
    """A configuration, or what it asks of this machine, cannot be used. Its text is one sentence."""

    def __init__(self, sentence: str, *, key: str = "", value: str = "", remedy: str = "") -> None:
        """The sentence, and its parts where they are known (for the metadata of INVALID_CONFIG)."""
        super().__init__(sentence)
        self.key, self.value, self.remedy = key, value, remedy


class Config(pydantic.BaseModel):
    """Base model: strict about keys, immutable, defaults validated too."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, validate_default=True)

    #: Dotted names that others have for keys of this model, and what a refusal of each says.
    OTHER_NAMES: ClassVar[Mapping[str, str]] = {}
    #: Keys of values that others write as tables, and what a refusal of such a table says.
    AS_TABLES: ClassVar[Mapping[str, str]] = {}
    #: What a refusal of any other unknown key of this model says; empty: a key of another table is guessed.
    OF_UNKNOWN_KEYS: ClassVar[str] = ""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _accept_kebab_case(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {_field_name(cls, key): value for key, value in data.items()}

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _refuse_coercion(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        if not isinstance(value, (bool, str)):
            return value
        kinds = set(alternatives(cls.model_fields[str(info.field_name)].annotation))
        mistaken = bool(kinds & {int, float}) and type(value) not in kinds
        # Anything besides scalars in the annotation may take text of its own (Literal, Path, enums).
        if mistaken and kinds <= {int, float, bool, type(None)}:
            raise ValueError("should be a whole number" if float not in kinds else "should be a number")
        return value


def _field_name(model: type[pydantic.BaseModel], key: Any) -> Any:
    if not isinstance(key, str):
        return key
    snake = key.replace("-", "_")
    return snake if snake in model.model_fields else key
