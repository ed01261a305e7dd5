"""Grammars on their way from a request to what a completion follows, beside all else that a service does.

1. What is compiled here was compiled in a process of its own before, which may die of it (`trial`): a grammar
   that would end the service, hold it up or fill its memory is refused (StructureError).
2. A grammar that several requests wait for is compiled once. At most TRIALS are tried at a time and
   MAX_UNDERWAY are under way; more are OVERLOADED.
3. Whoever waits may leave at any time: what is under way goes on, for a few seconds, and the next one has it.
4. Compiling has a thread of its own: nothing else waits behind it.
5. The MAX_REFUSED grammars that were refused last are refused again with the same reason and without a trial;
   but those that ran out of time on a clock or were killed, which may have been others' doing.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog
from quartet.errors import QuartetError

from quartet_inference.structure import trial
from quartet_inference.structure.following import Compiled, StructureError, Structures

#: On a machine with two cores the others are left one.
TRIALS = 2
#: Different grammars that wait, as of a batch whose tasks have tools of their own; each takes a tenth of a
#: second where it is harmless.
MAX_UNDERWAY = 1024
#: For CPU_SECONDS of a processor that is shared, and for the start.
WALL_SECONDS = 30.0
#: Each is a digest and a reason of at most 400 characters.
MAX_REFUSED = 1024
#: A refused one is tried again sooner than the queue is through.
RETRY_AFTER_MS = 1000

log = structlog.get_logger()


class Uncertain(StructureError):
    """A refusal that another trial might not confirm."""


class Compiler:
    """Compiles the grammars of one model for the requests of one event loop."""

    def __init__(self, structures: Structures) -> None:
        self._structures = structures
        self._underway: dict[str, asyncio.Task[Compiled]] = {}
        self._refused: OrderedDict[bytes, str] = OrderedDict()  # the reasons
        self._places = asyncio.Semaphore(TRIALS)
        self._thread = _deep_thread()

    async def compiled(self, grammar: str) -> Compiled:
        """A grammar that can be followed. Raises StructureError.

        Errors: NOT_IMPLEMENTED (by the tokenizer), OVERLOADED.
        """
        known = self._structures.find(grammar)
        if known is not None:
            return known
        refused = self._refused.get(_digest(grammar))
        if refused is not None:
            raise StructureError(refused)
        task = self._underway.get(grammar)
        if task is None:
            if len(self._underway) >= MAX_UNDERWAY:
                why = f"{MAX_UNDERWAY} structures are being compiled already"
                raise QuartetError("OVERLOADED", why, retry_after_ms=RETRY_AFTER_MS)
            task = self._underway[grammar] = asyncio.create_task(self._compile(grammar), name="structure")
            task.add_done_callback(lambda done: self._ended(grammar, done))
        return await asyncio.shield(task)

    def _ended(self, grammar: str, task: asyncio.Task[Compiled]) -> None:
        del self._underway[grammar]
        if task.cancelled():
            return
        error = task.exception()  # whoever waited was told, if anybody did
        if isinstance(error, StructureError) and not isinstance(error, Uncertain):
            self._refused[_digest(grammar)] = str(error)
            if len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)

    async def _compile(self, grammar: str) -> Compiled:
        loop = asyncio.get_running_loop()
        named = await loop.run_in_executor(self._thread, self._structures.named)
        async with self._places:
            grown_bytes = await _try(json.dumps({"grammar": grammar, **named}).encode())
        return await loop.run_in_executor(self._thread, self._structures.compile, grammar, grown_bytes)


def _digest(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()


def _deep_thread() -> ThreadPoolExecutor:
    """A thread with twice the stack of a trial."""
    thread = ThreadPoolExecutor(1, "structure")
    before = threading.stack_size(2 * trial.STACK_BYTES)
    try:
        thread.submit(int).result()  # it is there from now on
    finally:
        threading.stack_size(before)
    return thread


async def _try(asked: bytes) -> int:
    """The bytes that compiling it took. Raises StructureError for a grammar that takes too much, or is none.

    Errors: OVERLOADED, INTERNAL.
    """
    pipe = asyncio.subprocess.PIPE
    # -P: the folder of the script is no place to import from.
    command = (sys.executable, "-P", str(Path(trial.__file__)))
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    except OSError as error:
        why = f"no process can be started to compile a structure in: {error}"
        raise QuartetError("OVERLOADED", why, retry_after_ms=RETRY_AFTER_MS) from error
    said = fault = b""
    is_asked = True
    try:
        async with asyncio.timeout(WALL_SECONDS):
            said, fault = await process.communicate(asked)
    except TimeoutError:
        pass  # it is ended below
    except RuntimeError:  # uvloop's, where nobody is left to write to: somebody killed it at its start
        is_asked = False
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    code = process.returncode
    assert code is not None, "it was waited for"
    if not is_asked:
        log.warning("structure_trial_lost", code=code)
        why = "the process that a structure was to be compiled in was ended; try again"
        raise QuartetError("OVERLOADED", why, retry_after_ms=RETRY_AFTER_MS)
    if code < 0 or code == trial.TOO_MUCH:
        log.warning("structure_too_much", code=code)
        kind = Uncertain if code == -signal.SIGKILL else StructureError
        raise kind("compiling it takes too much time, memory or depth; send a simpler one")
    if code == trial.REFUSED:
        raise StructureError(said.decode(errors="replace").strip())
    if code:
        log.error("structure_trial_failed", code=code, said=fault[-2000:].decode(errors="replace"))
        raise QuartetError("INTERNAL", "a structure could not be tried; the log says why")
    return int(said)
