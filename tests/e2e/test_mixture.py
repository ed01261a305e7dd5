"""Two real environments in one run, with dynamic sampling and evaluations of their own: configs/mixture.toml,
shortened. Four real processes, real environments, real weights moving.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import QUARTET, REPOSITORY, summary_of

pytestmark = pytest.mark.usefixtures("imported_once")

STEPS = 4
SHARES = {"reverse-text": 0.75, "alphabet-sort": 0.25}
# Tries of a place beyond the first: max_resample of the file.
RESAMPLES = 2
RUN_SECONDS = 280
# max_tokens of a turn of alphabet-sort in training; evaluations have that of the file.
SHORTER = 6


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output folder of one short run."""
    output = tmp_path_factory.mktemp("mixture") / "run"
    command = [*QUARTET, "rl", "@", "configs/mixture.toml", "--model", str(tiny_model)]
    command += ["--max-steps", str(STEPS), "--eval.interval", "2", "--output-dir", str(output)]
    command += ["--env.1.sampling.max_tokens", str(SHORTER)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return output


def rows_of(output: Path, name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if name in row]


def test_environments_are_trained_in_proportion_and_reported_apart(finished: Path) -> None:
    steps = rows_of(finished, "train/loss")
    assert len(steps) == STEPS
    for env_id, share in SHARES.items():
        assert sum(step[f"env/{env_id}/share"] for step in steps) / STEPS == pytest.approx(share, abs=0.02)
        assert all(0 <= step[f"env/{env_id}/reward"] <= 1 for step in steps)
    for step in steps:
        lengths = {env_id: step[f"env/{env_id}/mean_length"] for env_id in SHARES}
        parts = (step[f"env/{env_id}/share"] * length for env_id, length in lengths.items())
        assert sum(parts) == pytest.approx(step["rollout/mean_length"], rel=1e-6)
        assert lengths["alphabet-sort"] <= 2 * SHORTER, "two turns"
        for env_id, length in lengths.items():
            least, most = bounds(finished, step, env_id)
            assert least - 1e-6 <= length <= most + 1e-6, env_id


def bounds(finished: Path, step: dict[str, Any], env_id: str) -> tuple[float, float]:
    """Between which the mean length of an environment's trained rollouts lies: they are some of those on
    file, and the bounds are one where they are all."""
    tokens = sorted(tokens_of(finished, f"step_{step['step']:04d}", env_id))
    trained = round(128 * step[f"env/{env_id}/share"])
    return sum(tokens[:trained]) / trained, sum(tokens[-trained:]) / trained


def tokens_of(finished: Path, part: str, environment: str) -> list[int]:
    """Of each completion on file of an environment."""
    rows = map(json.loads, (finished / f"rollouts/{part}.jsonl").read_text().splitlines())
    return [row["completion_tokens"] for row in rows if row["env"] == environment]


def test_invariant_1_groups_that_teach_nothing_are_replaced_and_in_the_ledger(finished: Path) -> None:
    ledger = summary_of(finished)["ledger"]
    steps = rows_of(finished, "train/loss")
    assert ledger["trained"] == STEPS * 128 and ledger["in_flight"] == 0
    assert ledger["dispatched"] == ledger["trained"] + sum(ledger["discarded"].values())
    resampled = sum(step["rollout/resampled"] for step in steps)
    # The model knows nothing of sorting: its groups earn nothing, all alike.
    assert ledger["discarded"]["no_spread"] == 8 * resampled > 0
    for step in steps:
        places = 16 * step["env/alphabet-sort/share"]
        assert step["env/alphabet-sort/resampled"] <= RESAMPLES * places


def test_evaluations_have_environments_of_their_own_and_one_version_each(finished: Path) -> None:
    found = rows_of(finished, "eval/coverage")
    assert [row["step"] for row in found] == [0, 2, 4]
    for row in found:
        assert row["eval/coverage"] == 1 and row["eval/rollouts"] == 2 * (64 + 16)
        assert row["eval/reverse-text/pass@2"] >= row["eval/reverse-text/pass@1"]
        assert 0 <= row["eval/sorting/reward"] <= 1
    lengths = [one for row in found for one in tokens_of(finished, f"eval_{row['step']:04d}", "sorting")]
    assert len(lengths) == 3 * 32 and max(lengths) > 2 * SHORTER, "sampled as [sampling] says"
    assert found[-1]["eval/reverse-text/reward"] > found[0]["eval/reverse-text/reward"]


def test_trainer_and_engine_agree_on_tokens_of_both(finished: Path) -> None:
    steps = rows_of(finished, "train/loss")
    assert max(step["train/logprob_difference_max"] for step in steps) <= 2e-5
    assert all(step["train/logprob_tokens_skipped"] == 0 for step in steps)
