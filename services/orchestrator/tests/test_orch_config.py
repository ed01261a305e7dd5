"""The orchestrator's configuration: what is refused before it begins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from quartet.config import ConfigError, load
from quartet_orchestrator.admission import refusal
from quartet_orchestrator.config import OrchestratorConfig

HOST = '--envhost-addresses=["127.0.0.1:1"]'


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "required key 'envhost_addresses' is not set"),
        (['--envhost-addresses=["x"]'], "envhost_addresses: address 'x' has no port; write host:port"),
        ([HOST, "--trainer-address=http://t:1"], "trainer_address: address 'http://t:1' is a URL"),
        ([HOST, "--trainer-address=t:1"], "trainer_address: address 't:1' is off loopback"),
        (
            [HOST, '--inference-addresses=["127.0.0.1:70000"]'],
            "inference_addresses: address '127.0.0.1:70000'",
        ),
    ],
)
def test_addresses_are_some(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(OrchestratorConfig, arguments)
    assert sentence in str(caught.value)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "quartet_orchestrator", HOST, f"--data-dir={tmp_path}/file"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: data_dir = '{tmp_path}/file' cannot be used")


def test_a_refused_value_is_said_as_toml_has_it() -> None:
    assert refusal("external_trainer", False, "x").message == "external_trainer = false is refused: x"
