"""quartet.kit.processor: which processors OpenBLAS is told about."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from quartet.kit.processor import choose_numpy_kernels

AVX512 = "fpu avx2 avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni"


def cpuinfo(folder: Path, vendor: str, flags: str) -> Path:
    """A machine of two processors."""
    one = f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\n\n"
    file = folder / "cpuinfo"
    file.write_text(one + one.replace("avx512f", "none"))
    return file


@pytest.mark.parametrize(
    ("vendor", "flags", "told"),
    [
        ("AuthenticAMD", AVX512, "SkylakeX"),
        ("AuthenticAMD", AVX512.replace("avx512vl ", ""), None),
        ("AuthenticAMD", "fpu avx2", None),
        ("GenuineIntel", AVX512, None),
    ],
)
def test_only_amd_s_with_avx512_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str, flags: str, told: str | None
) -> None:
    environ = environment(monkeypatch)
    choose_numpy_kernels(cpuinfo(tmp_path, vendor, flags))
    assert environ.get("OPENBLAS_CORETYPE") == told
    environ["OPENBLAS_CORETYPE"] = "Zen"
    choose_numpy_kernels(cpuinfo(tmp_path, vendor, flags))
    assert environ["OPENBLAS_CORETYPE"] == "Zen", "what somebody chose stays"


def test_a_system_that_does_not_say_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = environment(monkeypatch)
    choose_numpy_kernels(tmp_path / "none")
    assert not environ


def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An empty one in place of this process's: kernels that the processor lacks would end its children."""
    environ: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environ)
    return environ
