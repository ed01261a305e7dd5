"""Grammars are compiled where they can do no harm: `structure/compiling.py` and `structure/trial.py`."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
import uvloop
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

    async def held(asked: bytes) -> int:
        tried.append(json.loads(asked)["grammar"])
        begun.set()
        await go.wait()
        return 1

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

    async def held(_asked: bytes) -> int:
        await go.wait()
        return 1

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


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars of the trials from now on."""
    seen: list[str] = []
    trying = compiling._try

    async def spied(asked: bytes) -> int:
        seen.append(json.loads(asked)["grammar"])
        return await trying(asked)

    monkeypatch.setattr(compiling, "_try", spied)
    return seen


NONE = [grammar(f"start: nothing{index}", {}) for index in range(3)]


async def test_what_was_refused_is_refused_again_without_a_trial(
    structures: Structures, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """compiling.py 5: with the same reason, as many as are remembered."""
    monkeypatch.setattr(compiling, "MAX_REFUSED", 2)
    compiler, reasons = Compiler(structures), []
    for one in (*NONE[:2], *NONE[:2], CHAIN, NONE[1], NONE[0]):
        with pytest.raises(StructureError) as refused:
            await compiler.compiled(one)
        reasons.append(str(refused.value))
    assert tried == [*NONE[:2], CHAIN, NONE[0]]
    assert reasons[:2] == reasons[2:4] and reasons[5] == reasons[1] and "too much" in reasons[4]


async def test_what_others_may_have_ended_is_tried_again(
    structures: Structures, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """compiling.py 5: too little time on the clock says nothing about a grammar."""
    compiler = Compiler(structures)
    monkeypatch.setattr(compiling, "WALL_SECONDS", 0.01)
    with pytest.raises(StructureError, match="too much"):
        await compiler.compiled(FINE)
    monkeypatch.undo()
    assert (await compiler.compiled(FINE)).weight_bytes > 0


async def test_a_trial_weighs_what_it_compiles(structures: Structures) -> None:
    """trial.py 3, following.py 1: by what it makes, not by its text."""
    compiler = Compiler(structures)
    heavy = grammar("start: @a", {"a": of_schema({"type": "integer", "multipleOf": 30_011})})
    one, other = await asyncio.gather(compiler.compiled(heavy), compiler.compiled(FINE))
    assert 8 << 20 < one.weight_bytes < trial.MEMORY_BYTES
    assert other.weight_bytes < 1 << 20


def test_a_process_that_is_killed_at_its_start_says_nothing_of_its_grammar(
    structures: Structures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """compiling.py 5: on the loop that the service has, whose pipes are closed by then."""
    begin = asyncio.create_subprocess_exec

    async def doomed(*command: str, **pipes: int) -> asyncio.subprocess.Process:
        process = await begin(*command, **pipes)
        process.kill()
        await process.wait()
        return process

    async def tried_twice() -> None:
        compiler = Compiler(structures)
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "create_subprocess_exec", doomed)
            with pytest.raises(QuartetError) as lost:
                await compiler.compiled(FINE)
        assert lost.value.reason == "OVERLOADED" and lost.value.retry_after_ms
        assert (await compiler.compiled(FINE)).weight_bytes > 0

    uvloop.run(tried_twice())
