"""`quartet sft`: samples in rows (best_fit.py), and steps of these (batches.py)."""

from __future__ import annotations

import random
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quartet.cli.sft import best_fit
from quartet.cli.sft.batches import Batching, drawable, ends_of_passes, steps_of
from quartet.cli.sft.best_fit import GROUP, Rows, fitted
from quartet.cli.sft.place import taken
from quartet.cli.sft.shelf import Shelf
from quartet.config import ConfigError
from quartet.run.sft import SftConfig
from quartet.v1.rollout_pb2 import PolicySpan, Sample
from sft_chats import CHAT, shelved, written

MOST = 20
LENGTHS = st.lists(st.integers(2, MOST), min_size=1, max_size=40)


def samples(lengths: list[int]) -> Shelf:
    return shelved(
        Sample(token_ids=[at] * one, spans=[PolicySpan(start=1, length=one - 1)])
        for at, one in enumerate(lengths)
    )


def config(**keys: Any) -> SftConfig:
    usual = {"model": "m", "data": Path("d"), "max_tokens": MOST, "packing": "best_fit"}
    return SftConfig(**usual | keys)


def ragged(count: int, most: int) -> list[int]:
    """As chats are: many short ones, some long."""
    drawn = random.Random(7)
    return [min(most, 8 + int(drawn.lognormvariate(4.5, 0.9))) for _ in range(count)]


def in_drawn_order(lengths: list[int], most: int) -> int:
    """How many rows as they come, none of which is longer, are these."""
    rows = room = 0
    for one in lengths:
        if one > room:
            rows, room = rows + 1, most
        room -= one
    return rows


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        # As TRL's documentation of pack_dataset has it, cut to four tokens.
        ([4, 2, 3, 1], [[0], [2, 3], [1]]),
        # Equal ones in their order, each into the row that has had its room the longest.
        ([3, 3, 1, 1], [[0, 2], [1, 3]]),
        # The least room that is enough: not the first row.
        ([2, 3, 1], [[1, 2], [0]]),
        ([4, 4], [[0], [1]]),
        ([], []),
    ],
)
def test_promise_1_each_goes_where_it_leaves_the_least_room(
    lengths: list[int], rows: list[list[int]]
) -> None:
    assert fitted(lengths, 4) == rows


@given(lengths=LENGTHS)
def test_every_sample_is_in_one_row_and_none_is_too_long(lengths: list[int]) -> None:
    made = samples(lengths)
    rows = Rows(made, MOST)
    numbers = [list(rows.numbers(row)) for row in range(len(rows))]
    assert sorted(chain.from_iterable(numbers)) == list(range(len(lengths)))
    assert list(rows.lengths) == [sum(lengths[one] for one in row) for row in numbers]
    assert max(rows.lengths) <= MOST
    for row in numbers:
        assert [lengths[one] for one in row] == sorted((lengths[one] for one in row), reverse=True)
    assert rows.taken([0, len(rows) - 1]) == [made[one] for one in (*numbers[0], *numbers[-1])]


def test_promise_2_rows_are_of_samples_that_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_fit, "GROUP", 3)
    rows = Rows(samples([3, 2, 17, 2, 18, 2, 2]), MOST)
    assert [list(rows.numbers(row)) for row in range(len(rows))] == [[2, 0], [1], [4, 3], [5], [6]]
    assert GROUP == 1000, "as of TRL"


@given(lengths=LENGTHS, size=st.integers(1, 5), short=st.booleans(), seed=st.integers(0, 5))
def test_a_step_takes_rows(lengths: list[int], size: int, short: bool, seed: int) -> None:
    """batches.py 1, of rows."""
    learns = config(batch_size=size, short_batches=short, seed=seed, epochs=2)
    rows = drawable(learns, samples(lengths))
    assert isinstance(rows, Rows)
    steps = steps_of(learns, rows)
    assert steps == (2 * -(-len(rows) // size) if short else -(-2 * len(rows) // size))
    drawn = list(islice(Batching.of(learns).drawn(rows, seed), steps))
    assert all(len(batch) <= size for batch in drawn)
    numbers = list(chain.from_iterable(drawn))
    for begin in (0, len(rows)):
        assert sorted(numbers[begin : begin + len(rows)]) == list(range(len(rows))), "each once in a pass"
    if short:
        assert len(numbers) == 2 * len(rows) and ends_of_passes(learns, rows, steps, 1.0) == [steps // 2]


@given(lengths=LENGTHS, tokens=st.integers(MOST, 3 * MOST))
def test_a_step_takes_rows_of_so_many_tokens(lengths: list[int], tokens: int) -> None:
    rows = drawable(config(batch_tokens=tokens), samples(lengths))
    for batch in islice(Batching(1, tokens).drawn(rows, 0), 5):
        assert sum(rows.lengths[row] for row in batch) <= tokens


def test_as_drawn_nothing_is_put_into_rows() -> None:
    made = samples([3, 4])
    assert drawable(config(packing="drawn"), made) is made


def test_a_set_that_is_measured_is_sent_as_many_tokens_at_once() -> None:
    """It stands by itself: of rows, 8 chats at once would be a few tokens each."""
    assert Batching.of_samples(config(batch_size=8)) == Batching(8, 8 * MOST)
    assert Batching.of_samples(config(batch_tokens=50)) == Batching(32, 50)
    assert Batching.of_samples(config(batch_size=8, packing="drawn")) == Batching(8)


def test_rows_are_fuller_than_in_the_order_in_which_chats_are_drawn() -> None:
    """The figures of docs/algorithms.md: of rows, and of the steps that are made of eight or without any."""
    most, lengths = 1024, ragged(5000, 1024)
    made, tokens = samples(lengths), sum(lengths)
    by_tokens = steps_of(config(packing="drawn", max_tokens=most, batch_tokens=8 * most), made)
    packed = config(max_tokens=most, batch_size=8)
    rows = drawable(packed, made)
    full = [
        tokens / (most * many)
        for many in (
            len(rows),
            in_drawn_order(lengths, most),
            8 * by_tokens,
            8 * steps_of(packed, rows),
        )
    ]
    page = (Path(__file__).resolve().parents[2] / "docs/algorithms.md").read_text().replace("\n", " ")
    best, drawn, size, eight = (f"{one:.1%}".replace("%", " %") for one in full)
    assert full[0] > full[3] > full[2] > full[1]
    assert f"({tokens / 5000:.0f} tokens in the mean, 1,024 at most)" in page
    assert f"rows of 1,024 tokens are {best} full" in page and f"one after the other, {drawn}." in page
    assert f"are {size} full" in page and f"steps of eight best-fit rows are {eight}." in page


def test_the_words_are_of_rows() -> None:
    with pytest.raises(ValueError, match="has no room for a row of max_tokens = 20"):
        config(batch_tokens=MOST - 1)
    decay = {"lr_scheduler": "warmup_stable_decay", "decay_steps": 5}
    with pytest.raises(ConfigError, match="3 rows are 3 steps"):
        config(batch_size=1, **decay).steps(3)
    with pytest.raises(ConfigError, match="1 chat is 1 step"):
        config(packing="drawn", **decay).steps(1)


def test_a_folder_goes_on_with_the_rows_that_it_was_begun_with(chat_model: Path, tmp_path: Path) -> None:
    """place.py 2."""
    data, output = written(tmp_path, {"messages": CHAT}), tmp_path / "out"
    packed = SftConfig(model=str(chat_model), data=data, packing="best_fit")
    with taken(output, packed, resume=False):
        pass
    with taken(output, packed, resume=True):
        pass
    drawn = packed.model_copy(update={"packing": "drawn"})
    why = r'another packing \("best_fit", and not "drawn"\); give what it was begun with'
    with pytest.raises(ConfigError, match=why), taken(output, drawn, resume=True):
        pass
