"""`quartet sft` as it is: a trainer process, a file of chats, a model that learns them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import QUARTET, REPOSITORY

SECONDS = 200


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model and three chats."""
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
    return work


def command(work: Path, output: Path, *more: str) -> list[str]:
    found = [*QUARTET, "sft", "--model", str(work / "model"), "--data", str(work / "chats.jsonl")]
    found += ["--max-steps", "30", "--batch-size", "6", "--learning-rate", "3e-3", "--ckpt.interval", "8"]
    return [*found, "--output-dir", str(output), *more]


def run_to_the_end(arguments: list[str]) -> None:
    done = subprocess.run(arguments, cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def finished(work: Path) -> Path:
    """Output folder of a run without interruption."""
    run_to_the_end(command(work, work / "out"))
    return work / "out"


def test_what_the_trainer_refuses_is_refused_before_the_folder_is_taken(work: Path) -> None:
    arguments = command(work, work / "refused", "--trainer.thread=2")
    done = subprocess.run(arguments, cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "[trainer] unknown key 'thread'" in done.stderr and "Traceback" not in done.stderr
    assert not (work / "refused").exists()


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


def rows_of(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def test_invariant_9_a_killed_run_goes_on_bit_equally_from_its_last_state(finished: Path, work: Path) -> None:
    """Command and trainer are killed together, after step 18: the state is that of step 16 or a later one."""
    from safetensors.torch import load_file

    output = work / "killed"
    metrics = output / "metrics.jsonl"
    process = subprocess.Popen(
        command(work, output), cwd=REPOSITORY, stdout=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + SECONDS
    while not metrics.exists() or metrics.read_text().count("\n") < 18:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    family = [process.pid, *children(process.pid)]
    for pid in family:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    assert not (output / "checkpoint").exists(), "it was too late to interrupt anything"
    refused = subprocess.run(command(work, output), cwd=REPOSITORY, capture_output=True, text=True)
    assert refused.returncode == 2 and "--resume" in refused.stderr
    run_to_the_end(command(work, output, "--resume"))
    assert rows_of(output) == rows_of(finished)
    ours, theirs = (load_file(one / "checkpoint" / "model.safetensors") for one in (output, finished))
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in theirs)


def children(pid: int) -> list[int]:
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [one for child in found for one in children(child)]
