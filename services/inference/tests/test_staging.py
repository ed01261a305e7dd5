"""Staged versions where disks are full: the next folder takes them, or they are refused; nothing is left."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.weights.tensor import Tensor
from quartet_inference.vllm.staging import Staging
from safetensors.numpy import load_file

SIZE = 1 << 16
TENSORS = {"w": Tensor("U8", (SIZE,), bytes(range(256)) * (SIZE // 256))}

Write = Callable[[Staging], Any]


def version(staging: Staging) -> Any:
    return staging.write(TENSORS)


def adapter(staging: Staging) -> Any:
    return staging.write_adapter("{}", TENSORS, 1)


def weights_in(staged: Any) -> Path:
    path: Path = staged.path
    return path / "adapter_model.safetensors" if path.is_dir() else path


@contextmanager
def files_end_at(limit: int) -> Iterator[None]:
    """No file of this process grows beyond it: as on a full disk, writing fails half-way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The one that is asked for, and the temporary one."""
    wanted, temporary = tmp_path / "wanted", tmp_path / "temporary"
    wanted.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return wanted, temporary


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() or path.suffix == ".adapter"]


@pytest.mark.parametrize("write", [version, adapter])
def test_what_is_staged_is_where_it_was_asked_for_until_nobody_has_it(
    folders: tuple[Path, Path], write: Write
) -> None:
    staging = Staging(folders[0])
    staged = write(staging)
    assert weights_in(staged).is_relative_to(folders[0])
    assert load_file(weights_in(staged))["w"].tobytes() == TENSORS["w"].data
    del staged
    gc.collect()
    assert not files(folders[0])
    staging.close()
    assert not list(folders[0].iterdir())


@pytest.mark.parametrize("write", [version, adapter])
def test_a_folder_that_is_full_by_now_is_passed_over(
    folders: tuple[Path, Path], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = os.write

    def full(descriptor: int, data: Any) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(folders[0])):
            raise OSError(errno.ENOSPC, "No space left on device")
        return writing(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    staging = Staging(folders[0])
    staged = write(staging)
    assert weights_in(staged).is_relative_to(folders[1])
    assert load_file(weights_in(staged))["w"].tobytes() == TENSORS["w"].data
    assert not files(folders[0])


@pytest.mark.parametrize("write", [version, adapter])
def test_where_no_folder_takes_it_it_is_refused_and_nothing_is_left(
    folders: tuple[Path, Path], write: Write
) -> None:
    staging = Staging(folders[0])
    with files_end_at(SIZE // 2), pytest.raises(QuartetError, match="found no room") as refused:
        write(staging)
    assert refused.value.reason == "INTERNAL"
    assert all(str(folder) in refused.value.message for folder in folders)
    assert not files(folders[0]) and not files(folders[1])
    staged = write(staging)
    assert load_file(weights_in(staged))["w"].tobytes() == TENSORS["w"].data


def test_a_folder_that_is_not_there_is_passed_over(folders: tuple[Path, Path]) -> None:
    staging = Staging(folders[0] / "missing")
    staged = version(staging)
    assert weights_in(staged).is_relative_to(folders[1])


def test_what_a_killed_engine_has_left_behind_is_removed_and_nothing_else(folders: tuple[Path, Path]) -> None:
    """Invariant 9: it may be as large as the model, and in memory."""
    living = Staging(folders[0])
    staged = version(living)
    code = (
        "import os, signal, sys; from pathlib import Path; from quartet.weights.tensor import Tensor\n"
        "from quartet_inference.vllm.staging import Staging\n"
        "staging = Staging(Path(sys.argv[1])); staged = staging.write({'w': Tensor('U8', (4,), b'left')})\n"
        "print(staged.path, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", code, str(folders[0])]
    left = Path(subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip())
    assert left.read_bytes().endswith(b"left")
    Staging(folders[0])
    assert not left.parent.exists()
    assert load_file(weights_in(staged))["w"].tobytes() == TENSORS["w"].data
