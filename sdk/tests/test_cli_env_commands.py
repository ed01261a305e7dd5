"""`quartet env`: what is read of a package before it is installed, and what is refused."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from quartet.cli.__main__ import main
from quartet.cli.env import install as installing
from quartet.cli.env.arguments import CHECK_DEFAULTS
from quartet.cli.env.catalogue import catalogue, info_lines
from quartet.cli.env.checking import Played, played_lines, problems
from quartet.cli.env.conversation import conversation_lines
from quartet.cli.env.install import READ, _ours
from quartet.cli.env.installed import candidates
from quartet.cli.env.package import Package
from quartet.cli.env.package import package as asked_for
from quartet.cli.env.scaffold import KINDS, write_package
from quartet.config import ConfigError
from quartet.v1.envhost_service_pb2 import EnvironmentInfo
from quartet.v1.rollout_pb2 import FAILURE_KIND_SCORER, Rollout, RolloutFailure, Task

SOME_ENV = Package("some-env", ("some-env",))


def generation(folder: Path, source: str, needs: str) -> str:
    """What `install` reads of a package with this source and this requirement, whatever lies beside it."""
    package = folder / "some_env"
    package.mkdir(parents=True)
    (package / ".#edited.py").symlink_to("user@host.4711")  # the lock of an editor
    (package / "legacy.py").write_bytes(b"# -*- coding: latin-1 -*-\nNAME = '\xe9'\n")
    (package / "__init__.py").write_text(source)
    info = folder / "some_env-1.0.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: some-env", "Version: 1.0", f"Requires-Dist: {needs}", ""]
    (info / "METADATA").write_text("\n".join(lines))
    return subprocess.check_output(
        [sys.executable, "-c", READ, "some_env", "some-env"], cwd=folder, text=True
    ).strip()


@pytest.mark.parametrize(
    ("source", "needs", "wanted"),
    [
        ("import verifiers.v1 as vf", "verifiers", "v1"),
        ("import verifiers as vf\ndef load_environment(): ...", "verifiers>=0.1.9", "classic"),
        ("import verifiers as vf", "verifiers", "classic"),
        ("", "verifiers>=0.4.0,<0.5", "v1"),
        ("", "verifiers==0.3.1", "classic"),
        ("", "verifiers-extras>=0.4", "classic"),
    ],
)
def test_the_generation_of_a_package_is_read_from_it(
    tmp_path: Path, source: str, needs: str, wanted: str
) -> None:
    assert generation(tmp_path, source, needs) == wanted


def test_what_an_uninstall_left_behind_hides_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation(tmp_path, "", "verifiers>=0.4.0")
    (tmp_path / "left_behind-1.0.dist-info").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "some-env" in [one.name for one in catalogue([sys.executable])]


def test_a_name_that_is_none_or_is_taken_is_refused(tmp_path: Path) -> None:
    write_package("my-env", tmp_path)
    for name in ("My_Env", "1env", "a b", "../x"):
        with pytest.raises(ConfigError, match="is no name of a package"):
            write_package(name, tmp_path)
    with pytest.raises(ConfigError, match="exists; choose another name"):
        write_package("my_env", tmp_path)


def test_promise_2_an_interpreter_that_is_stopped_half_way_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    python = tmp_path / ".quartet/envs/some_env/bin/python"

    def create(folder: Path, **_: object) -> None:
        python.parent.mkdir()
        python.symlink_to(sys.executable)

    monkeypatch.setattr(installing.venv, "create", create)

    def stopped(*given: object) -> None:
        assert python.exists() and python not in [one.absolute() for one in candidates("some-env")]
        raise KeyboardInterrupt

    monkeypatch.setattr(installing, "_fill", stopped)
    with pytest.raises(KeyboardInterrupt):
        installing.install(SOME_ENV, None, None)
    assert [one.name for one in (tmp_path / ".quartet" / "envs").iterdir()] == [".replaced"]


#: A package that builds nothing.
BROKEN = """
[project]
name = "some-env"
version = "2.0"
[build-system]
requires = []
build-backend = "broken"
backend-path = ["."]
"""


def test_promise_3_an_install_that_fails_leaves_the_environment_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one lose it that was killed before."""
    monkeypatch.chdir(tmp_path)
    package, works = tmp_path / "some_env", tmp_path / ".quartet/envs/some_env/works"
    package.mkdir()
    (package / "pyproject.toml").write_text(BROKEN)
    (package / "broken.py").write_text("raise RuntimeError('no wheel of this')")
    works.mkdir(parents=True)
    with pytest.raises(ConfigError, match="cannot be installed"):
        installing.install(asked_for("some_env"), None, None)
    assert works.is_dir() and [one.name for one in works.parent.iterdir()] == ["works"]
    assert {one.name for one in works.parent.parent.iterdir()} == {"some_env", ".replaced"}

    made = installing.venv.create
    # With pip each takes seconds; here, too, nothing can be installed.
    monkeypatch.setattr(installing.venv, "create", lambda folder, **_: made(folder))
    with monkeypatch.context() as killed:
        killed.setattr(installing.shutil, "rmtree", lambda *given, **known: None)  # as a kill has it
        with pytest.raises(OSError):
            installing.install(asked_for("some_env"), None, None)
    assert not works.exists()
    with pytest.raises(ConfigError, match="cannot be installed"):
        installing.install(asked_for("some_env"), None, None)
    assert works.is_dir() and [one.name for one in works.parent.iterdir()] == ["works"]


def test_an_install_that_succeeds_replaces_what_was_there_and_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(installing.venv, "create", lambda folder, **_: (folder / "new").mkdir(parents=True))

    def filled(*given: object) -> None:
        with pytest.raises(ConfigError, match="another quartet env install of some-env is under way"):
            installing.install(SOME_ENV, None, None)

    monkeypatch.setattr(installing, "_fill", filled)
    folder = tmp_path / ".quartet/envs/some_env"
    (folder / "old").mkdir(parents=True)
    installing.install(SOME_ENV, None, None)
    assert [one.name for one in folder.iterdir()] == ["new"]
    assert [one.name for one in (tmp_path / ".quartet/envs/.replaced/some_env").iterdir()] == [".lock"]


def test_what_lies_on_another_file_system_is_replaced_and_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container, whose environment is in a layer of its image."""
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "bin").mkdir(parents=True)
    (source / "bin/python").symlink_to("/usr/bin/python3")
    plain = Path.rename

    def rename(self: Path, other: Path) -> Path:
        if self in (source, target):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return plain(self, other)

    monkeypatch.setattr(Path, "rename", rename)
    installing._move(source, target)
    assert not source.exists() and (target / "bin/python").readlink() == Path("/usr/bin/python3")
    installing._move(target, source)
    assert [one.name for one in tmp_path.iterdir()] == ["source"]
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(PermissionError("no")))
    with pytest.raises(PermissionError):
        installing._move(source, target)
    assert (source / "bin/python").is_symlink()


def test_quartet_itself_comes_from_the_tree_that_runs() -> None:
    (flag, where) = _ours("quartet", "[cli]")
    assert flag == "-e" and (Path(where.removesuffix("[cli]")) / "pyproject.toml").is_file()


def test_the_tree_that_runs_may_be_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Mock(read_text=Mock(return_value='{"url": "file:///home/me/my%20work/100%25/sdk"}'))
    monkeypatch.setattr(installing.importlib.metadata, "distribution", Mock(return_value=told))
    assert _ours("quartet", "[cli]") == ["-e", "/home/me/my work/100%/sdk[cli]"]


@pytest.mark.parametrize("name", ["class", "random", "verifiers", "My-Env", "a--b", "1a"])
def test_names_that_python_could_not_import_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is no name of a package"):
        write_package(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_hides_a_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'numpy' is the name of a package that is installed"):
        write_package("numpy", tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_the_templates_are_python_of_the_package_s_own_name(tmp_path: Path, kind: str) -> None:
    folder = write_package("three-word-name", tmp_path, kind)
    for file in folder.rglob("*.py"):
        compile(file.read_text(), str(file), "exec")
    assert "ThreeWordNameTaskset" in (folder / "three_word_name" / "__init__.py").read_text()
    assert not any(re.search("my.env|MyEnv", file.read_text()) for file in folder.rglob("*.*"))
    assert f"quartet env install {folder}" in (folder / "README.md").read_text()
    assert {"pyproject.toml", "README.md", "three_word_name"} == {entry.name for entry in folder.iterdir()}


def played(who: str, *rewards: float | None) -> Played:
    """Rollouts of examples 0, 1, ...; None is a failure."""
    rollouts = []
    for index, reward in enumerate(rewards):
        rollout = Rollout(reward=reward or 0.0, num_turns=2)
        if reward is None:
            rollout.failure.CopyFrom(RolloutFailure(kind=FAILURE_KIND_SCORER, message="KeyError: 'x'"))
        rollouts.append((Task(index=index), rollout))
    return Played(who, rollouts)


def test_invariant_5_a_failure_is_reported_and_is_no_reward() -> None:
    one = played("the oracle", 1.0, None, 1.0)
    lines = played_lines(one, tokens=False)
    assert "  reward       mean 1.000, 1.000 to 1.000" in lines
    assert "  failed at example 1: SCORER: KeyError: 'x'" in lines
    assert problems([one], 1.0) == ["the oracle: 1 SCORER of 3 rollouts failed"]


def test_failures_alike_are_told_once_with_how_many_there_are() -> None:
    lines = played_lines(played("a model", None, 1.0, None, None), tokens=False)
    assert lines[-1] == "  failed at example 0 (3 such): SCORER: KeyError: 'x'"
    hung = played("a model", None, None)
    for number, (_, one) in enumerate(hung.rollouts):
        one.failure.message = f"rewards.py:{number // 2} in exact: worker {number} was silent for 60 s"
    (line,) = [line for line in played_lines(hung, tokens=False) if "failed at" in line]
    assert line.endswith("0 (2 such): SCORER: rewards.py:0 in exact: worker 0 was silent for 60 s")


def test_what_an_environment_says_is_letters_to_a_terminal() -> None:
    one = played("a model", None, 1.0)
    one.rollouts[0][1].failure.message = "\x1b]52;c;Zm9v\x07"
    one.rollouts[1][1].metrics["m\x9b2J"] = 1.0
    said = "\n".join(played_lines(one, tokens=False))
    said += "\n".join(info_lines(EnvironmentInfo(id="e"), "python", {"question": "\x1b[2J"}))
    assert not {"\x1b", "\x07", "\x9b"} & {*said}
    assert "SCORER: \\x1b]52;c;Zm9v\\x07" in said and "question: \\x1b[2J" in said


def test_what_a_model_said_is_shown_shortened_with_what_it_earned() -> None:
    one = played("a model", None, 0.25)
    assert conversation_lines(one) == []
    (_, failed), (_, rewarded) = one.rollouts
    failed.messages.add(role="assistant", content="")
    assert conversation_lines(one) == [
        "  what was said at example 0 (SCORER):",
        "    assistant  (nothing)",
    ]
    rewarded.messages.add(role="system", content="Look\n it up.\x1b[2J")
    rewarded.messages.add(role="user", content="first " + 500 * "x" + " last")
    said = rewarded.messages.add(role="assistant", reasoning_content="hm")
    said.tool_calls.add(name="lookup", arguments_json='{"key": "k"}')
    heading, system, user, *rest = conversation_lines(one)
    assert heading == "  what was said at example 1 (reward 0.250):"
    assert system == "    system     Look it up.\\x1b[2J"
    assert user.startswith("    user       first x") and user.endswith("x last") and len(user) < 330
    assert rest == [
        "    assistant  (thinking) hm",
        '    assistant  calls lookup({"key": "k"})',
    ]
    for number in range(8):
        rewarded.messages.add(role="tool", content=str(number))
    lines = conversation_lines(one)
    assert "    … 3 more messages …" in lines and lines[-1] == "    tool       7" and len(lines) == 11


def test_an_oracle_must_earn_everything_and_a_wrong_answer_less() -> None:
    assert problems([played("o", 1.7, 1.7), played("w", 0.0, 1.6)], 1.7) == []
    (short,) = problems([played("o", 1.0, 0.9), played("w", 0.0, 0.0)], 1.0)
    assert short.startswith("the oracle earns 0.900 of 1 at example 1 (1 such)")
    (empty,) = problems([played("o", 1.0), played("w", 1.0)], 1.0)
    assert empty.startswith("a wrong answer earns as much as the right one at example 0")


def test_bad_arguments_are_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["env", "install", "nope/nope"], "fetch the package and name its folder"),
        (["env", "check", "reverse-text", "--full-reward", "0"], "--full-reward 0 is refused"),
        (["env", "check", "no-such-env"], "no package 'no_such_env'"),
        (["env", "show", "reverse-text", "-a", "[1]"], "is no JSON object"),
        (["env", "show", "reverse-text", "--num-exmaples", "3"], "did you mean 'num_examples'?"),
        (["env", "list", "--python", "/no/python"], "cannot be run: No such file"),
    ):
        assert main(arguments) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("python", "named"), [("/elsewhere/python", " --envhost.python /elsewhere/python"), (sys.executable, "")]
)
def test_an_interpreter_that_nobody_looks_in_is_to_be_named(
    python: str, named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quartet.cli.env.command.install", lambda *given: Path(python))
    assert main(["env", "install", "mine", "--into", python]) == 0
    assert capsys.readouterr().out.endswith(f"next: quartet env check mine{named}\n")


@pytest.mark.parametrize(
    ("module", "where"),
    [
        ("one_env.py", "one_env_oracle.py beside one_env.py"),
        ("one_env/__init__.py", "one_env/oracle.py"),
    ],
)
def test_where_an_oracle_is_looked_for_is_told(
    module: str,
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / module).parent.mkdir(exist_ok=True)
    (tmp_path / module).touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["env", "check", "one-env", "--envhost.python", sys.executable]) == 2
    assert f"'one-env' has no oracle ({where}, with answer(task, messages)); write" in capsys.readouterr().err


def test_the_help_says_the_defaults_of_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["env", "check", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "rollouts of each example (default: 1)" in told and "-1 for all (default: 5)" in told
    assert CHECK_DEFAULTS == ("--num-examples=5", "--rollouts-per-example=1")
