"""run_tables.py: what services get because of the run that they are started for."""

from __future__ import annotations

from typing import Any

import pytest
from quartet.cli.run_tables import tables_of
from quartet.config import ConfigError
from quartet.run.config import RunConfig, parse_run

RUN = 'model = "m"\n[[env]]\nid = "e"\nargs = { k = 1 }\n'


def run(*tables: str) -> RunConfig:
    return parse_run(RUN + "\n".join(tables))


def test_the_run_says_what_its_tables_leave_out() -> None:
    """Promise 1."""
    tables = tables_of(run("[eval]\nnum_examples = 0"))
    assert tables["envhost"] == {"preload": [{"id": "e", "args": {"k": 1}}]}
    assert tables["trainer"] == {} and tables["inference"] == {}
    assert tables_of(run("[trainer]\nmax_states = 5"))["trainer"] == {"max_states": 5}
    foreign = tables_of(parse_run("external_trainer = true\n" + RUN))
    assert "trainer" not in foreign and foreign["inference"] == {"accept_push": True}


@pytest.mark.parametrize(
    ("inference", "gets"),
    [
        ('engine = "vllm"', {"max_lora_rank": 16}),
        ('engine = "vllm"\nvllm = { max_lora_rank = 64, threads = 2 }', {"max_lora_rank": 64, "threads": 2}),
        ("vllm = { threads = 2 }", {"threads": 2}),
    ],
)
def test_vllm_has_room_for_the_adapter(inference: str, gets: dict[str, Any]) -> None:
    """Promise 1."""
    adapter = run("[lora]\nenabled = true\nr = 16", f"[inference]\n{inference}")
    assert tables_of(adapter)["inference"]["vllm"] == gets
    merged = run('[lora]\nenabled = true\npublish = "merged"', '[inference]\nengine = "vllm"')
    assert "vllm" not in tables_of(merged)["inference"]


def rounded(keys: str, inference: str = "", lora: str = "enabled = true") -> dict[str, Any]:
    tables = (f"[lora]\n{lora}", f"[inference]\n{inference}")
    return tables_of(parse_run(f"{keys}\n{RUN}" + "\n".join(tables)))["inference"]


@pytest.mark.parametrize("keys", ['served_dtype = "bfloat16"', 'compute_dtype = "bfloat16"'])
def test_the_replica_rounds_the_base_as_the_trainer_does(keys: str) -> None:
    """Promises 1 and 2."""
    assert rounded(keys) == {"embedded": {"dtype": "bfloat16"}}
    told = rounded(keys, 'embedded = { dtype = "auto", threads = 2 }')
    assert told == {"embedded": {"dtype": "bfloat16", "threads": 2}}
    assert rounded(keys, 'engine = "vllm"')["vllm"]["dtype"] == "bfloat16"
    refused = rf'{keys} rounds .* inference.embedded.dtype = "float32" does not; set served_dtype = "float32"'
    with pytest.raises(ConfigError, match=refused):
        rounded(keys, 'embedded = { dtype = "float32" }')
    # A whole model's versions bring what the replica holds.
    assert rounded(keys, lora='enabled = true\npublish = "merged"') == {}
    assert rounded('compute_dtype = "bfloat16"\nserved_dtype = "float32"') == {}


def test_what_a_table_says_against_the_run_is_refused() -> None:
    """Promise 2."""
    with pytest.raises(ConfigError, match=r"trainer.keep_last = 5 is for runs that do not say it, and this"):
        tables_of(run("[trainer]\nkeep_last = 5"))
    with pytest.raises(ConfigError, match=r"set trainer.gradient_checkpointing = true, or remove it"):
        tables_of(run("[trainer]\nkeep-attention = true"))
    assert tables_of(run("[trainer]\nkeep_attention = true\ngradient-checkpointing = true"))["trainer"]
    small = '[inference]\nengine = "vllm"\nvllm = { max_lora_rank = 8 }'
    with pytest.raises(ConfigError, match=r"lora.r = 16 is above inference.vllm.max_lora_rank = 8"):
        tables_of(run("[lora]\nenabled = true\nr = 16", small))
    own = '[algorithm]\nloss = "custom"\ncustom = "mine"'
    with pytest.raises(ConfigError, match=r"'mine' is none of trainer.losses; give trainer.losses.mine"):
        tables_of(run(own))
    given = tables_of(run(own, '[trainer.losses]\nmine = "package.module:function"'))
    assert given["trainer"]["losses"] == {"mine": "package.module:function"}
    own = '[algorithm]\nadvantage = "custom"\ncustom_advantage = "mine"'
    with pytest.raises(ConfigError, match=r"'mine' is none of orchestrator.advantages; give"):
        tables_of(run(own))
    given = tables_of(run(own, '[orchestrator.advantages]\nmine = "package.module:function"'))
    assert given["orchestrator"]["advantages"] == {"mine": "package.module:function"}
