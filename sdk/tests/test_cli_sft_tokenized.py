"""`quartet sft`: tokenized data that are kept beside a fine-tuning (tokenized.py)."""

from __future__ import annotations

import errno
import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
from quartet.cli.__main__ import main
from quartet.cli.sft import chats, sets, tokenized
from quartet.cli.sft.chats import Chats, read_chats
from quartet.cli.sft.line import Form
from quartet.cli.sft.sets import read_sets
from quartet.cli.sft.shelf import Shelf
from quartet.config import ConfigError
from quartet.kit.build import Build
from quartet.run.sft import SftConfig
from quartet.v1.rollout_pb2 import PolicySpan, Sample
from sft_chats import CHAT, shelved, stop_at_once, written

LONG = {"prompt": "a", "completion": "b" * 99}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys whose files were tokenized."""
    found: list[str] = []

    def watched(named: Path, folder: Path, roles: Any, most: int, key: str, *rest: Any, **more: Any) -> Chats:
        found.append(key)
        return read_chats(named, folder, roles, most, key, *rest, **more)

    monkeypatch.setattr(sets, "read_chats", watched)
    return found


@pytest.fixture
def config(chat_model: Path, tmp_path: Path) -> SftConfig:
    data = written(tmp_path, {"prompt": "a", "completion": "b", "label": 1}, LONG)
    (tmp_path / "more.jsonl").write_text('{"text": "x"}')
    files = {"data": data, "validation": tmp_path / "more.jsonl"}
    return SftConfig(model=str(chat_model), max_tokens=50, **files)


def kept(config: SftConfig, folder: Path) -> list[Path]:
    """Keeps what this reads."""
    tokenized.keep(folder, read_sets(config).by_name)
    return sorted(folder.iterdir())


def test_what_is_kept_is_what_was_read(config: SftConfig, tmp_path: Path, read: list[str]) -> None:
    folder = tmp_path / "tokenized"
    assert len(kept(config, folder)) == 2 and read == ["data", "validation"]
    first, again = read_sets(config), read_sets(config, folder)
    assert read == ["data", "validation"] * 2, "by the first of these"
    for ours, theirs in ((first.learned, again.learned), (first.measured, again.measured)):
        assert list(ours.samples) == list(theirs.samples) and len(ours.samples) == 1
        assert list(ours.samples.lengths) == list(theirs.samples.lengths)
        parts = ("left_out", "form", "lines", "covered", "counted")
        assert [getattr(ours, one) for one in parts] == [getattr(theirs, one) for one in parts]
        assert list(ours.notices) == list(theirs.notices) and ours.notices
    assert again.learned.left_out == 1 and again.learned.form is Form.COMPLETED
    assert again.learned.covered == sum(span.length for one in first.learned.samples for span in one.spans)
    assert again.contents == first.contents and again.by_name.keys() == first.by_name.keys()


@pytest.mark.parametrize(
    "change",
    [
        {"roles": ("user",)},
        {"learns": "everything"},
        {"learn_prompts": True},
        {"max_tokens": 40},
        {"overlong": "cut"},
    ],
)
def test_promise_1_another_key_is_another_name(
    config: SftConfig, tmp_path: Path, read: list[str], change: dict[str, Any]
) -> None:
    folder = tmp_path / "tokenized"
    kept(config, folder)
    read.clear()
    read_sets(config.model_copy(update=change), folder)
    assert read == ["data", "validation"]
    read.clear()
    read_sets(config.model_copy(update={"seed": 9, "epochs": 3.0, "packing": "best_fit"}), folder)
    assert read == [], "these say nothing of what a line is"


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "data"],
)
def test_promise_1_so_are_other_files(config: SftConfig, tmp_path: Path, read: list[str], name: str) -> None:
    model = tmp_path / "copied"
    shutil.copytree(config.model, model)
    config = config.model_copy(update={"model": str(model)})
    kept(config, tmp_path / "tokenized")
    read.clear()
    file = config.data if name == "data" else model / name
    file.write_text(file.read_text() + "\n")
    read_sets(config, tmp_path / "tokenized")
    assert read == (["data"] if name == "data" else ["data", "validation"])


def test_promise_1_so_is_what_the_model_takes_and_other_code(
    config: SftConfig, tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "copied"
    shutil.copytree(config.model, model)
    config = config.model_copy(update={"model": str(model)})
    kept(config, tmp_path / "tokenized")
    (model / "config.json").write_text('{"max_position_embeddings": 2}')
    with pytest.raises(ConfigError, match="and the model takes 2"):
        read_sets(config, tmp_path / "tokenized")
    for part, other in (("version", lambda _: "0"), ("build_of", lambda: Build("", "")), ("LAYOUT", 0)):
        before = tokenized.name_of(config, "")
        monkeypatch.setattr(tokenized, part, other)
        assert tokenized.name_of(config, "") != before


@pytest.mark.parametrize("at", [0, 5, 200, -17, -1])
def test_promise_2_one_that_was_damaged_counts_as_none(
    config: SftConfig, tmp_path: Path, read: list[str], at: int
) -> None:
    folder = tmp_path / "tokenized"
    for file in kept(config, folder):
        whole = file.read_bytes()
        place = at % len(whole)
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    read.clear()
    again = read_sets(config, folder)
    assert read == ["data", "validation"] and len(again.learned.samples) == 1
    for file in folder.iterdir():
        file.write_bytes(whole[:at])
    read.clear()
    assert len(read_sets(config, folder).learned.samples) == 1 and read == ["data", "validation"]


def test_promise_2_nothing_is_left_of_one_that_was_not_written_whole(
    config: SftConfig, tmp_path: Path, read: list[str]
) -> None:
    folder = tmp_path / "tokenized"
    folder.mkdir()
    (folder / f"{'0' * 32}.partial").write_bytes(b"torn")
    files = kept(config, folder)
    assert len(files) == 2 and not any(file.suffix for file in files)
    assert [file.stat().st_mode & 0o777 for file in files] == [0o600] * 2, "promise 4"


def test_promise_2_a_damaged_one_is_written_anew(config: SftConfig, tmp_path: Path, read: list[str]) -> None:
    folder = tmp_path / "tokenized"
    for file in kept(config, folder):
        file.write_bytes(b"")
    tokenized.keep(folder, read_sets(config, folder).by_name)
    read.clear()
    read_sets(config, folder)
    assert read == []


def test_what_is_kept_is_not_written_again_and_what_is_not_ours_stays(
    config: SftConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "tokenized"
    first = [file.stat().st_ino for file in kept(config, folder)]
    (folder / "mine").write_text("precious")
    (folder / "0").mkdir()
    tokenized.keep(folder, read_sets(config, folder).by_name)
    again = sorted(folder.iterdir())
    assert {one.name for one in again} >= {"mine", "0"}
    assert [file.stat().st_ino for file in again if len(file.name) == 32] == first


def test_nothing_behind_a_link_is_touched(config: SftConfig, tmp_path: Path) -> None:
    behind = tmp_path / "behind"
    behind.mkdir()
    (behind / ("0" * 32)).write_text("precious")
    (tmp_path / "tokenized").symlink_to(behind)
    with pytest.raises(OSError, match="symbolic links"):
        kept(config, tmp_path / "tokenized")
    assert [file.read_text() for file in behind.iterdir()] == ["precious"]


def test_promise_3_no_more_than_so_much_is_kept(
    config: SftConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = read_sets(config)
    monkeypatch.setattr(tokenized, "MAX_BYTES", both.measured.samples.size_bytes)
    assert both.learned.samples.size_bytes > tokenized.MAX_BYTES
    (file,) = kept(config, tmp_path / "tokenized")
    assert both.by_name[file.name] is both.measured
    (other,) = kept(config.model_copy(update={"max_tokens": 60}), tmp_path / "tokenized")
    assert other.name != file.name, "and what nobody will read any more is removed"


def test_a_shelf_in_a_file_is_the_shelf(tmp_path: Path) -> None:
    """shelf.py 4: also once its file has no name any more, and as long as it is held."""
    made = [Sample(token_ids=[at] * (at + 2), spans=[PolicySpan(start=1, length=at)]) for at in range(9)]
    file = tmp_path / "shelf"
    file.write_bytes(b"before" + b"".join(shelved(made).blocks(7)))
    opened = file.open("rb")
    opened.seek(6)
    shelf = Shelf.of(opened, 9)
    file.unlink()
    assert (
        list(shelf) == made and list(shelf.lengths) == [at + 2 for at in range(9)] and shelf[-1] == made[-1]
    )
    assert b"".join(shelf.blocks(100)) == b"".join(shelved(made).blocks(3))
    del shelf
    gc.collect()
    assert opened.closed


@pytest.fixture
def begin(chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command, with a trainer that takes every run and is stopped."""
    stop_at_once(monkeypatch)
    return lambda *words: main(["sft", *words])


def test_one_that_goes_on_tokenizes_nothing(
    chat_model: Path,
    tmp_path: Path,
    begin: Callable[..., int],
    read: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data, output = written(tmp_path, {"messages": CHAT}), tmp_path / "out"
    assert begin("--model", str(chat_model), "--data", str(data), "--output-dir", str(output)) == 130
    assert len(list((output / "tokenized").iterdir())) == 1 and read == ["data"]
    told = capsys.readouterr().out.splitlines()[0]
    monkeypatch.setattr(chats, "rows_of", None)
    go_on = ("--output-dir", str(output), "--resume")
    assert begin(*go_on) == 130 and begin(*go_on, "--dry-run") == 0 and read == ["data"]
    assert capsys.readouterr().out.count(told) == 2, "what is in the data is told as before"
    monkeypatch.undo()


def test_a_disk_that_is_full_keeps_nothing_and_ends_nothing(
    chat_model: Path,
    tmp_path: Path,
    begin: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is trained is no worse for it."""

    def full(file: IO[bytes], chats: Chats) -> None:
        file.write(b"as far as there is room")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tokenized, "_write", full)
    data, output = written(tmp_path, {"messages": CHAT}), tmp_path / "out"
    asked = ("--model", str(chat_model), "--data", str(data), "--output-dir", str(output))
    assert begin(*asked) == 130, "as without"
    assert "are not kept" in capsys.readouterr().err and list((output / "tokenized").iterdir()) == []


def test_a_dry_run_and_a_refusal_keep_nothing(
    chat_model: Path, tmp_path: Path, begin: Callable[..., int]
) -> None:
    data, output = written(tmp_path, {"messages": CHAT}), tmp_path / "out"
    asked = ("--model", str(chat_model), "--data", str(data), "--output-dir", str(output))
    assert begin(*asked, "--dry-run") == 0 and not output.exists()
    output.mkdir()
    (output / "mine").touch()
    assert begin(*asked) == 2 and [one.name for one in output.iterdir()] == ["mine"]
