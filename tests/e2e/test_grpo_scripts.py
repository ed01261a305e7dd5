"""Scripts written for GRPOTrainer, as real processes: the example, and one in a notebook, interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY, summary_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("imported_once")]

SECONDS = 300  # a loaded machine takes many times the usual 20 s
STEPS = 16  # of the one that is interrupted after the second
EXAMPLE = REPOSITORY / "examples/grpo_script/train.py"

# A kernel runs cells inside its loop, on the main thread, beside threads of its own; its SIGINT is Python's.
NOTEBOOK = """
import asyncio, logging, signal, sys, threading, time
from pathlib import Path
import quartet.grpo as vf

# As a kernel does: what a shell starts in the background, tests too, has it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

vf.setup_logging("ERROR")
beats, prints = [], []

def beat():
    while True:
        beats.append(time.monotonic())
        prints.append(sys.stdout.write(""))  # the output of other threads is theirs
        time.sleep(0.05)

threading.Thread(target=beat, daemon=True).start()

async def cell():
    model, tokenizer = vf.get_model_and_tokenizer(sys.argv[1])
    args = vf.grpo_defaults(run_name="cell")
    args.output_dir = sys.argv[2]
    args.max_steps, args.max_tokens, args.learning_rate = int(sys.argv[3]), 13, 1e-3
    args.report_to, args.overrides = "none", {"eval": {"num_examples": 8}}
    env = vf.load_environment("reverse-text", min_chars=4, max_chars=8)
    lora = vf.lora_defaults(r=4, alpha=8)
    trainer = vf.GRPOTrainer(model, env, args, tokenizer, peft_config=lora)
    arguments = list(sys.argv)
    try:
        done = trainer.train(resume_from_checkpoint=Path(args.output_dir).exists())
    except KeyboardInterrupt:
        trainer.save_model(sys.argv[4])
        print("interrupted after", trainer.state.global_step, flush=True)
        return
    assert sys.argv == arguments
    print("completed", done.global_step, done.metrics["phase"], len(trainer.state.log_history), flush=True)
    print("evaluated", trainer.evaluate()["eval_reward"])

loop = asyncio.new_event_loop()
signal_is_pythons = __import__("signal").getsignal(__import__("signal").SIGINT)
loop.run_until_complete(cell())
assert __import__("signal").getsignal(__import__("signal").SIGINT) is signal_is_pythons
# Not for the run; on a slow machine every thread stands still for seconds.
longest, run = max(b - a for a, b in zip(beats, beats[1:])), beats[-1] - beats[0]
assert longest < max(5, run / 2), "other threads went on"
"""


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", **more}


def script(words: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment(**more),
    )


def rows_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(4 * SECONDS)  # the model is made within it, too
def test_the_example_trains_an_adapter(tiny_model: Path, tmp_path: Path) -> None:
    # As in the repository: environments are found from the folder in which a script is started.
    (tmp_path / ".venv-envs").symlink_to(REPOSITORY / ".venv-envs")
    output = tmp_path / "outputs" / "adapter"
    words = ["--model", str(tiny_model), "--max-steps", "4", "--run-name", "adapter", "--lora"]
    done = script([str(EXAMPLE), *words], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 steps, loss " in done.stdout
    assert f"the model is in {output / 'checkpoint'}; trainer.save_model(FOLDER)" in done.stdout
    summary, rows = summary_of(output), rows_of(output)
    assert (summary["phase"], summary["steps"], summary["seed"]) == ("completed", 4, 42)
    assert summary["reward_before"] is not None and summary["reward_after"] is not None
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
    assert rows[1]["train/reference_kl"] == 0.0, "the adapter begins as the model"
    assert "kl_coef = 0.001" in json.loads((output / "run.json").read_text())["config_toml"]
    assert (output / "checkpoint" / "adapter" / "adapter_config.json").is_file()
    again = script([str(EXAMPLE), *words, "--resume"], tmp_path)
    assert again.returncode == 0 and "is completed; nothing is left to do" in again.stderr, again.stderr
    other = script([str(EXAMPLE), *words], tmp_path)
    assert "add train(resume_from_checkpoint=True) to go on with its run" in other.stderr


@pytest.mark.timeout(4 * SECONDS)
def test_ctrl_c_in_a_notebook_stops_in_order_and_another_cell_goes_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    output, model, cell = tmp_path / "run", tmp_path / "stopped", tmp_path / "cell.py"
    log = tmp_path / "first.log"
    cell.write_text(NOTEBOOK)
    words = [str(cell), str(tiny_model), str(output), str(STEPS), str(model)]
    with log.open("w") as out:
        command = [sys.executable, *words]
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=out, stderr=out, env=environment())
        try:
            deadline = time.monotonic() + SECONDS
            while not (output / "metrics.jsonl").exists() or len(rows_of(output)) < 2:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            assert process.wait(SECONDS) == 0, log.read_text()
        finally:
            process.kill()
    said = log.read_text()
    assert "stopping after the step under way" in said and "interrupted after" in said, said
    assert summary_of(output)["phase"] == "stopped" and 2 <= summary_of(output)["steps"] < STEPS
    assert (model / "config.json").is_file() and (model / "adapter" / "adapter_config.json").is_file()
    done = script(words, REPOSITORY)
    assert f"completed {STEPS} completed {STEPS}" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0 and 0 < float(done.stdout.split("evaluated ")[1]) <= 1
    assert summary_of(output)["reward_before"] is None, "nobody asked for evaluations in the run"
    assert [row["step"] for row in rows_of(output)] == list(range(1, STEPS + 1)), "none lost, none twice"


def test_ranks_of_a_launcher_are_refused(tmp_path: Path) -> None:
    words = "import quartet.grpo as vf; vf.GRPOTrainer('m', vf.Environment('e'), vf.GRPOConfig())"
    done = script(["-c", words], tmp_path, WORLD_SIZE="2", RANK="1")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "rank 1 of 2 (RANK, WORLD_SIZE)" in last and "args.num_processes = 2" in last
