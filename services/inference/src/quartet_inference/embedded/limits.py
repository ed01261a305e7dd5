"""Bounds of an embedded engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of an engine."""

    max_model_len: int
    max_num_seqs: int = 128
    max_waiting: int = 4096
    kv_cache_bytes: int = 1 << 30
    prefix_cache_bytes: int = 128 << 20
    packed_bytes: int = 4 << 30
    recompute_on_update: bool = True
    max_adapters: int = 16
    adapter_bytes: int = 1 << 30
    routed_experts: bool = False  # note which experts take each token
    cuda_graphs: bool = True  # record decode steps, where that can be
