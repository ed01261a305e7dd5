"""What a run takes from the adapter that it begins with, and what it needs of that when it goes on."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from adapter_files import matrices, model, weights
from planned_runs import accepted, planned
from quartet.adapter_config import SETTINGS, WEIGHTS
from quartet.cli import rl
from quartet.cli.initial_adapter import with_adapter
from quartet.cli.sft.place import begun_lora, taken
from quartet.config import ConfigError
from quartet.run.config import RunConfig, parse_run
from quartet.run.lora import LoraConfig, lora_spec
from quartet.run.sft import SftConfig


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return written(tmp_path / "adapter")


def written(folder: Path, **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    given = {"peft_type": "LORA", "r": 8, "lora_alpha": 12, "target_modules": ["v_proj", "q_proj"], **more}
    (folder / SETTINGS).write_text(json.dumps(given))
    weights(folder / WEIGHTS, matrices(given["target_modules"], given["r"]))
    return folder


def table(adapter: Path | str, **more: Any) -> LoraConfig:
    return LoraConfig(enabled=True, initial_adapter=str(adapter), **more)


def test_what_is_left_out_is_the_adapters_and_what_is_said_stays(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """initial_adapter.py 1."""
    monkeypatch.chdir(adapter.parent)
    found = with_adapter(table("adapter"), None)
    assert (found.r, found.alpha, found.target_modules) == (8, 12.0, ("v_proj", "q_proj"))
    assert found.initial_adapter == str(adapter)
    spec = lora_spec(found)
    assert spec is not None and (spec.rank, spec.initial_adapter) == (8, str(adapter))
    said = with_adapter(table(adapter, r=16, target_modules=["o_proj"]), None)
    assert (said.r, said.alpha, said.target_modules) == (16, 12.0, ("o_proj",)), "the trainer refuses it"
    written(adapter, target_modules="q_.*", use_rslora=True)
    pattern = with_adapter(table(adapter), None)
    assert pattern.target_modules == () and pattern.use_rslora


def test_without_one_nothing_is_looked_for() -> None:
    for lora in (LoraConfig(), LoraConfig(enabled=True)):
        assert with_adapter(lora, None) == lora


def test_one_that_is_not_trained_is_refused() -> None:
    with pytest.raises(ValueError, match="is where an adapter begins, and enabled = false trains none"):
        LoraConfig(enabled=False, initial_adapter="x")


def test_what_cannot_be_used_is_refused_by_its_key(adapter: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora\.initial_adapter = '/nowhere' is refused: .* has no"):
        with_adapter(table("/nowhere"), None)
    written(adapter, modules_to_save=["lm_head"])
    with pytest.raises(ConfigError, match=r"\['lm_head'\], which are no part of a served adapter; set"):
        with_adapter(table(adapter), None)
    assert with_adapter(table(adapter, publish="merged"), None).modules_to_save == ("lm_head",)


def test_a_run_that_goes_on_needs_it_no_more(
    adapter: Path, tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """initial_adapter.py 2: nor does what it says now count."""
    base = model(tmp_path / "model")
    monkeypatch.setattr(rl, "model_path", lambda _: str(base))
    monkeypatch.setattr(rl, "with_interpreters", lambda envhost, _: envhost)
    asked, folder = config.model_copy(update={"lora": table(adapter)}), tmp_path / "run"
    with accepted(rl.prepared(asked, folder, resume=False, overwrite=False)):
        pass
    text = json.loads((folder / "run.json").read_text())["config_toml"]
    assert parse_run(text).lora.r == 8, "it is written down"
    written(adapter, r=4)
    assert rl.prepared(asked, folder, resume=True, overwrite=False).resumed
    shutil.rmtree(adapter)
    assert rl.prepared(asked, folder, resume=True, overwrite=False).resumed
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json"):
        rl.prepared(asked, tmp_path / "new", resume=False, overwrite=False)
    other = config.model_copy(update={"lora": table(tmp_path / "other")})
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json"):
        rl.prepared(other, folder, resume=True, overwrite=False)


def test_whatever_is_refused_of_a_run_is_told_together(
    adapter: Path, tmp_path: Path, config: RunConfig
) -> None:
    """rl.py 1. Of a run that goes on it is not told that it began otherwise: that nobody knows."""
    lacking = {"model": str(tmp_path / "model"), "lora": table("/nowhere")}
    asked, folder = config.model_copy(update=lacking), tmp_path / "run"
    (tmp_path / "model").mkdir()
    with accepted(planned(config, folder)):
        pass
    model, of_adapter = r"^model = '.*' has no config\.json", r"lora\.initial_adapter = '/nowhere' is refused"
    taken_already = "output folder .* is not empty; add --resume"
    for resume, told in ((False, (model, of_adapter, taken_already)), (True, (model, of_adapter))):
        with pytest.raises(ConfigError) as caught:
            rl.prepared(asked, folder, resume=resume, overwrite=False)
        assert len(caught.value.each) == len(told), caught.value
        for one, why in zip(caught.value.each, told, strict=True):
            assert re.search(why, str(one)), one


def test_nor_does_a_fine_tuning(adapter: Path, tmp_path: Path) -> None:
    """initial_adapter.py 2."""
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    config = SftConfig(model="m", data=data, lora=with_adapter(table(adapter), None))
    output = tmp_path / "sft"
    assert begun_lora(output) is None
    with taken(output, config, resume=False):
        pass
    shutil.rmtree(adapter)
    again = config.model_copy(update={"lora": with_adapter(table(adapter), begun_lora(output))})
    assert again.lora == config.lora
    with taken(output, again, resume=True):
        pass


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            'initial_optimizer = "fresh"',
            'initial_optimizer = "fresh" is about initial_state, which is not set',
        ),
        (
            'initial_state = "/s"\nlora = { enabled = true, initial_adapter = "/a" }',
            "initial_state and lora.initial_adapter both say what the adapter begins with; remove one",
        ),
        ('initial_optimizer = "none"', "initial_optimizer = 'none'"),
        ('external_trainer = true\ninitial_state = "/s"\ninitial_optimizer = "fresh"', "initial_optimizer"),
    ],
)
def test_what_a_run_cannot_begin_with_is_refused(lines: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_run(f'model = "m"\n{lines}\n[[env]]\nid = "e"\n')
    assert said in str(refused.value)
