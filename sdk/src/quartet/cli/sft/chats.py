"""The data as samples to train on, line by line: chats (rendered.py) and raw text (passages.py).

1. What is too long is left out, cut, or refused, as is asked.
2. All rows of all files have one form, that of the first.
3. Lines that are refused are told together (refused_lines.py). What is left out or passed over is said once,
   however many lines have it.
4. Memory holds one row of the files, and the samples as far as a shelf does (shelf.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from quartet.cli.context import positions_of
from quartet.cli.sft.line import Conversation, Form, Omitted, read_line
from quartet.cli.sft.message import is_malformed
from quartet.cli.sft.passages import Passages
from quartet.cli.sft.refused_lines import MAX_TOLD, Places, RefusedLines, TooLong
from quartet.cli.sft.rendered import Covering, covered, cut, sample_of
from quartet.cli.sft.rows import rows_of
from quartet.cli.sft.shelf import Shelf
from quartet.cli.sft.sources import files_of
from quartet.cli.sft.template import Template, template_of
from quartet.config import ConfigError
from quartet.counted import counted
from quartet.left_out import What
from quartet.run.sft import Learns, Overlong
from quartet.tokenizer_file import end_tokens_of, tokenizer_of
from quartet.v1.rollout_pb2 import Sample


@dataclass(frozen=True)
class Chats:
    """What a file gave."""

    samples: Shelf
    left_out: int
    #: What whoever wrote the file should know, a sentence each.
    notices: Sequence[str] = ()
    form: Form = Form.MESSAGES
    #: Lines that the samples are of: fewer than samples where texts were cut.
    lines: int = 0
    #: Tokens that the loss is taken of.
    covered: int = 0

    @property
    def counted(self) -> str:
        """How much it is, in words."""
        cut = f" in {len(self.samples)} pieces" if len(self.samples) > self.lines else ""
        return counted(self.lines, self.form.thing) + cut


def read_chats(
    named: Path,
    folder: Path,
    roles: Sequence[str],
    max_tokens: int,
    key: str = "data",
    overlong: Overlong = "leave_out",
    *,
    learns: Learns = "roles",
    learn_prompts: bool = False,
) -> Chats:
    """Read the data that this key names, for a model folder. Raises ConfigError with files and lines."""
    what = f"{key} = {str(named)!r}"
    files = files_of(named, key)
    reading = _Reading(folder, Covering(tuple(roles), learns, learn_prompts), max_tokens, overlong)
    refused = RefusedLines()
    for place, row in rows_of(files, key):
        try:
            if isinstance(row, ValueError):
                raise row
            reading.take(place, row)
        except ValueError as error:
            refused.put(place, error)
    chats, most = reading.chats(), positions_of(folder)
    thing = chats.form.thing
    if told := refused.told(f"{files[0]}, " if len(files) == 1 else "", thing, max_tokens):
        raise ConfigError(told)
    if most is not None and reading.longest > most:
        cuts = chats.form is Form.TEXT or overlong == "cut"
        raise ConfigError(
            f"{what} has a {thing} of {reading.longest} tokens, and the model takes {most} "
            f"(max_position_embeddings); set max_tokens to {most}"
            + ("" if overlong == "refuse" else f", which {'cuts' if cuts else 'leaves out'} longer ones")
        )
    if not chats.samples:
        left_out = chats.left_out
        most_said = f"of at most max_tokens = {max_tokens}; longer: {left_out}"
        if overlong == "cut":
            most_said = f"with anything that is learned before max_tokens = {max_tokens}; without: {left_out}"
        short = f" {most_said}" if left_out else ""
        raise ConfigError("; ".join([f"{what} has no {thing}{short}", *chats.notices]))
    return chats


@dataclass
class _Reading:
    """What is known of a file so far."""

    folder: Path
    covering: Covering
    max_tokens: int
    overlong: Overlong
    samples: Shelf = field(default_factory=Shelf)
    #: That of the files, and the row that has shown it.
    form: Form | None = None
    #: Tokens of the longest sample.
    longest: int = 0
    _shown_by: str = ""
    _lines: int = 0
    _covered: int = 0
    _left_out: int = 0
    _cut: int = 0
    _cut_off: int = 0
    _unlisted: int = 0
    #: Where chats have what their template leaves out, by what it is.
    _unshown: dict[str, Places] = field(default_factory=dict)
    _endless: int = 0
    #: Messages that are learned although they have weight 0, and those with a call that is no JSON object.
    _weightless: Places = field(default_factory=Places)
    _malformed: Places = field(default_factory=Places)
    _ignored: set[str] = field(default_factory=set)
    _omitted: Counter[Omitted] = field(default_factory=Counter)

    def take(self, place: str, row: Any) -> None:
        """Take a row. Raises ValueError where it is refused, and ConfigError where the model cannot be
        read."""
        line = read_line(row)
        if isinstance(line, Omitted):
            self._omitted[line] += 1
            return
        if self.form is None:
            self.form, self._shown_by = line.form, place
        if line.form is not self.form:
            raise ValueError(
                f"it has {line.form.value}, and {self._shown_by} has {self.form.value}; write all rows of "
                "the data in one form"
            )
        if isinstance(line, Conversation):
            samples = [sample_of(line, self.covering, self._template, self._tokenizer)]
            self._unlisted += self._template.reads_tools and line.calls_unlisted
            for what, number in self._left_out_of(line).items():
                self._unshown.setdefault(what, Places()).put(f"{place} (message {number})")
            if self._template.leaves_out_tools(line.messages, line.tools, line.settings):
                self._unshown.setdefault("tools", Places()).put(place)
            self._count(place, line)
            is_learned = "assistant" in self.covering.roles and bool(self._ends)
            self._endless += is_learned and self._ends.isdisjoint(_learned(samples[0]))
        else:
            most = None if self.overlong == "cut" else self.max_tokens
            samples = self._passages.samples(line, most, learn_prompts=self.covering.prompts)
        self._ignored |= line.ignored
        fitting = [kept for one in samples if (kept := self._fitting(one)) is not None]
        for one in fitting:
            self.samples.put(one)
            self._covered += covered([one])
            self.longest = max(self.longest, len(one.token_ids))
        self._lines += bool(fitting)
        self._left_out += not fitting

    def _count(self, place: str, chat: Conversation) -> None:
        """What of a chat its author may not have meant to be learned."""
        for number, message in enumerate(chat.messages):
            at = f"{place} (message {number + 1})"
            if self.covering.learns == "everything" and number in chat.unlearned:
                self._weightless.put(at)
            if is_malformed(message) and self.covering.covers(chat, number):
                self._malformed.put(at)

    def _left_out_of(self, chat: Conversation) -> Mapping[str, int]:
        """What a chat has and its template leaves out, with the number of the first message that has it."""
        found: dict[str, int] = {}
        for part in self._template.left_out(chat.messages, chat.tools, chat.settings):
            what = part.what.value
            if part.call is not None:
                what = "tool_calls"
            elif part.what is What.CONTENT:
                what = f"content of {chat.messages[part.message]['role']}"
            found.setdefault(what, part.message + 1)
        return found

    def _fitting(self, sample: Sample) -> Sample | None:
        """Of a sample what is learned of it; None: nothing. Raises ValueError."""
        tokens = len(sample.token_ids)
        if tokens <= self.max_tokens:
            return sample
        if self.overlong == "refuse":
            raise TooLong(tokens)
        kept = cut(sample, self.max_tokens) if self.overlong == "cut" else None
        if kept is not None:
            self._cut += 1
            self._cut_off += covered([sample]) - covered([kept])
        return kept

    def chats(self) -> Chats:
        """What it came to."""
        form = self.form or Form.MESSAGES
        notices = _notices(form, self._ignored, self._omitted, self._unlisted)
        notices += [
            f"chats with {what} that the chat template leaves out: {places.count}; the model never sees it: "
            f"{places}; use a template that shows it"
            for what, places in sorted(self._unshown.items())
        ]
        if self._weightless.count:
            notices.append(
                f'messages of weight 0, which learns = "everything" learns all the same: {self._weightless}; '
                'set learns = "roles"'
            )
        if self._malformed.count:
            instead = ", or give the message weight 0" if self.covering.learns == "roles" else ""
            notices.append(
                f"messages with a call whose arguments are no JSON object: {self._malformed}; the model "
                f"learns to call so: mend them{instead}"
            )
        if self._endless:
            notices.append(
                f"chats in which no token that is learned ends a turn: {self._endless}; the model does not "
                "learn to stop: use a template that ends an answer with one of the model's end tokens"
            )
        if self._cut:
            notices.append(
                f"{form.thing}s cut to max_tokens = {self.max_tokens}: {self._cut}, which leaves "
                f"{self._cut_off} tokens unlearned"
            )
        return Chats(self.samples, self._left_out, notices, form, self._lines, self._covered)

    # What a file does not need is not read: a base model may have no chat template.
    @cached_property
    def _template(self) -> Template:
        return template_of(self.folder)

    @cached_property
    def _passages(self) -> Passages:
        return Passages(self.folder, self._tokenizer)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.folder)

    @cached_property
    def _ends(self) -> frozenset[int]:
        return end_tokens_of(self.folder, self._tokenizer)


def _notices(form: Form, ignored: set[str], omitted: Mapping[Omitted, int], unlisted: int) -> list[str]:
    notices = []
    if not form.is_chat:
        notices.append(
            f"{form.value}: learned as raw text, without the chat template, whatever roles says; for chats "
            "write messages"
        )
    if ignored:
        names = sorted(ignored)
        more = f" and {len(names) - MAX_TOLD} more" if len(names) > MAX_TOLD else ""
        notices.append(f"ignored keys of the data: {', '.join(names[:MAX_TOLD])}{more}")
    notices += [f"{why.value}: {count}" for why, count in omitted.items()]
    if unlisted:
        notices.append(
            f"chats that call tools and list none, which the chat template would print: {unlisted}; add "
            '"tools" beside "messages", or the model learns behind other prompts than it is served'
        )
    return notices


def _learned(sample: Sample) -> Iterator[int]:
    for span in sample.spans:
        yield from sample.token_ids[span.start : span.start + span.length]
