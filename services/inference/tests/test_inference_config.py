"""What whoever served a model by vLLM's own command is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from quartet.config import ConfigError
from quartet.config.load import load
from quartet_inference.config import SERVED_BY_VLLM, InferenceConfig, VllmConfig


def test_a_command_line_of_vllm_is_refused_with_what_to_write(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    theirs = ["--data-parallel-size", "6", "--enforce-eager", "--disable-log-requests", "--port", "8000"]
    with pytest.raises(ConfigError) as caught:
        load(InferenceConfig, ["--model", str(tmp_path), *theirs])
    assert str(caught.value).split("\n  also: ") == [
        "unknown key 'data_parallel_size'; it is vllm.args.data_parallel_size here, with engine = \"vllm\"",
        "unknown key 'enforce_eager'; it is vllm.args.enforce_eager here, with engine = \"vllm\"",
        "unknown key 'disable_log_requests'; no request is logged; remove it",
        "unknown key 'port'; give openai.address (host:port) for the OpenAI-compatible front",
    ]


def test_what_is_named_instead_is_taken() -> None:
    for remedy in SERVED_BY_VLLM.values():
        if remedy.startswith("it is vllm.args."):
            VllmConfig(args={remedy.split()[2].removeprefix("vllm.args."): 1})
