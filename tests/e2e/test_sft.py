"""`quartet sft` as it is: a trainer process, a file of chats, a model that learns them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import QUARTET, REPOSITORY

pytestmark = pytest.mark.usefixtures("imported_once")

SECONDS = 200
OF_TIME = ("time", "time/step_s", "time/validation_s", "tokens_per_second")


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
    assert rows[-1]["train/loss"] < 0.1 < 2.0 < rows[0]["train/loss"]
    assert rows[-1]["train/learning_rate"] < rows[0]["train/learning_rate"] == pytest.approx(3e-3)


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
    return [{key: value for key, value in row.items() if key not in OF_TIME} for row in rows]


def kill_after(arguments: list[str], output: Path, step: int) -> None:
    """Start the command; command and trainer are killed together after so many steps.

    Anew where they had come to the end by then: they do not wait for this process.
    """
    for _ in range(5):
        process = subprocess.Popen(
            arguments, cwd=REPOSITORY, stdout=subprocess.DEVNULL, start_new_session=True
        )
        metrics, deadline = output / "metrics.jsonl", time.monotonic() + SECONDS
        while not metrics.exists() or metrics.read_text().count('"train/loss":') < step:
            assert process.poll() in (None, 0) and time.monotonic() < deadline
            time.sleep(0.01)
        for pid in [process.pid, *children(process.pid)] if process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        if not (output / "checkpoint").exists():
            return
        shutil.rmtree(output)
    raise AssertionError("it was too late to interrupt anything")


def test_ctrl_c_saves_the_step_under_way_and_the_folder_says_how_it_goes_on(
    finished: Path, work: Path
) -> None:
    """Asked for the end wherever it is, and gone on with from elsewhere by the folder alone, to the same
    bits."""
    from safetensors.torch import load_file

    output = work / "stopped"
    metrics, deadline = output / "metrics.jsonl", time.monotonic() + SECONDS
    process = subprocess.Popen(
        command(Path("."), output, "--model", str(work / "model")),
        cwd=work,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not metrics.exists() or metrics.read_text().count('"train/loss":') < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, said
    done = len(rows_of(output))
    assert f"stopped after step {done}; go on with: quartet sft --output-dir {output} --resume\n" in said
    states = [one.name for one in (output / "data" / "trainer" / "sft").iterdir() if one.is_dir()]
    assert done < 30 and any(name.startswith("closed") for name in states) is bool(done % 8)
    resumed = [*QUARTET, "sft", "--output-dir", str(output), "--resume"]
    again = subprocess.run(resumed, cwd=work / "model", capture_output=True, text=True, timeout=SECONDS)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"going on after step {done}/30" in again.stdout
    assert rows_of(output) == rows_of(finished)
    ours, theirs = (load_file(one / "checkpoint" / "model.safetensors") for one in (output, finished))
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in theirs)


ADAPTER = ("--lora.enabled", "--lora.dropout", "0.1", "--learning-rate", "2e-2", "--eval.interval", "5")
PACKED = ("--packing", "best_fit", "--max-tokens", "40", "--batch-size", "2")


def adapter(work: Path, output: Path, *more: str) -> list[str]:
    """The command that trains an adapter, and measures it on one chat that it learns and one that it does
    not. Best fit: of ten chats in rows of 40 tokens at most, two rows a step, several passes."""
    validation, ragged = work / "validation.jsonl", work / "ragged.jsonl"
    known = (work / "chats.jsonl").read_text()
    one = known.splitlines()[0]
    validation.write_text(f"{one}\n{one.replace('correct', 'wrong')}")
    others = [
        [{"role": "user", "content": "d" * number}, {"role": "assistant", "content": "b" * number}]
        for number in (1, 9, 2, 5, 1, 3, 1)
    ]
    ragged.write_text("\n".join([known, *(json.dumps({"messages": chat}) for chat in others)]))
    asked = [*command(work, output), *ADAPTER, *PACKED, "--data", str(ragged)]
    return [*asked, "--validation", str(validation), *more]


@pytest.fixture(scope="module")
def adapted(work: Path) -> Path:
    """Output folder of an adapter, measured and shown."""
    shown = ("--wandb.project", "p", "--wandb.mode", "offline", "--tensorboard.enabled", "true")
    run_to_the_end(adapter(work, work / "adapted", *shown))
    return work / "adapted"


def test_an_adapter_is_measured_and_shown(adapted: Path) -> None:
    sys.path.insert(0, str(REPOSITORY / "sdk" / "tests"))
    import wandb_file

    rows = rows_of(adapted)
    losses = {row["step"]: row["val/loss"] for row in rows if "val/loss" in row}
    assert list(losses) == [0, 5, 10, 15, 20, 25, 30]
    assert losses[30] > rows[-2]["train/loss"], "of the two answers to one question only one was learned"
    assert losses[0] != losses[5]
    (file,) = adapted.glob("wandb/offline-run-*/run-*.wandb")
    assert len(list(adapted.glob("tensorboard/events.out.tfevents.*"))) == 1
    assert json.loads((adapted / "tensorboard" / "quartet.json").read_text()) == {"event": rows[-1]["event"]}
    written = wandb_file.read(file)
    assert [row["_step"] for row in written.history] == [row["event"] for row in rows]
    assert written.summary["phase"] == "completed" and written.config["lora"]["dropout"] == 0.1


def test_the_checkpoint_of_an_adapter_is_merged_and_has_the_adapter(adapted: Path, work: Path) -> None:
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    ids = torch.arange(3, 35)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(adapted / "checkpoint")(ids).logits
        base = AutoModelForCausalLM.from_pretrained(work / "model")
        plain = base(ids).logits
        own = peft.PeftModel.from_pretrained(base, adapted / "checkpoint" / "adapter").eval()(ids).logits
    torch.testing.assert_close(merged, own, rtol=0, atol=1e-3)
    assert float((merged - plain).abs().max()) > 0.1


def test_invariant_9_a_killed_run_goes_on_bit_equally_from_its_last_state_and_is_exported(
    adapted: Path, work: Path
) -> None:
    """The state is that of step 8 or a later one, in the middle of a pass over rows that were packed."""
    output = work / "killed"
    kill_after(adapter(work, output), output, 10)
    for more, said in (
        ((), "--resume"),
        (
            ("--packing", "drawn", "--resume"),
            'was begun with another packing ("best_fit", and not "drawn")',
        ),
    ):
        refused = subprocess.run(
            adapter(work, output, *more), cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS
        )
        assert refused.returncode == 2 and said in refused.stderr, refused.stdout + refused.stderr
    done = subprocess.run(
        [*QUARTET, "export", str(output), str(work / "exported")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0 and "the model of state step-" in done.stdout, done.stdout + done.stderr
    assert (work / "exported" / "adapter" / "adapter_model.safetensors").exists()
    run_to_the_end(adapter(work, output, "--resume"))
    assert rows_of(output) == rows_of(adapted)
    tokens = {row["train/tokens"] for row in rows_of(adapted) if "train/tokens" in row}
    assert len(tokens) > 1 and max(tokens) <= 80
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        ours, theirs = (one / "checkpoint" / file for one in (output, adapted))
        assert ours.read_bytes() == theirs.read_bytes()


def test_training_begins_from_an_adapter_where_it_ended(adapted: Path, work: Path) -> None:
    output = work / "further"
    whole = ("--model", str(adapted / "checkpoint"), "--no-lora.enabled", "--max-steps", "1")
    run_to_the_end(adapter(work, output, *whole))
    first = rows_of(output)[0]
    assert first["val/loss"] == pytest.approx(rows_of(adapted)[-1]["val/loss"], abs=1e-3)


def test_what_the_model_has_no_place_for_leaves_no_folder(work: Path) -> None:
    arguments = adapter(work, work / "refused", "--lora.target-modules", '["q_pro"]')
    done = subprocess.run(arguments, cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "lora.target_modules = 'q_pro' is refused" in done.stderr and "q_proj" in done.stderr
    assert "go on by the same command" not in done.stderr and not (work / "refused").exists()


def children(pid: int) -> list[int]:
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [one for child in found for one in children(child)]


def test_invariant_9_a_killed_file_of_prime_rl_on_a_folder_of_tables_goes_on_bit_equally(work: Path) -> None:
    """Two Parquet files, steps of so many tokens, and samples that are on disk (shelf.py) or not."""
    import pyarrow
    from pyarrow import parquet
    from safetensors.torch import load_file

    folder = work / "tables"
    folder.mkdir()
    rows = [json.loads(line) for line in (work / "chats.jsonl").read_text().splitlines()]
    for name, part in (("train-0", rows[:2]), ("train-1", rows[2:])):
        parquet.write_table(pyarrow.Table.from_pylist(part), folder / f"{name}.parquet")
    file = work / "sft.toml"
    file.write_text(
        f'max_steps = 24\n[model]\nname = "{work / "model"}"\n[data]\nname = "{folder}"\nseq_len = 64\n'
        "batch_size = 3\n[val]\ninterval = 5\neval_on_start = true\n"
        f'[val.data]\nname = "{folder}/*-1.parquet"\n[optim]\nlr = 3e-3\n[ckpt]\ninterval = 5\n'
    )

    def asked(output: Path, *more: str) -> list[str]:
        return [*QUARTET, "sft", "@", str(file), "--output-dir", str(output), *more]

    whole, killed = work / "whole-prime", work / "killed-prime"
    run_to_the_end(asked(whole))
    kill_after(asked(killed), killed, 8)
    run_to_the_end(asked(killed, "--resume"))
    assert rows_of(killed) == rows_of(whole)
    measured = [row for row in rows_of(whole) if "val/loss" in row]
    assert measured[-1]["val/token_accuracy"] == 1.0 > measured[0]["val/token_accuracy"]
    assert [row["step"] for row in measured] == [0, 5, 10, 15, 20, 24]
    ours, theirs = (load_file(one / "checkpoint" / "model.safetensors") for one in (killed, whole))
    assert all(ours[name].equal(theirs[name]) for name in theirs)
