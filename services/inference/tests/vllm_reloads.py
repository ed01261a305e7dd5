"""vLLM's own models in this process, and versions for them.

On a CPU vLLM packs the weights of layers after loading. Here they stay as they were loaded, as on a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from quartet_inference.vllm.asked import COPY_PLAN
from quartet_inference.vllm.loading import Loading
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

DEVICE = torch.device(current_platform.device_type)
#: What a reload of the CPU build does beside copies; on a GPU there is nothing to leave out.
PACKS = current_platform.is_cpu()
Bits = dict[str, Tensor]


@contextmanager
def parallel(folder: Path, rank: int = 0, world: int = 1) -> Iterator[None]:
    """vLLM's groups of ranks, which belong to a process."""
    current_platform.import_kernels()
    rendezvous = f"file://{folder}/rendezvous"
    os.environ["VLLM_DIST_IDENT"] = folder.name  # of the memory that ranks on a CPU share
    backend = "gloo" if PACKS else current_platform.dist_backend
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(world, rank, rendezvous, rank, backend)
        initialize_model_parallel(world)
    with pytest.MonkeyPatch.context() as patch:
        if PACKS:  # as vLLM's worker has it
            patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        yield
        cleanup_dist_env_and_memory()


def leave_as_loaded(patch: pytest.MonkeyPatch) -> None:
    """Let no layer pack its weights."""
    if not PACKS:
        return
    from quartet_inference.vllm import copy_plan

    def as_on_a_gpu(method: Any, layer: Any, w13: Tensor, w2: Tensor) -> None:
        replace_parameter(layer, "w13_weight", w13, prefer_copy=True)
        replace_parameter(layer, "w2_weight", w2, prefer_copy=True)

    for plain in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        patch.setattr(plain, "process_weights_after_loading", lambda method, layer: None)
    patch.setattr(UnquantizedFusedMoEMethod, "_setup_kernel", as_on_a_gpu)
    patch.setattr(copy_plan, "keeps_weights", lambda: True)
    patch.setattr(copy_plan, "PLAIN_BACKENDS", (UnquantizedMoeBackend.CPU,))


class Reloaded:
    """A model of vLLM's, and both ways to load a version into it."""

    def __init__(self, folder: Path, world: int = 1) -> None:
        """Of the model that is saved in a folder, in bfloat16."""
        self.first = load_file(folder / "model.safetensors", device=str(DEVICE))
        arguments = EngineArgs(
            model=str(folder), dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True,
            max_model_len=64, tensor_parallel_size=world, kv_cache_memory_bytes=1 << 25,
            distributed_executor_backend="mp",
        )  # fmt: skip
        self.config: Any = arguments.create_engine_config()
        with set_current_vllm_config(self.config):
            self.model: nn.Module = get_model(vllm_config=self.config)
        self.planned = Loading(self.model, self.config)

    def reload(self, tensors: Bits) -> None:
        """By vLLM's reload, whatever is planned."""
        self.config.additional_config[COPY_PLAN] = False
        by_reload = Loading(self.model, self.config)
        self.config.additional_config.clear()
        by_reload.prepared(tensors)()

    def load(self, tensors: Bits) -> None:
        """As a worker does."""
        self.planned.prepared(tensors)()

    def held(self) -> Bits:
        """Every parameter and buffer, of which the bits are compared."""
        both = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: bits(one.detach()).clone() for name, one in both}

    def places(self) -> dict[str, int]:
        return {name: one.data_ptr() for name, one in self.model.named_parameters()}

    def version(self, seed: int) -> Bits:
        """One that nobody has trained: any bits, NaNs and infinities among them."""
        generator = torch.Generator().manual_seed(seed)

        def random(one: Tensor) -> Tensor:
            drawn = torch.randint(256, (one.nbytes,), generator=generator, dtype=torch.uint8)
            return drawn.view(one.dtype).view(one.shape).to(DEVICE)

        return {name: random(one) for name, one in self.first.items()}

    def check(self, seeds: range) -> None:
        """Every version is, by copies, what it is by vLLM's reload, and where it was."""
        places = self.places()
        for seed in seeds:
            version = self.version(seed)
            self.reload(self.version(seed + 1000))
            self.load(version)
            copied = self.held()
            self.reload(self.version(seed + 2000))
            assert not same(copied, self.held())
            self.reload(version)
            assert same(copied, self.held())
        assert self.places() == places


def bits(one: Tensor) -> Tensor:
    return one.reshape(-1).view(torch.uint8)


def same(one: Bits, other: Bits) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(bits(one[name]), bits(other[name])) for name in one)


def main(rank: str, world: str, *folders: str) -> None:
    """One of several ranks, each a process, with a model of each folder."""
    shared = [Path(folder) for folder in folders]
    with parallel(shared[0], int(rank), int(world)), pytest.MonkeyPatch.context() as patch:
        leave_as_loaded(patch)
        for folder in shared:
            one = Reloaded(folder, int(world))
            one.load(one.version(0))
            assert one.planned.why == ""
            one.check(range(1, 3))


if __name__ == "__main__":
    main(*sys.argv[1:])
