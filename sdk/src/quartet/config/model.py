"""The base of every configuration model.

1. Unknown keys are refused, values are frozen, and `max-steps` means `max_steps` wherever a key is written.
2. TOML has types, so nothing is coerced across them: `true` is not 1 and `"3"` is not 3.
3. A configuration that cannot be used is a `ConfigError`, whose text is one sentence for the person who
   wrote it, on a line of its own for each thing that is wrong.
4. What several keys of a model have to agree on are its rules. All that are broken are told, those of the
   tables in it too; where a key is wrong by itself, those of tables that are right otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, Final, Self, TypeVar

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

Method = TypeVar("Method", bound=Callable[..., Iterator[str] | None])

#: Whether a model around the one that is read will tell the rules of both.
_INSIDE: Final = ContextVar("_INSIDE", default=False)


def rule(method: Method) -> Method:
    """A method of a model whose ValueError says which of its keys do not agree; or that yields a sentence for
    each that does not."""
    method.is_rule = True  # type: ignore[attr-defined]
    return method


def wrong(model: str, *problems: tuple[str, tuple[str | int, ...], Any, str]) -> pydantic.ValidationError:
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
    #: Tables that others sort such keys into; a key in one means what its own name does.
    TABLES_OF_OTHERS: ClassVar[frozenset[str]] = frozenset()
    #: Names of keys besides those of the fields.
    ALSO_KEYS: ClassVar[tuple[str, ...]] = ()
    #: Keys of values that others write as tables, and what a refusal of such a table says.
    AS_TABLES: ClassVar[Mapping[str, str]] = {}
    #: What a refusal of any other unknown key of this model says; empty: a key of another table is guessed.
    OF_UNKNOWN_KEYS: ClassVar[str] = ""
    _rules: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def is_others(cls, name: str) -> bool:
        """Whether only others have this dotted name, so that no value of it is read."""
        return name in cls.OTHER_NAMES or name.partition(".")[0] in cls.TABLES_OF_OTHERS

    @classmethod
    def outdone(cls, key: str, value: Any, before: Mapping[str, Any]) -> tuple[str, ...]:
        """Dotted keys that mean nothing, or the contrary, beside a key of this value, where the tables said
        `before`. What a file says by them gives way to an option that says it."""
        return ()

    @classmethod
    def outdone_by_a_file(cls, key: str, value: Any, before: Mapping[str, Any]) -> tuple[str, ...]:
        """Those that give way to a later file, too: with them it would mean something else, or nothing, and
        nobody is told. What only contradicts it is refused."""
        return ()

    @classmethod
    def all_outdone(
        cls, path: tuple[str, ...], value: Any, before: Mapping[str, Any], *, by_option: bool
    ) -> list[str]:
        """The same of an option or a file, perhaps a table of keys, and of tables as they are written."""
        tables = {key: _by_field(one) for key, one in _by_field(before).items()}
        outdone = cls.outdone if by_option else cls.outdone_by_a_file
        return [one for key, said in _said(path, value) for one in outdone(key, said, tables)]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Find the rules, in the order in which they are written."""
        super().__pydantic_init_subclass__(**kwargs)
        methods = {name: one for base in reversed(cls.__mro__) for name, one in vars(base).items()}
        cls._rules = tuple(name for name, one in methods.items() if getattr(one, "is_rule", False))

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _keeps_its_rules(cls, data: Any, validate: pydantic.ModelWrapValidatorHandler[Self]) -> Self:
        if _INSIDE.get():
            return validate(data)
        outermost = _INSIDE.set(True)
        try:
            config = validate(data)
        except pydantic.ValidationError:
            config = None
        finally:
            _INSIDE.reset(outermost)
        if config is None:  # raises again, and now the tables that can be read tell their own
            return validate(data)
        if broken := list(_broken(config)):
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


def _broken(config: pydantic.BaseModel) -> Iterator[tuple[str, tuple[str | int, ...], Any, str]]:
    """The rules that are broken in a model and in those in it, as `wrong` takes them."""
    for name in config._rules if isinstance(config, Config) else ():
        try:
            for sentence in getattr(config, name)() or ():
                yield "value_error", (), config, sentence
        except ValueError as error:
            yield "value_error", (), config, str(error)
    for name in type(config).model_fields:
        for place, inner in _models_in(getattr(config, name)):
            for kind, loc, value, sentence in _broken(inner):
                yield kind, (name, *place, *loc), value, sentence


def _models_in(value: Any) -> Iterator[tuple[tuple[str | int, ...], pydantic.BaseModel]]:
    """Those that a key has, each with its place there."""
    match value:
        case pydantic.BaseModel():
            yield (), value
        case list() | tuple() | dict():
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from (((key,), one) for key, one in items if isinstance(one, pydantic.BaseModel))


def _field_name(model: type[pydantic.BaseModel], key: Any) -> Any:
    if not isinstance(key, str):
        return key
    snake = key.replace("-", "_")
    return snake if snake in model.model_fields else key


def _said(path: tuple[str, ...], value: Any) -> Iterator[tuple[str, Any]]:
    """What an option says, by dotted keys."""
    if not isinstance(value, Mapping):
        yield ".".join(path), value
        return
    for key, one in _by_field(value).items():
        yield from _said((*path, key), one)


def _by_field(table: Any) -> Any:
    """A table whose keys are written as fields are: `a_b` for `a-b`. What is none stays."""
    is_table = isinstance(table, Mapping)
    return {key.replace("-", "_"): value for key, value in table.items()} if is_table else table
