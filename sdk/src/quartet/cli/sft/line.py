"""A line of the data: a conversation, or raw text, in whichever of the usual forms it is written.

    messages                 {"messages": [{"role", "content"}, ...]}; lines of rollouts/*.jsonl are such
    conversations            {"conversations": [{"from", "value"}, ...], "system": "..."}: ShareGPT
    prompt and completion    {"prompt": [messages], "completion": [messages]}: of it the completion is learned
    ... of text              {"prompt": "...", "completion": "..."}: without a chat template
    text                     {"text": "..."}: all of it is learned

1. A line has the first of these forms of which it has all keys, null counting as none; with any list of
   messages `tools` may stand (`tool_defs`, where rollouts of Verifiers say it), and `chat_template_kwargs`:
   what the chat template is given beside them.
2. Wherever a list of messages stands, its messages may be OpenAI's or ShareGPT's (message.py).
3. What says nothing of the line is left out and named; what cannot be read is refused: ValueError.
"""

from __future__ import annotations

import enum
import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from quartet.cli.sft.message import (
    Message,
    Tool,
    decoded,
    ignored_of,
    is_learned,
    list_of,
    message_of,
    object_of,
    tool_of,
    unknown_keys,
)
from quartet.template_settings import RESERVED

#: Of a chat, the tools that it may call: the first that it has.
TOOLS: Final = ("tools", "tool_defs")
#: Of a chat, variables of the template as TRL reads them.
SETTINGS: Final = "chat_template_kwargs"
FORMS: Final = (
    'write {"messages": [{"role", "content"}, ...]}, {"conversations": [{"from", "value"}, ...]}, '
    '{"prompt", "completion"}, both messages or both text, or {"text"}'
)
#: What every line of rollouts/*.jsonl has, and no other file is likely to.
ROLLOUT_KEYS: Final = frozenset({"env", "group", "member", "reward"})
#: Of what a chat shows besides text: without it, the answers would be learned behind other prompts.
SEEN: Final = ("images", "image", "videos", "audios")


class Form(enum.Enum):
    """How the lines of a file are written. The value is the form's name in what is said."""

    MESSAGES = "messages"
    CONVERSATIONS = "conversations"
    PROMPTED = "prompt and completion, which are messages"
    COMPLETED = "prompt and completion, which are text"
    TEXT = "text"

    @property
    def keys(self) -> frozenset[str]:
        """Those that have a meaning in it."""
        match self:
            case Form.MESSAGES:
                return frozenset({"messages", *TOOLS, SETTINGS})
            case Form.CONVERSATIONS:
                return frozenset({"conversations", "system", *TOOLS, SETTINGS})
            case Form.PROMPTED:
                return frozenset({"prompt", "completion", *TOOLS, SETTINGS})
            case Form.COMPLETED:
                return frozenset({"prompt", "completion"})
            case Form.TEXT:
                return frozenset({"text"})

    @property
    def is_chat(self) -> bool:
        """Whether a chat template renders it."""
        return self not in (Form.COMPLETED, Form.TEXT)

    @property
    def thing(self) -> str:
        """What a line of it holds; with an s, several."""
        return {Form.COMPLETED: "completion", Form.TEXT: "text"}.get(self, "chat")


@dataclass(frozen=True)
class Conversation:
    """What a line says, and the keys in which it says something else."""

    messages: Sequence[Message]
    tools: Sequence[Tool]
    ignored: frozenset[str]
    form: Form = Form.MESSAGES
    #: Messages before are what the model is given, whoever speaks.
    first_learned: int = 0
    #: Variables of the chat template.
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: Messages that are not learned whoever speaks: those of weight 0.
    unlearned: frozenset[int] = frozenset()

    @property
    def calls_unlisted(self) -> bool:
        """Whether tools are called, and none are listed."""
        return not self.tools and any("tool_calls" in message for message in self.messages)


@dataclass(frozen=True)
class Passage:
    """Raw text: what the model is given, and what it learns to go on with."""

    prompt: str
    text: str
    ignored: frozenset[str]
    form: Form


class Omitted(enum.Enum):
    """A line from which nothing can be learned, and why."""

    WITHOUT_MESSAGES = (
        "rollouts left out, without messages (the run's messages_of_members says how many of a group have "
        "them)"
    )
    FAILED = "rollouts left out, failed"
    SEVERAL_AGENTS = (
        "rollouts left out, of several agents, whose conversations are one after the other in them"
    )
    EMPTY = "lines left out, whose text is empty"


def read_line(row: Any) -> Conversation | Passage | Omitted:
    """What a line says that was read as JSON. Raises ValueError."""
    if not isinstance(row, dict):
        raise ValueError(f"it is {reprlib.repr(row)}, and no object; {FORMS}")
    rollout = row.keys() >= ROLLOUT_KEYS
    if rollout and row.get("failure") is not None:
        return Omitted.FAILED
    if rollout and row.get("messages") is None:
        return Omitted.WITHOUT_MESSAGES
    if "reward" in row and isinstance(parts := row.get("parts"), list) and len(parts) > 1:
        return Omitted.SEVERAL_AGENTS
    form = form_of(row)
    ignored = frozenset[str]() if rollout else frozenset(unknown_keys(row, form.keys))
    line = _conversation(row, form, ignored) if form.is_chat else _passage(row, form, ignored)
    if isinstance(line, Conversation):
        _check_text([*line.messages, *line.tools, line.settings])
        return line
    _check_text(line.prompt + line.text)
    return line if line.prompt or line.text else Omitted.EMPTY


def form_of(row: Mapping[str, Any]) -> Form:
    """The form of a line, by its keys. Raises ValueError."""
    given = {key for key, value in row.items() if value is not None}
    if "messages" in given:
        return Form.MESSAGES
    if "conversations" in given:
        return Form.CONVERSATIONS
    if {"prompt", "completion"} <= given:
        return _of_prompt_and_completion(row["prompt"], row["completion"])
    if "text" in given:
        return Form.TEXT
    raise ValueError(_none_of_them(given))


def _of_prompt_and_completion(prompt: Any, completion: Any) -> Form:
    if isinstance(prompt, str) and isinstance(completion, str):
        return Form.COMPLETED
    for key, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str | list):
            raise ValueError(f"{key} is {reprlib.repr(value)}; write text, or a list of messages")
    if isinstance(prompt, str) or isinstance(completion, str):
        listed = "completion" if isinstance(prompt, str) else "prompt"
        raise ValueError(
            f"of prompt and completion only {listed} is a list; write both as messages, or as text"
        )
    return Form.PROMPTED


def _none_of_them(given: set[str]) -> str:
    """Why the keys make no form."""
    for key, other in (("prompt", "completion"), ("completion", "prompt")):
        if key in given:
            better = "; of two answers chosen may be it" if {"chosen", "rejected"} & given else ""
            return f'it has {key}, and no {other}; write "{other}" beside it{better}'
    if "instruction" in given and "output" in given:
        return (
            "instruction and output have no form that a model would meet again; write the one into a user's "
            f"message, the other into an assistant's: {FORMS}"
        )
    keys = f"the keys {', '.join(map(reprlib.repr, sorted(given)[:8]))}" if given else "no key with a value"
    return f"it has {keys}, which is no form that is read; {FORMS}"


def _conversation(row: Mapping[str, Any], form: Form, ignored: frozenset[str]) -> Conversation:
    for key in SEEN:
        if row.get(key):
            raise ValueError(f"it has {key}, and only text is learned; remove the line, or the key")
    keys = ("prompt", "completion") if form is Form.PROMPTED else (form.value,)
    lists = [_messages(key, row[key], several=len(keys) > 1) for key in keys]
    messages = [message for one in lists for message in one]
    first_learned = len(lists[0]) if form is Form.PROMPTED else 0
    unlearned = _unlearned([message for key in keys for message in row[key]])
    if form is Form.CONVERSATIONS and row.get("system"):
        messages = [_system(row["system"], messages), *messages]
        unlearned = frozenset(number + 1 for number in unlearned)
    listed = next((key for key in TOOLS if row.get(key) is not None), TOOLS[0])
    tools = [
        tool_of(f"{listed}[{number}]", tool)
        for number, tool in enumerate(list_of(listed, decoded(listed, row.get(listed))))
    ]
    within = {f"{key}[].{name}" for key in keys for message in row[key] for name in ignored_of(message)}
    return Conversation(messages, tools, ignored | within, form, first_learned, _settings(row), unlearned)


def _settings(row: Mapping[str, Any]) -> Mapping[str, Any]:
    if row.get(SETTINGS) is None:
        return {}
    settings = object_of(SETTINGS, decoded(SETTINGS, row[SETTINGS]))
    if taken := sorted(RESERVED & settings.keys()):
        raise ValueError(f"{SETTINGS} has {', '.join(taken)}, which is no setting of a template; remove it")
    return settings


def _messages(key: str, given: Any, *, several: bool) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise ValueError(f"{key} is {reprlib.repr(given)}; write a list of messages, of one at least")
    of = f"{key}, " if several else ""
    return [message_of(f"{of}message {number}", message) for number, message in enumerate(given, start=1)]


def _unlearned(given: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    learned = [is_learned(f"message {number}", message) for number, message in enumerate(given, start=1)]
    return frozenset(number for number, one in enumerate(learned) if not one)


def _system(given: Any, messages: Sequence[Message]) -> Message:
    """What stands beside ShareGPT's conversations, as those who write tools have it."""
    if not isinstance(given, str):
        raise ValueError(f"system is {reprlib.repr(given)}; write text")
    if messages[0]["role"] == "system":
        raise ValueError("system stands beside conversations that begin with one; remove either")
    return {"role": "system", "content": given}


def _passage(row: Mapping[str, Any], form: Form, ignored: frozenset[str]) -> Passage:
    if form is Form.COMPLETED:
        return Passage(row["prompt"], row["completion"], ignored, form)
    if not isinstance(row["text"], str):
        raise ValueError(f"text is {reprlib.repr(row['text'])}; write text")
    return Passage("", row["text"], ignored, form)


def _check_text(said: Any) -> None:
    try:
        json.dumps(said, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it has half a surrogate pair, which is no text") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except TypeError as error:  # of a table, which has more types than JSON
        raise ValueError(f"it has what JSON does not have: {error}") from error
