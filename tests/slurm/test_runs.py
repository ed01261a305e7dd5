"""Runs of `quartet slurm` under a real SLURM (cluster.py), on three nodes: two ranks of the trainer on the
first two, a replica of inference on the third.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import QUARTET, REPOSITORY, summary_of
from tests.slurm.cluster import Cluster, until

pytestmark = pytest.mark.slow

STEPS = 12
PLACED = ["--trainer.nodes=2", "--inference.nodes=1"]
#: Ranks over gloo else meet by what the machine's own name means.
VARIABLES = {"GLOO_SOCKET_IFNAME": "lo"}
#: From the queue to the end; a loaded machine takes many times the usual 40 s.
RUN_SECONDS = 280.0


def queue(slurm: Cluster, output: Path, *words: str) -> str:
    """The number of the job that the command has queued."""
    done = subprocess.run(
        [*QUARTET, "slurm", *words, "--output-dir", str(output)],
        cwd=REPOSITORY, env={**slurm.environment, **VARIABLES}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    number = done.stdout.partition("job ")[2].partition(":")[0]
    assert number.isdecimal(), done.stdout
    return number


def first(model: Path) -> list[str]:
    """What begins a run."""
    return [
        "@", "configs/reverse-text.toml", "--model", str(model), f"--max-steps={STEPS}",
        "--eval.num-examples=16", *PLACED,
    ]  # fmt: skip


def rows(output: Path) -> list[dict[str, Any]]:
    """Of the steps that were done."""
    file = output / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [row for row in map(json.loads, lines) if "train/loss" in row]


def log_of(output: Path, number: str) -> str:
    """What a job said."""
    return Path(f"{output}.slurm/{number}.log").read_text()


def ends(slurm: Cluster, output: Path, number: str, state: str) -> None:
    """Wait for it."""
    slurm.wait(number, state, RUN_SECONDS, lambda: log_of(output, number)[-3000:])


def check_whole(output: Path) -> None:
    """Every step once, whole."""
    assert [row["step"] for row in rows(output)] == list(range(1, STEPS + 1)), "every step once, in order"
    ledger = summary_of(output)["ledger"]
    assert (ledger["trained"], ledger["in_flight"]) == (STEPS * 128, 0)


@pytest.mark.timeout(2 * RUN_SECONDS)
def test_a_run_over_three_nodes_is_completed(slurm: Cluster, tiny_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    number = queue(slurm, output, *first(tiny_model))
    ends(slurm, output, number, "COMPLETED")
    check_whole(output)
    said = log_of(output, number)
    assert f"on {','.join(slurm.names)}" in said
    assert f"{slurm.names[1]} runs trainer-2" in said
    assert f"{slurm.names[2]} runs inference" in said
    assert said.count("the run ended") == 2, "the other machines end with it, by themselves"
    assert (output / "checkpoint" / "config.json").is_file()


@pytest.mark.timeout(3 * RUN_SECONDS)
@pytest.mark.parametrize(
    ("end", "state"),
    [(["--batch", "--signal=TERM"], "FAILED"), ([], "CANCELLED")],
    ids=["stopped", "cancelled"],
)
def test_a_job_that_was_ended_is_queued_again_and_goes_on(
    end: list[str], state: str, slurm: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    number = queue(slurm, output, *first(tiny_model))
    until(lambda: len(rows(output)) >= 2, RUN_SECONDS, "two steps", slurm.logs)
    began = time.monotonic()
    slurm.call("scancel", *end, number)
    ends(slurm, output, number, state)
    print(
        f"{time.monotonic() - began:.1f} s from scancel to the end", log_of(output, number)[-2000:], sep="\n"
    )
    assert len(rows(output)) < STEPS
    if end:
        assert "stopped after step" in log_of(output, number)
    again = queue(slurm, output, "@", str(output / "run.toml"), "--resume")
    ends(slurm, output, again, "COMPLETED")
    check_whole(output)
