"""Memory of versions: nobody's else while it is seen, used again after, never more kept than lent."""

from __future__ import annotations

import random
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quartet.weights.pages
from quartet.weights.delta import apply_delta, make_delta
from quartet.weights.fetched import Fetched
from quartet.weights.manifest import build_manifest, of_full_payload
from quartet.weights.pages import ALIGNMENT, KEPT_FROM_BYTES, Pages
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor

SIZE = 2 * KEPT_FROM_BYTES


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_a_version_lives_in_what_the_one_before_the_last_gave_back() -> None:
    pages = Pages()
    first, second = pages.take(SIZE), pages.take(SIZE)
    was = address(first)
    del first
    assert pages.kept_bytes == SIZE
    third = pages.take(SIZE)
    assert address(third) == was != address(second)
    assert pages.kept_bytes == 0


@pytest.mark.parametrize("size", [1, 100, KEPT_FROM_BYTES - 1, KEPT_FROM_BYTES, SIZE + 1])
def test_every_block_is_as_large_as_asked_for_and_aligned(size: int) -> None:
    taken = Pages().take(size)
    assert len(taken) == size and not taken.readonly
    assert address(taken) % ALIGNMENT == 0


def test_any_view_keeps_a_block_from_others() -> None:
    pages = Pages()
    held = pages.take(SIZE)
    held[:] = bytes([7]) * SIZE
    # Ways in which readers hold a piece of a version, and nothing else of it.
    ways: list[Callable[[memoryview], Any]] = [
        lambda view: view[5:9],
        lambda view: view[SIZE // 2 :].toreadonly(),
        lambda view: np.frombuffer(view, np.uint8)[3:].view(),
        lambda view: np.frombuffer(view, np.uint16)[7::2],
        lambda view: np.frombuffer(view, np.uint8)[10:20].reshape(2, 5).data,
    ]
    for way in ways:
        piece = way(held)
        other = pages.take(SIZE)  # so that one block might be kept
        del held
        assert pages.kept_bytes == 0, "somebody still sees it"
        held = pages.take(SIZE)
        held[:] = bytes([7]) * SIZE
        assert set(bytes(piece)) == {7}
        seen = address(other)
        del piece, other
        assert pages.kept_bytes == SIZE
        taken = pages.take(SIZE), pages.take(SIZE)
        assert seen in map(address, taken)
        del taken


def test_no_more_is_kept_than_is_lent() -> None:
    pages = Pages()
    blocks = [pages.take(SIZE) for _ in range(6)]
    kept = []
    while blocks:
        del blocks[0]
        kept.append(pages.kept_bytes // SIZE)
    assert kept == [1, 2, 3, 2, 1, 0]


def test_who_finds_no_block_of_his_size_lets_the_oldest_go() -> None:
    pages = Pages()
    lent = [pages.take(SIZE) for _ in range(4)]
    del lent[:2]
    assert pages.kept_bytes == 2 * SIZE
    larger = pages.take(SIZE + 1)
    assert pages.kept_bytes == 0
    del larger
    assert pages.kept_bytes == SIZE + 1


def test_who_gives_back_never_waits() -> None:
    """A view may be dropped anywhere, while others are counted too; the next who takes finds its block."""
    pages = Pages()
    lent = [pages.take(SIZE) for _ in range(2)]
    was = address(lent[0])
    with pages._lock:
        dropping = threading.Thread(target=lent.pop, args=(0,), daemon=True)
        dropping.start()
        dropping.join(10)
        assert not dropping.is_alive()
    assert address(pages.take(SIZE)) == was


def test_what_nobody_uses_goes_back_to_the_system_block_by_block() -> None:
    """Also beside blocks that stay: the heap would hold on to what lies between them."""

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    pages = Pages()
    blocks = [pages.take(4 << 20) for _ in range(32)]
    for block in blocks:
        block[:] = bytes(len(block))
    full = resident_bytes()
    stays = blocks[::8]
    del block, blocks
    assert pages.kept_bytes == sum(map(len, stays))
    assert full - resident_bytes() > (32 - 2 * len(stays) - 4) * (4 << 20)


def test_keeping_costs_nothing_beyond_the_most_that_was_lent() -> None:
    """pages.py 4."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance, pages, most = random.Random(seed), Pages(), 0
    held: list[memoryview] = []
    for _ in range(500):
        if held and chance.random() < 0.5:
            del held[chance.randrange(len(held))]
        else:
            held.append(pages.take(KEPT_FROM_BYTES * chance.randint(1, 5)))
        lent = sum(map(len, held))
        most = max(most, lent)
        assert pages.kept_bytes <= lent and lent + pages.kept_bytes <= most


@pytest.mark.parametrize(("links", "beside"), [(1, 2), (3, 3)])
def test_a_reader_of_deltas_needs_so_many_copies_beside_those_it_holds(
    links: int, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of docs/weights.md: what is on its way, the full payload, and of a chain the link before."""
    count, keep = 16, 2
    most, model, memory = 0, count * KEPT_FROM_BYTES, Pages()

    def take(size: int) -> memoryview:
        nonlocal most
        taken = memory.take(size)
        most = max(most, memory.kept_bytes + memory._lent_bytes)
        return taken

    def version(number: int, tensors: dict[str, Tensor]) -> Fetched:
        return Fetched(build_manifest("r", number, tensors), tensors)

    monkeypatch.setattr(quartet.weights.pages, "take", take)
    whole = take(model)
    cut = range(0, model, KEPT_FROM_BYTES)
    published = held = version(
        0, {str(at): Tensor("U8", (KEPT_FROM_BYTES,), whole[at : at + KEPT_FROM_BYTES]) for at in cut}
    )
    del whole
    store = WeightStore(keep)
    store.hold(held)
    for number in range(1, 5 * links + 1):
        changed = {
            name: Tensor("U8", one.shape, memoryview(np.full(KEPT_FROM_BYTES, number, np.uint8)))
            for name, one in published.tensors.items()
            if name != "0"  # which keeps the payload that it came in
        }
        before, published = published, version(number, published.tensors | changed)
        delta = make_delta(before, published)
        payload = memoryview(b"".join(delta.payload.parts))
        held = Fetched(of_full_payload(delta.manifest), apply_delta(payload, delta.manifest, held))
        if number % links == 0:
            store.hold(held)
    assert keep + beside - 1 < most / model <= keep + beside


def test_threads_that_take_and_drop_never_see_the_bytes_of_another() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    pages, faults = Pages(), []
    sizes = [KEPT_FROM_BYTES, KEPT_FROM_BYTES + 64]

    def work(number: int) -> None:
        chance = random.Random(seed + number)
        held: list[tuple[memoryview, int]] = []
        for step in range(300):
            if held and chance.random() < 0.5:
                view, mark = held.pop(chance.randrange(len(held)))
                if bytes(view).count(mark) != len(view):
                    faults.append((number, step))
            else:
                view, mark = pages.take(chance.choice(sizes)), (number * 61 + step) % 256
                view[:] = bytes([mark]) * len(view)
                # Often only a piece outlives the rest.
                held.append((view[100:200] if chance.random() < 0.5 else view, mark))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert pages.kept_bytes == 0, "nothing is lent any more"
