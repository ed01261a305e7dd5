"""What tests of more than one folder share: tiny random models on disk, and a trainer that is served."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


@pytest.fixture(scope="session")
def write_qwen3() -> Callable[..., Path]:
    """`write_qwen3(folder, seed, **config)`: a random Qwen3 with tied embeddings that prefers some tokens."""

    def write(folder: Path, seed: int, **config: Any) -> Path:
        import torch
        import transformers

        torch.set_num_threads(1)
        torch.manual_seed(seed)
        tied = {"tie_word_embeddings": True, "num_key_value_heads": 1, "initializer_range": 0.2}
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**tied, **config))
        model.save_pretrained(folder)
        return folder

    return write


@pytest.fixture(scope="session")
def serving_trainer() -> Callable[..., Any]:
    """`async with serving_trainer(state_dir, **config) as address`: a trainer in this process."""

    @contextlib.asynccontextmanager
    async def serving(state_dir: Path, **config: Any) -> AsyncIterator[str]:
        from quartet.kit.server import ServerConfig, start
        from quartet_trainer.assembly import assemble
        from quartet_trainer.config import TrainerConfig

        trainer = assemble(TrainerConfig(state_dir=state_dir, device="cpu", **config))
        server = await start(trainer.services, ServerConfig(address="127.0.0.1:0"), trainer.health)
        try:
            yield server.address
        finally:
            await server.stop(0)
            await trainer.worker.close()

    return serving
