"""What starting a process imports, and how (quartet.kit.imports)."""

from __future__ import annotations

import gc

import pytest
from quartet.kit.imports import uncollected


def test_nothing_is_collected_inside_and_the_collector_runs_again_after() -> None:
    collections: list[str] = []
    gc.callbacks.append(watch := lambda phase, _info: collections.append(phase))
    try:
        with uncollected():
            kept = [[] for _ in range(10_000)]  # more than the collector's first threshold
            assert collections == []
        assert gc.isenabled()
        more = [[] for _ in range(10_000)]
        assert collections, (len(kept), len(more))
    finally:
        gc.callbacks.remove(watch)


def test_what_was_imported_is_not_looked_through_again() -> None:
    with uncollected():
        made = [[] for _ in range(100)]
    assert not any(one is made for one in gc.get_objects())


def test_an_import_that_fails_leaves_the_collector_running() -> None:
    with pytest.raises(ImportError), uncollected():
        raise ImportError("no such module")
    assert gc.isenabled()
