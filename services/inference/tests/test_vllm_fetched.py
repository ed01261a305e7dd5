"""quartet_inference.vllm.fetched, on a CPU; of a worker, test_vllm_workers.py."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from quartet_inference.vllm import fetched
from quartet_inference.vllm.fetched import Fetched, has_room
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

CPU = torch.device("cpu")
PIECE = 1000


@pytest.fixture
def given() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "small.0": torch.randn(3, 5), "large": torch.randn(70, 41).bfloat16(), "small.1": torch.randn(7),
        "one": torch.tensor(3.5), "none": torch.zeros(0, 4), "whole": torch.randn(PIECE // 4),
    }  # fmt: skip


@pytest.fixture
def path(given: dict[str, Tensor], tmp_path: Path) -> str:
    save_file(given, tmp_path / "v.safetensors")
    return str(tmp_path / "v.safetensors")


def test_a_version_comes_in_bounded_pieces_with_all_its_bits(
    given: dict[str, Tensor], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fetched.py 1, 2."""
    copied = []
    copy = Tensor.copy_

    def noting(self: Tensor, other: Tensor) -> Tensor:
        copied.append(other.nbytes)
        return copy(self, other)

    monkeypatch.setattr(fetched, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(Tensor, "copy_", noting)
    version, pieces, is_left = Fetched(path, CPU), [], True
    while is_left:
        assert not version.complete
        before = sum(copied)
        is_left = version.more()
        pieces.append(sum(copied) - before)
    assert version.complete and not version.more()
    assert len(pieces) > 5 and max(pieces) < 2 * PIECE
    assert sum(pieces) == sum(one.nbytes for one in given.values())
    assert version.tensors.keys() == given.keys()
    for name, one in given.items():
        found = version.tensors[name]
        assert (found.dtype, found.shape) == (one.dtype, one.shape)
        assert torch.equal(found, one)


def test_a_file_of_which_all_was_fetched_is_held_no_more(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Staged files lie in memory."""

    def is_mapped() -> bool:
        return path in Path("/proc/self/maps").read_text()

    version = Fetched(path, CPU)
    assert is_mapped()
    while version.more():
        pass
    assert version.complete and not is_mapped()
    monkeypatch.setattr(fetched, "SMALL_BYTES", 0)
    version = Fetched(path, CPU)
    assert not version.more() and not is_mapped(), "nothing of it will be fetched"


def test_what_is_dropped_half_fetched_goes_at_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next version asks for the room that it has."""
    monkeypatch.setattr(fetched, "PIECE_BYTES", PIECE)
    gc.disable()
    try:
        version = Fetched(path, CPU)
        while not version.tensors:
            assert version.more()
        held = [weakref.ref(one) for one in version.tensors.values()]
        del version
        assert all(one() is None for one in held) and path not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


def test_a_version_of_which_a_piece_failed_is_never_complete(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Tensor.copy_

    def crowded(self: Tensor, other: Tensor) -> Tensor:
        if other.dtype == torch.bfloat16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return copy(self, other)

    monkeypatch.setattr(Tensor, "copy_", crowded)
    version = Fetched(path, CPU)
    with pytest.raises(torch.OutOfMemoryError):
        while version.more():
            pass
    assert not version.more() and not version.complete


def test_what_there_is_no_room_for_is_not_fetched(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fetched.py 3."""
    monkeypatch.setattr(fetched, "SMALL_BYTES", 1000)
    version = Fetched(path, CPU)
    assert not version.more() and not version.complete and not version.tensors
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for free, is_enough in ((9 << 30, True), ((7 << 30) - 1, False), (7 << 30, True)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 80 << 30))
        assert has_room(cuda, 4 << 30, 1 << 29) == is_enough
    assert not has_room(torch.device("xpu"), 1, 1)


def test_a_file_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "v.safetensors").write_bytes(b"123456789")
    with pytest.raises(SafetensorError):
        Fetched(str(tmp_path / "v.safetensors"), CPU)
