"""Tasks of a loop that runs code of one's own: what that raises in one ends that task, and neither the loop
nor the process.

asyncio lets SystemExit and KeyboardInterrupt of a task out of the loop, which ends all that it has beside it;
and what else is no Exception (a panic of a Rust library, an outcome of a test framework) passes whoever
handles errors. Whoever gathers makes tasks of its own, where nobody else can be asked first.

1. What a task raises is an Exception, or its cancellation: all else is a RuntimeError that tells it, raised
   from it.
2. A task is what it was otherwise: its coroutine's name, code and frames are those of what it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, Final

from quartet.kit.own_function import text_of

#: What is no failure of whoever raises it, as a rule (from_outside).
CONTROL: Final = (asyncio.CancelledError, GeneratorExit)


def from_outside(error: BaseException) -> bool:
    """Whether it ends the task that runs, and is not what code of one's own in it raised for itself."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop is left: the coroutine is closed as garbage
        return isinstance(error, CONTROL)
    return isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling() > 0)


def told(error: BaseException) -> RuntimeError:
    """What is no Exception as one."""
    return RuntimeError(f"{type(error).__name__}: {text_of(error)}")


class OwnTask(Coroutine[Any, Any, Any]):
    """A coroutine as a task of this loop runs it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __await__(self) -> Generator[Any, Any, Any]:
        """Where somebody else runs it on."""
        return (yield from self._inner.__await__())

    def send(self, value: Any) -> Any:
        """One step of it."""
        try:
            return self._inner.send(value)
        # A GeneratorExit that ends it comes by `throw` and `close`.
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:
            raise told(error) from error

    def throw(self, *raised: Any) -> Any:
        """A step that begins by raising."""
        try:
            return self._inner.throw(*raised)
        except (Exception, *CONTROL):
            raise
        except BaseException as error:
            raise told(error) from error

    def close(self) -> None:
        """End it where it stands."""
        self._inner.close()


def made(loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
    """Of a loop the factory of tasks."""
    return asyncio.Task(OwnTask(coroutine), loop=loop, **more)
