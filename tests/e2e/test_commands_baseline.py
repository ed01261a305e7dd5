"""`quartet baseline` as it is, on a run's own file."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.conftest import Endpoint, only, quartet


def test_a_run_that_is_too_easy_and_one_that_is_too_hard_are_told_so(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    run = ["baseline", "@", "configs/reverse-text.toml", "-m", "mini", "-b", endpoint.url]
    run += ["-n", "4", "-r", "3"]
    done = quartet(*run, "-o", tmp_path / "easy")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "reverse-text: too easy. 100% of the full reward already" in done.stdout
    assert "args for harder examples" in done.stdout
    assert {body["max_completion_tokens"] for body in endpoint.bodies} == {13}, "as the run samples"
    endpoint.magic = "never said"
    done = quartet(*run, "-o", tmp_path / "hard")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "reverse-text: too hard. 0 % of the full reward after 12 attempts" in done.stdout
    verdict = json.loads(only(tmp_path / "hard", "baselines/*/*/baseline.json").read_text())
    assert verdict["verdict"] == "too hard" and verdict["failed"] == 0
