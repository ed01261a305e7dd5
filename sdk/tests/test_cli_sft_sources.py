"""`quartet sft`: files, folders and patterns of data, compressed ones and tables (sources.py, packed.py,
columns.py)."""

from __future__ import annotations

import bz2
import gc
import gzip
import importlib.util
import json
import lzma
import random
import struct
import tracemalloc
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from pyarrow import feather, parquet
from quartet.cli.sft import columns, rows
from quartet.cli.sft.chats import read_chats
from quartet.cli.sft.packed import unpacked
from quartet.cli.sft.place import taken
from quartet.cli.sft.rows import rows_of
from quartet.cli.sft.sources import digest_of, files_of
from quartet.config import ConfigError
from quartet.run.sft import SftConfig
from sft_chats import CHAT, parts

CALLS = [
    {"x": 1},
    {"city": "Bern", "when": {"day": 3}},
]


def lines(*values: object) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in values).encode()


def zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def texts(named: Path) -> list[str]:
    return [row["text"] for _, row in rows_of(files_of(named, "data"), "data")]


def called(arguments: dict[str, Any]) -> dict[str, Any]:
    """A chat that calls a tool with these; each such chat lists another."""
    properties = {name: {"type": "string"} for name in arguments}
    function = {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": properties},
    }
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "42!"},
    ]
    return {"messages": messages, "tools": [{"type": "function", "function": function}]}


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zstd])
def test_compressed_files_are_known_by_how_they_begin(
    tmp_path: Path, pack: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """packed.py 1: also several of them in one file, as `cat` makes it; cut anywhere, it is refused."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    drawn = random.Random(seed)
    said = ["".join(drawn.choices("abcdefgh", k=drawn.randrange(400))) for _ in range(3000)]
    whole = pack(lines(*({"text": one} for one in said[:2000])))
    content = whole + pack(lines(*({"text": one} for one in said[2000:])))
    file = tmp_path / "data"
    file.write_bytes(content)
    assert texts(file) == said
    for end in {len(content) - 5, drawn.randrange(len(whole) + 10, len(content) - 5), len(whole) - 5}:
        file.write_bytes(content[:end])
        with pytest.raises(ConfigError, match=r"^data = '.*data' cannot be read"):
            texts(file)
    file.write_bytes(pack(json.dumps([{"text": one} for one in said[:3]]).encode()))
    assert texts(file) == said[:3]


def test_lines_are_read_as_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rows.py 3, packed.py 2."""
    file = tmp_path / "data"
    file.write_bytes(zstd(lines(*({"text": random.randbytes(9).hex()} for _ in range(50_000)))))
    with file.open("rb") as raw:
        assert len(unpacked(raw).readline()) == len('{"text": ""}\n') + 18
        assert raw.tell() <= 1 << 17 < file.stat().st_size
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 20)
    file.write_bytes(lines({"text": "a"}, {"text": "a" * 20}))
    with pytest.raises(ConfigError, match="line 2 has more than 20 bytes; write shorter ones"):
        texts(file)


def test_what_was_packed_very_small_is_read_piece_by_piece(tmp_path: Path) -> None:
    """packed.py 2"""
    line = b'{"text": "again and again"}\n'
    packed = zstd(line * 1_000_000)
    assert len(packed) < 1 << 13 < 1 << 24 < 1_000_000 * len(line)
    tracemalloc.start()
    try:
        assert sum(1 for one in unpacked(BytesIO(packed)) if one == line) == 1_000_000
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 1 << 23


def test_frames_that_say_nothing_are_no_contents(tmp_path: Path) -> None:
    file = tmp_path / "data"
    nothing = struct.pack("<II", 0x184D2A53, 7) + b"nothing"
    file.write_bytes(nothing + zstd(lines({"text": "a"})) + nothing + zstd(lines({"text": "b"})))
    assert texts(file) == ["a", "b"]


def test_a_table_says_what_lines_say(chat_model: Path, tmp_path: Path) -> None:
    """columns.py 2: a struct of it gives each row the keys of all, with nulls."""
    chats = [called(arguments) for arguments in CALLS]
    table = pyarrow.Table.from_pylist(chats)
    assert table.to_pylist()[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["city"] is None
    written = {name: tmp_path / name for name in ("a.jsonl", "b.parquet", "c.arrow", "d.arrow")}
    written["a.jsonl"].write_bytes(lines(*chats))
    parquet.write_table(table, written["b.parquet"])
    feather.write_feather(table, str(written["c.arrow"]))
    with pyarrow.ipc.new_stream(str(written["d.arrow"]), table.schema) as stream:
        stream.write_table(table)
    read = [read_chats(file, chat_model, ("assistant",), 4096) for file in written.values()]
    samples = [[parts(chat_model, one) for one in found.samples] for found in read]
    assert samples[1:] == samples[:1] * 3 and len(samples[0]) == 2
    assert all('"city": null' not in whole for whole, _ in samples[0])
    ignored = [told for told in read[1].notices if told.startswith("ignored keys")]
    assert not ignored, "nulls are no keys that are ignored"


@pytest.mark.parametrize("values", [[None, 1], [{"a": None}, None]])
def test_a_null_in_a_list_stays(tmp_path: Path, values: list[Any]) -> None:
    parquet.write_table(pyarrow.table({"list": [values]}), tmp_path / "t")
    ((place, row),) = rows_of([tmp_path / "t"], "data")
    assert (place, row) == ("row 1", {"list": values if values[0] is None else [{}, None]})


def test_a_moment_that_python_has_not_is_in_no_ones_way(chat_model: Path, tmp_path: Path) -> None:
    """columns.py 3: days of the year 29349; within what is read it is said, and no traceback."""
    file, days = tmp_path / "t.parquet", pyarrow.array([10**7, None], pyarrow.date32())
    parquet.write_table(pyarrow.table({"text": ["x", "y"], "day": days}), file)
    assert [row for _, row in rows_of([file], "data")] == [{"text": "x", "day": 10**7}, {"text": "y"}]
    assert "ignored keys of the data: day" in read_chats(file, chat_model, ("assistant",), 4096).notices
    parquet.write_table(pyarrow.table({"text": pyarrow.StructArray.from_arrays([days], ["day"])}), file)
    with pytest.raises(ConfigError, match=r"t\.parquet' is Parquet that cannot be read: date value out of"):
        list(rows_of([file], "data"))


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])
def test_few_rows_are_objects_at_a_time(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """columns.py 1: of a file, too, that has all of them in one part."""
    monkeypatch.setattr(columns, "BATCH_ROWS", 8)
    table, file = pyarrow.table({"counted here": [[number] for number in range(30)]}), tmp_path / "t"
    if kind == "parquet":
        parquet.write_table(table, file)
    elif kind == "arrow":
        feather.write_feather(table, str(file))
    else:
        with pyarrow.ipc.new_stream(str(file), table.schema) as stream:
            stream.write_table(table)
    read, most = [], 0
    for _, row in rows_of([file], "data"):
        read.append(row.pop("counted here"))
        alive = sum(1 for one in gc.get_objects() if type(one) is dict and "counted here" in one)
        most = max(most, alive)
    assert read == [[number] for number in range(30)]
    assert 1 < most <= 8 + 1, "and the row that was taken last"


def test_a_table_is_refused_by_its_rows(chat_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"text": ["x", None, "y"], "score": [1, 2, 3]}), file)
    with pytest.raises(ConfigError, match=r"t\.parquet, row 2: it has the keys 'score'"):
        read_chats(file, chat_model, ("assistant",), 4096)
    moment = pyarrow.table({"messages": [[{"role": "user", "content": "x"}]]}).append_column(
        "chat_template_kwargs",
        pyarrow.array([{"now": 1}]).cast(pyarrow.struct({"now": pyarrow.timestamp("s")})),
    )
    parquet.write_table(moment, file)
    with pytest.raises(ConfigError, match=r"row 1: .*datetime"):
        read_chats(file, chat_model, ("assistant",), 4096)


def test_a_table_of_other_bytes_than_text_is_refused(tmp_path: Path) -> None:
    binary = pyarrow.array([b"fine", b"\xff\xfe"], pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), 2, binary.buffers())
    parquet.write_table(pyarrow.table({"text": text}), tmp_path / "t")
    with pytest.raises(ConfigError, match=r"^data = '.*' is Parquet that cannot be read: 'utf-8' codec"):
        texts(tmp_path / "t")


def test_without_pyarrow_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"text": ["x"]}), file)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name == "pyarrow" else found(name, *of)
    )
    with pytest.raises(ConfigError) as caught:
        texts(file)
    assert str(caught.value) == (
        f"data = '{file}' is Parquet, for which pyarrow is not installed; in the repository: "
        "pip install './sdk[data]'; or write JSON lines"
    )


def test_what_the_library_datasets_saves_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="a development dependency, of TRL")
    one = datasets.Dataset.from_list([{"text": str(number)} for number in range(5)])
    one.shuffle(seed=1).save_to_disk(str(tmp_path / "one"), num_shards=2)
    assert texts(tmp_path / "one") == one.shuffle(seed=1)["text"][:]
    datasets.DatasetDict(train=one, test=one).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(ConfigError, match=r"^data = .* holds the sets test, train; name the folder of one"):
        texts(tmp_path / "two")
    assert texts(tmp_path / "two" / "train") == list("01234")
    (tmp_path / "one" / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"state.json in it lists no parts"):
        texts(tmp_path / "one")


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        content = lines({"text": name})
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


def test_a_folder_is_its_files_in_their_order(tmp_path: Path) -> None:
    """sources.py 1, 2."""
    put(tmp_path, "b-2.jsonl", "b-10.json", "a.jsonl.gz", "README.md", ".hidden.jsonl", "dataset_infos.json")
    assert texts(tmp_path) == ["a.jsonl.gz", "b-10.json", "b-2.jsonl"]
    assert texts(tmp_path / "b-*") == ["b-10.json", "b-2.jsonl"]
    put(tmp_path, "deep/er/c.jsonl")
    assert texts(tmp_path / "**" / "*.jsonl") == ["b-2.jsonl", "deep/er/c.jsonl"]
    put(tmp_path, "odd[1].jsonl", "odd1.jsonl")
    assert texts(tmp_path / "odd[1].jsonl") == ["odd[1].jsonl"], "a file of that name comes first"


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ((), r"is a folder without files of data \(.jsonl, .json, .parquet, .arrow\)$"),
        (("data/a.parquet",), r"name one that has some, such as '.*/data', or all by '.*\*.parquet'"),
        (
            ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test-00000-of-00001.jsonl"),
            r"several sets \(test, train\); name those of one by a pattern, such as '.*/train\*.jsonl'",
        ),
        (("chats.jsonl", "val.jsonl"), r"several sets \(train, validation\); .* such as '.*/chats.jsonl'"),
    ],
)  # fmt: skip
def test_a_folder_is_not_guessed_at(tmp_path: Path, names: tuple[str, ...], why: str) -> None:
    put(tmp_path, *names)
    with pytest.raises(ConfigError, match=f"^data = '.*' .*{why}"):
        files_of(tmp_path, "data")


def test_the_pattern_that_is_told_names_the_set(tmp_path: Path) -> None:
    put(tmp_path, "train-0-of-2.jsonl", "train-1-of-2.jsonl", "test-0-of-1.jsonl")
    with pytest.raises(ConfigError) as caught:
        files_of(tmp_path, "data")
    told = Path(str(caught.value).rsplit("'", 2)[1])
    assert texts(told) == ["train-0-of-2.jsonl", "train-1-of-2.jsonl"]
    with pytest.raises(ConfigError, match="is a pattern that no file has"):
        files_of(tmp_path / "*.csv", "data")


@pytest.mark.parametrize(
    ("key", "sets", "told"),
    [
        ("data", ("train", "validation"), "train"),
        ("validation", ("train", "validation"), "validation"),
        ("validation", ("test", "train", "validation"), "validation"),
        ("data", ("test", "train", "validation"), "train"),
        ("data", ("test", "validation"), "test"),
        ("validation", ("test", "train"), "test"),
    ],
)
def test_the_set_that_is_told_is_that_of_the_key(
    tmp_path: Path, key: str, sets: tuple[str, ...], told: str
) -> None:
    """sources.py 2; where there is none of it, the first."""
    put(tmp_path, *(f"{one}-{part}-of-2.jsonl" for one in sets for part in range(2)))
    with pytest.raises(ConfigError, match=rf"^{key} = .* such as '.*/{told}\*\.jsonl'$"):
        files_of(tmp_path, key)


def test_rows_of_several_files_are_refused_with_their_files(chat_model: Path, tmp_path: Path) -> None:
    """chats.py 2 and 3."""
    (tmp_path / "a.jsonl").write_bytes(b"\n" + lines({"messages": CHAT}))
    (tmp_path / "b.jsonl").write_bytes(lines({"messages": CHAT}, {"text": "x"}, {"messages": 5}))
    with pytest.raises(ConfigError) as caught:
        read_chats(tmp_path, chat_model, ("assistant",), 4096)
    first, second = str(caught.value).splitlines()
    assert first == (
        f"{tmp_path / 'b.jsonl'}, line 2: it has text, and {tmp_path / 'a.jsonl'}, line 2 has messages; "
        "write all rows of the data in one form"
    )
    assert second.startswith(f"  also: {tmp_path / 'b.jsonl'}, line 3: messages is 5")


def test_a_fine_tuning_goes_on_with_the_same_contents(chat_model: Path, tmp_path: Path) -> None:
    """sources.py 3, place.py 2."""
    folder, output = tmp_path / "data", tmp_path / "out"
    put(folder, "a.jsonl", "b.jsonl")
    config = SftConfig(model=str(chat_model), data=folder)
    with taken(output, config, resume=False):
        pass
    with taken(output, config, resume=True):
        pass
    first, second = ((folder / name).read_bytes() for name in ("a.jsonl", "b.jsonl"))
    for contents in ((second, first), (first + second, b""), (first, second + b"\n")):
        (folder / "a.jsonl").write_bytes(contents[0])
        (folder / "b.jsonl").write_bytes(contents[1])
        with pytest.raises(ConfigError, match="another contents of data"), taken(output, config, resume=True):
            pass
    alone = tmp_path / "alone"
    put(alone, "a.jsonl")
    assert digest_of(alone, "data") == digest_of(alone / "a.jsonl", "data")
