"""Every key of every configuration is named in README.md or docs/, and `--help` has its default."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from quartet.cli.eval.config import EvalFileConfig
from quartet.cli.gepa.config import GepaConfig
from quartet.config import Config
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
def test_help_has_defaults_that_are_values(config: type[Config]) -> None:
    """A folder as it is written, and no PosixPath('outputs')."""
    for shown in filter(None, known_keys(config).values()):
        ast.literal_eval(shown)
