"""Scripts for SFTTrainer (quartet.sft): rows in memory, a real trainer process, a model that learned them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from quartet.sft import ConfigError, LoraConfig, SFTConfig, SFTTrainer

from tests.conftest import REPOSITORY

SECONDS = 200
WORDS = (("a", "correct"), ("b", "lower"), ("c", "higher"))
ROWS = [
    {"prompt": [{"role": "user", "content": asked}], "completion": [{"role": "assistant", "content": said}]}
    for asked, said in WORDS
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one."""
    import torch
    import transformers
    from quartet.cli.tiny.files import PHRASES, write_model_files

    folder = tmp_path_factory.mktemp("scripts") / "model"
    write_model_files(folder, PHRASES)
    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def arguments(output: Path, **more: Any) -> SFTConfig:
    usual = {"max_steps": 24, "per_device_train_batch_size": 6, "learning_rate": 3e-3, "max_length": 64}
    return SFTConfig(str(output), **usual | {"save_steps": 8, "assistant_only_loss": True} | more)


def test_a_script_trains_measures_and_saves(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    args = arguments(tmp_path / "out", eval_strategy="steps", eval_steps=12, eval_on_start=True)
    trainer = SFTTrainer(str(model), args, train_dataset=ROWS, eval_dataset=ROWS[:2])
    done = trainer.train()
    history = trainer.state.log_history
    losses = [row["loss"] for row in history if "loss" in row]
    assert done.global_step == trainer.state.global_step == trainer.state.max_steps == len(losses) == 24
    assert losses[-1] < 0.5 < 2.0 < losses[0]
    assert done.training_loss == pytest.approx(sum(losses) / 24) and done.metrics["train_runtime"] > 0
    assert [row["step"] for row in history if "eval_loss" in row] == [0, 12, 24]
    measured = trainer.evaluate()
    assert measured["eval_mean_token_accuracy"] == 1.0 and measured["eval_loss"] < 0.5
    trainer.save_model(tmp_path / "saved")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").config.model_type
    with pytest.raises(ConfigError, match="is not empty; go on with what it holds"):
        trainer.train()
    assert trainer.train(resume_from_checkpoint=True).global_step == 24, "nothing is left to do"


def test_promise_3_what_dies_with_its_script_goes_on(model: Path, tmp_path: Path) -> None:
    """promise 2, too: started again, it goes on, to the same end."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom quartet.sft import LoraConfig, SFTConfig, SFTTrainer\n"
        f"args = SFTConfig({str(tmp_path / 'out')!r}, max_steps=30, per_device_train_batch_size=6, "
        "learning_rate=2e-2, max_length=64, save_steps=5, assistant_only_loss=True)\n"
        f"lora = LoraConfig(r=4, lora_alpha=8, target_modules=['q_proj', 'v_proj'])\n"
        f"trainer = SFTTrainer({str(model)!r}, args, train_dataset={ROWS!r}, peft_config=lora)\n"
        "trainer.train(resume_from_checkpoint='--resume' in sys.argv)\n"
    )
    metrics = tmp_path / "out" / "metrics.jsonl"
    process = subprocess.Popen([sys.executable, str(script)], cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + SECONDS
    while not metrics.exists() or metrics.read_text().count("\n") < 7:
        assert process.poll() in (None, 0) and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    again = [sys.executable, str(script), "--resume"]
    while True:  # until what died with it has let go of the folder
        done = subprocess.run(again, cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS)
        if "is going on" not in done.stderr:
            break
        assert time.monotonic() < deadline
    assert done.returncode == 0, done.stdout + done.stderr
    args = arguments(tmp_path / "out", max_steps=30)
    adapted = SFTTrainer(str(model), args, train_dataset=ROWS, peft_config=LoraConfig(r=4, lora_alpha=8))
    assert [row["step"] for row in adapted.state.log_history] == list(range(1, 31))
    assert (tmp_path / "out" / "checkpoint" / "adapter").is_dir()
