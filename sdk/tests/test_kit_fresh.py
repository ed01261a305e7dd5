"""Ids of requests, answers and calls: no two alike, and the system is not asked for each."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from quartet.kit import context
from quartet.kit.fresh import fresh_id


def test_no_two_ids_are_alike_whichever_threads_ask() -> None:
    with ThreadPoolExecutor(4) as threads:
        ids = list(threads.map(lambda _: fresh_id(), range(20_000)))
    assert len(set(ids)) == 20_000
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)


def test_a_forked_process_makes_other_ids() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, fresh_id().encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as ids:
        assert ids.read() != fresh_id()


def test_an_id_is_made_without_asking_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of requests, too, which every call has."""

    def asked(_: int) -> bytes:
        raise AssertionError("the event loop would wait for the interpreter")

    monkeypatch.setattr(os, "urandom", asked)
    assert re.fullmatch("[0-9a-f]{32}", fresh_id())
    assert re.fullmatch("[0-9a-f]{16}", context.new_request_id())
