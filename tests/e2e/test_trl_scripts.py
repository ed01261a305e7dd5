"""Scripts written for TRL's GRPOTrainer, as real processes: the example with either import, and one that is
interrupted, whose reward function raises, and whose process is killed, and one with callbacks.
"""

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
EXAMPLE = REPOSITORY / "examples/trl_script/train.py"
IMPORT = "from quartet.trl import GRPOConfig, GRPOTrainer"
STEPS = 12

# argv: model, output folder, what happens once so many steps were made, whether it goes on.
SCRIPT = f"""
import os, signal, sys, threading, time
{IMPORT}

# What a shell starts in the background, tests too, has it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
model, output, what, made, on = sys.argv[1:]

def lengths(completions, number, trainer_state, log_metric, **kwargs):
    assert threading.current_thread() is threading.main_thread()
    assert len(set(number)) == 1 and len(completions) == 4
    if trainer_state.global_step >= int(made) and what == "raise":
        raise LookupError("of the script")
    if trainer_state.global_step >= int(made) and what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if trainer_state.global_step >= int(made) and what == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
    log_metric("number", number[0])
    return [len(one) / 10 for one in completions]

async def beside(completion_ids, **kwargs):
    return [None if len(ids) < 2 else float(len(ids)) for ids in completion_ids]

args = GRPOConfig(output, max_steps={STEPS}, per_device_train_batch_size=8, num_generations=4,
    max_completion_length=6, logging_steps=1, save_steps=2, reward_weights=[1.0, 0.0], use_cpu=True,
    loss_type="grpo", num_iterations=2, temperature=0.9)
rows = [{{"prompt": f"number {{one}}", "number": one}} for one in range(9)]
trainer = GRPOTrainer(model, [lengths, beside], args, rows, rows[:3])
try:
    done = trainer.train(resume_from_checkpoint=on == "on")
except (LookupError, KeyboardInterrupt) as error:
    print("raised", type(error).__name__, error, flush=True)
    sys.exit()
print("completed", done.global_step, sorted(trainer.state.log_history[-1]))
print("evaluated", trainer.evaluate())
trainer.save_model(output + "-model")
"""


# argv: model, output folder. Two parts: a callback wants the end of the first.
WITH_CALLBACKS = f"""
import json, sys, threading
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback
{IMPORT}

model, output = sys.argv[1:]

class Noting(TrainerCallback):
    def __init__(self, what):
        self.what, self.heard = what, []

    def note(self, event, state):
        assert threading.current_thread() is threading.main_thread()
        self.heard.append([event, state.global_step, state.epoch])

    def on_train_begin(self, args, state, control, **kwargs):
        self.note("begin", state)

    def on_step_end(self, args, state, control, **kwargs):
        self.note("step", state)
        if self.what == "stop":
            control.should_training_stop = True

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.note("measured", state)
        assert "eval_reward" in metrics and "eval_reward" in state.log_history[-1]

    def on_epoch_end(self, args, state, control, **kwargs):
        self.note("epoch", state)

    def on_train_end(self, args, state, control, **kwargs):
        self.note("end", state)

args = GRPOConfig(output, max_steps=24, per_device_train_batch_size=8, num_generations=4,
    max_completion_length=6, logging_steps=1, save_steps=2, use_cpu=True, num_iterations=2,
    eval_strategy="steps", eval_steps=8, metric_for_best_model="eval_reward")
rows = [{{"prompt": f"number {{one}}"}} for one in range(9)]
for part, what in enumerate(("stop", "nothing")):
    heard = Noting(what)
    trainer = GRPOTrainer(model, lambda completions, **_: [len(one) / 10 for one in completions], args,
        rows, rows[:3], callbacks=[EarlyStoppingCallback(99), PrinterCallback, heard])
    how = trainer.train(resume_from_checkpoint=part > 0).metrics["phase"]
    print("HEARD", json.dumps([what, how, trainer.state.global_step, heard.heard]), flush=True)
"""


def script(words: list[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def told(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr


def rows_of(said: str) -> list[dict[str, Any]]:
    """Of the history that the example prints."""
    return [json.loads(line.replace("'", '"')) for line in said.splitlines() if line.startswith("{'step'")]


@pytest.mark.timeout(4 * SECONDS)  # the model is made within it, too
def test_the_example_trains_with_either_import(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is a development dependency")
    text = EXAMPLE.read_text()
    assert IMPORT in text
    there = tmp_path / "there.py"
    there.write_text(text.replace(IMPORT, "from trl import GRPOConfig, GRPOTrainer"))
    found = {}
    for name, file in (("here", EXAMPLE), ("there", there)):
        words = [file, "--model", tiny_model, "--max-steps", 10, "--output-dir", tmp_path / name]
        done = script(words, tmp_path)
        assert done.returncode == 0, told(done)
        assert "10 steps, loss " in done.stdout
        found[name] = [row for row in rows_of(done.stdout) if "reward" in row]
        assert [row["step"] for row in found[name]] == [5, 10]
    for here, original in zip(found["here"], found["there"], strict=True):
        assert here.keys() == original.keys()
        assert here["epoch"] == pytest.approx(original["epoch"])
    assert all(one[1]["reward"] > one[0]["reward"] + 0.05 for one in found.values())
    assert found["here"][1]["reward"] == pytest.approx(found["there"][1]["reward"], abs=0.25)
    more = script(
        [EXAMPLE, "--model", tiny_model, "--max-steps", 12, "--output-dir", tmp_path / "here", "--resume"],
        tmp_path,
    )
    assert more.returncode == 0 and "12 steps, loss " in more.stdout, told(more)


@pytest.mark.timeout(4 * SECONDS)
def test_what_ends_early_goes_on_where_it_was_also_in_another_folder(
    tiny_model: Path, tmp_path: Path
) -> None:
    """trainer.py 3, and address.py 1: later parts are served where the first was. Each part ends two steps
    behind the one before, as a step of the run is two of its iterations."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    output, on, addresses = tmp_path / "run", "new", set[str]()
    for part, what in enumerate(("interrupt", "raise", "kill")):
        ended = script([file, tiny_model, output, what, 2 * part + 2, on], tmp_path)
        if what == "kill":
            assert ended.returncode == -signal.SIGKILL, told(ended)
            wait_for_the_services(output)
        else:
            assert ended.returncode == 0, told(ended)
            name = {"raise": "LookupError of the script", "interrupt": "KeyboardInterrupt"}[what]
            assert f"raised {name}" in ended.stdout, told(ended)
            assert "go on with trainer.train(resume_from_checkpoint=True)" in ended.stderr
        addresses.add(address_in(output))
        output, on = output.rename(tmp_path / f"moved-{part}"), "on"
    done = script([file, tiny_model, output, "nothing", STEPS, on], tmp_path)
    assert done.returncode == 0, told(done)
    assert f"completed {STEPS}" in done.stdout and "goes on after step" in done.stdout, told(done)
    assert "'rewards/lengths/mean'" in done.stdout and "'rewards/beside/mean'" in done.stdout
    assert "'number'" in done.stdout and "'eval_rewards/lengths/mean'" in done.stdout
    assert addresses == {address_in(output)}
    summary = summary_of(output)
    assert (summary["phase"], summary["steps"]) == ("completed", STEPS // 2), "of two iterations"
    ledger = summary["ledger"]
    lost = sum(ledger["discarded"].values()) + ledger["in_flight"]
    assert ledger["dispatched"] == ledger["trained"] + lost and ledger["trained"] == 8 * STEPS // 2
    steps = [row["step"] for row in map(json.loads, (output / "metrics.jsonl").open()) if "train/loss" in row]
    assert steps == list(range(1, STEPS // 2 + 1)), "none is missing, none is twice"
    assert (tmp_path / f"{output.name}-model" / "config.json").is_file()


@pytest.mark.timeout(4 * SECONDS)
def test_callbacks_hear_each_step_once_and_stop_what_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    """Of two iterations a step of the run is two, and nine prompts are four batches of two: eight steps."""
    file = tmp_path / "script.py"
    file.write_text(WITH_CALLBACKS)
    done = script([file, tiny_model, tmp_path / "run"], tmp_path)
    assert done.returncode == 0, told(done)
    heard = [
        json.loads(line.removeprefix("HEARD ")) for line in done.stdout.splitlines() if line[:5] == "HEARD"
    ]
    assert [(what, how) for what, how, *_ in heard] == [("stop", "stopped"), ("nothing", "completed")]
    assert "without effect" not in done.stderr, told(done)
    last = 0
    for _, _, steps, events in heard:
        stepped = [step for event, step, _ in events if event == "step"]
        whole = [step for step in stepped if step % 8 == 0]
        assert stepped == list(range(last + 1, steps + 1)) and all(at == step / 8 for _, step, at in events)
        assert [step for event, step, _ in events if event == "measured"] == whole
        passes = [step for event, step, _ in events if event == "epoch"]
        assert passes == whole + ([steps] if steps % 8 else [])
        assert (events[0][:2], events[-1][:2]) == (["begin", last], ["end", steps])
        last = steps
    assert last == 24 and "'eval_reward'" in done.stdout


def address_in(output: Path) -> str:
    """Where the prompts and rewards of a run are served, to the end of its configuration."""
    config: str = json.loads((output / "run.json").read_text())["config_toml"]
    return config.split('address = "')[1]


def killed_and_gone_on(text: str, model: Path, folder: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    """How the second part of a script ended, whose first one kills itself, and the output folder, which was
    moved in between; argv: model, output folder, "new" or "on"."""
    file, output = folder / "script.py", folder / "run"
    file.write_text(text)
    killed = script([file, model, output, "new"], folder)
    assert killed.returncode == -signal.SIGKILL, told(killed)
    wait_for_the_services(output)
    address, moved = address_in(output), output.rename(folder / "moved")
    done = script([file, model, moved, "on"], folder)
    assert done.returncode == 0 and "goes on after step" in done.stdout, told(done)
    assert address_in(moved) == address, "served where the first part was"
    return done, moved


def wait_for_the_services(output: Path) -> None:
    """They end with the script; who has the folder open goes on writing into it for a moment."""
    import fcntl

    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        with (output / ".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                time.sleep(0.05)
    raise AssertionError("the folder is still somebody's")
