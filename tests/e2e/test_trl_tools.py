"""A script for TRL's GRPOTrainer whose model calls its tools, as real processes, killed in the middle of a
call.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import summary_of
from tests.e2e.test_trl_scripts import IMPORT, SECONDS, killed_and_gone_on

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("imported_once")]

STEPS, SAMPLES = 12, 16

# argv: model, output folder, whether it goes on. What is said and called is of the whole run: it is appended.
SCRIPT = f"""
import json, os, signal, sys, threading
{IMPORT}

model, output, on = sys.argv[1:]
counted = 0

def shout(text: str) -> str:
    \"\"\"Says it loudly.

    Args:
        text: What to say.
    \"\"\"
    global counted
    assert threading.current_thread() is threading.main_thread()
    counted += 1
    if on == "new" and counted == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return text.upper()

def called(completions, **kwargs):
    with open("said.jsonl", "a") as file:
        file.writelines(json.dumps(messages) + chr(10) for messages in completions)
    return [float(any(one["role"] == "tool" for one in messages)) for messages in completions]

args = GRPOConfig(output, max_steps={STEPS}, per_device_train_batch_size={SAMPLES}, num_generations=8,
    learning_rate=4e-4, max_completion_length=96, max_tool_calling_iterations=2, logging_steps=1,
    save_steps=2, use_cpu=True, overrides={{"checks": {{"verify_logprobs": True}}}})
rows = [{{"prompt": [{{"role": "user", "content": f"say {{one}}"}}]}} for one in range(12)]
trainer = GRPOTrainer(model, called, args, rows, tools=[shout])
trainer.train(resume_from_checkpoint=on == "on")
trainer.save_model("trained")
print("LOG", json.dumps(trainer.state.log_history))
"""


@pytest.mark.timeout(4 * SECONDS)  # the model is made within it, too
def test_a_policy_learns_to_call_a_tool_and_a_kill_in_a_call_loses_nothing(
    calling_model: Path, tmp_path: Path
) -> None:
    done, output = killed_and_gone_on(SCRIPT, calling_model, tmp_path)

    for messages in map(json.loads, (tmp_path / "said.jsonl").open()):
        for call, result in pairwise(messages):
            if result["role"] == "tool" and "error" not in result["content"]:
                (made,) = call["tool_calls"]
                assert result["content"] == made["function"]["arguments"]["text"].upper()
        roles = [one["role"] for one in messages]
        assert set(roles[::2]) == {"assistant"} and set(roles[1::2]) <= {"tool"}

    summary = summary_of(output)
    assert (summary["phase"], summary["steps"]) == ("completed", STEPS)
    ledger = summary["ledger"]
    lost = sum(ledger["discarded"].values()) + ledger["in_flight"]
    assert ledger["dispatched"] == ledger["trained"] + lost and ledger["trained"] == SAMPLES * STEPS
    assert summary["max_logprob_difference"] <= 2e-5

    (log,) = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("LOG ")]
    rows = {row["step"]: row for row in log if "reward" in row}
    assert list(rows) == list(range(1, STEPS + 1)), "none is missing, none is twice"
    rollouts = rollouts_of(output)
    assert set(Counter(one["step"] for one in rollouts).values()) == {SAMPLES}
    for step, row in rows.items():
        calls = [one["metrics"]["tools/call_frequency"] for one in rollouts if one["step"] == step]
        assert row["tools/call_frequency"] == pytest.approx(sum(calls) / SAMPLES)
    before, after = (calls_at_once(folder) for folder in (calling_model, tmp_path / "trained"))
    assert before < 0.6 and after > 0.8, (before, after)


def calls_at_once(folder: Path) -> float:
    """How probable it is that an answer begins as a call does."""
    import torch
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    texts = [[{"role": "user", "content": f"say {number}"}] for number in range(12)]
    first = tokenizer.encode("<tool_call>", add_special_tokens=False)[0]
    found = []
    with torch.no_grad():
        for chat in texts:
            given = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
            found.append(float(model(given["input_ids"]).logits[0, -1].softmax(-1)[first]))
    return sum(found) / len(found)


def rollouts_of(output: Path) -> list[dict[str, Any]]:
    """As the run's folder shows those that were trained on."""
    return [json.loads(line) for file in sorted((output / "rollouts").iterdir()) for line in file.open()]
