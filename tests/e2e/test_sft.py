"""`quartet sft` as it is: a trainer process, a file of chats, a model that learns them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.conftest import QUARTET, REPOSITORY

SECONDS = 200


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output folder of a run on a random model."""
    import torch
    import transformers
    from quartet.cli.tiny.files import PHRASES, write_model_files

    work = tmp_path_factory.mktemp("sft")
    write_model_files(work / "model", PHRASES)
    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = transformers.AutoConfig.from_pretrained(work / "model")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(work / "model")
    chats = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in (("a", "correct"), ("b", "lower"), ("c", "higher"))
    ]
    (work / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    command = [*QUARTET, "sft", "--model", str(work / "model"), "--data", str(work / "chats.jsonl")]
    command += ["--max-steps", "30", "--batch-size", "6", "--learning-rate", "3e-3"]
    command += ["--output-dir", str(work / "out")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return work / "out"


def test_the_loss_falls_along_the_schedule(finished: Path) -> None:
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert rows[-1]["loss"] < 0.1 < 2.0 < rows[0]["loss"]
    assert rows[-1]["learning_rate"] < rows[0]["learning_rate"] == pytest.approx(3e-3)


def test_the_checkpoint_answers_as_it_was_taught(finished: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(finished / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(finished / "checkpoint")
    for question, answer in (("a", "correct"), ("b", "lower"), ("c", "higher")):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        out = model.generate(**prompt, max_new_tokens=4, do_sample=False)
        said = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])
        assert said.startswith(f"{answer}<|im_end|>"), said
