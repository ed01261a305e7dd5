"""`quartet gepa` as it is: the library, a host of environments, an endpoint that plays and teaches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import Endpoint, only, quartet

pytestmark = pytest.mark.usefixtures("imported_once")

MAGIC = "MIRROR"
BETTER = f"Write the text as a {MAGIC} shows it. Put your answer in <reversed_text> tags."


def test_a_better_prompt_is_found_kept_and_usable_by_one_line(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.magic, endpoint.proposal = MAGIC, f"Try this:\n```\n{BETTER}\n```"
    where = ["-b", endpoint.url, "-o", tmp_path]
    command = ["gepa", "reverse-text", "-m", "mini", *where, "-n", "6", "-N", "4", "--perfect-score", "1.0"]
    refused = quartet(*command, "--run-id", "one", "--state-columns", "exact_mach")
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "a rollout has no 'exact_mach'; did you mean 'exact_match'?" in refused.stderr
    command += ["--state-columns", "exact_match", "answer"]
    done = quartet(*command, "-B", "4", "--run-id", "one")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = only(tmp_path / "gepa", "reverse-text--mini/one")
    assert (folder / "best_prompt.txt").read_text().startswith("Reverse the text"), "the budget ended there"

    refused = quartet(*command, "-B", "30", "--resume", "one", "--seed", "4")
    assert refused.returncode == 2 and "seed = 4 is refused" in refused.stderr

    played = len(endpoint.bodies)
    done = quartet(*command, "-B", "30", "--resume", "one")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "best_prompt.txt").read_text() == BETTER
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["best_score"] == 1.0 and metadata["initial_score"] < 0.5
    calls = [body for body in endpoint.bodies[played:] if body["messages"][0]["role"] == "system"]
    assert metadata["total_metric_calls"] == 4 + len(calls), "what was played before is not played again"
    (asked,) = {
        body["messages"][0]["content"] for body in endpoint.bodies if body["messages"][0]["role"] == "user"
    }
    assert "exact_match" in asked and "Reverse the text" in asked
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [row["info"]["is_best"] for row in rows] == [False, True]
    assert rows[1]["info"]["parent_candidate_idxs"] == [0]
    frontier = [json.loads(line) for line in (folder / "pareto_frontier.jsonl").read_text().splitlines()]
    assert [row["best_candidates"][0]["candidate_idx"] for row in frontier] == [1] * 4

    # The line that it says, in an evaluation: the prompt reaches the model.
    args = f'{{"system_prompt": "{folder / "best_prompt.txt"}"}}'
    assert f'args = {{ system_prompt = "{folder / "best_prompt.txt"}" }}' in done.stdout
    done = quartet("eval", "reverse-text", "-m", "mini", *where, "-n", "3", "-r", "1", "-a", args)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(only(tmp_path / "evals", "*/*/metadata.json").read_text())["avg_reward"] == 1.0


def test_our_inference_plays_and_reflects(random_model: Path, tmp_path: Path) -> None:
    command = ["gepa", "reverse-text", "-m", random_model, "-o", tmp_path, "-n", "3", "-N", "2", "-t", "6"]
    command += ["--reflection-max-tokens", "5", "--run-id", "one"]
    done = quartet(*command, "-B", "9")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the teacher reflects" in done.stdout
    folder = only(tmp_path / "gepa", "reverse-text--*/one")
    assert (folder / "best_prompt.txt").read_text().startswith("Reverse the text")
