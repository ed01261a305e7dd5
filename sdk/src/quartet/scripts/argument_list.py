"""What the arguments of a script are: attributes of an object, each of which is known.

1. Those that a class declares are translated. Those of WITHOUT_EFFECT and of REFUSED are known, too: each is
   said to be without effect, or refused, where it is not its default (quartet.scripts.known). Those of
   FOR_CALLBACKS are without effect where there are no callbacks, which the trainer knows.
2. A name that is neither is refused with the nearest that is, when it is set.
3. Nothing is checked against another argument before it is translated: a script sets them one by one.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from os import PathLike
from typing import Any, ClassVar, Final

from quartet.config.model import ConfigError
from quartet.config.refusals import together
from quartet.run.other_names import SAME
from quartet.scripts.known import EARLIER, FOR_CALLBACKS, Known

NOTHING: Mapping[str, Any] = {}
PYTHON_PAGE: Final = "docs/python.md"
#: In what is said of another's argument: what was given for it.
VALUE: Final = "VALUE"


class ArgumentList:
    """The arguments that a class below declares."""

    WITHOUT_EFFECT: ClassVar[Mapping[str, Known]] = {}
    REFUSED: ClassVar[Mapping[str, Known]] = {}
    #: Arguments of others: what to write instead, in which VALUE is what was given.
    ELSEWHERE: ClassVar[Mapping[str, str]] = {}
    #: Where all of them are told.
    PAGE: ClassVar[str] = PYTHON_PAGE
    #: What callbacks read of the process that they are in, which is a script's only one.
    process_index: ClassVar[int] = 0
    local_process_index: ClassVar[int] = 0
    should_log: ClassVar[bool] = True
    should_save: ClassVar[bool] = True
    overrides: Mapping[str, Any]

    def __init__(self, output_dir: str | None = None, **given: Any) -> None:
        """The defaults, and what is given beside them. Raises ConfigError, for all at once that is wrong."""
        self.overrides = {}
        if output_dir is not None:
            given = {"output_dir": output_dir, **given}
        refusals = []
        for name, value in given.items():
            try:
                setattr(self, name, value)
            except ConfigError as refusal:
                refusals.append(refusal)
        if refusals:
            raise together(refusals)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """All that may be set."""
        return (*cls._declared(), *cls.known())

    @classmethod
    def known(cls) -> Mapping[str, Known]:
        """Those that are not translated."""
        return {**cls.WITHOUT_EFFECT, **cls.REFUSED, **FOR_CALLBACKS}

    @classmethod
    def _declared(cls) -> dict[str, str]:
        """Those that are translated, with what they should be."""
        kinds = cls.__mro__[: cls.__mro__.index(ArgumentList)]
        return {name: kind for one in reversed(kinds) for name, kind in inspect.get_annotations(one).items()}

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.names():
            instead = self._instead(name).replace(VALUE, repr(value))
            raise ConfigError(f"args.{name}: there is no such argument; {instead}")
        if (wanted := _lacks(self._declared().get(name, ""), value)) is not None:
            raise ConfigError(f"args.{name} = {value!r} is refused: should be {wanted}")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """Of those that are not translated, the default."""
        if (known := self.known().get(name)) is not None:
            return known.default
        raise AttributeError(f"args.{name}: there is no such argument; {self._instead(name)}")

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({given})"

    def refuse(self) -> None:
        """Raises ConfigError for the first that is refused."""
        for name, known in self.REFUSED.items():
            if (value := getattr(self, name)) != known.default:
                raise ConfigError(f"args.{name} = {value!r} is refused: {known.why}")

    @property
    def world_size(self) -> int:
        """Ranks of the trainer, as callbacks read it."""
        ranks: int = self.num_processes
        return ranks

    def without_effect(self, usual: Mapping[str, Any] = NOTHING) -> list[str]:
        """A sentence for each that does nothing. `usual`: what nobody asked for, besides defaults."""
        return self._told(self.WITHOUT_EFFECT, usual)

    def without_callbacks(self) -> list[str]:
        """A sentence for each that does nothing where there are none."""
        return self._told(FOR_CALLBACKS, NOTHING)

    def _told(self, table: Mapping[str, Known], usual: Mapping[str, Any]) -> list[str]:
        return [
            f"args.{name} = {value!r} is without effect: {known.why}"
            for name, known in table.items()
            if (value := getattr(self, name)) not in (known.default, usual.get(name, known.default))
        ]

    def _instead(self, name: str) -> str:
        return self.ELSEWHERE.get(name) or EARLIER.get(name) or nearest(name, self.names(), self.PAGE)


def _lacks(annotation: str, value: Any) -> str | None:
    """What a value should be that is not of the kind that its annotation says."""
    if value is None and "None" in annotation:
        return None
    if annotation.startswith(("int", "float")):
        is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
        return None if is_number else "a number"
    if annotation.startswith("Mapping"):
        return None if isinstance(value, Mapping) else "a dict"
    if annotation in ("bool", "bool | None"):
        return None if isinstance(value, bool) else "True or False"
    if annotation.startswith("str"):
        # A path is text, and so are transformers' enums.
        is_text = isinstance(value, str | PathLike)
        are_texts = isinstance(value, Sequence) and all(isinstance(one, str) for one in value)
        return None if is_text or ("Sequence" in annotation and are_texts) else "text"
    return None


def nearest(name: str, known: Sequence[str], page: str = PYTHON_PAGE) -> str:
    """What may have been meant; `page` has all that is known."""
    others = (SAME.get(name), *(other for other, key in SAME.items() if key == name))
    if meant := next((other for other in others if other in known), None):
        return f"did you mean {meant!r}?"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"{page} lists them"
