"""`quartet sft`: what of its data is refused is told once for each reason (refused_lines.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from quartet.cli.sft.chats import read_chats
from quartet.cli.sft.refused_lines import MAX_TOLD, RefusedLines, TooLong
from quartet.config import ConfigError
from sft_chats import written


def refused(model: Path, file: Path, most: int = 4096, overlong: str = "refuse") -> str:
    with pytest.raises(ConfigError) as caught:
        read_chats(file, model, ("assistant",), most, overlong=overlong)  # type: ignore[arg-type]
    return str(caught.value)


def test_promise_1_equal_reasons_are_told_once(chat_model: Path, tmp_path: Path) -> None:
    bad = {"messages": 5}
    file = written(tmp_path, bad, {"messages": 6}, bad, bad, "{", bad, bad)
    assert refused(chat_model, file).splitlines() == [
        f"{file}, line 1, line 3, line 4 and 2 more: messages is 5; write a list of messages, of one at "
        "least",
        "  also: line 2: messages is 6; write a list of messages, of one at least",
        "  also: line 5: it is no JSON (Expecting property name enclosed in double quotes at letter 2); "
        "write an object, whole in a line of its own",
    ]


def test_promise_1_so_are_lines_that_are_too_long(chat_model: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "a", "completion": "b" * size} for size in (1, 9, 1, 30, 12, 11, 10)]
    file = written(tmp_path, *lines)
    assert refused(chat_model, file, 5) == (
        f"{file}, 5 completions have more than max_tokens = 5 tokens: line 2 (11), line 4 (32), line 5 (14) "
        "and 2 more; shorten them, set max_tokens to more (the longest has 32), or set overlong to "
        '"leave_out" or "cut"'
    )
    file = written(tmp_path, *lines[:2], {"prompt": 5, "completion": "x"})
    first, second = refused(chat_model, file, 5).splitlines()
    assert first.startswith(f"{file}, line 3: prompt is 5")
    assert second == (
        "  also: 1 completion has more than max_tokens = 5 tokens: line 2 (11); shorten it, set max_tokens "
        'to more, or set overlong to "leave_out" or "cut"'
    )


def test_items_of_one_line_are_told_apart(chat_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "chats.json"
    file.write_text(json.dumps([{"text": "x"}, {"text": 5}, {"text": 5}]) + "\n")
    assert refused(chat_model, file) == f"{file}, line 1, item 2, line 1, item 3: text is 5; write text"
    file.write_text('[{"text": "x"},\n {"text": 5}, {"text": 6}]')
    first, second = refused(chat_model, file).splitlines()
    assert first.startswith(f"{file}, line 2: text is 5") and second.startswith(
        "  also: line 2, item 3: text"
    )


def test_promise_2_reasons_are_bounded() -> None:
    lines = RefusedLines()
    assert lines.told("f, ", "chat", 5) == ""
    for number in range(MAX_TOLD + 3):
        lines.put(f"line {number}", ValueError(f"reason {number}"))
    for _ in range(1000):
        lines.put("line x", ValueError("reason 0"))
    for number in range(1000):
        lines.put(f"line {number}", TooLong(number))
    told = lines.told("f, ", "chat", 5).splitlines()
    assert told[0] == "f, line 0, line x, line x and 998 more: reason 0"
    assert len(told) == MAX_TOLD + 2 and told[-1] == "  and 3 more"
    assert told[-2].startswith(
        "  also: 1000 chats have more than max_tokens = 5 tokens: line 0 (0), line 1 (1)"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("my chats.csv", 'prompt,completion\n"a, b",yes\nc,"no\n?"\n'),
        ("chats.tsv", 'prompt\tcompletion\na, b\tyes\nc\t"no\n?"\n'),
        ("one.csv", '"text"\n5\n'),
    ],
)
def test_a_table_of_text_is_refused_with_what_makes_lines_of_it(
    chat_model: Path, tmp_path: Path, name: str, text: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    told = refused(chat_model, file)
    assert told.startswith(f"data = {str(file)!r} is a table of text, which is not read; write JSON lines: ")
    assert len(told.splitlines()) == 1
    command = told.partition("write JSON lines: ")[2].replace("python ", f"{sys.executable} ", 1)
    subprocess.run(command, shell=True, check=True, timeout=60)
    rows = [json.loads(line) for line in file.with_suffix(".jsonl").read_text().splitlines()]
    if name == "one.csv":
        assert rows == [{"text": "5"}]
    else:
        assert rows == [{"prompt": "a, b", "completion": "yes"}, {"prompt": "c", "completion": "no\n?"}]
    read_chats(file.with_suffix(".jsonl"), chat_model, ("assistant",), 4096)


def test_lines_of_json_may_have_any_name(chat_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "odd.csv"
    file.write_text('{"text": "x"}\n')
    assert read_chats(file, chat_model, ("assistant",), 4096).lines == 1
