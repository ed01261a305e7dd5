"""`quartet baseline` as it is, on a run's own file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import Endpoint, only, quartet

pytestmark = pytest.mark.usefixtures("imported_once")

#: In place of the run's one environment.
TWO = """
[[env]]
id = "reverse-text"
[[env]]
id = "reverse-text"
name = "unsaid"
args = {{ system_prompt = "{prompt}" }}
"""


def test_a_run_that_is_too_easy_and_one_that_is_too_hard_are_told_so(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    prompt, two = tmp_path / "prompt.txt", tmp_path / "two.toml"
    prompt.write_text("Say something.")
    two.write_text(TWO.format(prompt=prompt))
    endpoint.magic = "Reverse the text"
    done = quartet(
        *("baseline", "@", "configs/reverse-text.toml", "@", two, "-m", "mini"),
        *("-b", endpoint.url, "-n", "4", "-r", "3", "-o", tmp_path),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "reverse-text: too easy. 100% of the full reward already" in done.stdout
    assert "args for harder examples" in done.stdout
    assert {body["max_completion_tokens"] for body in endpoint.bodies} == {13}, "as the run samples"
    assert "unsaid: too hard. 0 % of the full reward after 12 attempts" in done.stdout
    verdict = json.loads(only(tmp_path, "baselines/unsaid--*/*/baseline.json").read_text())
    assert verdict["verdict"] == "too hard" and verdict["failed"] == 0
