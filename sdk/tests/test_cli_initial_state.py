"""Which state of another run a run begins with, and what is refused of it before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from planned_runs import accepted, planned
from quartet.cli import rl
from quartet.cli.initial_state import state_path
from quartet.config import ConfigError
from quartet.run.config import RunConfig


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
    with pytest.raises(ConfigError, match=r"'.*frist' is no folder; did you mean '.*first'"):
        state_path("frist")


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
