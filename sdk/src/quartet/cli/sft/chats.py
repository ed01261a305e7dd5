"""The data as samples to train on: chats rendered by the model's own template and covered where the chosen
roles speak, and raw text (passages.py).

1. A chat is rendered message by message, and each message's text is tokenized by itself, as it is when the
   model is sampled: what stands before a covered message is what the model is asked to go on from.
2. Covered is what a model would have to say: from the end of the generation prompt to the end of the turn.
   White space that the template puts between turns is not. Of a prompt with a completion only messages of the
   completion are covered.
3. A chat whose template rewrites earlier turns (dropping their reasoning, say) has no such reading and is
   refused; one that is too long is left out.
4. All lines of a file have one form, that of the first.
5. Of all lines that are refused the first MAX_TOLD are told together. What is left out or passed over is said
   once, however many lines have it.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from quartet.cli.sft.line import Conversation, Form, Omitted, read_line
from quartet.cli.sft.passages import Passages
from quartet.cli.sft.rows import rows_of
from quartet.cli.sft.template import Template, template_of
from quartet.config import ConfigError
from quartet.config.refusals import ALSO
from quartet.v1.rollout_pb2 import PolicySpan, Sample

#: Lines that are refused, and keys that are ignored: more are not read at once.
MAX_TOLD = 20


@dataclass(frozen=True)
class Chats:
    """What a file gave."""

    samples: Sequence[Sample]
    left_out: int
    #: What whoever wrote the file should know, a sentence each.
    notices: Sequence[str] = ()
    form: Form = Form.MESSAGES
    #: Lines that the samples are of: fewer than samples where texts were cut.
    lines: int = 0

    @property
    def covered(self) -> int:
        """Tokens that the loss is taken of."""
        return covered(self.samples)

    @property
    def counted(self) -> str:
        """How much it is, in words."""
        cut = f" in {len(self.samples)} pieces" if len(self.samples) > self.lines else ""
        return f"{self.lines} {self.form.thing}s{cut}"


def read_chats(file: Path, folder: Path, roles: Sequence[str], max_tokens: int, key: str = "data") -> Chats:
    """Read a file of data, which this key names, for a model folder. Raises ConfigError with file and
    lines."""
    reading = _Reading(folder, roles, max_tokens)
    refused: list[str] = []
    for number, row in rows_of(file, key):
        try:
            if isinstance(row, ValueError):
                raise row
            reading.take(number, row)
        except ValueError as error:
            refused.append(f"line {number}: {error}")
    if refused:
        more = [f"\n  and {len(refused) - MAX_TOLD} more"] if len(refused) > MAX_TOLD else []
        raise ConfigError("".join([f"{file}, ", ALSO.join(refused[:MAX_TOLD]), *more]))
    chats = reading.chats()
    what = chats.form.thing
    longest, most = max((len(one.token_ids) for one in chats.samples), default=0), positions_of(folder)
    if most is not None and longest > most:
        raise ConfigError(
            f"{key} = {str(file)!r} has a {what} of {longest} tokens, and the model takes {most} "
            f"(max_position_embeddings); set max_tokens to {most}, which "
            + ("cuts longer ones" if chats.form is Form.TEXT else "leaves longer ones out")
        )
    if not chats.samples:
        left_out = chats.left_out
        short = f" of at most max_tokens = {max_tokens}; longer: {left_out}" if left_out else ""
        none = f"{key} = {str(file)!r} has no {what}{short}"
        raise ConfigError("; ".join([none, *chats.notices]))
    return chats


@dataclass
class _Reading:
    """What is known of a file so far."""

    folder: Path
    roles: Sequence[str]
    max_tokens: int
    samples: list[Sample] = field(default_factory=list)
    #: That of the file, and the line that has shown it.
    form: Form | None = None
    _shown_by: int = 0
    _lines: int = 0
    _left_out: int = 0
    _unlisted: int = 0
    _ignored: set[str] = field(default_factory=set)
    _omitted: Counter[Omitted] = field(default_factory=Counter)

    def take(self, number: int, row: Any) -> None:
        """Take a line. Raises ValueError where it is refused, and ConfigError where the model cannot be
        read."""
        line = read_line(row)
        if isinstance(line, Omitted):
            self._omitted[line] += 1
            return
        if self.form is None:
            self.form, self._shown_by = line.form, number
        if line.form is not self.form:
            raise ValueError(
                f"it has {line.form.value}, and line {self._shown_by} has {self.form.value}; write all lines "
                "of a file in one form"
            )
        if isinstance(line, Conversation):
            samples = [sample_of(line, self.roles, self._template, self._tokenizer)]
            self._unlisted += self._template.reads_tools and line.calls_unlisted
        else:
            samples = self._passages.samples(line, self.max_tokens)
        self._ignored |= line.ignored
        if samples and len(samples[0].token_ids) <= self.max_tokens:
            self.samples += samples
            self._lines += 1
        else:
            self._left_out += 1

    def chats(self) -> Chats:
        """What it came to."""
        form = self.form or Form.MESSAGES
        notices = _notices(form, self._ignored, self._omitted, self._unlisted)
        return Chats(self.samples, self._left_out, notices, form, self._lines)

    # What a file does not need is not read: a base model may have no chat template.
    @cached_property
    def _template(self) -> Template:
        return template_of(self.folder)

    @cached_property
    def _passages(self) -> Passages:
        return Passages(self.folder, self._tokenizer)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return _tokenizer_of(self.folder)


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


def sample_of(chat: Conversation, roles: Sequence[str], template: Template, tokenizer: Tokenizer) -> Sample:
    """One chat. Raises ValueError."""
    sample, told = Sample(), ""

    def tell(text: str, *, covered: bool = False) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if covered and ids:
            sample.spans.append(PolicySpan(start=len(sample.token_ids), length=len(ids)))
        sample.token_ids.extend(ids)

    for number, message in enumerate(chat.messages):
        if message["role"] not in roles or number < chat.first_learned:
            continue
        before, assistant = chat.messages[:number], message["role"] == "assistant"
        opening = template.render(before, chat.tools, assistant, chat.settings) if number else ""
        whole = template.render(chat.messages[: number + 1], chat.tools, False, chat.settings)
        if not opening.startswith(told) or not whole.startswith(opening):
            raise ValueError(
                f"the chat template renders what comes before message {number + 1} otherwise once that came; "
                "end the chat before it, or use a template that keeps earlier turns"
            )
        turn = whole[len(opening) :].rstrip()
        tell(opening[len(told) :])
        tell(turn, covered=True)
        told = opening + turn
    if not sample.spans:
        where = " in its completion" if chat.form is Form.PROMPTED else ""
        raise ValueError(f"no message of {', '.join(roles)}{where}, which roles says are learned")
    if sample.spans[0].start == 0:
        raise ValueError("the first token of a chat has no prediction; choose roles that do not begin it")
    return sample


def covered(samples: Sequence[Sample]) -> int:
    """Tokens of samples that the loss is taken of."""
    return sum(span.length for sample in samples for span in sample.spans)


def batches(samples: Sequence[Sample], size: int, seed: int) -> Iterator[list[Sample]]:
    """Batches for ever: every sample once in each epoch, in an order of its own."""
    order: list[int] = []
    epoch = 0
    while True:
        batch: list[Sample] = []
        while len(batch) < size:
            if not order:
                order = list(range(len(samples)))
                random.Random(f"{seed}/{epoch}").shuffle(order)
                epoch += 1
            batch.append(samples[order.pop()])
        yield batch


def positions_of(folder: Path) -> int | None:
    """How long a text the model of a folder takes, as its configuration says; None where it does not."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        most = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None  # the trainer says what is wrong with it
    return most if isinstance(most, int) and most > 0 else None


def _tokenizer_of(folder: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"tokenizer.json of the model in {folder} cannot be read: {error}") from error
    # Which some files ask for; whoever serves the model does without, too.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
