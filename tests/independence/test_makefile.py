"""The Makefile where something came in between, whose next call makes whole what was left half made; and how
it makes a seed's model.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def test_an_interpreter_that_was_left_half_made_is_made_whole_and_a_whole_one_left(tmp_path: Path) -> None:
    """`python3 -m venv` that fails to bring pip, or is broken off, leaves a Python without it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "here"], check=True)
    rule = "mend: ; $(call venv,here)"
    made = []
    for _ in range(2):
        subprocess.run(
            ["make", "-f", REPOSITORY / "Makefile", "--eval", rule, "mend"], cwd=tmp_path, check=True
        )
        subprocess.run([tmp_path / "here/bin/python", "-m", "pip", "--version"], check=True)
        made.append((tmp_path / "here/pyvenv.cfg").stat().st_mtime_ns)
    assert made[0] == made[1]


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
