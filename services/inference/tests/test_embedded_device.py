"""What the embedded engine does on a device that is not the CPU, and that it is the same there."""

from __future__ import annotations

import math
import weakref
from pathlib import Path

import pytest
import torch
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.weights.tensor import Tensor
from quartet_inference.embedded import device, model
from simulated_device import CHILD_SECONDS, DEVICES, NAME, Found, found_by

from .engine_calls import complete, running
from .other_device import CASES
from .random_models import qwen3, weights_of


@pytest.fixture(scope="module", params=DEVICES)
def other(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def found(other: str) -> Found:
    """By case and device."""
    return found_by(Path(__file__).parent.parent, other)


@pytest.mark.timeout(CHILD_SECONDS)
@pytest.mark.parametrize("case", CASES)
def test_an_engine_on_another_device_tells_what_it_tells_on_the_cpu(
    case: str, other: str, found: Found
) -> None:
    here, there = found[case]["cpu"], found[case][other]
    tolerance = 0.05 if case == "narrow" else 1e-4
    assert len(here) == len(there) > 20
    assert all(map(math.isfinite, there))
    assert there == pytest.approx(here, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("other", [NAME], indirect=True)
def test_a_decode_step_brings_nothing_to_the_device_but_the_numbers_that_it_draws_by(found: Found) -> None:
    """Each copy waits for all that was begun there. Where there are structures, their masks come in one."""
    assert found["arriving"][NAME] == [1, 1, 2]


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


async def test_a_version_for_which_a_device_has_no_room_is_overloaded_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """device.py 2."""
    tensors, converted = weights_of(qwen3(1)), []

    def as_torch(tensor: Tensor) -> torch.Tensor:
        if len(converted) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 594.00 MiB. GPU 0 has ...")
        made = plain(tensor).clone()
        converted.append(weakref.ref(made))
        return made

    async with running(qwen3(0)) as engine:
        plain = model.as_torch
        monkeypatch.setattr(model, "as_torch", as_torch)
        with pytest.raises(QuartetError, match=r"memory of the device does not reach \(CUDA out") as refused:
            await engine.stage(tensors)
        assert refused.value.reason == "OVERLOADED"
        assert [one() for one in converted] == [None] * 3
        (told,) = await complete(engine, [5, 9], max_tokens=4, ignore_eos=True)
    assert len(told.tokens) == 4
