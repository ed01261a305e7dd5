"""A script of TRL with environment_factory, as real processes: killed in the midst of a method, and gone on
with while its environment host is killed, with environments open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import summary_of
from tests.e2e.test_trl_scripts import IMPORT, SECONDS, killed_and_gone_on

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("imported_once")]

STEPS, SAMPLES = 6, 16

# argv: model, output folder, whether it goes on. What is seen is of the whole run: it is appended.
SCRIPT = f"""
import json, os, pathlib, signal, sys, threading
{IMPORT}

model, output, on = sys.argv[1:]
counted = 0

def host():
    \"\"\"Of this run; its workers are processes of its own.\"\"\"
    config = f"{{output}}/config/envhost.toml".encode()
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if config in (folder / "cmdline").read_bytes().split(bytes(1)):
                return int(folder.name)
        except OSError:
            pass  # it has ended

class Room:
    def reset(self, prompt, number, **columns):
        self.number, self.heard = number, []
        return f" {{number}}"

    def shout(self, text: str) -> str:
        \"\"\"Says it loudly.

        Args:
            text: What to say.
        \"\"\"
        global counted
        assert threading.current_thread() is threading.main_thread()
        counted += 1
        if on == "new" and counted == 15:
            os.kill(os.getpid(), signal.SIGKILL)
        if on == "on" and counted == 15:
            os.kill(host(), signal.SIGKILL)
        self.heard.append(text.upper())
        return text.upper()

    def get_reward(self):
        return float(bool(self.heard))

def seen(prompts, completions, environments, number, **kwargs):
    with open("seen.jsonl", "a") as file:
        for prompt, messages, room, one in zip(prompts, completions, environments, number):
            assert room.number == one and prompt[-1]["content"] == f"say {{one}}"
            file.write(json.dumps([messages, room.heard]) + chr(10))
    return [0.0] * len(completions)

args = GRPOConfig(output, max_steps={STEPS}, per_device_train_batch_size={SAMPLES}, num_generations=8,
    learning_rate=5e-5, max_completion_length=96, max_tool_calling_iterations=2, logging_steps=1,
    save_steps=1, use_cpu=True, eval_strategy="steps", eval_steps=3,
    overrides={{"checks": {{"verify_logprobs": True}}}})
rows = [{{"prompt": [{{"role": "user", "content": "say"}}], "number": one}} for one in range(12)]
trainer = GRPOTrainer(model, seen, args, rows, rows[:2], environment_factory=Room)
trainer.train(resume_from_checkpoint=on == "on")
print("LOG", json.dumps(trainer.state.log_history))
print("EVAL", json.dumps(trainer.evaluate()))
"""


@pytest.mark.timeout(4 * SECONDS)  # the model is made within it, too
def test_a_policy_acts_in_environments_of_a_script(calling_model: Path, tmp_path: Path) -> None:
    done, output = killed_and_gone_on(SCRIPT, calling_model, tmp_path)
    assert "changed since the run began" not in done.stdout + done.stderr

    heard = 0
    for messages, own in map(json.loads, (tmp_path / "seen.jsonl").open()):
        results = [one["content"] for one in messages if one["role"] == "tool"]
        # One that found no room any more was dropped.
        assert "error" in str(results) or results == own[: len(results)]
        heard += len(own)
    assert heard

    summary = summary_of(output)
    assert (summary["phase"], summary["steps"]) == ("completed", STEPS)
    assert summary["ledger"]["trained"] == SAMPLES * STEPS
    assert summary["restarts"]["envhost"] == 1, "it was killed, and is back"
    assert summary["max_logprob_difference"] <= 2e-5
    told_of = {line[:4]: line[4:] for line in done.stdout.splitlines() if line.startswith(("LOG ", "EVAL"))}
    rows = [row for row in json.loads(told_of["LOG "]) if "reward" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row["reward"] == pytest.approx(row["rewards/Room/mean"]) and row["rewards/seen/mean"] == 0
    assert any(0 < row["rewards/Room/mean"] <= row["tools/call_frequency"] for row in rows)
    measured = [row for row in json.loads(told_of["LOG "]) if "eval_reward" in row]
    assert [row["step"] for row in measured] == [3, 6]
    for row in measured:
        assert row["eval_reward"] == pytest.approx(row["eval_rewards/Room/mean"])
    found = json.loads(told_of["EVAL"])
    assert found["eval_failed"] == 0 and "eval_rewards/Room/mean" in found
