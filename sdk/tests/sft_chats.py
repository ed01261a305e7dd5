"""A chat, as the tests of `quartet sft` learn it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from quartet.cli.sft import command
from quartet.cli.sft.line import Conversation
from quartet.cli.sft.rendered import Covering, sample_of
from quartet.cli.sft.shelf import Shelf
from quartet.cli.sft.stopping import Stopped
from quartet.cli.sft.template import template_of
from quartet.v1.rollout_pb2 import Sample
from tokenizers import Tokenizer

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "é?"},
    {"role": "assistant", "content": "yes  "},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "no"},
]


CONVERSATION = Conversation(CHAT, (), frozenset())


def sample(folder: Path, *roles: str) -> Sample:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return sample_of(CONVERSATION, Covering(roles), template_of(folder), tokenizer)


def shelved(samples: Iterable[Sample]) -> Shelf:
    shelf = Shelf()
    for one in samples:
        shelf.put(one)
    return shelf


def written(tmp_path: Path, *lines: object) -> Path:
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines))
    return file


def parts(model: Path, sample: Sample) -> tuple[str, list[str]]:
    """The text of all tokens, and that of each span."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def text(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    ids = list(sample.token_ids)
    return text(ids), [text(ids[span.start : span.start + span.length]) for span in sample.spans]


def stop_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`quartet sft` has a trainer that would take every run, and is stopped after three steps."""

    async def accepts(specs: object) -> None:
        """The trainer would."""

    async def stops(*given: object) -> None:
        raise Stopped(3)

    monkeypatch.setattr(command, "check", accepts)
    monkeypatch.setattr(command, "_train", stops)
