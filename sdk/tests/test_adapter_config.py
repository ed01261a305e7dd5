"""What an adapter's configuration says beside its tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from quartet.adapter_config import PLAIN, SETTINGS, WEIGHTS, adapter_config_of, read_adapter_config

GIVEN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "use_rslora": False}


def test_rank_scale_and_modules_are_read() -> None:
    plain = read_adapter_config(json.dumps(GIVEN))
    assert (plain.rank, plain.alpha, plain.rslora, plain.scale) == (4, 8.0, False, 2.0)
    assert (plain.target_modules, plain.modules_to_save, plain.beyond) == (("q_proj",), (), {})
    root = read_adapter_config(json.dumps({**GIVEN, "use_rslora": True, "modules_to_save": ["lm_head"]}))
    assert (root.scale, root.modules_to_save) == (4.0, ("lm_head",))
    assert read_adapter_config(json.dumps({**GIVEN, "target_modules": "q_.*"})).target_modules is None


def test_stacked_experts_are_told() -> None:
    named = ["experts.down_proj", "experts.gate_up_proj"]
    found = read_adapter_config(json.dumps({**GIVEN, "target_parameters": named}))
    assert (found.target_parameters, found.beyond) == (tuple(named), {})
    assert read_adapter_config(json.dumps({**GIVEN, "target_parameters": None})).target_parameters == ()


@pytest.mark.parametrize(
    ("wanted", "alike"),
    [
        (["experts"], True),
        (["down_proj", "mlp.experts.gate_up_proj"], True),
        (["experts.down_proj"], False),
        (["experts", "up_proj"], False),
        ([], False),
    ],
)
def test_stacks_of_experts_are_compared_by_parts_of_their_names(wanted: list[str], alike: bool) -> None:
    named = ["experts.down_proj", "experts.gate_up_proj"]
    held = read_adapter_config(json.dumps({**GIVEN, "target_parameters": named}))
    assert (held.unlike(4, 8.0, False, (), wanted) == {}) == alike
    short = read_adapter_config(json.dumps({**GIVEN, "target_parameters": ["gate_up_proj"]}))
    assert (short.unlike(4, 8.0, False, (), wanted) == {}) == bool(wanted)


def test_what_a_run_says_otherwise_is_told_with_both() -> None:
    """adapter_config.py 3: whatever the order of modules, and however often one is named."""
    held = read_adapter_config(json.dumps({**GIVEN, "modules_to_save": ["norm", "lm_head"]}))
    assert held.unlike(4, 8.0, False, ("lm_head", "norm", "norm"), ()) == {}
    assert held.unlike(2, 8.5, True, ("norm",), ("experts",)) == {
        "rank": (2, 4),
        "alpha": (8.5, 8.0),
        "rslora": (True, False),
        "modules_to_save": (["norm"], ["lm_head", "norm"]),
        "target_parameters": (["experts"], []),
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "DORA"),
        ("use_dora", True),
        ("bias", "all"),
        ("init_lora_weights", "pissa"),
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"q_proj": 2}),
        ("layer_replication", [[0, 2]]),
    ],
)
def test_what_computes_otherwise_is_told_by_its_name(key: str, value: object) -> None:
    """adapter_config.py 1 and 2."""
    assert read_adapter_config(json.dumps({**GIVEN, key: value})).beyond == {key: value}


def test_what_changes_nothing_is_not_told() -> None:
    for key, values in PLAIN.items():
        for value in values:
            assert not read_adapter_config(json.dumps({**GIVEN, key: value})).beyond, key


def test_another_kind_of_adapter_is_told_by_its_name() -> None:
    assert read_adapter_config('{"peft_type": "IA3"}').beyond == {"peft_type": "IA3"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"r": "x", "lora_alpha": 1}', '{"r": 0, "lora_alpha": 1}'])
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="adapter_config"):
        read_adapter_config(text)


@pytest.mark.parametrize("below", ["checkpoint/adapter", "adapter"])
def test_the_adapter_of_an_output_folder_is_pointed_at(tmp_path: Path, below: str) -> None:
    (tmp_path / below).mkdir(parents=True)
    (tmp_path / below / SETTINGS).write_text(json.dumps(GIVEN))
    with pytest.raises(ValueError, match=f"has no {SETTINGS}; name '{tmp_path / below}', which has one"):
        adapter_config_of(tmp_path)


def test_a_folder_has_both_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"has no {SETTINGS}"):
        adapter_config_of(tmp_path)
    (tmp_path / SETTINGS).write_text(json.dumps(GIVEN))
    with pytest.raises(ValueError, match=f"has no {WEIGHTS}; save the adapter with save_pretrained"):
        adapter_config_of(tmp_path)
    (tmp_path / WEIGHTS).touch()
    assert adapter_config_of(tmp_path).rank == 4
    (tmp_path / SETTINGS).write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config is not peft's.*; name a folder"):
        adapter_config_of(tmp_path)
