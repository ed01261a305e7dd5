"""The base of every configuration model.

1. Unknown keys are refused, values are frozen, and `max-steps` means `max_steps` wherever a key is written.
2. TOML has types, so nothing is coerced across them: `true` is not 1 and `"3"` is not 3.
3. A configuration that cannot be used is a `ConfigError`, whose text is one sentence for the person who
   wrote it, on a line of its own for each thing that is wrong.
4. What several keys of a model have to agree on are its rules, of which all that are broken are told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import pydantic
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticKnownError

from quartet.config.keys import alternatives


class ConfigError(Exception):
    """A configuration, or what it asks of this machine, cannot be used. Its text is one sentence, or one for
    each thing that is wrong (refusals.py)."""

    def __init__(
        self,
        sentence: str,
        *,
        key: str = "",
        value: str = "",
        remedy: str = "",
        each: tuple[ConfigError, ...] = (),
    ) -> None:
        """The sentence, and its parts where they are known (for the metadata of INVALID_CONFIG)."""
        super().__init__(sentence)
        self.key, self.value, self.remedy = key, value, remedy
        #: What is wrong, one by one.
        self.each = each or (self,)


#: Types of errors, beside pydantic's: a key that is refused by its name, and one that is needed and left out.
#: Their text says what to do.
ELSEWHERE, NOT_GIVEN = "elsewhere", "not_given"

Method = TypeVar("Method", bound=Callable[..., None])


def rule(method: Method) -> Method:
    """A method of a model whose ValueError says which of its keys do not agree."""
    method.is_rule = True  # type: ignore[attr-defined]
    return method


def wrong(model: str, *problems: tuple[str, tuple[str, ...], Any, str]) -> pydantic.ValidationError:
    """What a validator raises for several problems: each one's type, place below it, value and text."""
    return pydantic.ValidationError.from_exception_data(
        model,
        [
            InitErrorDetails(type=PydanticCustomError(kind, "{text}", {"text": text}), loc=loc, input=value)
            for kind, loc, value, text in problems
        ],
    )


class Config(pydantic.BaseModel):
    """Base model: strict about keys, immutable, defaults validated too."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, validate_default=True)

    #: Dotted names that others have for keys of this model, and what a refusal of each says.
    OTHER_NAMES: ClassVar[Mapping[str, str]] = {}
    #: Names of keys besides those of the fields.
    ALSO_KEYS: ClassVar[tuple[str, ...]] = ()
    #: Keys of values that others write as tables, and what a refusal of such a table says.
    AS_TABLES: ClassVar[Mapping[str, str]] = {}
    #: What a refusal of any other unknown key of this model says; empty: a key of another table is guessed.
    OF_UNKNOWN_KEYS: ClassVar[str] = ""
    _rules: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def outdone(cls, key: str, value: Any, before: Mapping[str, Any]) -> tuple[str, ...]:
        """Dotted keys that mean nothing, or the contrary, beside a key of this value, where the tables said
        `before`. What a file says by them gives way to an option that says it."""
        return ()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Find the rules, in the order in which they are written."""
        super().__pydantic_init_subclass__(**kwargs)
        methods = {name: one for base in reversed(cls.__mro__) for name, one in vars(base).items()}
        cls._rules = tuple(name for name, one in methods.items() if getattr(one, "is_rule", False))

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _keeps_its_rules(cls, data: Any, validate: pydantic.ModelWrapValidatorHandler[Self]) -> Self:
        config = validate(data)
        broken = []
        for name in cls._rules:
            try:
                getattr(config, name)()
            except ValueError as error:
                broken.append(("value_error", (), data, str(error)))
        if broken:
            raise wrong(cls.__name__, *broken)
        return config

    @pydantic.model_validator(mode="before")
    @classmethod
    def _accept_kebab_case(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields: dict[Any, Any] = {}
        for key, value in data.items():
            name = _field_name(cls, key)
            if name in fields:  # in a list, whose tables are merged with nothing
                raise ValueError(f"{name!r} is given twice, with '-' and with '_'; remove one")
            fields[name] = value
        return fields

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _refuse_coercion(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        kinds = set(alternatives(cls.model_fields[str(info.field_name)].annotation))
        if kinds <= {bool, type(None)} and type(value) not in kinds:
            raise PydanticKnownError("bool_type")
        if not isinstance(value, (bool, str)):
            return value
        if value == "" and Path in kinds:
            raise ValueError("should name a file or a folder")
        mistaken = bool(kinds & {int, float}) and type(value) not in kinds
        # Anything besides scalars in the annotation may take text of its own (Literal, Path, enums).
        if mistaken and kinds <= {int, float, bool, type(None)}:
            raise PydanticKnownError("int_type" if float not in kinds else "float_type")
        return value


def _field_name(model: type[pydantic.BaseModel], key: Any) -> Any:
    if not isinstance(key, str):
        return key
    snake = key.replace("-", "_")
    return snake if snake in model.model_fields else key
