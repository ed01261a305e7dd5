"""quartet_inference.vllm.copy_plan and loading: copies alone make what vLLM's reload makes, to the bit.

Of tracing, test_vllm_tracing.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from .random_models import causal, qwen3

pytest.importorskip("vllm", reason="vLLM is not installed in this interpreter (make install-vllm)")

from quartet_inference.vllm import copy_plan, loading
from quartet_inference.vllm.copy_plan import CopyPlan, NoPlan, check_kinds
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from . import vllm_reloads
from .vllm_reloads import DEVICE, PACKS, Reloaded, leave_as_loaded, parallel, same

MODELS: dict[str, Callable[[], Any]] = {
    "tied": lambda: qwen3(0, head_dim=32),
    "untied": lambda: qwen3(0, head_dim=32, tie_word_embeddings=False),
    "biases": lambda: causal("qwen2", 0),
    "experts": lambda: causal("qwen3_moe", 0),
    "other experts": lambda: causal("mixtral", 0),
}
RANKS = 2
RANKS_SECONDS = 300


@pytest.fixture(scope="module", autouse=True)
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with parallel(tmp_path_factory.mktemp("ranks")):
        yield


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_as_loaded(monkeypatch)


def saved(kind: str, folder: Path) -> Path:
    MODELS[kind]().to(torch.bfloat16).save_pretrained(folder)
    return folder


def only_copies(one: Reloaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing but copies load a version from now on."""

    def never(*_: Any) -> None:
        raise AssertionError("it was reloaded")

    monkeypatch.setattr(one.planned, "_reload", never)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("kind", MODELS)
def test_copies_make_what_the_reload_makes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """copy_plan.py 1 to 4: fused, tied and padded weights, experts, over any versions."""
    one = Reloaded(saved(kind, tmp_path))
    one.load(one.version(0))
    assert one.planned.why == ""
    only_copies(one, monkeypatch)
    one.check(range(1, 4))


@pytest.mark.skipif(not PACKS, reason="one GPU has one rank")
@pytest.mark.timeout(RANKS_SECONDS + 60)
def test_each_rank_copies_its_own_part(tmp_path: Path) -> None:
    folders = [str(saved(kind, tmp_path / kind)) for kind in ("biases", "experts")]
    command = [sys.executable, vllm_reloads.__file__]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS), *folders],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(RANKS)
    ]
    try:
        told = [process.communicate(timeout=RANKS_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * RANKS, "\n".join(told)[-4000:]


@pytest.mark.skipif(not PACKS, reason="a GPU packs nothing")
def test_what_is_packed_is_reloaded_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """loading.py 2: no plan is made, nor looked for again, and versions are what they were."""
    one = Reloaded(saved("tied", tmp_path))
    first, second = one.version(1), one.version(2)
    one.load(first)
    assert "pack" in one.planned.why
    with monkeypatch.context() as patch:
        patch.setattr(loading, "Trace", None)
        one.load(second)
    held = one.held()
    one.reload(first)
    assert not same(held, one.held())
    one.reload(second)
    assert same(held, one.held())
    # Nor would a trace have been taken in: it does not see what packs them, but on a processor with AMX,
    # where that is an operation, which copies nothing.
    monkeypatch.setattr(copy_plan, "keeps_weights", lambda: True)
    again = loading.Loading(one.model, one.config)
    again.prepared(first)()
    assert "is not used as it was copied" in again.why or "convert_weight_packed" in again.why


@pytest.mark.usefixtures("plain")
def test_a_plan_goes_with_names_shapes_types_and_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """copy_plan.py 3: another layout, or a tensor in other memory, is reloaded, and traced again."""
    one = Reloaded(saved("untied", tmp_path))
    traced = []
    trace = loading.Trace
    monkeypatch.setattr(loading, "Trace", lambda *given: traced.append(1) or trace(*given))
    for seed in (0, 1):
        one.load(one.version(seed))
    assert len(traced) == 1
    finite = {name: torch.randn(tensor.shape, device=DEVICE) for name, tensor in one.first.items()}
    for _ in range(2):
        one.load(finite)  # in float32: every value is rounded
        held = one.held()
        one.reload(one.version(2))
        one.reload(finite)
        assert same(held, one.held())
    assert len(traced) == 2
    # What a GPU's graphs would not know of.
    norm = one.model.get_submodule("model.norm")
    norm.weight.data = norm.weight.data.clone()
    one.load(finite)
    assert len(traced) == 3 and one.planned.why == ""


@pytest.mark.usefixtures("plain")
def test_a_plan_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Reloaded(saved("tied", tmp_path))
    monkeypatch.setattr(loading, "Trace", None)
    one.reload(one.version(0))


class Other(UnquantizedLinearMethod):
    """A method of somebody else's."""


class Kinds(nn.Module):
    """A layer of a kind, as far as it is looked at."""

    def __init__(self, method: Any) -> None:
        super().__init__()
        self.quant_method = method


def attention(kind: type[nn.Module], has_sink: bool) -> nn.Module:
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    layer.has_sink = has_sink  # type: ignore[assignment]
    return layer


def mixture(backend: UnquantizedMoeBackend) -> nn.Module:
    method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    nn.Module.__init__(method)
    method.unquantized_backend = backend
    return Kinds(method)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (lambda: Kinds(UnquantizedLinearMethod()), ""),
        (lambda: Kinds(Other()), "Other"),
        (lambda: attention(Attention, False), ""),
        (lambda: attention(Attention, True), "Attention"),
        (lambda: attention(MLAAttention, False), "MLAAttention"),
        (lambda: mixture(UnquantizedMoeBackend.TRITON), ""),
        (lambda: mixture(UnquantizedMoeBackend.FLASHINFER_TRTLLM), "TRTLLM"),
    ],
)
def test_only_kinds_that_are_known_are_planned(
    layer: Callable[[], nn.Module], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """copy_plan.py 1."""
    monkeypatch.setattr(copy_plan, "keeps_weights", lambda: True)
    config = SimpleNamespace(
        model_config=SimpleNamespace(quantization=None), parallel_config=SimpleNamespace(enable_eplb=False)
    )
    model = nn.Sequential(layer())
    if why:
        with pytest.raises(NoPlan, match=why):
            check_kinds(model, config)
        return
    check_kinds(model, config)
    config.parallel_config.enable_eplb = True
    with pytest.raises(NoPlan, match="experts move"):
        check_kinds(model, config)
    config.model_config.quantization = "fp8"
    with pytest.raises(NoPlan, match="quantized"):
        check_kinds(model, config)


@pytest.mark.usefixtures("plain")
def test_a_load_that_fails_says_whether_it_touched_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """workers.py 1: what fails between two copies ends the engine, what fails before does not."""
    from quartet_inference.vllm.worker import WeightWorker

    one = Reloaded(saved("tied", tmp_path))
    worker = WeightWorker()
    worker.device, worker.vllm_config = DEVICE, one.config
    worker.model_runner = SimpleNamespace(get_model=lambda: one.model, reset_lora_state=lambda: None)

    def load(path: Path) -> dict[str, Any]:
        while worker.quartet_fetch(str(path))["more"]:
            pass
        return worker.quartet_load(str(path))

    paths = [tmp_path / f"{seed}" for seed in range(3)]
    for seed, path in enumerate(paths):
        save_file(one.version(seed), path)
        if seed < 2:
            assert load(path) == {"ok": True, "reloads": ""}
    second = one.held()
    with monkeypatch.context() as patch:
        patch.setattr(CopyPlan, "bind", lambda *_: 1 // 0)
        answer = load(paths[2])
    assert not answer["ok"] and not answer["touched"] and same(second, one.held())
    many = torch._foreach_copy_

    def half(targets: list[Any], sources: list[Any]) -> None:
        many(targets[: len(targets) // 2], sources[: len(targets) // 2])
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(torch, "_foreach_copy_", half)
    answer = load(paths[2])
    assert not answer["ok"] and answer["touched"] and not same(second, one.held())
