"""Ids of answers and calls: no two alike, and the system is not asked for each."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from quartet_inference.chat import ParsedCall, Turn
from quartet_inference.fresh import fresh_id
from quartet_inference.messages import from_turn


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
    def asked(_: int) -> bytes:
        raise AssertionError("the event loop would wait for the interpreter")

    monkeypatch.setattr(os, "urandom", asked)
    [named] = from_turn(Turn("", "", (ParsedCall("f", "{}"),))).tool_calls
    assert re.fullmatch("[0-9a-f]{9}", named.id)
