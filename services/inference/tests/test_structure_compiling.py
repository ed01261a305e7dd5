"""Grammars are compiled where they can do no harm: `structure/compiling.py` and `structure/trial.py`."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from quartet.errors import QuartetError
from quartet_inference.structure import compiling, trial
from quartet_inference.structure.compiling import WALL_SECONDS, Compiler
from quartet_inference.structure.following import StructureError, Structures
from quartet_inference.structure.grammar import grammar, of_schema
from quartet_inference.structure.vocabulary import ll_tokenizer

from .random_models import byte_tokenizer

#: Rules that call rules that call rules: compiling them needs more stack than a thread has.
RULES = "".join(f'r{i}: r{i + 1} "a"\n' for i in range(3500)) + 'r3500: "b"'
CHAIN = grammar("start: r0\n" + RULES, {})
#: What a trial that knew no special tokens would take for a mistake, and not compile.
MARKED = grammar("start: <|im_end|> <[256]> r0\n" + RULES, {})
#: Minutes and gigabytes.
SLOW = grammar("start: @a", {"a": of_schema({"type": "integer", "multipleOf": 10_000_019})})
#: Of forty characters, and 400 megabytes.
WEIGHTY = grammar("start: @a", {"a": of_schema({"type": "integer", "multipleOf": 300_007})})
FINE = grammar('start: "fine"', {})


@pytest.fixture
def structures() -> Structures:
    return Structures(lambda: ll_tokenizer(byte_tokenizer(), {258}), {258})


@pytest.mark.parametrize(
    "hostile", [CHAIN, MARKED, SLOW, WEIGHTY], ids=["chain", "marked", "slow", "weighty"]
)
async def test_what_would_end_or_hold_up_the_service_is_refused(structures: Structures, hostile: str) -> None:
    """compiling.py 1, 4; trial.py 1-3: and another one is compiled meanwhile."""
    compiler, began = Compiler(structures), time.monotonic()
    doomed = asyncio.create_task(compiler.compiled(hostile))
    await compiler.compiled(FINE)
    assert hostile is not SLOW or not doomed.done()
    with pytest.raises(StructureError, match="too much time, memory or depth"):
        await doomed
    assert structures.find(hostile) is None and time.monotonic() - began < 2 * WALL_SECONDS


async def test_one_grammar_is_compiled_once_and_few_are_under_way(
    structures: Structures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """compiling.py 2."""
    tried, begun, go = [], asyncio.Event(), asyncio.Event()

    async def held(asked: bytes) -> None:
        tried.append(json.loads(asked)["grammar"])
        begun.set()
        await go.wait()

    monkeypatch.setattr(compiling, "_try", held)
    monkeypatch.setattr(compiling, "MAX_UNDERWAY", 1)
    compiler = Compiler(structures)
    waiting = [asyncio.create_task(compiler.compiled(FINE)) for _ in range(50)]
    await begun.wait()
    with pytest.raises(QuartetError) as refused:
        await compiler.compiled(SLOW)
    assert refused.value.reason == "OVERLOADED"
    go.set()
    compiled = await asyncio.gather(*waiting)
    assert tried == [FINE] and len({id(one) for one in compiled}) == 1
    assert await compiler.compiled(FINE) is compiled[0] and tried == [FINE]


async def test_whoever_waits_may_leave(structures: Structures, monkeypatch: pytest.MonkeyPatch) -> None:
    """compiling.py 3."""
    go = asyncio.Event()

    async def held(_asked: bytes) -> None:
        await go.wait()

    monkeypatch.setattr(compiling, "_try", held)
    compiler = Compiler(structures)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await compiler.compiled(FINE)
    go.set()
    assert await compiler.compiled(FINE) is structures.find(FINE)


async def test_what_is_refused_with_a_reason_is_told_that_reason(structures: Structures) -> None:
    """trial.py 3."""
    for _ in range(2):
        with pytest.raises(StructureError, match="unknown name"):
            await Compiler(structures).compiled(grammar("start: nothing", {}))


async def test_a_trial_that_does_not_run_is_no_fault_of_the_grammar(
    structures: Structures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "__file__", "/no/such/script.py")
    with pytest.raises(QuartetError) as failed:
        await Compiler(structures).compiled(FINE)
    assert failed.value.reason == "INTERNAL" and structures.find(FINE) is None
