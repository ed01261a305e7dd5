"""What of an adapter is refused before anything of the run that would begin with it starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapter_files import MODULES, matrices, model, weights
from quartet.adapter_config import MAX_TOLD, SETTINGS, WEIGHTS
from quartet.cli import rl
from quartet.cli.adapter_fit import misfits
from quartet.cli.initial_adapter import with_adapter
from quartet.config import ConfigError
from quartet.run.config import RunConfig
from quartet.run.lora import LoraConfig

TARGETS = ["q_proj", "v_proj"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return model(tmp_path / "model")


def adapter(folder: Path, specs: dict[str, Any] | None = None, **more: Any) -> Path:
    folder.mkdir()
    given = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": TARGETS, **more}
    (folder / SETTINGS).write_text(json.dumps(given))
    weights(folder / WEIGHTS, matrices(TARGETS, 2) if specs is None else specs)
    return folder


def told(folder: Path, base: Path | None, **said: Any) -> list[str]:
    table = with_adapter(LoraConfig(enabled=True, initial_adapter=str(folder), **said), None)
    return [str(one) for one in misfits(table, base)]


def test_one_that_fits_is_not_refused(tmp_path: Path, base: Path) -> None:
    folder = adapter(tmp_path / "adapter")
    assert not told(folder, base) and not told(folder, None)
    assert not told(folder, base, r=2, alpha=4.0, target_modules=["self_attn.v_proj", "q_proj"])
    saved = {**matrices(TARGETS, 2), "base_model.model.model.embed_tokens.weight": ("F32", (32, 4))}
    whole = adapter(tmp_path / "saved", saved, modules_to_save=["embed_tokens"])
    assert not told(whole, base, publish="merged")


def test_matrices_of_stacked_experts_are_left_to_the_trainer(tmp_path: Path, base: Path) -> None:
    """adapter_fit.py 2: of four experts they have four times the rank."""
    place = "base_model.model.model.layers.0.mlp.experts"
    specs = matrices(TARGETS, 2) | {
        f"{place}.lora_A.weight": ("F32", (8, 4)),
        f"{place}.lora_B.weight": ("F32", (4, 8)),
    }
    folder = adapter(tmp_path / "adapter", specs, target_parameters=["experts.down_proj"])
    assert not told(folder, base, publish="merged")
    assert not told(folder, base, publish="merged", target_parameters=["experts"])
    with pytest.raises(
        ConfigError, match=r"has target_parameters = \['experts.down_proj'\], which are no part"
    ):
        told(folder, base)


def test_all_misfits_are_told_at_once(tmp_path: Path, base: Path, config: RunConfig) -> None:
    """adapter_fit.py 1, and rl.py 1: with those of the rest of the run."""
    wide = {name: (rows, 6) for name, (rows, _) in MODULES.items()}
    folder = adapter(tmp_path / "adapter", matrices(TARGETS, 2, layers=3, modules=wide), use_dora=False)
    said = {"r": 16, "alpha": 8.0, "use_rslora": True, "target_modules": ["o_proj"]}
    lora = LoraConfig(enabled=True, initial_adapter=str(folder), **said)
    asked = config.model_copy(update={"model": str(base), "lora": lora, "envhost": {"python": "/nowhere"}})
    with pytest.raises(ConfigError) as caught:
        rl.prepared(asked, tmp_path / "run", resume=False, overwrite=False)
    for part in (
        f"lora.r = 16 is refused: the adapter in {folder} has 2; set that, or leave lora.r out",
        "lora.alpha = 8.0 is refused",
        "lora.use_rslora = true is refused",
        "it has matrices of q_proj, v_proj, and lora.target_modules names o_proj",
        "it has matrices of model.layers.2.self_attn.q_proj, model.layers.2.self_attn.v_proj, which model",
        "are of other shapes in model (the first: [8, 4] there, [8, 6] here)",
    ):
        assert part in str(caught.value), part


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda specs: {**specs, **matrices(["up_proj"], 3)}, "says r = 2, and model.layers.0.mlp.up_proj,"),
        (lambda specs: {k: v for k, v in specs.items() if ".1." not in k}, "no matrices of model.layers.1."),
        (
            lambda specs: {k: v for k, v in specs.items() if "B" not in k},
            "one of lora_A and lora_B is missing",
        ),
        (lambda specs: {k: ("I8", shape) for k, (_, shape) in specs.items()}, "is of I8, where floating"),
        (
            lambda specs: {k.replace("_proj", "_dense"): v for k, v in specs.items()},
            "model has no q_dense, v_dense, of which it has matrices, but embed_tokens, q_proj, up_proj, v_p",
        ),
        (
            lambda specs: {**specs, "base_model.model.model.embed_tokens.weight": ("F32", (33, 4))},
            "model.embed_tokens is of other shapes in model (the first: [32, 4] there, [33, 4] here)",
        ),
    ],
)
def test_what_the_headers_say_is_refused(
    tmp_path: Path, base: Path, change: Callable[[dict[str, Any]], dict[str, Any]], why: str
) -> None:
    folder = adapter(tmp_path / "adapter", change(matrices(TARGETS, 2)))
    assert why in " ".join(told(folder, base))


def test_a_file_that_is_none_and_settings_beyond_matrices_are_refused(tmp_path: Path, base: Path) -> None:
    torn = adapter(tmp_path / "torn")
    (torn / WEIGHTS).write_bytes((torn / WEIGHTS).read_bytes()[:-1])
    assert "adapter_model.safetensors cannot be read: the tensors end at byte" in told(torn, base)[0]
    (torn / WEIGHTS).write_bytes(b"")
    assert "save the adapter again" in told(torn, base)[0]
    beyond = adapter(tmp_path / "beyond", use_dora=True, bias="all")
    said = told(beyond, base, r=3)
    assert ["its use_dora = True" in said[1], "its bias = 'all'" in said[0], "lora.r = 3" in said[2]] == [
        True
    ] * 3
    other = adapter(tmp_path / "other", peft_type="LOHA")
    assert len(told(other, base, r=3)) == 1, "its rank is none"


def test_what_only_the_loaded_model_can_tell_is_left_to_the_trainer(tmp_path: Path) -> None:
    """adapter_fit.py 2: names that are others in memory, layers that are not loaded, files not understood."""
    folder = adapter(tmp_path / "adapter")
    assert not told(folder, model(tmp_path / "renamed", form="language_model.layers.{}.{}"))
    assert not told(folder, model(tmp_path / "more", more=1))
    gates = {name.replace("q_proj", "gate_proj"): one for name, one in matrices(["q_proj"], 2).items()}
    gated = adapter(tmp_path / "gated", gates, target_modules=["gate_proj"])
    assert not told(gated, model(tmp_path / "exaone", kind="exaone"))
    packed = model(tmp_path / "packed")
    weights(packed / "model.safetensors", {"model.layers.0.self_attn.q_proj.weight": ("U8", (16, 1))})
    assert not told(folder, packed)
    (packed / "model.safetensors").write_bytes(b"none")
    assert not told(folder, packed)
    shorter = model(tmp_path / "shorter", layers=1)
    (shorter / "config.json").write_text("{}")
    assert "which model has not" in told(folder, shorter)[0]


def test_of_many_modules_a_few_are_named(tmp_path: Path, base: Path) -> None:
    folder = adapter(tmp_path / "adapter", matrices(TARGETS, 2, layers=9))
    assert f" and {2 * 7 - MAX_TOLD} more, which model has not" in told(folder, base)[0]
