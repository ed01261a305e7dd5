"""Tools of a script: functions that the policy may call, as TRL's GRPOTrainer has them.

1. The policy is shown of each the schema that transformers makes of its type hints and its docstring, as
   there; but for what it returns, of which a ToolDefinition says nothing.
2. Of an answer's calls those of functions that are no coroutines are made one after another, in the thread
   in which reward functions are called (turns.py); coroutines side by side on the loop of theirs
   (own_loop.py). Results come in the order of the calls.
3. What one raises, a name that no tool has, and arguments that do not fit are told to the policy, in TRL's
   words. What is no Exception is a `Failed`, and raised again where the script waits for the training.
4. The results of an answer have MAX_RESULTS_BYTES together. One that goes beyond, or has what is no text, is
   an error that the policy is told.
5. Methods of an object are tools as functions are; `of` has those of another object in their place, which may
   be of another class: one that it has not is not found. Where there are any, coroutines are begun when the
   other calls of their answer were made, as there: they may see what these do.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
from collections.abc import Mapping
from typing import Any, Final

import xxhash

from quartet.config.model import ConfigError
from quartet.kit.own_function import text_of
from quartet.rewards.callee import Callee, kind_of, looking_at
from quartet.rewards.functions import Failed, first_that_failed
from quartet.rewards.own_loop import OwnLoop, outcome
from quartet.rewards.turns import Turns
from quartet.v1 import common_pb2

#: What makes schemas of functions.
OF_TRANSFORMERS: Final = "transformers.utils.chat_template_utils"
#: They travel with every prompt, and are rendered into it.
MAX_DEFINITIONS_BYTES: Final = 1 << 18
#: More than any context holds, and a quarter of a message.
MAX_RESULTS_BYTES: Final = 1 << 20
#: What to give instead.
RIGHT: Final = "give a function, with type hints and a docstring that describes its arguments"
NO_METHODS: Final[Mapping[str, Any]] = {}
# Of the text of {"error": "..."}, which Python writes with either quote.
_BEGINS: Final = ("{'error': '", "{'error': \"")
_ENDS: Final = ("'}", '"}')


class Tools:
    """All tools of a script."""

    def __init__(
        self, given: Any, turns: Turns, loop: OwnLoop, methods: Mapping[str, Any] = NO_METHODS
    ) -> None:
        """A list of functions, and where they are called; methods by their names in their object. Raises
        ConfigError."""
        if not isinstance(given, list | tuple):
            raise ConfigError(f"tools = {kind_of(given)} is refused: give a list of functions")
        self._turns, self._loop = turns, loop
        # By the names by which they are called.
        self._tools: dict[str, Callee] = {}
        self._functions: dict[str, Callee] = {}
        self._has_methods = bool(methods)
        # Of whom methods are, and for what they are called.
        self._whose = self._where = ""
        definitions = []
        functions = [(f"tools[{number}]", "", one) for number, one in enumerate(given)]
        for key, method, one in (*functions, *((f"method {name}", name, methods[name]) for name in methods)):
            tool, definition = _read(key, one)
            if tool.name in self._tools:
                raise ConfigError(
                    f"{key} is the second tool called {tool.name!r}{tool.place}, and the policy calls them "
                    "by name; rename one"
                )
            self._tools[tool.name] = tool
            if not method:
                self._functions[tool.name] = tool
            definitions.append(definition)
        #: As the policy is shown them.
        self.definitions = tuple(definitions)
        size = sum(one.ByteSize() for one in definitions)
        if size > MAX_DEFINITIONS_BYTES:
            raise ConfigError(
                f"tools are described in {size} bytes, and at most {MAX_DEFINITIONS_BYTES} travel with a "
                "prompt; shorten their docstrings"
            )
        #: Of what they are in this process, as of functions.
        self.digest = self._digest()

    def of(self, methods: Mapping[str, Any], kind: str, where: str) -> Tools:
        """The same with these methods of an object (5). Its class, and where its row is, are told of one that
        does not return."""
        found = copy.copy(self)
        own = [Callee(method.__name__, method) for method in methods.values()]
        found._tools = {**self._functions, **{one.name: one for one in own}}
        found._has_methods, found._whose, found._where = bool(own), f" of {kind}", f" for {where}"
        return found

    def _digest(self) -> str:
        """Of their names, schemas and source text."""
        state = xxhash.xxh3_128()
        for tool, definition in zip(self._tools.values(), self.definitions, strict=True):
            written = definition.SerializeToString(deterministic=True)
            state.update(len(written).to_bytes(4, "little") + written)
            state.update(f"{tool.source}\0".encode(errors="replace"))
        return str(state.hexdigest())

    async def answer(self, message: common_pb2.Message) -> list[common_pb2.Message] | Failed:
        """The results of the calls that an assistant's message makes."""
        calls = message.tool_calls
        results = [""] * len(calls)

        def in_turn(numbers: list[int]) -> Failed | None:
            for number in numbers:
                self._turns.doing(self._told(calls[number].name))
                try:
                    results[number] = _text_of(self._called(calls[number]))
                    self._turns.leave_child()
                except Exception as error:  # noqa: BLE001 - told to the policy, whatever it is (3)
                    self._turns.leave_child(error)
                    results[number] = _error(error)
                except BaseException as error:  # noqa: BLE001 - whatever a script raises is its own
                    self._turns.leave_child(error)
                    return self._failed(calls[number].name, error)
            return None

        async def beside(number: int) -> Failed | None:
            try:
                results[number] = _text_of(await outcome(self._called(calls[number])))
            except Exception as error:  # noqa: BLE001 - likewise
                results[number] = _error(error)
            except BaseException as error:  # noqa: BLE001 - likewise
                return self._failed(calls[number].name, error)
            return None

        waited = [number for number, call in enumerate(calls) if self._is_async(call.name)]
        others = [number for number in range(len(calls)) if number not in waited]
        if others and waited and self._has_methods:
            if (failed := await self._turns.call(functools.partial(in_turn, others))) is not None:
                return failed
            others = []
        asked = [self._loop.call(functools.partial(beside, number)) for number in waited]
        if others:
            asked.append(self._turns.call(functools.partial(in_turn, others)))
        if (failed := await first_that_failed(asked)) is not None:
            return failed
        return [
            common_pb2.Message(role="tool", content=text, tool_call_id=call.id, name=call.name)
            for call, text in zip(calls, _bounded(results), strict=True)
        ]

    def _is_async(self, name: str) -> bool:
        return name in self._tools and self._tools[name].is_async

    def _called(self, call: common_pb2.ToolCall) -> Any:
        """What it answers, or what is awaited for that. Raises what it raises."""
        if call.name not in self._tools:
            raise ValueError(f"Tool {call.name} not found.")
        return self._tools[call.name].call(**json.loads(call.arguments_json or "{}"))

    def _told(self, name: str) -> str:
        """Which one a person is told that it is."""
        if self._tools.get(name) is self._functions.get(name):
            return f"tool {name!r}{self._where}"
        return f"method {name!r}{self._whose}{self._where}"

    def _failed(self, name: str, error: BaseException) -> Failed:
        return Failed(name, f"tool {name!r}: {self._tools[name].own.told(error)}", error)


def _read(key: str, given: Any) -> tuple[Callee, common_pb2.ToolDefinition]:
    """One that can be called later as it can be now. Raises ConfigError."""
    with looking_at(key, given, RIGHT):
        name = getattr(given, "__name__", "")
        if isinstance(given, type) or not callable(given) or not isinstance(name, str) or not name:
            raise ConfigError(f"{key} = {kind_of(given)} is refused: {RIGHT}")
        tool = Callee(name, given)
        definition = _definition(key, tool)
        # Here, too, is what is looked at when it is called, or has failed.
        _ = tool.is_async, tool.source, tool.own
        return tool, definition


def _definition(key: str, tool: Callee) -> common_pb2.ToolDefinition:
    """Raises ConfigError."""
    try:
        # By name: a script with tools has it, and nothing here depends on it.
        transformers = importlib.import_module(OF_TRANSFORMERS)
    except ImportError:
        raise ConfigError(
            "tools are shown to the policy by the schemas that transformers makes of them, and it is not "
            "installed; pip install transformers"
        ) from None
    try:
        schema = transformers.get_json_schema(tool.call)["function"]
        parameters = json.dumps(schema["parameters"], ensure_ascii=False)
        return common_pb2.ToolDefinition(
            name=tool.name, description=schema["description"] or "", parameters_json=parameters
        )
    except Exception as error:  # whatever the hints and the docstring of a script make it raise
        raise ConfigError(
            f"{key} = {tool.name}{tool.place} is refused: {' '.join(str(error).split())}; give it type "
            'hints, and a docstring that describes it and, under "Args:", each argument'
        ) from error


def _text_of(result: Any) -> str:
    """A result as the policy is told it. Raises ValueError, and what an object of a script raises."""
    is_parts = isinstance(result, list) and any(isinstance(one, Mapping) and "type" in one for one in result)
    text = "".join(map(_part, result)) if is_parts else str(result)
    return text.encode(errors="replace").decode()


def _part(part: Any) -> str:
    """The text of a content block. Raises ValueError."""
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ValueError(f"the result has a part of type {kind!r}, and the model is given only text")
    return str(part["text"])


def _error(error: Exception) -> str:
    """As TRL tells it."""
    return _text_of({"error": text_of(error)})


def is_error(result: str) -> bool:
    """Whether a result reads as an error is told; a tool may say so itself."""
    return result.startswith(_BEGINS) and result.endswith(_ENDS)


def _bounded(results: list[str]) -> list[str]:
    """With an error in the place of each that finds no room any more."""
    left, told = MAX_RESULTS_BYTES, []
    for text in results:
        if (size := len(text.encode())) > left:
            why = f"the result has {size} bytes, and the results of an answer {MAX_RESULTS_BYTES} at most"
            told.append(_error(ValueError(why)))
        else:
            left -= size
            told.append(text)
    return told
