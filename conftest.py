"""What tests of more than one folder share: tiny random models, a trainer that is served, a scraper; and a
garbage collector that leaves alone what was imported, and gRPC's thread."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

# As quartet.kit.imports does for a service: what tests import, torch among it, is a million
# objects that stay. To look through them again and again was a third of the CPU of the trainer's tests.
gc.disable()


def pytest_collection_finish() -> None:
    if "grpc" in sys.modules:
        from grpc import aio

        # It ends its thread with the last channel or server. Where the garbage collector found that one under
        # another event loop, the wait for the thread was seen to hang: 300 s of a test of something else
        # (github.com/grpc/grpc/pull/40989). The thread does not end while this holds on to it.
        aio.init_grpc_aio()
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    # The interpreters of environments and of vLLM have no hypothesis, nor the tests that use it.
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import HealthCheck, settings

        # A machine that others share pauses an example, or the making of one, for longer than they are given.
        slow = [HealthCheck.too_slow]
        settings.register_profile("shared machine", deadline=None, suppress_health_check=slow)
        settings.load_profile("shared machine")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """For `make test`, whose suites take turns: when each ended."""
    terminalreporter.write_line(f"{time.strftime('%H:%M:%S')}: the end of {' '.join(config.args)}")


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
def small_qwen3(tmp_path_factory: pytest.TempPathFactory, write_qwen3: Callable[..., Path]) -> Path:
    """One of 96 tokens, for a trainer, with a file that stands for its tokenizer; for reading alone."""
    path = write_qwen3(
        tmp_path_factory.mktemp("model"),
        seed=7,
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=128,
    )
    (path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    return path


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


@pytest.fixture
def scrape() -> Iterator[Callable[[], Awaitable[dict[str, float]]]]:
    """`await scrape()`: what Prometheus would read of this process, {'name{label="value"}': number}."""
    from quartet.kit.metrics import start_metrics

    server = start_metrics("127.0.0.1:0")

    def read() -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        series = (line.rpartition(" ") for line in lines if line.startswith("quartet_"))
        # The library tells of each counter when it was made, too.
        return {name: float(value) for name, _, value in series if "_created" not in name.partition("{")[0]}

    yield lambda: asyncio.to_thread(read)
    server.close()
