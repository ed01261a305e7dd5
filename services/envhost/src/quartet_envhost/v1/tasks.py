"""The tasks of a split.

1. They have their places, also where the taskset raised while it was read, and where it has no end.
2. What a taskset's `load` gives is tasks; what it gives instead is told. Verifiers fails at it without a word
   of where.
3. Evaluation examples are those of the `split` that the arguments name. Where they name none, or one to train
   on ("train", and what begins so), they are the taskset with its `split` set to "eval", "test" or
   "validation", whichever it knows, else the taskset itself.
4. A `split` of any text is set to "test", which nobody said it has: where there is none (NO_SUCH_SPLIT),
   there are no evaluation examples, and who asks for some reads why. What else it raises, as where a hub is
   away, is no answer to that.
"""

from __future__ import annotations

import enum
import itertools
import reprlib
import sys
import time
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Final

import verifiers.v1 as vf
from quartet.errors import QuartetError
from verifiers.v1.utils.loaders import load_taskset

from quartet_envhost.own_code import OwnCode

_EVAL_SPLITS: Final = ("eval", "test", "validation")
_TRAIN: Final = "train"
# What reading a split raises that is not there.
NO_SUCH_SPLIT: Final = (LookupError, ValueError, FileNotFoundError)
# Where a taskset without an end is taken to end. To read so far takes about half a GiB of memory and half a
# minute of the worker's loop, which is stopped after a minute of silence.
MAX_READ: Final = 500_000
# After a taskset raised; its worker's loop, which reads it, has the time between for its rollouts.
AGAIN_S: Final = 2.0


class Tasks:
    """A split as a list that grows as far as it is read; an infinite taskset is read to MAX_READ at most.

    One that raised while it was read is no shorter for that: it is read anew, up to where it was and on. That
    takes time where much was read, so until AGAIN_S later whoever asks is told what it raised.
    """

    def __init__(self, taskset: Any) -> None:
        """Nothing of it is read yet."""
        self._taskset = taskset
        self._source: Iterator[Any] = iter(taskset)
        self._bounded = taskset.bounded
        self._read: list[Any] = []
        # With its traceback: raised again, it would collect more.
        self._raised: tuple[BaseException, types.TracebackType | None] | None = None
        self._again_at = 0.0

    def get(self, index: int) -> Any | None:
        """The task there, if there is one. Raises what the taskset raises."""
        if not self._bounded and index >= MAX_READ:
            return None
        missing = index + 1 - len(self._read)
        if missing > 0:
            self._extend(min(missing, sys.maxsize))
        return self._read[index] if index < len(self._read) else None

    @property
    def count(self) -> int:
        """How many there are, where all were read, or may be."""
        return len(self._read) if self._bounded else MAX_READ

    def size(self) -> int:
        """How many there are; of a taskset with an end. Raises what the taskset raises."""
        self._extend(None)
        return len(self._read)

    def _extend(self, by: int | None) -> None:
        if self._raised is not None:
            if time.monotonic() < self._again_at:
                error, traceback = self._raised
                raise error.with_traceback(traceback)
            self._source = itertools.islice(iter(self._taskset), len(self._read), None)
            self._raised = None
        try:
            self._read.extend(itertools.islice(self._source, by))
        except BaseException as error:
            self._raised = error, error.__traceback__
            self._again_at = time.monotonic() + AGAIN_S
            raise


class GuessedTasks(Tasks):
    """Those of a split that nobody said the taskset has."""

    def __init__(self, taskset: Any, own: OwnCode) -> None:
        """Nothing of it is read yet."""
        super().__init__(taskset)
        self._config = taskset.config
        self._own = own

    def _extend(self, by: int | None) -> None:
        """Raises QuartetError where it does not load."""
        try:
            super()._extend(by)
        except NO_SUCH_SPLIT as error:
            env_id, split = self._config.id, self._config.split
            text = (
                f"environment {env_id!r} has no evaluation examples: split was set to {split!r} for them, "
                f"and does not load ({self._own.text_of(error)}); args.split of [[eval.env]] names another"
            )
            raise QuartetError("ENVIRONMENT_UNAVAILABLE", text, env_id=env_id) from error


def eval_tasks(taskset: Any, train: Tasks, own: OwnCode) -> Tasks:
    """The evaluation examples of a taskset; `train`, which are held once, where they are the same."""
    config = taskset.config
    field = type(config).model_fields.get("split")
    if field is None or ("split" in config.model_fields_set and not _is_to_train_on(config.split)):
        return train
    split = eval_split(field.annotation)
    if split is None:
        return train
    held_out = load_taskset(config.model_copy(update={"split": split}))
    tell_of_no_task(held_out)
    return GuessedTasks(held_out, own) if field.annotation is str else Tasks(held_out)


def _is_to_train_on(split: Any) -> bool:
    return str(_said(split)).startswith(_TRAIN)


def _said(choice: Any) -> Any:
    return choice.value if isinstance(choice, enum.Enum) else choice


def tell_of_no_task(taskset: Any) -> None:
    """Let its `load` raise, where it is read, by what it gave that is no task."""
    load, name = taskset.load, type(taskset).__name__

    def checked() -> Iterator[Any]:
        found = load()
        if not isinstance(found, Iterable):
            text = f"{name}.load gave {reprlib.repr(found)}"
            raise TypeError(f"{text}: it returns its tasks, or yields them, and is no coroutine")
        for at, task in enumerate(found):
            if not isinstance(task, vf.Task):
                text = f"{name}.load gave {reprlib.repr(task)} as example {at}"
                raise TypeError(f"{text}: each is a vf.Task, made of its data and `self.config.task`")
            yield task

    taskset.load = checked


def eval_split(annotation: Any) -> Any | None:
    """Which split is for evaluation, by the type of a taskset's `split`: one of its choices, also where that
    may be None; "test" where it is any text. None where it is something else, such as a share."""
    if annotation is str:
        return "test"
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    parts = typing.get_args(annotation) if is_union else (annotation,)
    known = [choice for part in parts for choice in _choices(part)]
    return next((choice for one in _EVAL_SPLITS for choice in known if _said(choice) == one), None)


def _choices(part: Any) -> Iterable[Any]:
    if isinstance(part, type) and issubclass(part, enum.Enum):
        return part
    return typing.get_args(part) if typing.get_origin(part) is typing.Literal else ()
