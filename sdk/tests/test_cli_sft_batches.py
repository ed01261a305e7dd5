"""`quartet sft`: which samples each step learns (batches.py)."""

from __future__ import annotations

import random
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quartet.cli.sft.batches import Batching, ends_of_passes, steps_of
from quartet.cli.sft.shelf import Shelf
from quartet.cli.sft.validation import Validation
from quartet.config import ConfigError, load
from quartet.run.sft import MeasureConfig, SftConfig
from quartet.v1.rollout_pb2 import PolicySpan, Sample
from sft_chats import shelved

LENGTHS = st.lists(st.integers(2, 20), min_size=1, max_size=12)


def samples(lengths: list[int]) -> Shelf:
    return shelved(
        Sample(token_ids=[0] * one, spans=[PolicySpan(start=1, length=one - 1)]) for one in lengths
    )


def config(**keys: Any) -> SftConfig:
    return SftConfig(**{"model": "m", "data": Path("d"), "max_tokens": 20} | keys)


@given(
    lengths=LENGTHS, size=st.integers(1, 9), tokens=st.sampled_from([0, 20, 33, 64]), seed=st.integers(0, 9)
)
def test_promise_1_every_sample_comes_once_in_each_pass(
    lengths: list[int], size: int, tokens: int, seed: int
) -> None:
    made = samples(lengths)
    drawn = chain.from_iterable(Batching(size, tokens).drawn(made, seed))
    for epoch in range(3):
        numbers = list(range(len(lengths)))
        random.Random(f"{seed}/{epoch}").shuffle(numbers)
        assert list(islice(drawn, len(lengths))) == numbers[::-1], "the order of every release"


@given(lengths=LENGTHS, tokens=st.integers(20, 70), seed=st.integers(0, 9))
def test_promise_2_a_batch_has_as_many_as_have_so_many_tokens(
    lengths: list[int], tokens: int, seed: int
) -> None:
    first = list(islice(Batching(3, tokens).drawn(samples(lengths), seed), 9))
    for batch, following in pairwise(first):
        together = sum(lengths[number] for number in batch)
        assert together <= tokens < together + lengths[following[0]]


@given(lengths=LENGTHS, tokens=st.integers(20, 70), epochs=st.sampled_from([0.5, 1.0, 2.5]))
def test_steps_are_as_many_as_learn_every_chat(lengths: list[int], tokens: int, epochs: float) -> None:
    made, learns = samples(lengths), config(batch_tokens=tokens, epochs=epochs)
    steps = steps_of(learns, made)
    drawn = [len(batch) for batch in islice(Batching.of(learns).drawn(made, 0), steps)]
    assert sum(drawn[:-1]) < epochs * len(lengths) <= sum(drawn)
    assert steps_of(config(batch_tokens=tokens, max_steps=3), made) == 3
    assert steps_of(config(batch_size=4, epochs=epochs), made) == -(-int(2 * epochs) * len(lengths) // 8)


@given(lengths=LENGTHS, size=st.integers(1, 9), tokens=st.sampled_from([0, 20, 33]))
def test_promise_1_the_last_of_a_pass_may_be_short(lengths: list[int], size: int, tokens: int) -> None:
    """Of which there are then as many steps as of transformers' Trainer, where tokens are not counted."""
    made, many = samples(lengths), {"batch_tokens": tokens} if tokens else {"batch_size": size}
    learns = config(short_batches=True, epochs=3, **many)
    steps, count = steps_of(learns, made), len(lengths)
    if not tokens:
        assert steps == 3 * -(-count // size)
    drawn = list(islice(Batching.of(learns).drawn(made, 0), steps))
    ends = [0, *ends_of_passes(learns, made, steps, 1.0), steps]
    assert len(ends) == 4
    for epoch, (begin, end) in enumerate(pairwise(ends)):
        numbers = list(chain.from_iterable(drawn[begin:end]))
        assert sorted(numbers) == list(range(count))
        whole = Batching(size, tokens).drawn(made, 0)
        assert list(islice(chain.from_iterable(whole), epoch * count, (epoch + 1) * count)) == numbers


@given(
    lengths=LENGTHS,
    size=st.integers(1, 9),
    short=st.booleans(),
    every=st.sampled_from([0.3, 0.5, 1.0, 2.0]),
    steps=st.integers(1, 40),
)
def test_a_pass_ends_with_the_step_that_has_its_last_sample(
    lengths: list[int], size: int, short: bool, every: float, steps: int
) -> None:
    made, learns = samples(lengths), config(short_batches=short, batch_size=size, max_steps=steps)
    behind, ends = 0, []
    for step, batch in enumerate(islice(Batching.of(learns).drawn(made, 0), steps - 1), start=1):
        before, behind = behind, behind + len(batch)
        # 0.3 of them are no whole number: the first sample behind that many ends them.
        passed = [int(10 * one / (10 * every * len(lengths)) + 1e-9) for one in (before, behind)]
        if passed[1] > passed[0]:
            ends.append(step)
    assert ends_of_passes(learns, made, steps, every) == ends
    assert ends_of_passes(learns, made, steps, None) == []


@given(lengths=LENGTHS)
def test_a_validation_set_is_measured_in_such_parts(lengths: list[int]) -> None:
    made = samples(lengths)
    parts = list(Validation(made, MeasureConfig(), 1, Batching(1, 40)).parts())
    assert [one for part in parts for one in part] == list(made)
    assert all(sum(len(one.token_ids) for one in part) <= 40 for part in parts)


@pytest.mark.parametrize("tokens", [0, 20])
def test_promise_3_what_is_gone_past_is_not_read(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """shelf.py 3: nor to know how many steps there are, and of a set that is measured its parts alone."""
    read: list[int] = []
    read_one = Shelf.__getitem__

    def watched(shelf: Shelf, index: int) -> Any:
        read.append(index)
        return read_one(shelf, index)

    monkeypatch.setattr(Shelf, "__getitem__", watched)
    made, batching = samples([3] * 10), Batching(2, tokens)
    assert len(list(islice(batching.drawn(made, 0), 20))) == 20
    assert steps_of(config(batch_tokens=tokens, epochs=2), made) > 0 and not read
    parts = Validation(made, MeasureConfig(), 1, batching).parts()
    assert read == list(range(len(next(iter(parts)))))


def test_both_of_them_are_refused_and_an_option_is_in_place_of_the_other(tmp_path: Path) -> None:
    (file := tmp_path / "sft.toml").write_text('model = "m"\ndata = "d"\nbatch_tokens = 9000\n')
    assert load(SftConfig, ["@", str(file)]).config.batch_tokens == 9000
    by_size = load(SftConfig, ["@", str(file), "--batch-size", "4"]).config
    assert (by_size.batch_size, by_size.batch_tokens) == (4, 0)
    (other := tmp_path / "other.toml").write_text("batch_size = 8\n")
    for arguments, why in (
        (["@", str(other)], "batch_size and batch_tokens both say what a step has; give one of the two"),
        (
            ["--max-tokens=9001"],
            "batch_tokens = 9000 has no room for a chat of max_tokens = 9001; set max_tokens",
        ),
    ):
        with pytest.raises(ConfigError, match=why):
            load(SftConfig, ["@", str(file), *arguments])
