"""Keys stay here: promises of quartet.cli.elsewhere.withheld."""

from __future__ import annotations

from pathlib import Path

import pytest
from quartet.cli.elsewhere.withheld import WITHHELD, withheld
from quartet.cli.wandb.place import WeightsAndBiases
from quartet.run.wandb import WandbConfig
from quartet.v1.orchestrator_service_pb2 import Run

CONFIG = """
model = "m"
[sampling]
max_tokens = 7
[[env]]
id = "judged"
[env.args]
judge_api_key = "sk-1"
api_key_var = "JUDGE_API_KEY"
headers = [{ token = "sk-2" }]
"""


def test_a_plan_has_no_key(tmp_path: Path) -> None:
    """withheld.py 1 and 2: what is written beside the run, and told."""
    run = Run(run_id="r", submitted_at_ms=1, config_toml=CONFIG)
    told = WeightsAndBiases(WandbConfig(project="p")).plan(tmp_path, run, here=True).config
    assert "sk-" not in repr(told)
    args = {"judge_api_key": WITHHELD, "api_key_var": "JUDGE_API_KEY", "headers": [{"token": WITHHELD}]}
    env = {"id": "judged", "args": args}
    assert told == {"run_id": "r", "model": "m", "sampling": {"max_tokens": 7}, "env": [env]}


@pytest.mark.parametrize(
    "name",
    [
        *("api_key", "OPENAI_API_KEY", "apiKey", "judge_api_keys", "aws_secret_access_key", "hf_token"),
        *("db-password", "passwords", "secret", "authToken", "clientSecret", "Authorization"),
    ],
)
def test_a_secret_is_known_by_its_name(name: str) -> None:
    """withheld.py 1."""
    assert withheld({name: "x"}) == {name: WITHHELD}
    assert withheld({name: ["x"]}) == {name: [WITHHELD]}
    assert withheld({name: {"judge": "x", "calls": 5}}) == {name: {"judge": WITHHELD, "calls": 5}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("api_key_var", "A"),
        ("max_tokens", 5),
        ("stop_token", 3),
        ("tokenizer", "t"),
        ("stop_tokens", ["</s>"]),
        ("answer_key", "b"),
        ("token", ""),
    ],
)
def test_other_settings_are_told(name: str, value: object) -> None:
    """withheld.py 2."""
    assert withheld({name: value}) == {name: value}
