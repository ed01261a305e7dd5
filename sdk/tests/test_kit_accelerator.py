"""How torch is told to take a device's memory (quartet.kit.accelerator)."""

from __future__ import annotations

import pytest
from quartet.kit.accelerator import allocate_expandably


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_what_the_user_says_of_the_allocator_stays(name: str) -> None:
    """torch reads PYTORCH_ALLOC_CONF first, so ours there would take the place of theirs in an older one."""
    environment = {name: "max_split_size_mb:128"}
    allocate_expandably(environment)
    assert environment == {name: "max_split_size_mb:128"}


def test_where_nobody_says_anything_segments_grow() -> None:
    environment: dict[str, str] = {}
    allocate_expandably(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
