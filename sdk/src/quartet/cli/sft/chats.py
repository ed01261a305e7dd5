"""Chats as samples to train on: rendered by the model's own template, covered where the chosen roles speak.

1. A chat is rendered message by message, and each message's text is tokenized by itself, as it is when the
   model is sampled: what stands before a covered message is what the model is asked to go on from.
2. Covered is what a model would have to say: from the end of the generation prompt to the end of the turn.
   White space that the template puts between turns is not.
3. A chat whose template rewrites earlier turns (dropping their reasoning, say) has no such reading and is
   refused; one that is too long is left out.
4. Of all lines that are refused the first MAX_TOLD are told together. What is left out or passed over is said
   once, however many lines have it.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from quartet.cli.sft.line import Conversation, Omitted, conversation_of
from quartet.cli.sft.template import Template, template_of
from quartet.config import ConfigError
from quartet.config.refusals import ALSO
from quartet.config.text import read_text
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

    @property
    def covered(self) -> int:
        """Tokens that the loss is taken of."""
        return covered(self.samples)


def read_chats(file: Path, folder: Path, roles: Sequence[str], max_tokens: int, key: str = "data") -> Chats:
    """Read a file of chats, which this key names, for a model folder. Raises ConfigError with file and
    lines."""
    template, tokenizer = template_of(folder), _tokenizer_of(folder)
    samples: list[Sample] = []
    refused: list[str] = []
    ignored: set[str] = set()
    omitted: Counter[Omitted] = Counter()
    left_out = unlisted = 0
    for number, line in _lines(file, key):
        try:
            chat = conversation_of(line)
            if isinstance(chat, Omitted):
                omitted[chat] += 1
                continue
            sample = sample_of(chat, roles, template, tokenizer)
        except ValueError as error:
            refused.append(f"line {number}: {error}")
            continue
        ignored |= chat.ignored
        unlisted += template.reads_tools and chat.calls_unlisted
        if len(sample.token_ids) > max_tokens:
            left_out += 1
        else:
            samples.append(sample)
    if refused:
        more = [f"\n  and {len(refused) - MAX_TOLD} more"] if len(refused) > MAX_TOLD else []
        raise ConfigError("".join([f"{file}, ", ALSO.join(refused[:MAX_TOLD]), *more]))
    notices = _notices(ignored, omitted, unlisted)
    longest, most = max((len(one.token_ids) for one in samples), default=0), positions_of(folder)
    if most is not None and longest > most:
        raise ConfigError(
            f"{key} = {str(file)!r} has a chat of {longest} tokens, and the model takes {most} "
            f"(max_position_embeddings); set max_tokens to {most}, which leaves longer ones out"
        )
    if not samples:
        short = f" of at most max_tokens = {max_tokens}; longer: {left_out}" if left_out else ""
        none = f"{key} = {str(file)!r} has no chat{short}"
        raise ConfigError("; ".join([none, *notices]))
    return Chats(samples, left_out, notices)


def _notices(ignored: set[str], omitted: Mapping[Omitted, int], unlisted: int) -> list[str]:
    notices = []
    if ignored:
        names = sorted(ignored)
        more = f" and {len(names) - MAX_TOLD} more" if len(names) > MAX_TOLD else ""
        notices.append(f"ignored keys of the data: {', '.join(names[:MAX_TOLD])}{more}")
    notices += [f"rollouts left out, {why.value}: {count}" for why, count in omitted.items()]
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
        if message["role"] not in roles:
            continue
        before, assistant = chat.messages[:number], message["role"] == "assistant"
        opening = template.render(before, chat.tools, assistant) if number else ""
        whole = template.render(chat.messages[: number + 1], chat.tools, False)
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
        raise ValueError(f"no message of {', '.join(roles)}")
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
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"tokenizer.json of the model in {folder} cannot be read: {error}") from error


def _lines(file: Path, key: str) -> Iterator[tuple[int, str]]:
    # Not splitlines: JSON may have U+2028 and its like within a text.
    for number, line in enumerate(read_text(file, f"{key} = {str(file)!r}").split("\n"), start=1):
        if line.strip():
            yield number, line
