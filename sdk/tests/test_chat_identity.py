"""Whether two model folders make the same tokens of a conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quartet.chat_identity import chat_identity, differences

VOCAB = {"a": 0, "b": 1, "ab": 2}
ADDED = [{"id": 3, "content": "<end>", "special": True}]


def folder(path: Path, template: str = "{{ messages }}", **model: Any) -> Path:
    path.mkdir()
    made = {"added_tokens": ADDED, "model": {"type": "BPE", "vocab": VOCAB, "merges": ["a b"], **model}}
    (path / "tokenizer.json").write_text(json.dumps(made))
    (path / "chat_template.jinja").write_text(template)
    return path


def test_what_another_release_writes_differently_makes_no_other_model(tmp_path: Path) -> None:
    one = chat_identity(folder(tmp_path / "one"), "one")
    two = folder(tmp_path / "two", merges=[["a", "b"]], vocab={"ab": 2, "b": 1, "a": 0, "<end>": 3})
    (two / "chat_template.jinja").unlink()
    (two / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}\n"}))
    made = json.loads((two / "tokenizer.json").read_text()) | {"padding": {"strategy": "longest"}}
    (two / "tokenizer.json").write_text(json.dumps(made))
    assert differences(one, chat_identity(two, "two")) == []
    assert one.tokenizer_digest and one.template_digest and one.model == "one"


def test_each_is_told_apart_by_itself(tmp_path: Path) -> None:
    one = chat_identity(folder(tmp_path / "one"), "one")
    other = chat_identity(folder(tmp_path / "template", "{{ other }}"), "other")
    assert differences(one, other) == ["chat template"]
    other = chat_identity(folder(tmp_path / "merges", merges=[]), "other")
    assert differences(one, other) == ["tokenizer"]
    unigram = chat_identity(folder(tmp_path / "unigram", "", type="Unigram", vocab=[["a", -1.0]]), "other")
    assert differences(one, unigram) == ["tokenizer"]


def test_a_template_of_ones_own_takes_the_place_of_the_folders(tmp_path: Path) -> None:
    one = chat_identity(folder(tmp_path / "one"), "one")
    own = tmp_path / "own.jinja"
    own.write_text("{{ own }}")
    other = chat_identity(tmp_path / "one", "one", own)
    assert differences(one, other) == ["chat template"] and other.model == f"one with {own}"


def test_what_is_not_there_is_compared_with_nothing(tmp_path: Path) -> None:
    one, bare = chat_identity(folder(tmp_path / "one"), "one"), tmp_path / "bare"
    bare.mkdir()
    assert differences(one, chat_identity(bare, "bare")) == []
    (bare / "tokenizer.json").write_text('{"model": {}}')
    (bare / "tokenizer_config.json").write_text("not json")
    assert differences(one, chat_identity(bare, "bare")) == []
    (bare / "tokenizer.json").write_bytes(b"\xff")
    assert differences(one, chat_identity(bare, "bare")) == []
    for unread in ("[]", '{"chat_template": "\\ud800"}'):
        (bare / "tokenizer_config.json").write_text(unread)
        assert differences(one, chat_identity(bare, "bare")) == []
