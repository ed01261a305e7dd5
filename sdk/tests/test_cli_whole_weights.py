"""What a download that was broken off has left of a model (quartet.cli.whole_weights)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from quartet.cli.job import model_path
from quartet.cli.whole_weights import INDEX, POINTER, WHOLE, lacking
from quartet.config import ConfigError
from quartet.weights.layout import header_of

PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def weights() -> bytes:
    header, _, size = header_of({"w": ("F32", (4,))})
    return header + bytes(size - len(header))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """In two parts, and whole."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).touch()
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": dict(zip("abc", (*PARTS, PARTS[0]), strict=True))})
    )
    for part in PARTS:
        (tmp_path / part).write_bytes(weights())
    return tmp_path


def test_a_model_that_is_not_whole_is_refused_by_its_first_part_that_is_not(model: Path) -> None:
    assert model_path(str(model)) == str(model)
    last, size = model / PARTS[1], len(weights())
    last.unlink()
    with pytest.raises(ConfigError, match=rf"has 1 of 2 parts, and no {PARTS[1]}; fetch it again \("):
        model_path(str(model))
    for there in (size - 1, 20):  # of the header, too
        last.write_bytes(weights()[:there])
        assert f"has {there} bytes of {PARTS[1]}, which are " in lacking(model)
    last.write_bytes(POINTER + b"/spec/v1\noid sha256:0\n")
    assert lacking(model).endswith("write 'git lfs pull' in its folder")
    (model / WHOLE).write_bytes(weights())
    assert not lacking(model), "what is not loaded is not looked at"


def test_what_else_is_wrong_is_said_by_who_loads_it(model: Path) -> None:
    for index in ("", "[]", '{"weight_map": [1]}', '{"weight_map": {"w": 1}}'):
        (model / INDEX).write_text(index)
        assert not lacking(model)
    prefix = (2).to_bytes(8, "little")
    for damaged in (b"", b"{}", prefix + b'{"', prefix + b"[]", b"\xff" * 9):
        (model / WHOLE).write_bytes(damaged)
        assert not lacking(model)
