"""`quartet eval` as it is: a host of environments, a model, files that Verifiers' tools read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Endpoint, only, quartet

pytestmark = pytest.mark.usefixtures("imported_once")


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_model_is_measured_on_two_environments_and_a_torn_evaluation_goes_on(
    random_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "two.toml"
    file.write_text(
        f"""
        model = "{random_model}"
        num_examples = 3
        rollouts_per_example = 4
        [sampling]
        max_tokens = 6
        temperature = 1.0
        seed = 5
        [[eval]]
        id = "reverse-text"
        [[eval]]
        id = "reverse-text"
        name = "long"
        num_examples = 2
        args = {{ min_chars = 9, max_chars = 12 }}
        """
    )
    done = quartet("eval", "@", file, "-o", tmp_path, "--run-id", "one")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass@4" in done.stdout
    folders = [only(tmp_path / "evals", f"{name}--*/one") for name in ("reverse-text", "long")]
    before = [rows_of(folder / "results.jsonl") for folder in folders]
    assert [len(rows) for rows in before] == [12, 8]
    for row in before[1]:
        assert 9 <= len(row["prompt"][-1]["content"]) <= 12
        assert row["answer"] == row["prompt"][-1]["content"][::-1]
        assert row["metrics"]["lcs_reward"] == row["reward"] == row["lcs_reward"]
        assert row["completion"][0]["role"] == "assistant" and row["token_usage"]["output_tokens"] <= 6
    metadata = json.loads((folders[0] / "metadata.json").read_text())
    assert metadata["env_id"] == "reverse-text" and metadata["num_examples"] == 3
    assert set(metadata["pass_at_k"]) == {"1", "2", "4"} and metadata["failures"] == {}

    results = folders[0] / "results.jsonl"
    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join(lines[:7]) + lines[7][:40])  # as a kill leaves it
    done = quartet("eval", "@", file, "-o", tmp_path, "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reverse-text: 7 of 12 rollouts have results already" in done.stdout
    assert "long: 8 of 8 rollouts have results already" in done.stdout
    after = rows_of(results)
    assert after[:7] == before[0][:7], "what has a result is not run again"
    keys = [(row["example_id"], row["rollout"]) for row in after]
    assert sorted(keys) == [(example, member) for example in range(3) for member in range(4)]
    said = {(row["example_id"], row["rollout"]): row["completion"] for row in before[0]}
    assert {key: row["completion"] for key, row in zip(keys, after, strict=True)} == said, "equal seeds"

    done = quartet("eval", "@", file, "-o", tmp_path, "--resume", "-T", "0.5")
    assert done.returncode == 2
    assert 'sampling = {"max_tokens": 6, "seed": 5, "temperature": 0.5} is refused' in done.stderr


def test_invariant_5_an_endpoint_is_measured_and_what_it_refuses_is_no_reward(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    (tmp_path / "endpoints.toml").write_text(
        f'[[endpoint]]\nendpoint_id = "mini"\nmodel = "mini-2026"\nurl = "{endpoint.url}"\nkey = "MINI_KEY"\n'
    )
    command = ["eval", "reverse-text", "-m", "mini", "-e", tmp_path / "endpoints.toml", "-o", tmp_path]
    command += ["-n", "3", "-r", "2", "-t", "33", "--run-id", "one"]
    done = quartet(*command)
    assert done.returncode == 2 and "environment variable MINI_KEY, which is not set" in done.stderr

    endpoint.picky = True
    command += ["--sampling.top-k", "3"]
    done = quartet(*command, MINI_KEY="secret")
    assert done.returncode == 1
    assert "2 rollouts failed and have no reward" in done.stderr
    folder = only(tmp_path / "evals", "reverse-text--mini/one")
    assert len(rows_of(folder / "results.jsonl")) == 4
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["avg_reward"] == 1.0 and metadata["failures"] == {"MODEL": 2}
    (error,) = {row["error"]["message"] for row in rows_of(folder / "failures.jsonl")}
    assert "that text is refused" in error

    endpoint.picky = False
    done = quartet(*command, "--resume", "one", MINI_KEY="secret")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {(body["model"], body["max_completion_tokens"], body["top_k"]) for body in endpoint.bodies} == {
        ("mini-2026", 33, 3)
    }
    results = rows_of(folder / "results.jsonl")
    assert [row["reward"] for row in results] == [1.0] * 6
    assert {row["token_usage"]["output_tokens"] for row in results} == {7.0}


def test_an_endpoint_where_nobody_listens_is_named(tmp_path: Path) -> None:
    where = ["-b", "http://127.0.0.1:9/v1", "-o", tmp_path]
    done = quartet("eval", "reverse-text", "-m", "any", *where, "-n", "1", "-r", "1")
    assert done.returncode == 2
    assert done.stderr.strip().startswith("error: the endpoint http://127.0.0.1:9/v1 cannot be reached")
    assert not list(tmp_path.glob("evals/reverse*/*/results.jsonl"))
