"""`quartet sft`: samples that memory does not hold (shelf.py), and those that are too long (chats.py 1)."""

from __future__ import annotations

import gc
import random
import shutil
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from quartet.cli.__main__ import main
from quartet.cli.sft import command
from quartet.cli.sft.chats import read_chats
from quartet.cli.sft.rendered import cut
from quartet.cli.sft.shelf import Shelf
from quartet.config import ConfigError
from quartet.v1.rollout_pb2 import PolicySpan, Sample
from sft_chats import CHAT, parts, written

END = "<|im_end|>"


def sample(tokens: int, number: int = 0) -> Sample:
    return Sample(token_ids=[number] * tokens, spans=[PolicySpan(start=1, length=tokens - 1)])


@pytest.mark.parametrize("memory_bytes", [1, 1 << 26])
def test_promise_1_each_comes_back_as_it_was(memory_bytes: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    drawn, shelf, put = random.Random(seed), Shelf(memory_bytes), []
    for number in range(300):
        put.append(sample(drawn.randint(2, 90), number))
        shelf.put(put[-1])
        assert shelf[at := drawn.randrange(len(put))] == put[at], "while it grows, too"
    assert list(shelf.lengths) == [len(one.token_ids) for one in put]
    assert list(shelf) == put and len(shelf) == 300 and shelf[-1] == put[-1]
    assert shelf[5:290:7] == put[5:290:7] and shelf[290:999] == put[290:]
    for outside in (300, -301):
        with pytest.raises(IndexError):
            shelf[outside]


def test_promise_2_memory_holds_little_of_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tracemalloc.start()
    try:
        shelf, one = Shelf(1 << 16), sample(2000)
        for _ in range(3000):
            shelf.put(one)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 3000 * one.ByteSize() > 5_000_000 and held < 1 << 18
    assert list(tmp_path.iterdir()) == [], "the file has no name"


def test_a_folder_that_has_no_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of temporary files, which have no names; nothing is said of what is then given up."""
    shelf = Shelf(file=open("/dev/full", "r+b"))  # noqa: SIM115 - it goes with the shelf
    with pytest.raises(OSError, match="No space left on device") as refused:
        for _ in range(9):
            shelf.put(sample(2000))
    assert refused.value.filename == f"{tempfile.gettempdir()} (TMPDIR)"
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    del shelf, refused
    gc.collect()
    assert told == []


def test_a_sample_is_cut_behind_what_is_learned_of_it() -> None:
    spans = [PolicySpan(start=2, length=3), PolicySpan(start=7, length=2)]
    whole = Sample(token_ids=range(10), spans=spans)
    for most, kept in ((9, [(2, 3), (7, 2)]), (8, [(2, 3), (7, 1)]), (7, [(2, 3)]), (3, [(2, 1)])):
        found = cut(whole, most)
        assert found is not None and list(found.token_ids) == list(range(most))
        assert [(span.start, span.length) for span in found.spans] == kept
    assert cut(whole, 2) is None


def test_what_is_too_long_is_left_out_cut_or_refused(chat_model: Path, tmp_path: Path) -> None:
    short, long = {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "bcdefgh"}
    file = written(tmp_path, short, long, {"prompt": "abcdefgh", "completion": "b"})
    arguments = (file, chat_model, ("assistant",), 5)
    left = read_chats(*arguments)
    assert (len(left.samples), left.lines, left.left_out) == (1, 1, 2)
    some = read_chats(*arguments, overlong="cut")
    assert [parts(chat_model, one) for one in some.samples] == [
        (f"ab{END}", [f"b{END}"]),
        ("abcde", ["bcde"]),
    ]
    assert (some.lines, some.left_out) == (2, 1), "of the last nothing is learned"
    assert some.notices[-1] == "completions cut to max_tokens = 5: 1, which leaves 4 tokens unlearned"
    with pytest.raises(ConfigError) as caught:
        read_chats(*arguments, overlong="refuse")
    assert str(caught.value) == (
        f"{file}, 2 completions have more than max_tokens = 5 tokens: line 2 (9), line 3 (10); shorten them, "
        'set max_tokens to more (the longest has 10), or set overlong to "leave_out" or "cut"'
    )


def test_a_text_is_in_pieces_but_where_it_is_cut(chat_model: Path, tmp_path: Path) -> None:
    file = written(tmp_path, {"text": "abcdefg"})
    left, refused = (
        read_chats(file, chat_model, (), 4, overlong="leave_out"),
        read_chats(file, chat_model, (), 4, overlong="refuse"),
    )
    assert list(left.samples) == list(refused.samples) and left.counted == "1 text in 3 pieces"
    some = read_chats(file, chat_model, (), 4, overlong="cut")
    assert [parts(chat_model, one) for one in some.samples] == [("abcd", ["bcd"])]
    assert some.notices[-1] == "texts cut to max_tokens = 4: 1, which leaves 4 tokens unlearned"


@pytest.mark.parametrize(
    ("overlong", "which"),
    [("leave_out", ", which leaves out longer ones"), ("cut", ", which cuts longer ones"), ("refuse", "")],
)
def test_more_than_the_model_takes_is_refused(
    chat_model: Path, tmp_path: Path, overlong: str, which: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(chat_model, model)
    (model / "config.json").write_text('{"max_position_embeddings": 20}')
    file = written(tmp_path, {"messages": CHAT})
    with pytest.raises(ConfigError) as caught:
        read_chats(file, model, ("assistant",), 4096, overlong=overlong)  # type: ignore[arg-type]
    assert str(caught.value).endswith(f"(max_position_embeddings); set max_tokens to 20{which}")


def test_the_command_takes_the_key(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def accepts(specs: object) -> None:
        """The trainer would."""

    monkeypatch.setattr(command, "check", accepts)
    file = written(tmp_path, {"prompt": "a", "completion": "bcdefgh"})
    asked = ["sft", "--model", str(chat_model), "--data", str(file), "--max-tokens", "5", "--dry-run"]
    assert main([*asked, "--overlong", "cut"]) == 0
    out = capsys.readouterr().out
    assert "1 completion, 4 tokens to learn, 0 left out as too long; 1 step\n" in out
    assert "completions cut to max_tokens = 5: 1, which leaves 4 tokens unlearned" in out
    assert main(asked) == 2 and main([*asked, "--overlong", "shorten"]) == 2
    assert "overlong" in capsys.readouterr().err
