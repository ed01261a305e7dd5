"""Runs of `quartet slurm` under a real SLURM (cluster.py), on three nodes: two ranks of the trainer on the
first two, a replica of inference on the third.
"""

from __future__ import annotations

import json
import shlex
import subprocess
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


@pytest.mark.timeout(4 * RUN_SECONDS)
def test_a_run_over_three_nodes_goes_on_in_one_job_after_the_other(
    slurm: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    stopped = queue(slurm, output, *first(tiny_model))
    until(lambda: len(rows(output)) >= 2, RUN_SECONDS, "two steps", slurm.logs)
    slurm.call("scancel", "--batch", "--signal=TERM", stopped)
    ends(slurm, output, stopped, "FAILED")
    assert slurm.state(stopped)["ExitCode"] == "130:0"
    said = log_of(output, stopped)
    assert "stopped after step" in said
    assert said.count("the launch ended") == 2, "the other machines end with it, by themselves"

    go_on = ["@", str(output / "run.toml"), "--resume"]
    assert f"quartet slurm {shlex.join(go_on[:2])} --output-dir {output} --resume" in said
    cancelled = queue(slurm, output, *go_on)
    before = len(rows(output))
    until(lambda: len(rows(output)) > before, RUN_SECONDS, "a step more", slurm.logs)
    slurm.call("scancel", cancelled)
    ends(slurm, output, cancelled, "CANCELLED")

    completed = queue(slurm, output, *go_on)
    ends(slurm, output, completed, "COMPLETED")
    said = log_of(output, completed)
    assert f"on {','.join(slurm.names)}" in said
    assert f"{slurm.names[1]} runs trainer-2" in said
    assert f"{slurm.names[2]} runs inference" in said
    assert [row["step"] for row in rows(output)] == list(range(1, STEPS + 1)), "every step once, in order"
    ledger = summary_of(output)["ledger"]
    assert (ledger["trained"], ledger["in_flight"]) == (STEPS * 128, 0)
    assert (output / "checkpoint" / "config.json").is_file()
