"""The Makefile where something came in between, whose next call makes whole what was left half made; and how
it makes a seed's model.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def test_one_without_pip_is_kept_with_what_is_in_it_and_given_pip_and_a_whole_one_left(
    tmp_path: Path,
) -> None:
    """As uv makes them; `python3 -m venv` that fails to bring pip, or is broken off, leaves one, too."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "here"], check=True)
    mine = tmp_path / "here" / "mine"
    mine.touch()
    done = _mend(tmp_path, sys.executable)
    assert done.returncode == 0 and done.stdout == "here had no pip: it is kept, and was given one\n"
    assert mine.exists()
    subprocess.run([tmp_path / "here/bin/python", "-m", "pip", "--version"], check=True)
    made = (tmp_path / "here/pyvenv.cfg").stat().st_mtime_ns
    again = _mend(tmp_path, sys.executable)
    assert (again.returncode, again.stdout) == (0, ""), "it is whole now"
    assert (tmp_path / "here/pyvenv.cfg").stat().st_mtime_ns == made


def test_one_that_cannot_be_given_pip_is_said_to_be_made_anew(tmp_path: Path) -> None:
    """As with Debian's Python without its python3-venv."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "here"], check=True)
    (packages,) = (tmp_path / "here/lib").glob("python*/site-packages")
    (packages / "ensurepip.pth").write_text("import sys; sys.modules['ensurepip'] = None\n")
    done = _mend(tmp_path, sys.executable)
    assert done.returncode == 0 and not (packages / "ensurepip.pth").exists()
    assert done.stdout.splitlines() == [
        "here has no Python from 3.11 on that can be given pip: it is made anew, what is in it goes",
        f"{sys.executable} -m venv --clear here",
    ]
    subprocess.run([tmp_path / "here/bin/python", "-m", "pip", "--version"], check=True)


def _old_python(at: Path) -> Path:
    """An interpreter that says of itself that it is Python 3.10, and has pip."""
    at.parent.mkdir(parents=True)
    # Its own code is run by a real one, which is told another version.
    code = 'exec "$REAL" -c "import sys; sys.version_info = (3, 10, 12); $2"'
    version = '[ "$1" = --version ] && { echo Python 3.10.12; exit; }'
    asked = '[ "$1" = -c ] || { echo "$@" >>"$ASKED"; exit; }'
    at.write_text("\n".join(("#!/bin/sh", version, asked, code, "")))
    at.chmod(0o755)
    return at


def _mend(tmp_path: Path, python: str | Path) -> subprocess.CompletedProcess[str]:
    """Make the interpreter `here`."""
    rule = "mend: ; $(call venv,here)"
    # Nothing of a make that runs the tests, whose jobs this one has no part in.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")
    }
    return subprocess.run(
        ["make", "-f", REPOSITORY / "Makefile", "--eval", rule, f"PYTHON={python}", "mend"],
        cwd=tmp_path,
        env=environment | {"REAL": sys.executable, "ASKED": str(tmp_path / "asked")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_python_that_is_too_old_or_not_there_is_refused_in_a_line_and_nothing_is_made(
    tmp_path: Path,
) -> None:
    old = _old_python(tmp_path / "bin/python3.10")
    for python, found in ((old, "Python 3.10.12"), ("no-such-python", "not there")):
        done = _mend(tmp_path, python)
        said = f"Quartet needs Python 3.11 or newer, and {python} is {found}; name another: make install "
        assert done.returncode != 0
        assert done.stderr.splitlines()[0] == f"{said}PYTHON=python3.12"
        assert not (tmp_path / "here").exists() and not (tmp_path / "asked").exists()


def test_an_interpreter_of_a_python_that_is_too_old_is_made_anew_with_one_that_is_not(tmp_path: Path) -> None:
    _old_python(tmp_path / "here/bin/python")
    refused = _mend(tmp_path, _old_python(tmp_path / "bin/python3.10"))
    assert refused.returncode != 0 and (tmp_path / "here/bin/python").exists()
    assert _mend(tmp_path, sys.executable).returncode == 0
    made = "import sys; print(sys.version_info[:2], sys.prefix)"
    done = subprocess.run(
        [tmp_path / "here/bin/python", "-c", made], capture_output=True, text=True, check=True
    )
    assert done.stdout.split(") ") == [str(sys.version_info[:2])[:-1], f"{tmp_path / 'here'}\n"]
    subprocess.run([tmp_path / "here/bin/python", "-m", "pip", "--version"], check=True)


@pytest.mark.parametrize("seed", [None, 0, 3])
def test_each_seed_of_the_demo_has_a_model_of_its_own_and_the_default_that_of_the_configs(
    tmp_path: Path, seed: int | None
) -> None:
    said = [] if seed is None else [f"SEED={seed}"]
    command = ["make", "-n", "-f", REPOSITORY / "Makefile", "-o", "install", *said, "demo"]

    def steps() -> list[list[str]]:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        said = [line.split() for line in done.stdout.splitlines()]
        return [words for command, *words in said if command == ".venv/bin/quartet"]

    folder = f"models/tiny-{seed}" if seed else "models/tiny"
    make, train = steps()
    assert make == ["model", "tiny", folder, "--seed", str(seed or 0)]
    assert train[:1] == ["rl"] and train[train.index("--model") + 1] == folder
    assert train[train.index("--seed") + 1] == str(seed or 0)
    other = tmp_path / "models" / ("tiny" if seed else "tiny-3") / "config.json"
    other.parent.mkdir(parents=True)
    other.touch()
    assert steps() == [make, train], "another seed's is none"
    (own := tmp_path / folder / "config.json").parent.mkdir(parents=True, exist_ok=True)
    own.touch()
    assert steps() == [train]
