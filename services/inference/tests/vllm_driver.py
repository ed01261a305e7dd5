"""A vLLM engine under test, and the models of the versions that it has served."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quartet_inference.config import InferenceConfig
from quartet_inference.engine import ServedWeights
from quartet_inference.vllm import environment

from .engine_calls import END, complete_one, update
from .told import Told

Make = Callable[..., Any]
PROMPT = list(range(100))


class Driver:
    """An engine, the models of the versions that it has served, and short ways to use it."""

    def __init__(self, engine: Any, make: Make) -> None:
        self.engine: Any = engine
        self.make = make
        self.models: dict[int, Any] = {0: make(0)}

    async def update(self, seed: int) -> int:
        version = max(self.models) + 1
        self.models[version] = self.make(seed)
        await update(self.engine, self.models[version], ServedWeights("r", version, b""))
        return version

    async def ask(self, prompt: list[int], **wanted: Any) -> Told:
        return await complete_one(self.engine, prompt, **wanted)

    def difference(self, told: Told) -> float:
        return told.difference(self.models)


def tear(path: Path, missing: int) -> None:
    """Cut off the end of a file."""
    os.truncate(path, path.stat().st_size - missing)


def launch(
    folder: Path, make: Make, context: int = 256, routed_experts: bool = False, **settings: Any
) -> Driver:
    """One with an engine that nobody checked."""
    environment.prepare(threads=1)
    from quartet_inference.vllm.start import start

    config = _config(folder, make(0), settings, max_model_len=context, routed_experts=routed_experts)
    return Driver(start(config, END, lambda tokens: "", lambda: None), make)


async def started(folder: Path, network: Any, routed_experts: bool = False, **settings: Any) -> Any:
    """An engine that takes updates, checked."""
    environment.prepare(threads=1)
    from quartet_inference.vllm.start import start_checked

    config = _config(
        folder, network, settings, max_model_len=256, accept_push=True, routed_experts=routed_experts
    )
    return await start_checked(config, END, lambda tokens: "", lambda: None)


def _config(folder: Path, network: Any, of_vllm: dict[str, Any], **keys: Any) -> InferenceConfig:
    network.save_pretrained(folder)
    vllm = {"max_num_seqs": 16, "kv_cache_bytes": 1 << 25, **of_vllm}
    return InferenceConfig.model_validate({"model": folder, "engine": "vllm", "vllm": vllm, **keys})
