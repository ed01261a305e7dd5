"""The tokenizer of a model's folder (quartet.rewards.tokenizer, promises 1 to 3): that of transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from quartet.config import ConfigError
from quartet.rewards.tokenizer import TextTokenizer

TEXTS = ["", "hello  world", " é 世界 <|im_end|>\n\n", "<mark>x<mark> yes", "word " * 40]
MARK = "<mark>"


def begins_with(token: str, number: int) -> dict[str, Any]:
    """What tokenizer.json says of a token before any text."""
    single = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {token: {"id": token, "ids": [number], "tokens": [token]}}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def written(model: Path, folder: Path, settings: dict[str, Any], *, begins: bool, marked: bool) -> Path:
    """A copy of the tokenizer that would cut texts, and has perhaps a token that is not special."""
    folder.mkdir()
    (folder / "config.json").write_text((model / "config.json").read_text())
    mine = json.loads((model / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**mine, **settings}))
    read = json.loads((model / "tokenizer.json").read_text())
    read["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    if marked:
        number = 1 + max(*(one["id"] for one in read["added_tokens"]), *read["model"]["vocab"].values())
        read["added_tokens"].append(
            {"id": number, "content": MARK, "special": False, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        )
    if begins:
        first = read["added_tokens"][0]
        read["post_processor"] = begins_with(first["content"], first["id"])
    (folder / "tokenizer.json").write_text(json.dumps(read))
    return folder


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"add_bos_token": True, "bos_token": "<|im_start|>"},
        {"add_bos_token": False, "add_eos_token": True},
        {"pad_token": MARK},
        {"pad_token": {"content": MARK, "__type": "AddedToken"}},
        {"extra_special_tokens": {"mark": MARK}},
        {"mark_token": MARK},
    ],
    ids=lambda settings: "+".join(settings) or "plain",
)
def test_promises_1_and_2_tokens_and_text_are_those_of_transformers(
    chat_model: Path, tmp_path: Path, settings: dict[str, Any], begins: bool, marked: bool
) -> None:
    from transformers import AutoTokenizer

    folder = written(chat_model, tmp_path / "model", settings, begins=begins, marked=marked)
    theirs, ours = AutoTokenizer.from_pretrained(folder), TextTokenizer(str(folder))
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_promise_2_what_only_the_settings_call_special_is_left_out(chat_model: Path, tmp_path: Path) -> None:
    """Also where an older form of the folder has it in a file of its own, which then counts."""
    plain = written(chat_model, tmp_path / "plain", {}, begins=False, marked=True)
    tokenizer = TextTokenizer(str(plain))
    assert tokenizer.decode(tokenizer.encode(f"a{MARK}b")) == f"a{MARK}b"
    (plain / "special_tokens_map.json").write_text(json.dumps({"pad_token": MARK}))
    assert TextTokenizer(str(plain)).decode(tokenizer.encode(f"a{MARK}b")) == "ab"


def test_promise_3_a_long_text_is_not_cut(chat_model: Path, tmp_path: Path) -> None:
    tokenizer = TextTokenizer(str(written(chat_model, tmp_path / "m", {}, begins=False, marked=False)))
    assert tokenizer.decode(tokenizer.encode("word " * 40)) == "word " * 40


def test_what_is_wrong_with_a_folder_is_said(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json.*save_pretrained\(folder\)$"):
        TextTokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(
        ConfigError,
        match=r"tokenizer\.json of the model in .* cannot be read: .*; fetch the model's files again",
    ):
        TextTokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text((chat_model / "tokenizer.json").read_text())
    for text, says in (("[]", "is no JSON object"), ("{", "cannot be read")):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(ConfigError, match=rf"tokenizer_config\.json {says}"):
            TextTokenizer(str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "tokenizers", raising=False)
    with pytest.raises(ConfigError, match=r"^tokenizers is not installed; .*sdk\[cli\]"):
        TextTokenizer(str(chat_model))
