"""Chats as samples to train on: rendered by the model's own template, covered where the chosen roles speak.

1. A chat is rendered message by message, and each message's text is tokenized by itself, as it is when the
   model is sampled: what stands before a covered message is what the model is asked to go on from.
2. Covered is what a model would have to say: from the end of the generation prompt to the end of the turn.
   White space that the template puts between turns is not.
3. A chat whose template rewrites earlier turns (dropping their reasoning, say) has no such reading and is
   refused; one that is too long is left out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from quartet.config import ConfigError
from quartet.config.text import read_text
from quartet.v1.rollout_pb2 import PolicySpan, Sample

Chat = Sequence[Mapping[str, Any]]
#: Renders messages; the flag says whether to end with the generation prompt.
Render = Callable[[Chat, bool], str]


@dataclass(frozen=True)
class Chats:
    """What a file gave."""

    samples: Sequence[Sample]
    left_out: int


def read_chats(file: Path, folder: Path, roles: Sequence[str], max_tokens: int) -> Chats:
    """Read a file of chats for a model folder. Raises ConfigError with file and line."""
    render, tokenizer = template_of(folder), _tokenizer_of(folder)
    samples: list[Sample] = []
    left_out = 0
    for number, chat in _lines(file):
        try:
            sample = sample_of(chat, roles, render, tokenizer)
        except (ValueError, jinja2.TemplateError) as error:
            raise ConfigError(f"{file}, line {number}: {error}") from error
        if len(sample.token_ids) > max_tokens:
            left_out += 1
        else:
            samples.append(sample)
    if not samples:
        raise ConfigError(f"data = {str(file)!r} has no chat of at most max_tokens = {max_tokens}")
    return Chats(samples, left_out)


def sample_of(chat: Chat, roles: Sequence[str], render: Render, tokenizer: Tokenizer) -> Sample:
    """One chat. Raises ValueError."""
    sample, told = Sample(), ""

    def tell(text: str, *, covered: bool = False) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if covered and ids:
            sample.spans.append(PolicySpan(start=len(sample.token_ids), length=len(ids)))
        sample.token_ids.extend(ids)

    for number, message in enumerate(chat):
        if message["role"] not in roles:
            continue
        opening = render(chat[:number], message["role"] == "assistant") if number else ""
        whole = render(chat[: number + 1], False)
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


def _tokenizer_of(folder: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"tokenizer.json of the model in {folder} cannot be read: {error}") from error


def template_of(folder: Path) -> Render:
    """The chat template of a model folder. Raises ConfigError."""
    beside = folder / "chat_template.jinja"
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        source = beside.read_text(encoding="utf-8") if beside.is_file() else config.get("chat_template")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"the chat template of the model in {folder} cannot be read: {error}") from error
    if not isinstance(source, str):
        raise ConfigError(f"the model in {folder} has no chat template; add chat_template.jinja")

    def fail(why: str) -> None:
        raise ValueError(f"the chat template refuses it: {why}")

    # As transformers renders them.
    engine = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    engine.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    engine.globals["raise_exception"] = fail
    tokens = {name: _text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    try:
        template = engine.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template of the model in {folder} cannot be read: {error}") from error
    return lambda chat, prompt: template.render(messages=chat, add_generation_prompt=prompt, **tokens)


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token or "")


def _lines(file: Path) -> Iterator[tuple[int, Chat]]:
    text = read_text(file, f"data = {str(file)!r}")
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield number, _chat(file, number, line)


def _chat(file: Path, number: int, line: str) -> Chat:
    try:
        chat = json.loads(line)["messages"]
        good = bool(chat) and all(isinstance(one["role"], str) and "content" in one for one in chat)
    except (ValueError, KeyError, TypeError):
        good = False
    if not good:
        raise ConfigError(
            f'{file}, line {number}: not a chat; write {{"messages": [{{"role", "content"}}, ...]}}'
        )
    return list(chat)
