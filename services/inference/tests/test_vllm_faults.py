"""faults.py: of what vLLM's processes log, the first fault is what ended them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from quartet_inference.vllm import faults


def test_the_first_fault_is_kept_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.FILE, "")
    monkeypatch.setattr(faults, "LOGGER", "vllm-of-this-test")
    logger = logging.getLogger("vllm-of-this-test.core")
    faults.keep(tmp_path / "fault")
    faults.write()
    assert faults.first() == ""
    logger.error("no exception")
    for error in (ValueError("heads of 7"), RuntimeError("the core failed")):
        try:
            raise error
        except Exception:
            logger.exception("failed")
    assert faults.first() == "ValueError: heads of 7"
    faults.forget()
    assert faults.first() == ""
    try:
        raise RuntimeError("Error raised in subprocess:\nTraceback ...\nModuleNotFoundError: No module 'x'\n")
    except RuntimeError:
        logger.exception("failed")
    assert faults.first() == "ModuleNotFoundError: No module 'x'"
    assert len(logging.getLogger("vllm-of-this-test").handlers) == 1


def test_where_nothing_is_kept_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(faults.FILE, raising=False)
    faults.write()
    assert faults.first() == ""
