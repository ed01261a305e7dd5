"""Which state of another run a run begins with, and what is refused of it before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from planned_runs import accepted, planned
from quartet.cli import rl
from quartet.cli.initial_state import state_path, with_beginning
from quartet.config import ConfigError
from quartet.run.config import RunConfig
from quartet.run.lora import LoraConfig


def saved(states: Path, *names: str, whole: bool = True) -> None:
    for name in names:
        (states / name).mkdir(parents=True)
        if whole:
            (states / name / "COMPLETE.json").touch()


def test_it_is_the_newest_of_an_output_folder_or_the_one_that_is_named(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with accepted(planned(config, tmp_path / "first")):
        pass
    states = tmp_path / "first" / "data" / "trainer" / "first"
    states.mkdir(parents=True)
    with pytest.raises(ConfigError, match="initial_state = 'first' has no saved state"):
        monkeypatch.chdir(tmp_path)
        state_path("first")
    saved(states, "state-1@9", "state-0@31", "state-1@20")
    saved(states, "@writing-state-0@90", "closed@42", whole=False)
    assert state_path("first") == str(states / "state-0@31"), "by the calls, whole ones alone"
    assert state_path(str(states)) == str(states / "state-0@31")
    assert state_path("first/data/trainer/first/state-1@9") == str(states / "state-1@9")
    refused = r"initial_state = 'frist' is refused: '.*frist' is no folder; did you mean '.*first'"
    with pytest.raises(ConfigError, match=refused):
        state_path("frist")
    with pytest.raises(ConfigError, match=r"name the output folder of a run, or the folder of its states\Z"):
        state_path("no/where")


def test_a_run_that_goes_on_needs_no_more_what_it_began_with(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the trainer needs it no more once it has saved a state of the new run: docs/runs.md."""
    monkeypatch.chdir(tmp_path)
    with accepted(planned(config, tmp_path / "first")):
        pass
    states = tmp_path / "first" / "data" / "trainer" / "first"
    saved(states, "state-0@31")
    second = tmp_path / "second"
    with accepted(planned(config.model_copy(update={"initial_state": state_path("first")}), second)):
        pass
    saved(states, "state-1@62")  # the first one went on
    for named in ("first", str(states), str(states / "state-0@31")):
        assert state_path(named, second) == str(states / "state-0@31")
    assert state_path(str(states / "state-1@62"), second) == str(states / "state-1@62"), "another, refused"
    monkeypatch.setattr(rl, "model_path", lambda model: model)
    monkeypatch.setattr(rl, "with_interpreters", lambda envhost, _: envhost)
    asked = config.model_copy(update={"initial_state": "first"})
    assert rl.prepared(asked, second, resume=True, overwrite=False).resumed
    shutil.rmtree(tmp_path / "first")
    assert rl.prepared(asked, second, resume=True, overwrite=False).resumed
    assert state_path("first", second) == str(states / "state-0@31")
    with pytest.raises(ConfigError, match=r"'.*/first' is no folder"):
        state_path("first")
    with pytest.raises(ConfigError, match=r"'.*/first' is no folder"):
        state_path("first", tmp_path / "nothing")


LORA = {"rank": 4, "alpha": 12.0, "rslora": True, "target_modules": ["q_proj"], "modules_to_save": []}


def begins(
    config: RunConfig, state: Path, lora: dict[str, Any], held: dict[str, Any] | None = LORA, **said: Any
) -> RunConfig:
    """Of a state that holds that adapter."""
    if not state.exists():
        saved(state.parent, state.name)
    spec = {"lora": held, "optimizer": {"kind": "adamw"}}
    (state / "run.json").write_text(json.dumps({"spec": spec}))
    asked = {"initial_state": str(state), "lora": LoraConfig(**lora), **said}
    return with_beginning(config.model_copy(update=asked))


def test_what_lora_leaves_out_is_that_of_the_state(tmp_path: Path, config: RunConfig) -> None:
    """state_fit.py 1: and written down, so that a run that goes on needs the state no more."""
    state = tmp_path / "states" / "state-0@9"
    lora = begins(config, state, {"enabled": True, "dropout": 0.5}).lora
    assert (lora.r, lora.alpha, lora.use_rslora, lora.target_modules) == (4, 12.0, True, ("q_proj",))
    assert lora.dropout == 0.5
    asked = config.model_copy(update={"initial_state": str(state), "lora": LoraConfig(enabled=True)})
    with accepted(planned(with_beginning(asked), tmp_path / "second")):
        pass
    shutil.rmtree(state)
    assert with_beginning(asked, goes_on_in=tmp_path / "second").lora.r == 4


def test_what_the_state_has_beside_low_rank_matrices_is_published_merged(
    tmp_path: Path, config: RunConfig
) -> None:
    state, held = tmp_path / "state-0@9", LORA | {"target_parameters": ["experts"]}
    with pytest.raises(ConfigError, match=r"it has target_parameters, no part of a served adapter; set lora"):
        begins(config, state, {"enabled": True}, held)
    merged = begins(config, state, {"enabled": True, "publish": "merged"}, held).lora
    assert (merged.target_parameters, merged.r) == (("experts",), 4)


def test_what_does_not_fit_the_state_is_refused_together(tmp_path: Path, config: RunConfig) -> None:
    """state_fit.py 1 and 2."""
    state = tmp_path / "state-0@9"
    other = {"enabled": True, "r": 8, "alpha": 32.0, "use_rslora": False, "target_modules": ["v_proj"]}
    with pytest.raises(ConfigError) as caught:
        begins(config, state, other, optimizer="muon")
    assert len(caught.value.each) == 5
    assert f"lora.r = 8 is refused: the adapter in initial_state = '{state}' has 4;" in str(caught.value)
    assert 'its moments are those of adamw, and optimizer = "muon"; set optimizer to' in str(caught.value)
    same = {"enabled": True, "r": 4, "alpha": 12.0, "target_modules": ["self_attn.q_proj"]}
    fresh = begins(config, state, same, optimizer="muon", initial_optimizer="fresh")
    assert fresh.lora.target_modules == ("self_attn.q_proj",), (
        "other names of the same, for all that is known"
    )
    with pytest.raises(
        ConfigError, match=r"of an adapter \(r = 4\), and this run trains the whole model; set lo"
    ):
        begins(config, state, {})
    with pytest.raises(ConfigError, match=r"it is of a whole model, and lora\.enabled = true trains an"):
        begins(config, state, {"enabled": True}, held=None)
    assert not begins(config, state, {}, held=None).lora.enabled


def test_of_a_state_that_cannot_be_read_the_trainer_tells(tmp_path: Path, config: RunConfig) -> None:
    """state_fit.py 3."""
    saved(tmp_path, "state-0@9")
    asked = config.model_copy(update={"initial_state": str(tmp_path / "state-0@9")})
    assert with_beginning(asked).lora == config.lora
    (tmp_path / "state-0@9" / "run.json").write_text("[")
    assert with_beginning(asked).lora == config.lora
