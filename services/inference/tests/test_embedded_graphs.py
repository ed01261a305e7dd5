"""Recorded decode steps: which they are, and that they give what plain ones give.

Without CUDA a recording is the operations of a pass, noted one by one and done again upon the memory that
they had, with the numbers that they were given then. What CUDA makes of it test_embedded_device.py shows, on
one.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quartet_inference.embedded import attention, forward, graphs, hub
from quartet_inference.embedded.kv_cache import KvCache
from quartet_inference.embedded.lora import Bank, Matrices, Slot
from quartet_inference.embedded.model import ModelWeights
from quartet_inference.embedded.prefill import prefill
from quartet_inference.engine import ServedWeights
from quartet_inference.lora import read_adapter
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .adapters import random_adapter
from .random_models import qwen3

ROWS, LENGTH = 12, 256


class Noted(TorchDispatchMode):
    """The operations that are done meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._done: list[tuple[Callable[[], Any], list[Tensor | None]]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        work = functools.partial(operation, *args, **(kwargs or {}))
        made = work()
        # What is a view of something, or was written into it, has no memory of its own.
        given = {one.untyped_storage().data_ptr() for one in tensors((args, kwargs))}
        own = [None if one.untyped_storage().data_ptr() in given else one for one in tensors(made)]
        self._done.append((work, own))
        return made

    def again(self) -> None:
        """All of them."""
        for work, own in self._done:
            for place, found in zip(own, tensors(work()), strict=True):
                if place is not None:
                    place.copy_(found)


def tensors(tree: Any) -> list[Tensor]:
    """But for copies in oneDNN's order, which have no storage to look at, and which CUDA does without."""
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor) and not one.is_mkldnn]


class Side:
    """A model over a cache, as the engine has them, and a recorder that counts."""

    def __init__(self, model: Any, graphed: bool, refused: str = "") -> None:
        self.recorded = 0
        self.slot: Slot | None = None
        self._refused = refused
        self.cache = KvCache(hub.kv_shape(model), ROWS, LENGTH, 1 << 26)
        self.bank = Bank(1, 1 << 20)
        self.plain = forward.choose(model, self.cache, self.bank)
        assert isinstance(self.plain, forward.LeanForward)
        vocabulary = model.config.vocab_size
        self.run: forward.Forward = self.plain
        if graphed:
            self.run = graphs.GraphedForward(self.plain, self.cache, self.bank, vocabulary, self)

    def begin(self) -> None:
        self.began = self.cache.place

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        work()
        if self._refused:
            raise torch.OutOfMemoryError(self._refused)
        with Noted() as noted:
            work()
        return noted.again

    def join(self, first: int, prompts: list[list[int]]) -> None:
        self.cache.reserve(first + len(prompts), max(map(len, prompts)) + 1)
        self.bank.set_rows(first, [None] * len(prompts))
        prefill(self.run, first, prompts, [0] * len(prompts))

    def step(self, lengths: list[int], tokens: list[int]) -> Tensor:
        self.cache.reserve(len(lengths), max(lengths) + 1)
        positions = torch.tensor(lengths)[:, None]
        return self.run(0, torch.tensor(tokens)[:, None], positions, max(lengths) + 1, None).clone()


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: what NumPy computes could not be noted."""
    monkeypatch.setattr(attention, "is_exact", lambda device, dtype: False)


@pytest.fixture(scope="module")
def model() -> Any:
    made = qwen3(0)
    attention.use(made)
    return made


@torch.inference_mode()
def test_rows_that_come_grow_and_go_have_the_logits_and_keys_of_plain_steps(model: Any) -> None:
    """graphs.py 1, 3."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    sides = [Side(model, False), Side(model, True)]
    lengths: list[int] = []
    for _ in range(160):
        if len(lengths) < ROWS and dice.random() < 0.15:
            prompts = [[dice.randrange(200) for _ in range(dice.randrange(1, 30))] for _ in range(2)]
            prompts = prompts[: ROWS - len(lengths)]
            for side in sides:
                side.join(len(lengths), prompts)
            lengths += map(len, prompts)
        if lengths and (dice.random() < 0.04 or max(lengths) >= LENGTH - 1):
            hole, last = dice.randrange(len(lengths)), len(lengths) - 1
            for side in sides:
                side.cache.fill_hole(hole, last, lengths[last])
                side.bank.fill_hole(hole, last)
            lengths[hole] = lengths[last]
            lengths.pop()
        if not lengths or max(lengths) >= LENGTH - 1:
            continue
        tokens = [dice.randrange(200) for _ in lengths]
        plain, graphed = (side.step(lengths, tokens) for side in sides)
        torch.testing.assert_close(graphed, plain, rtol=0, atol=1e-5)
        lengths = [length + 1 for length in lengths]
        for row, length in enumerate(lengths):
            held, expected = (side.cache.read_row(row, length) for side in reversed(sides))
            torch.testing.assert_close(held, expected, rtol=0, atol=1e-5)
    assert sides[1].recorded > 3
    assert sides[1].cache.place > 2, "the cache never grew"


@torch.inference_mode()
def test_a_size_is_recorded_when_it_comes_for_the_second_time_and_anew_when_the_cache_has_grown(
    model: Any,
) -> None:
    """graphs.py 2, 3."""
    side = Side(model, True)
    side.join(0, [[1, 2, 3], [4, 5, 6]])
    seen = []
    for length in range(3, 40):  # one context: LEAST_CONTEXT
        side.step([length, length], [7, 8])
        seen.append(side.recorded)
    assert seen == [0, *[1] * 36]
    side.cache.reserve(ROWS, 100)
    side.step([40, 40], [7, 8])
    assert side.recorded == 1
    assert side.began == side.cache.place
    side.step([41, 41], [7, 8])
    assert side.recorded == 2


@torch.inference_mode()
def test_a_recording_takes_the_weights_of_now(model: Any) -> None:
    """graphs.py 3: new ones are copied into the old place."""
    sides = []
    for graphed in (False, True):
        mine = qwen3(5)
        attention.use(mine)
        side = Side(mine, graphed)
        side.join(0, [[1, 2, 3]])
        for length in (3, 4):
            side.step([length], [7])
        for own, other in zip(mine.parameters(), model.parameters(), strict=True):
            own.copy_(other)
        sides.append(side)
    plain, recorded = (side.step([5], [9]) for side in sides)
    assert sides[1].recorded == 1
    torch.testing.assert_close(recorded, plain, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_rows_of_one_adapter_are_recorded_and_anew_when_it_changes_and_mixed_rows_never(model: Any) -> None:
    """graphs.py 2, 3."""
    sides = [Side(model, graphed) for graphed in (False, True)]
    layout, like = ModelWeights(model).layout(), next(model.parameters())
    made, other = (
        Matrices.of(read_adapter(one.config, one.tensors, layout), like)
        for one in (random_adapter(model, seed) for seed in (1, 2))
    )
    for side in sides:
        side.join(0, [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
        side.slot = side.bank.put(made, ServedWeights("a", 1, b""))

    def stepped(lengths: range) -> int:
        for length in lengths:
            plain, graphed = (side.step([length] * 3, [7, 8, 9]) for side in sides)
            torch.testing.assert_close(graphed, plain, rtol=0, atol=1e-5)
        return sides[1].recorded

    def owned(*with_adapter: bool) -> None:
        for side in sides:
            side.bank.set_rows(0, [side.slot if one else None for one in with_adapter])

    owned(True, False, True)
    assert stepped(range(3, 9)) == 0
    owned(True, True, True)
    assert stepped(range(9, 15)) == 1
    for side in sides:
        side.bank.put(other, ServedWeights("a", 2, b""))
    assert stepped(range(15, 21)) == 2
    owned(False, False, False)
    assert stepped(range(21, 27)) == 3


@torch.inference_mode()
def test_what_was_used_longest_ago_is_forgotten(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """graphs.py 4."""
    monkeypatch.setattr(graphs, "MOST_RECORDED", 2)
    side = Side(model, True)
    side.cache.reserve(4, 64)
    side.join(0, [[1]] * 4)

    def twice(rows: int) -> int:
        for _ in range(2):
            side.step([5] * rows, [7] * rows)
        return side.recorded

    assert [twice(1), twice(2), twice(1)] == [1, 2, 2]
    assert twice(4) == 3  # in the place of 2 rows
    assert [twice(1), twice(2)] == [3, 4]


@torch.inference_mode()
def test_where_a_pass_cannot_be_recorded_steps_are_plain_from_then_on(model: Any) -> None:
    """graphs.py 4."""
    sides = [Side(model, True, "CUDA out of memory. Tried to allocate 1.00 GiB"), Side(model, False)]
    for side in sides:
        side.join(0, [[1, 2, 3]])
    for length in range(3, 9):
        graphed, plain = (side.step([length], [7]) for side in sides)
        torch.testing.assert_close(graphed, plain, rtol=0, atol=1e-5)
    assert sides[0].recorded == 1
    run: Any = sides[0].run
    assert not run._logits.numel(), "what is not used takes no room"


@torch.inference_mode()
def test_a_step_that_had_no_room_for_larger_buffers_leaves_the_next_one_whole(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """graphs.py 4: whoever shares the device may have given back what was lacking."""
    sides = [Side(model, True), Side(model, False)]
    for side in sides:
        side.join(0, [[1, 2, 3]] * ROWS)
    empty = torch.empty

    def crowded(*sizes: Any, **named: Any) -> Tensor:
        if sizes == (sides[0].cache.rows, model.config.vocab_size):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 148.00 MiB")
        return empty(*sizes, **named)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(torch, "empty", crowded)
        with pytest.raises(torch.OutOfMemoryError):
            sides[0].step([3] * ROWS, [7] * ROWS)
    for length in range(3, 6):
        graphed, plain = (side.step([length] * ROWS, [7] * ROWS) for side in sides)
        torch.testing.assert_close(graphed, plain, rtol=0, atol=1e-5)
    assert sides[0].recorded == 1
