"""The rows of a data set as prompts: what the policy is asked, and what functions are told of it.

1. The column `prompt` of a row is text, whose tokens are sent as they are, or a list of messages, which the
   inference tier renders with the model's chat template, opened for the assistant's answer: whoever spoke
   last, as TRL does.
2. Rows stay where they are. One is read when it is asked for, by one thread at a time, and nothing of it is
   kept. Every prompt is looked at once beforehand, so that what is wrong with any is said before anything
   starts: a ConfigError, with the place as one writes it in Python.
3. Equal prompts have equal keys; equal data sets, as far as their prompts go, with equal settings have equal
   digests.
4. A page of prompts fits into a message.
5. Where there are tools they are shown with each prompt, all prompts are messages, and functions are given
   completions as the messages that came after the prompt. Where there are environments all prompts are
   messages, too, and each is opened (instances.py): a row without one begins with an empty message, as there.
"""

from __future__ import annotations

import copy
import logging
import reprlib
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import repeat
from typing import Any, Final

import xxhash

from quartet.config.model import ConfigError
from quartet.config.refusals import together
from quartet.kit.options import MAX_MESSAGE_BYTES
from quartet.rewards import shown
from quartet.rewards.functions import Group
from quartet.rewards.messages import given_of, passed_over, prompt_of
from quartet.rewards.tokenizer import TextTokenizer
from quartet.template_settings import read as settings_of
from quartet.v1 import common_pb2, inference_service_pb2, reward_service_pb2

PROMPT: Final = "prompt"
#: Of a row without a prompt, where there are environments.
EMPTY: Final = {"role": "user", "content": ""}
#: Columns that no function is given, as TRL leaves them out.
LEFT_OUT: Final = frozenset({PROMPT, "completion", "completion_ids"})
#: What functions get by these names is something else.
TAKEN: Final = ("prompts", "completions")
IMAGES: Final = ("image", "images")
#: A prompt of that many bytes has at most as many tokens, of three bytes each: it fits into a message.
MAX_PROMPT_BYTES: Final = MAX_MESSAGE_BYTES // 4
#: With one more prompt behind it, it fits as well.
MAX_PAGE_BYTES: Final = MAX_MESSAGE_BYTES // 8
#: Rows are wrong alike: the first ones say it.
MAX_WRONG: Final = 5
RIGHT: Final = "give a list of dicts, or a Dataset of the library datasets"

logger = logging.getLogger("quartet.rewards")


class Prompts:
    """The examples of a data set."""

    def __init__(
        self,
        name: str,
        rows: Any,
        tokenizer: TextTokenizer,
        template_settings: str = "",
        tools: Sequence[common_pb2.ToolDefinition] = (),
        *,
        opens: bool = False,
    ) -> None:
        """`name` is what the script calls the data set; `opens` where there are environments. Looks at
        every prompt. Raises ConfigError."""
        self.name, self.tokenizer, self.template_settings = name, tokenizer, template_settings
        self._tools, self._opens = tools, opens
        try:
            self._settings = settings_of(template_settings)
        except ValueError as error:
            raise ConfigError(f"chat_template_kwargs = {template_settings} is refused: {error}") from error
        _check_kind(name, rows)
        self._rows, self._size, self._lock = rows, len(rows), threading.Lock()
        if not self._size:
            raise ConfigError(f"{name} has no rows; give one at least")
        self.digest = self._look()

    def __len__(self) -> int:
        return self._size

    @property
    def columns(self) -> tuple[str, ...]:
        """Those that functions are given, as the first row has them."""
        return tuple(key for key in self.row(0) if key not in LEFT_OUT)

    def row(self, index: int) -> Mapping[str, Any]:
        """One as it is."""
        with self._lock:
            row: Mapping[str, Any] = self._rows[index]
        return row

    def _asked(self, row: Mapping[str, Any]) -> Any:
        """The prompt of a row (5)."""
        return [dict(EMPTY)] if self._opens and PROMPT not in row else row[PROMPT]

    def page(self, start: int, count: int) -> Iterator[reward_service_pb2.RewardPrompt]:
        """Examples from one on: at most so many, and no more than fit into a message."""
        size = 0
        for index in range(start, min(start + count, self._size)):
            if size > MAX_PAGE_BYTES:
                return
            prompt = self._prompt(self.row(index), index)
            size += prompt.ByteSize()
            yield prompt

    def group(
        self,
        index: int,
        completion_ids: Sequence[Sequence[int]],
        conversations: Sequence[Sequence[common_pb2.Message]] = (),
    ) -> Group:
        """What functions are given of the answers to one prompt; where there are tools, `conversations` are
        the messages after it."""
        # A row for each, and copies: a function may change what it is given.
        rows = [self.row(index) for _ in completion_ids]
        return Group(
            prompts=[copy.deepcopy(self._asked(row)) for row in rows],
            completions=[list(map(given_of, messages)) for messages in conversations]
            if self._tools
            else self._answers(completion_ids, is_text=isinstance(self._asked(rows[0]), str)),
            completion_ids=[list(ids) for ids in completion_ids],
            columns={
                key: [
                    copy.deepcopy(row[key]) if isinstance(row[key], list | dict) else row[key] for row in rows
                ]
                for key in rows[0]
                if key not in LEFT_OUT
            },
            settings=self._settings,
        )

    def _answers(self, completion_ids: Sequence[Sequence[int]], *, is_text: bool) -> list[Any]:
        """Of one turn each."""
        texts = [self.tokenizer.decode(ids) for ids in completion_ids]
        return texts if is_text else [[{"role": "assistant", "content": text}] for text in texts]

    def _prompt(self, row: Mapping[str, Any], index: int) -> reward_service_pb2.RewardPrompt:
        given = self._asked(row)
        prompt = reward_service_pb2.RewardPrompt(
            template_settings=self.template_settings,
            key=xxhash.xxh3_128_hexdigest(self._written(given, index)),
            # Messages are shown as what they are; text travels as tokens.
            data_json=shown.told(
                {n: value for n, value in row.items() if n != PROMPT or isinstance(value, str)}
            ),
            tools=self._tools,
            opens=self._opens,
        )
        if isinstance(given, str):
            prompt.tokens.token_ids.extend(self.tokenizer.encode(given))
        else:
            prompt.messages.CopyFrom(self._messages(given, index))
        return prompt

    def _look(self) -> str:
        """At every prompt; the digest of all. Raises ConfigError."""
        state = xxhash.xxh3_128(self.template_settings.encode())
        wrong: list[ConfigError] = []
        unread: set[str] = set()
        for index, row in enumerate(self._each()):
            try:
                _check_row(f"{self.name}[{index}]", row, needs=not self._opens)
                given = self._asked(row)
                written = self._written(given, index)
            except ValueError as error:
                wrong.append(ConfigError(str(error)))
                if len(wrong) == MAX_WRONG:
                    break
                continue
            state.update(len(written).to_bytes(4, "little") + written)
            if not isinstance(given, str):
                unread |= passed_over(given)
        if wrong:
            raise together(wrong)
        for key in sorted(unread):
            logger.warning(
                "%s: %r of a message is without effect: no chat template is given it", self.name, key
            )
        return str(state.hexdigest())

    def _each(self) -> Iterator[Mapping[str, Any]]:
        """Every row, as far as prompts go. Raises ConfigError."""
        datasets = sys.modules.get("datasets")
        if datasets is not None and isinstance(self._rows, datasets.Dataset):
            try:
                _check_columns(self.name, self._rows.column_names, needs=not self._opens)
            except ValueError as error:
                raise ConfigError(str(error)) from None
            # A transform may want all columns at once.
            if self._rows.format["type"] is None:
                columns = [name for name in (PROMPT, *IMAGES) if name in self._rows.column_names]
                yield from self._rows.select_columns(columns) if columns else repeat({}, self._size)
                return
        for index in range(self._size):
            try:
                yield self.row(index)
            except Exception as error:  # of whatever the rows are
                raise ConfigError(f"{self.name}[{index}] cannot be read ({error!r}); {RIGHT}") from error

    def _written(self, given: Any, index: int) -> bytes:
        """A prompt as bytes: others for another one. Raises ValueError where it is none."""
        where = f'{self.name}[{index}]["{PROMPT}"]'
        if isinstance(given, str) and (self._tools or self._opens):
            why = (
                "tools are shown by a chat template"
                if self._tools
                else "what reset() returns is appended to a message"
            )
            raise ValueError(
                f'{where} is text, and {why}; give a list of messages, [{{"role": "user", "content": "..."}}]'
            )
        if isinstance(given, str):
            try:
                written = b"text" + given.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{where} has half a surrogate pair, which is no text; mend it") from None
            if not given.strip() and not self.tokenizer.encode(given):
                raise ValueError(f"{where} = {given!r} has no tokens; give text")
        elif isinstance(given, list) and given:
            written = self._messages(given, index).SerializeToString(deterministic=True)
            if self._opens and given[-1].get("content") is None:
                raise ValueError(
                    f"{where}[-1] has no content, and what reset() returns is appended to it; end with a "
                    "message that has, if an empty one"
                )
        else:
            raise ValueError(
                f"{where} = {reprlib.repr(given)} is refused: give text, or a list of messages, "
                '[{"role": "user", "content": "..."}]'
            )
        if len(written) > MAX_PROMPT_BYTES:
            raise ValueError(
                f"{where} has {len(written)} bytes; at most {MAX_PROMPT_BYTES} travel: shorten it"
            )
        return written

    def _messages(self, given: Sequence[Any], index: int) -> inference_service_pb2.MessagesPrompt:
        return prompt_of(f'{self.name}[{index}]["{PROMPT}"]', given)


def _check_kind(name: str, rows: Any) -> None:
    """Raises ConfigError where it is no sequence of rows."""
    kind = type(rows).__name__
    if isinstance(rows, Mapping):
        raise ConfigError(f'{name} = {kind} is refused: give one of its splits, such as {name}["train"]')
    has_numbers = hasattr(rows, "__getitem__") and not isinstance(rows, str | bytes)
    if isinstance(rows, str | bytes) or not (has_numbers or isinstance(rows, Iterable)):
        raise ConfigError(f"{name} = {kind} is refused: {RIGHT}")
    if not (has_numbers and isinstance(rows, Sized)):
        raise ConfigError(
            f"{name} = {kind} is refused: prompts are drawn by their number, and it has none; give "
            f"list({name}), or where it streams for ever its first rows, list({name}.take(1000))"
        )


def _check_row(where: str, row: Any, *, needs: bool) -> None:
    """`needs`: whether it has to have a prompt. Raises ValueError."""
    if not isinstance(row, Mapping):
        raise ValueError(
            f"{where} = {reprlib.repr(row)} is refused: give a dict of columns, {PROMPT!r} among them"
        )
    _check_columns(where, row, needs=needs)
    for name in IMAGES:
        value = row.get(name)
        if value is not None and not (isinstance(value, list) and not value):
            raise ValueError(
                f"{where}[{name!r}] is refused: a model is given only text; leave out the column, or the row"
            )


def _check_columns(where: str, names: Iterable[str], *, needs: bool) -> None:
    """Raises ValueError."""
    has = [str(name) for name in names]
    if needs and PROMPT not in has:
        raise ValueError(f"{where} has no column {PROMPT!r}, but {', '.join(has) or 'none'}; rename one")
    for name in TAKEN:
        if name in has:
            raise ValueError(
                f"{where} has a column {name!r}, by which functions get something else; rename it"
            )
