"""The benchmarks that want a GPU, tried without one: what a session with a GPU runs must run."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize("number", [1, 4])
def test_the_training_benchmark_measures_steps(number: int, tmp_path: Path) -> None:
    shape, train = (importlib.import_module(name) for name in ("gpu_shape", "gpu_train"))
    shape.model(0, trial=True, device="cpu").save_pretrained(tmp_path)
    case, tokens = train.cases()[number], 512
    assert (case.optimizer_offload, case.deterministic) == (number == 1, number == 1)
    batches = [case.make(tokens, 512, seed) for seed in range(train.WARM_UP + 1)]
    assert all(400 < train.computed(batch) < 620 for batch in batches)
    machine = train.machine_of(
        case, tokens, Namespace(device="cpu", row_tokens=None, keep_attention=number == 1)
    )
    try:
        rate, memory = train.measure(case, batches, tmp_path, machine)
    finally:
        torch.use_deterministic_algorithms(False)
    assert rate.value > 0 and math.isfinite(memory.value)
    assert not rate.bar and not memory.bar, "the bars are of a GPU"


def test_the_training_benchmark_tells_its_cases_apart() -> None:
    cases = importlib.import_module("gpu_train").cases()
    assert len({case.name for case in cases}) == len(cases)
    assert [case.bars[0] for case in cases if case.tokens > 16_384] == [">= 10150"] * 2


async def test_the_generation_benchmark_measures_rates_and_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pause, generate = (importlib.import_module(name) for name in ("pause", "gpu_generate"))
    monkeypatch.setattr(generate, "IN_FLIGHT", (2,))
    for name, value in {"QUIET_SECONDS": 1.0, "UPDATES": 2, "INTERVAL": 0.5, "NEW_TOKENS": 32}.items():
        monkeypatch.setattr(pause, name, value)
    engine = await generate.started("embedded", "cpu", True, "keep")
    (rate,) = await generate.rates(engine, "embedded")
    assert rate.value > 0
    pauses = await generate.pauses(engine, "cpu", True, "keep", "embedded")
    found: dict[str, Any] = {one.name.partition(": ")[2]: one for one in pauses}
    assert found["requests failed"].value == 0
    assert 0 < found["pause, median"].value <= found["pause, longest"].value
    assert found["weights of one update"].value > 0.1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["gpu_train", "gpu_generate"])
def test_without_a_gpu_they_say_that_they_are_skipped(name: str) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "skipped: torch finds no CUDA device" in done.stdout
