"""`quartet env` as it is: a package from the template, its interpreter, the host that loads it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.e2e.conftest import quartet


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package of `init`."""
    return made(tmp_path_factory.mktemp("env"))


def made(folder: Path, *options: str) -> Path:
    """The folder with a package of `init`, in an interpreter as `install` makes it, without the downloads."""
    done = quartet("env", "init", "two-numbers", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "quartet env install environments/two_numbers" in done.stdout
    python = folder / ".quartet" / "envs" / "two_numbers" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", python.parent.parent], check=True)
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    shared = subprocess.check_output([REPOSITORY / ".venv-envs/bin/python", "-c", script], text=True)
    own = subprocess.check_output([python, "-c", script], text=True)
    # addsitedir, because the packages of the other interpreter are themselves found through .pth files.
    lines = [f"import site; site.addsitedir({shared.strip()!r})", str(folder / "environments/two_numbers")]
    (Path(own.strip()) / "shared.pth").write_text("\n".join(lines) + "\n")
    return folder


def test_a_package_of_the_template_passes_at_once(workspace: Path) -> None:
    done = quartet("env", "check", "two-numbers", cwd=workspace)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the oracle: 5 results, 0 failures\n  reward       mean 1.000" in done.stdout
    assert "a wrong answer: 5 results, 0 failures\n  reward       mean 0.000" in done.stdout
    assert "two-numbers passes" in done.stdout
    assert "destroyed" not in done.stderr and "never retrieved" not in done.stderr


@pytest.mark.parametrize("kind", ["tool", "turns"])
def test_packages_of_the_other_templates_pass_at_once(tmp_path: Path, kind: str) -> None:
    done = quartet("env", "check", "two-numbers", cwd=made(tmp_path, "--kind", kind))
    assert done.returncode == 0, done.stdout + done.stderr
    oracle, wrong = done.stdout.split("a wrong answer:")
    assert re.search(r"5 results, 0 failures\n  reward +mean 1\.000", oracle), done.stdout
    assert re.search(r"5 results, 0 failures\n  reward +mean 0\.000", wrong), done.stdout
    assert re.search(r"turns +mean 2, most 2", oracle), done.stdout
    assert "two-numbers passes" in done.stdout


def test_what_the_host_says_of_it_is_shown(workspace: Path) -> None:
    # For a small model: few pairs are there then, of which most are trained on.
    done = quartet("env", "show", "two-numbers", "-a", '{"largest": 9}', cwd=workspace)
    assert done.returncode == 0, done.stderr
    assert "examples     80 to train on, 20 to evaluate with" in done.stdout
    assert "rewards      correct" in done.stdout and "system_prompt: Answer with one number." in done.stdout
    refused = quartet("env", "show", "two-numbers", "-a", '{"num_trian": 7}', cwd=workspace)
    assert refused.returncode == 2
    assert "takes no argument 'num_trian'; did you mean 'num_train'?" in refused.stderr


def test_a_reward_that_tells_nothing_and_an_oracle_that_breaks_do_not_pass(workspace: Path) -> None:
    package = workspace / "environments/two_numbers/two_numbers"
    taskset, oracle = package / "taskset.py", package / "oracle.py"
    good = taskset.read_text(), oracle.read_text()
    try:
        taskset.write_text(good[0].replace("return float(bool(numbers) and", "return float(True or"))
        oracle.write_text(good[1].replace("task['answer']", "task['solution']"))
        done = quartet("env", "check", "two-numbers", "-n", "2", cwd=workspace)
        assert done.returncode == 1
        assert "a wrong answer earns as much as the right one at example 0 (2 such)" in done.stderr
        assert "the oracle: 2 MODEL of 2 rollouts failed" in done.stderr
        assert "the oracle failed: KeyError: 'solution'" in done.stdout
    finally:
        taskset.write_text(good[0])
        oracle.write_text(good[1])
