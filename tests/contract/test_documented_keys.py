"""Every key of every configuration is named in README.md or docs/, and `--help` has its default."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from pydantic_core import PydanticUndefined
from quartet.cli.eval.config import EvalFileConfig
from quartet.cli.gepa.config import GepaConfig
from quartet.config import Config
from quartet.config.described import described
from quartet.config.keys import known_keys
from quartet.run.config import RunConfig
from quartet.run.evaluation import EvaluateConfig
from quartet.run.presets import PRESETS
from quartet.run.sft import SftConfig
from quartet_envhost.config import EnvHostConfig
from quartet_inference.config import InferenceConfig
from quartet_orchestrator.config import OrchestratorConfig
from quartet_tinker.config import GatewayConfig
from quartet_trainer.config import TrainerConfig

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = (
    *(RunConfig, EvaluateConfig, SftConfig, EvalFileConfig, GepaConfig),
    *(TrainerConfig, OrchestratorConfig, InferenceConfig, EnvHostConfig, GatewayConfig),
)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_key_is_in_a_document(config: type[Config]) -> None:
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    words = set(re.findall(r"\w+", "\n".join(page.read_text() for page in pages)))
    assert [key for key in known_keys(config) if key.rpartition(".")[2] not in words] == []


def test_every_preset_is_in_the_table_of_them_with_its_credit_and_loss() -> None:
    page = (REPOSITORY / "docs/algorithms.md").read_text()
    table = page[page.index("## Presets") : page.index("## Keys")]
    rows = {name: rest for name, rest in re.findall(r"^\| `(\w+)` \| (.*)$", table, re.MULTILINE)}
    assert list(rows) == list(PRESETS)
    for name, values in PRESETS.items():
        credit, loss, *_ = rows[name].split(" | ")
        assert credit == f"`{values['advantage']}`"
        assert loss.startswith(f"`{values['loss']}`")
        assert (" of sequences" in loss) == (values.get("ratio_level") == "sequence"), name


@pytest.mark.parametrize("config", CONFIGS)
def test_help_has_defaults_as_a_file_has_them(config: type[Config]) -> None:
    shown = [re.fullmatch(r"  ([\w.]+)(?: = (.*?))?(?:    \(.*\))?", line) for line in described(config)]
    defaults = {line[1]: line[2] for line in shown if line is not None}
    assert defaults.keys() == known_keys(config).keys()
    for key, (owner, name) in known_keys(config).items():
        default = owner.model_fields[name].get_default(call_default_factory=True, validated_data={})
        read = tomllib.loads(f"value = {defaults[key]}")["value"] if defaults[key] else None
        if default is None or default is PydanticUndefined:
            assert read is None, key
        else:
            assert read == TypeAdapter(Any).dump_python(default, mode="json"), key
