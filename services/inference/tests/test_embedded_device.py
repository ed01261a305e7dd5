"""What the embedded engine does on a device that is not the CPU, and that it is the same there."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from quartet.config import ConfigError
from quartet_inference.embedded import device
from simulated_device import CHILD_SECONDS, NAME, Found, found_by

from .other_device import CASES


@pytest.fixture(scope="module")
def found() -> Found:
    """By case and device."""
    return found_by(Path(__file__).parent.parent)


@pytest.mark.timeout(CHILD_SECONDS)
@pytest.mark.parametrize("case", CASES)
def test_an_engine_on_another_device_tells_what_it_tells_on_the_cpu(case: str, found: Found) -> None:
    here, there = found[case]["cpu"], found[case][NAME]
    tolerance = 0.05 if case == "narrow" else 1e-4
    assert len(here) == len(there) > 20
    assert all(map(math.isfinite, there))
    assert there == pytest.approx(here, rel=tolerance, abs=tolerance)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none_is_refused_and_never_a_cpu() -> None:
    """device.py 1."""
    with pytest.raises(ConfigError, match=r'embedded\.device = "cuda", but torch finds no CUDA device'):
        device.chosen("cuda")
    assert device.chosen("auto") == torch.device("cpu")


def test_the_type_follows_the_device_unless_it_is_said() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [device.dtype_on(cpu, "auto"), device.dtype_on(cuda, "auto")] == ["float32", "bfloat16"]
    assert device.dtype_on(cuda, "float32") == "float32"
