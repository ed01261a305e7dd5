"""How much a manifest may describe, and what of it is checked."""

from __future__ import annotations

import pytest
from quartet.errors import QuartetError
from quartet.exported.manifest import MAX_FILES, MAX_MODEL_BYTES, MAX_PATH_BYTES, check_manifest, digest_of
from quartet.v1 import model_pb2 as mpb


def of_sizes(*sizes: int, digest_bytes: int = 16) -> mpb.ModelManifest:
    """Consistent in itself."""
    files = [
        mpb.ModelFile(path=f"{number:05}", size_bytes=size, digest=b"x" * digest_bytes)
        for number, size in enumerate(sizes)
    ]
    return mpb.ModelManifest(run_id="r", state="final", files=files, digest=digest_of(files))


def of_names(*paths: str) -> mpb.ModelManifest:
    """Of empty files, in this order."""
    files = [mpb.ModelFile(path=path, digest=b"x" * 16) for path in paths]
    return mpb.ModelManifest(files=files, digest=digest_of(files))


def test_a_manifest_is_bounded_and_up_to_its_bounds_it_is_taken() -> None:
    """manifest.py 1: each with a digest of the whole that is right."""
    half = MAX_MODEL_BYTES // 2
    for sizes in ((0,) * MAX_FILES, (half, half), (0,), (1,)):
        check_manifest(of_sizes(*sizes))
    check_manifest(of_names("m" * MAX_PATH_BYTES))
    check_manifest(of_names("a", "a.b", "ab/c", "abc"))
    for bad, what in (
        (of_sizes(*(0,) * (MAX_FILES + 1)), f"a model of {MAX_FILES + 1} files"),
        (of_sizes(half, half, 1), f"files and {MAX_MODEL_BYTES + 1} bytes"),
        (of_sizes(), "a model of 0 files"),
        (of_sizes(1, digest_bytes=15), "a file's digest"),
    ):
        with pytest.raises(QuartetError, match=what) as raised:
            check_manifest(bad)
        assert raised.value.reason == "CHECKSUM_MISMATCH" and what in raised.value.metadata["what"]
    bad = of_sizes(1, 1)
    bad.files[1].digest = b""
    bad.digest = digest_of(bad.files)
    with pytest.raises(QuartetError, match="a file's digest"):
        check_manifest(bad)
