"""Which interpreter has an environment, and what is said where none has."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from quartet.cli.env import installed
from quartet.cli.env.installed import with_interpreters
from quartet.config import ConfigError

HERE = {"python": sys.executable}


def test_environments_are_looked_for_in_the_interpreter_that_is_named() -> None:
    assert with_interpreters(HERE, ["owner/json@1.0"]) == HERE
    with pytest.raises(ConfigError, match=f"no package 'no_such_env' in {sys.executable}; give it"):
        with_interpreters(HERE, ["no-such-env"])
    with pytest.raises(ConfigError, match="the interpreter '/no/python' cannot be run: No such file"):
        with_interpreters({"python": "/no/python"}, ["json"])


def test_an_interpreter_that_says_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 30\n")
    silent.chmod(0o755)
    monkeypatch.setattr(installed, "FIND_SECONDS", 0.1)
    with pytest.raises(ConfigError, match="said nothing for"):
        with_interpreters({"python": str(silent)}, ["json"])


@pytest.mark.parametrize("table", [{"python": 3}, {"environments": {"json": {"python": True}}}])
def test_what_is_no_path_is_left_to_the_host_to_refuse(table: dict[str, Any]) -> None:
    assert with_interpreters(table, ["json"]) == table


def test_an_entry_of_another_spelling_is_the_environments_own() -> None:
    table = {"workers": 2, "environments": {"owner/Json": {"python": sys.executable, "workers": 3}}}
    assert with_interpreters(table, ["json"]) == table


def test_where_nothing_is_said_the_first_interpreter_that_has_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "empty").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "empty").chmod(0o755)
    monkeypatch.setattr(installed, "ENVIRONMENTS_PYTHON", "bin/empty")
    assert with_interpreters({}, ["json"]) == {"environments": {"json": {"python": sys.executable}}}
    own = installed.own_python("json")
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    entries = with_interpreters({"environments": {"json": {"workers": 2}}}, ["json"])["environments"]
    assert entries == {"json": {"workers": 2, "python": str(own.absolute())}}
    with pytest.raises(ConfigError, match=r"'no_such_env' in bin/empty, .*python; give it an interpreter"):
        with_interpreters({}, ["no-such-env"])


def test_the_interpreter_of_another_environment_may_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `quartet env install --into` one of them leaves it, and `quartet env list` shows it."""
    monkeypatch.chdir(tmp_path)
    other = installed.own_python("another")
    other.parent.mkdir(parents=True)
    other.symlink_to(sys.executable)
    assert installed.interpreter_of("json") == str(other)
    (tmp_path / "environments" / "mine").mkdir(parents=True)
    (tmp_path / "environments" / "mine" / "pyproject.toml").touch()
    with pytest.raises(ConfigError, match=r"give it an interpreter: quartet env install environments/mine$"):
        installed.interpreter_of("mine")


def test_an_unknown_environment_is_refused_with_what_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "environments" / "reverse_vowels").mkdir(parents=True)
    (tmp_path / "environments" / "reverse_vowels" / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    for wanted, remedy in (
        ("reverse-vowels", r"-m pip install -e environments/reverse_vowels$"),
        ("reverse-vowel", r"did you mean 'reverse-vowels'\?$"),
        (
            "quite-another",
            r"quartet env install FOLDER_OR_NAME, or .*--envhost\.python PATH; known here: .*reverse-vowels",
        ),
    ):
        with pytest.raises(ConfigError, match=remedy):
            with_interpreters(HERE, [wanted])


def test_an_environment_of_the_other_interpreter_is_pointed_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "python"
    monkeypatch.setattr(installed, "ENVIRONMENTS_PYTHON", str(other))
    other.symlink_to(sys.executable)
    (tmp_path / "empty").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "empty").chmod(0o755)
    remedy = f"has it: name no envhost.python, or add --envhost.python {re.escape(str(other))}"
    with pytest.raises(ConfigError, match=remedy):
        with_interpreters({"python": str(tmp_path / "empty")}, ["json"])
    own = installed.own_python("json")
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    with pytest.raises(ConfigError, match=f"{re.escape(str(own))} has it: name no"):
        with_interpreters({"python": str(tmp_path / "empty")}, ["json"])


def test_a_project_in_this_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_project" / "some_project").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no package 'some_project'"):
        with_interpreters(HERE, ["some-project"])


def test_what_is_built_into_the_host_is_in_every_interpreter(tmp_path: Path, monkeypatch: Any) -> None:
    """installed.py 3: nobody looks for a package of it; and a host that runs others has it beside them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(installed, "run_in", lambda *given: pytest.fail(f"{given} was asked"))
    for env_id in ("reward-service", "owner/Reward-Service@1.0"):
        assert with_interpreters({}, [env_id]) == {"environments": {env_id: {}}}
        assert with_interpreters(HERE, [env_id]) == HERE
        assert installed.python_of({}, env_id) == installed.interpreter_of(env_id) == sys.executable
        assert installed.python_of({"python": "/other"}, env_id) == "/other"
    own = {"environments": {"reward_service": {"python": "/its/own", "workers": 2}}}
    assert with_interpreters(own, ["reward-service"]) == own
    assert installed.python_of(own, "reward-service") == "/its/own"
