"""Scripts for SFTTrainer (quartet.sft): rows in memory, a real trainer process, a model that learned them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from quartet.sft import ConfigError, LoraConfig, SFTConfig, SFTTrainer

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.usefixtures("imported_once")

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
    with pytest.raises(ConfigError, match=r"is not empty; call train\(resume_from_checkpoint=True\)"):
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


#: So many that a callback which wants the end of them is heard long before.
MANY, EVERY = 160, 40


class Noting:
    """A callback: what it hears, and what it does at the end of a step behind the `after`-th."""

    def __init__(self, what: str, after: int) -> None:
        self.ends: list[int] = []
        self.begins: list[int] = []
        self.logged: list[tuple[int, bool]] = []
        self.trained: list[str] = []
        self._what, self._after = what, after

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        assert state.max_steps == MANY and Path(more["model"].folder).is_dir()
        self.trained.append(f"from {state.global_step}")

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.begins.append(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.ends.append(state.global_step)
        if self._what == "stop" and state.global_step > self._after:
            control.should_training_stop = True
        if self._what == "raise" and state.global_step > self._after:
            raise LookupError("of a callback")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **more: Any) -> None:
        self.logged.append((state.global_step, "eval_loss" in logs))

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.trained.append(f"to {state.global_step}")


def test_promise_4_callbacks_hear_each_step_once_and_end_what_goes_on(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that wants the end, one that raises, and then none that does either."""
    import transformers

    last = 0
    for what in ("stop", "raise", "nothing"):
        args = arguments(
            tmp_path / "out",
            **{"max_steps": MANY, "save_steps": EVERY, "eval_strategy": "steps", "eval_steps": EVERY},
            metric_for_best_model="eval_loss",
        )
        heard = Noting(what, last + 3)
        patient = transformers.EarlyStoppingCallback(early_stopping_patience=5)
        given = [transformers.PrinterCallback, transformers.ProgressCallback, patient, heard]
        trainer = SFTTrainer(str(model), args, ROWS, ROWS[:2], callbacks=given)
        if what == "raise":
            with pytest.raises(LookupError, match="of a callback"):
                trainer.train(resume_from_checkpoint=True)
            assert heard.ends[-1] == last + 4 and heard.trained == [f"from {last}"]
        else:
            done = trainer.train(resume_from_checkpoint=bool(last))
            assert done.global_step == heard.ends[-1] == trainer.state.global_step
            assert heard.trained == [f"from {last}", f"to {done.global_step}"]
        assert heard.ends == list(range(last + 1, heard.ends[-1] + 1))
        assert heard.begins[: len(heard.ends)] == list(range(last, heard.ends[-1]))
        assert [step for step, is_measured in heard.logged if is_measured] == [
            step for step in range(EVERY, heard.ends[-1] + 1, EVERY) if step > last
        ]
        # Saved behind the step under way, of which one that raised does not hear.
        last = trainer.state.global_step
        assert last < MANY or what == "nothing"
    assert last == MANY and (tmp_path / "out" / "checkpoint").is_dir()
    assert "'eval_mean_token_accuracy'" in capsys.readouterr().out


def test_a_script_counts_in_epochs(model: Path, tmp_path: Path) -> None:
    """Seven rows in batches of three are three steps of each pass, the last of one row, as in TRL."""
    rows = [ROWS[at % 3] for at in range(7)]
    args = SFTConfig(
        str(tmp_path / "out"),
        num_train_epochs=3,
        per_device_train_batch_size=3,
        learning_rate=3e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_ratio=0.3,
        max_length=64,
        eval_strategy="epoch",
        save_strategy="epoch",
    )
    trainer = SFTTrainer(str(model), args, train_dataset=rows, eval_dataset=ROWS[:1])
    assert trainer.state.max_steps == -1, "nobody has read the data"
    assert trainer.train().global_step == trainer.state.max_steps == 9
    history = trainer.state.log_history
    assert [row["step"] for row in history if "eval_loss" in row] == [3, 6, 9]
    rates = [row["learning_rate"] for row in history if "loss" in row]
    assert rates == pytest.approx([1e-3, 2e-3, *[3e-3] * 7]), "three steps are three tenths, rounded up"
    states = {
        one.name.partition("@")[0] for one in (tmp_path / "out/data/trainer/sft").iterdir() if one.is_dir()
    }
    assert states == {"step-3", "step-6", "final"}


#: As it is written for TRL, but for where it imports from, what it prints at its end, and the cases, of which
#: each is a training of its own.
OF_TRL = """
import json
import torch
import datasets
from {library} import SFTConfig, SFTTrainer

torch.set_num_threads(1)
found = []
for number, case in enumerate({cases!r}):
    args = SFTConfig(
        {output!r} + str(number),
        num_train_epochs=3,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        **case,
    )
    trainer = SFTTrainer({model!r}, args, train_dataset=datasets.Dataset.from_list({rows!r}))
    trainer.train()
    found.append([[row["loss"], row["grad_norm"]] for row in trainer.state.log_history if "loss" in row])
print(json.dumps(found))
"""
CASES = (
    {"assistant_only_loss": False, "max_length": 24, "packing": False},
    {"assistant_only_loss": True, "max_length": 24, "packing": False},
    {"assistant_only_loss": False, "max_length": 48, "packing": True},
)
SAID = (
    ("a", "no"),
    ("bcd", "yes, it is"),
    ("e", "maybe; " * 9),
    ("f?", "higher"),
    ("g", "x"),
    ("hi", "lower"),
)


@pytest.mark.slow
def test_a_script_of_trl_learns_the_same_with_another_import(model: Path, tmp_path: Path) -> None:
    """Every step is all rows, whose order is each library's own; one is cut."""
    pytest.importorskip("trl", reason="TRL is a development dependency")
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
        "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rows = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        for asked, said in SAID
    ]
    found = []
    for library in ("trl", "quartet.sft"):
        output = str(tmp_path / library)
        script = OF_TRL.format(library=library, output=output, model=str(folder), rows=rows, cases=CASES)
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    for case, theirs, ours in zip(CASES, *found, strict=True):
        assert len(theirs) == len(ours) == 3, f"{case}: as many steps"
        for row in zip(theirs, ours, strict=True):
            assert row[1] == pytest.approx(row[0], rel=1e-4), case
