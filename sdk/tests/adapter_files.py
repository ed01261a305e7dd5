"""Files of weights that have a header and no numbers: all that is read before a run begins."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from quartet.weights.layout import header_of
from quartet.weights.tensor import tensor_bytes

#: Of the model: modules of a layer with their rows and columns.
MODULES = {"self_attn.q_proj": (8, 4), "self_attn.v_proj": (4, 4), "mlp.up_proj": (16, 4)}
LAYERS = 2

Specs = Mapping[str, tuple[str, tuple[int, ...]]]


def weights(file: Path, specs: Specs) -> None:
    """A file of these tensors, each of a dtype and a shape."""
    header, _, _ = header_of(specs)
    data = sum(tensor_bytes(dtype, shape) for dtype, shape in specs.values())
    file.write_bytes(header + bytes(data))


def model(
    folder: Path,
    layers: int = LAYERS,
    form: str = "model.layers.{}.{}",
    more: int = 0,
    kind: str = "qwen3",
) -> Path:
    """A model's folder; its file has so many layers `more` than are loaded."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "num_hidden_layers": layers}))
    (folder / "tokenizer.json").touch()
    specs: dict[str, tuple[str, tuple[int, ...]]] = {"model.embed_tokens.weight": ("F32", (32, 4))}
    for layer in range(layers + more):
        specs |= {f"{form.format(layer, name)}.weight": ("F32", shape) for name, shape in MODULES.items()}
        specs[f"model.layers.{layer}.norm.weight"] = ("F32", (4,))
    weights(folder / "model.safetensors", specs)
    return folder


def matrices(
    targets: Iterable[str], rank: int, layers: int = LAYERS, modules: Mapping[str, tuple[int, int]] = MODULES
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Of an adapter of that model, by peft's names."""
    specs = {}
    for layer in range(layers):
        for name, (rows, columns) in modules.items():
            if name.rpartition(".")[2] in targets:
                stem = f"base_model.model.model.layers.{layer}.{name}"
                specs[f"{stem}.lora_A.weight"] = ("F32", (rank, columns))
                specs[f"{stem}.lora_B.weight"] = ("F32", (rows, rank))
    return specs
