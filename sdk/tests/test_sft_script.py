"""SFTTrainer scripts: what becomes of their arguments and data, and what is refused (quartet.sft)."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from quartet.cli.sft.sources import files_of
from quartet.config import ConfigError
from quartet.config.refusals import together
from quartet.run.sft import SftConfig
from quartet.scripts.adapter import LoraConfig
from quartet.scripts.argument_list import ArgumentList
from quartet.scripts.models import Model
from quartet.scripts.process import ERROR, MAX_ERROR_LINES, run_command
from quartet.scripts.trainer_table import MAX_KEPT
from quartet.sft import SFTConfig, SFTTrainer, TuningFailed
from quartet.sft.data_set import path_of, write, written
from quartet.sft.translate import translate
from quartet.sft.untranslated import REFUSED, WITHOUT_EFFECT
from vf_rl_tables import value_at

#: What the page names otherwise than alone: in code, or with "args." before it.
IN_WORDS = ("output_dir", "overrides")
CHAT = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]}


@pytest.fixture
def model(tmp_path: Path) -> Model:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"max_position_embeddings": 512}')
    return Model("m", str(tmp_path / "m"))


def config(model: Model, validation: Path | None = None, peft: Any = None, **arguments: Any) -> SftConfig:
    return translate(SFTConfig(**arguments), model, Path("d.jsonl"), validation, peft).config


def notes(model: Model, **arguments: Any) -> tuple[str, ...]:
    return translate(SFTConfig(**arguments), model, Path("d")).notes


def test_what_a_script_leaves_out_is_as_in_trl(model: Model) -> None:
    expected = {
        "model": model.folder,
        "data": Path("d.jsonl"),
        "validation": None,
        "epochs": 3.0,
        "max_steps": None,
        "batch_size": 8,
        "batch_tokens": 0,
        "max_tokens": 512,
        "overlong": "cut",
        "learns": "everything",
        "short_batches": True,
        "learning_rate": 2e-5,
        "lr_scheduler": "linear",
        "warmup_steps": 0,
        "optimizer": "adamw",
        "seed": 42,
        "ckpt.interval": 500,
        "ckpt.keep_last": MAX_KEPT,
        "trainer": {"gradient_checkpointing": True},
        "roles": ("assistant",),
        "wandb.project": None,
        "lora.enabled": False,
    }
    found = config(model)
    assert {path: value_at(found, path) for path in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"max_steps": 7, "num_train_epochs": 2}, {"max_steps": 7, "epochs": None}),
        ({"num_train_epochs": 0.5}, {"epochs": 0.5}),
        (
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "num_processes": 2},
            {"batch_size": 12, "trainer": {"ranks": 2, "gradient_checkpointing": True}},
        ),
        (
            {"packing": True, "max_length": 100},
            {"packing": "best_fit", "batch_size": 8, "batch_tokens": 0, "max_tokens": 100},
        ),
        ({"packing": False}, {"packing": "drawn", "batch_size": 8}),
        ({"max_length": None}, {"max_tokens": 512}),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}},
            {"lr_scheduler": "cosine", "min_lr": 1e-6},
        ),
        ({"warmup_ratio": 0.1, "max_steps": 55}, {"warmup_ratio": 0.1, "warmup_steps": 0}),
        ({"warmup_steps": 0.1}, {"warmup_ratio": 0.1, "warmup_steps": 0}),
        ({"warmup_steps": 9}, {"warmup_steps": 9}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4}, {"lr_scheduler": "constant"}),
        ({"report_to": ["tensorboard"]}, {"tensorboard.enabled": True}),
        ({"optim": "sgd"}, {"optimizer": "sgd", "momentum": 0.0}),
        (
            {"save_steps": 0.5, "max_steps": 9, "save_total_limit": 2},
            {"ckpt.interval": 5, "ckpt.keep_last": 2},
        ),
        ({"save_strategy": "epoch"}, {"ckpt.epochs": 1.0, "ckpt.interval": 10}),
        ({"save_steps": 0.5, "num_train_epochs": 5}, {"ckpt.epochs": 2.5}),
        ({"loss_type": "chunked_nll"}, {"learns": "everything", "learn_prompts": False}),
        ({"assistant_only_loss": True}, {"learns": "roles", "roles": ("assistant",)}),
        ({"completion_only_loss": False}, {"learns": "everything", "learn_prompts": True}),
        ({"completion_only_loss": True}, {"learns": "everything", "learn_prompts": False}),
        (
            {"use_cpu": True, "gradient_checkpointing": False, "activation_checkpointing": True},
            {"trainer": {"device": "cpu", "gradient_checkpointing": True}},
        ),
        (
            {"overrides": {"trainer": {"threads": 2}, "roles": ["user"], "batch_size": 3}},
            {"trainer": {"threads": 2, "gradient_checkpointing": True}, "roles": ("user",), "batch_size": 3},
        ),
    ],
)  # fmt: skip
def test_promise_1_arguments_are_translated(
    model: Model, arguments: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = config(model, **arguments)
    assert {path: value_at(found, path) for path in expected} == expected


def test_a_set_is_measured_when_asked_and_at_the_end(model: Model) -> None:
    once = config(model, Path("v")).eval
    assert (once.before, once.interval, once.after) == (False, 0, True)
    asked = {"eval_strategy": "steps", "eval_on_start": True}
    often = config(model, Path("v"), eval_steps=20, **asked).eval
    assert (often.before, often.interval, often.after) == (True, 20, True)
    assert config(model, Path("v"), **asked).eval.interval == 10, "of logging_steps, where nothing is said"
    each = config(model, Path("v"), eval_strategy="epoch").eval
    assert (each.before, each.epochs, each.interval, each.after) == (False, 1.0, 0, True)
    shared = config(model, Path("v"), eval_strategy="steps", eval_steps=0.25, num_train_epochs=2).eval
    assert shared.epochs == 0.5


def test_an_adapter_is_as_of_a_run(model: Model) -> None:
    lora = config(model, peft=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])).lora
    assert (lora.enabled, lora.r, lora.alpha, lora.target_modules) == (True, 4, 8, ("q_proj",))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"loss_type": "dft"}, "args.loss_type = 'dft' is refused: should be one of nll, chunked_nll"),
        ({"packing": True, "max_length": None}, "args.packing = True packs rows of max_length tokens"),
        ({"warmup_ratio": 2.0, "max_steps": 3}, "args.warmup_ratio = 2.0 is refused: should be a share of"),
        ({"warmup_steps": -1}, "args.warmup_steps = -1 is refused: should be 0 or more"),
        ({"overwrite_output_dir": True}, "args.overwrite_output_dir: there is no such argument; nothing is"),
        ({"save_steps": 1.5}, "args.save_steps = 1.5 is refused: should be a number of steps"),
        ({"eval_strategy": "steps"}, "args.eval_strategy = 'steps' measures eval_dataset; give one to"),
        ({"eval_strategy": "best"}, "args.eval_strategy = 'best' is refused: should be one of no, steps, ep"),
        ({"packing": True, "packing_strategy": "ffd"}, "args.packing_strategy = 'ffd' is refused: should be"),
        ({"max_length": 0}, "args.max_length = 0 is refused: should be a whole number from 2"),
        ({"learning_rate": -1.0}, "args.learning_rate = -1.0 is refused: should be"),
        ({"overrides": {"rate": 1}}, "unknown key 'rate'"),
        ({"truncation_mode": "keep_end"}, "args.truncation_mode = 'keep_end' is refused: what is too long"),
        ({"dataset_text_field": "body"}, 'is refused: name the column "text"'),
        ({"learning_rat": 1}, "args.learning_rat: there is no such argument; did you mean 'learning_rate'"),
        ({"packing": "yes"}, "args.packing = 'yes' is refused: should be True or False"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused(model: Model, arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(model, **arguments)
    assert why in str(caught.value)


def test_what_is_without_effect_is_said(model: Model) -> None:
    assert notes(model) == notes(model, logging_steps=10, bf16=None) == ()
    assert notes(model, logging_steps=1, dataset_num_proc=4) == (
        "args.dataset_num_proc = 4 is without effect: rows are read once, before the first step, and drawn "
        "in an order that follows from seed",
        "args.logging_steps = 1 is without effect: every step is in metrics.jsonl of output_dir, and in "
        "trainer.state.log_history",
    )
    by_logging = {"logging_steps": 25, "eval_strategy": "steps"}
    measured = translate(SFTConfig(**by_logging), model, Path("d"), Path("v"))
    assert measured.config.eval.interval == 25 and measured.notes == ()
    assert len(notes(model, logging_steps=25)) == 1, "with nothing to measure"
    assert "'constant' has no warm-up" in notes(model, lr_scheduler_type="constant", warmup_steps=3)[0]
    assert "is taken as 'bfd'" in notes(model, packing=True, packing_strategy="wrapped")[0]
    assert notes(model, packing_strategy="wrapped") == (), "nothing is packed"
    assert "args.save_strategy = 'no' is without effect" in notes(model, save_strategy="no")[0]
    assert "args.report_to = 'comet_ml' is without effect" in notes(model, report_to="comet_ml")[0]
    assert translate(SFTConfig(), model, Path("d")).notes == ()
    assert not WITHOUT_EFFECT.keys() & REFUSED.keys()
    assert issubclass(SFTConfig, ArgumentList)
    assert not set(SFTConfig.__annotations__) & SFTConfig.known().keys()


def test_rows_become_a_file_that_is_the_same_each_time(tmp_path: Path) -> None:
    """data_set.py 1 and 2."""
    output = tmp_path / "out"
    file = path_of("train_dataset", [CHAT], output)
    assert file == tmp_path / "out.data" / "train_dataset.jsonl"
    write("train_dataset", [CHAT, {"text": None}], output)
    first = file.read_bytes()
    assert [json.loads(line) for line in first.splitlines()] == [CHAT, {"text": None}]
    write("train_dataset", [CHAT, {"text": None}], output)
    assert file.read_bytes() == first and list(files_of(file, "data")) == [file]
    write("train_dataset", [CHAT, {"text": None}], output, goes_on=True)
    with pytest.raises(ConfigError, match=r"train_dataset is another one than .*out was begun with"):
        write("train_dataset", [CHAT], output, goes_on=True)
    assert file.read_bytes() == first and [one.name for one in file.parent.iterdir()] == [file.name]
    datasets = pytest.importorskip("datasets", reason="a development dependency, of TRL")
    write("train_dataset", datasets.Dataset.from_list([{"a": {"x": 1}}, {"a": {"y": "é"}}]), output)
    assert file.read_text() == '{"a": {"x": 1}}\n{"a": {"y": "é"}}\n'
    for given, why in (
        ({"train": [CHAT]}, "train_dataset = dict is refused: give the path of a file"),
        (5, "train_dataset = int is refused"),
        # Of a stream that never ends a file would be written that never ends.
        (repeat(CHAT), r"= repeat is refused: all rows are .* list\(train_dataset.take\(1000\)\)$"),
        (datasets.Dataset.from_list([CHAT]).to_iterable_dataset(), "= IterableDataset is refused"),
    ):
        with pytest.raises(ConfigError, match=why):
            path_of("train_dataset", given, output)
    for rows, why in (
        ([5], "row 1 is int; write a dict"),
        ([CHAT, {"x": {1}}], "row 2 has what JSON does not"),
    ):
        with pytest.raises(ConfigError, match=why):
            write("train_dataset", rows, output)


def test_a_disk_that_takes_no_rows_is_named(tmp_path: Path) -> None:
    file = path_of("train_dataset", [CHAT], tmp_path / "out")
    write("train_dataset", [CHAT], tmp_path / "out")
    file.with_suffix(".new").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=rf"^train_dataset cannot be written to {file}: No space left"):
        write("train_dataset", [CHAT] * 2, tmp_path / "out")
    assert file.read_text() == json.dumps(CHAT) + "\n" and len(list(file.parent.iterdir())) == 1
    (taken := tmp_path / "other.data").touch()  # nor a folder for them
    with (
        pytest.raises(ConfigError, match=rf"^train_dataset cannot be written to {taken}: File exists; make"),
        written({"train_dataset": [CHAT]}, tmp_path / "other"),
    ):
        pass


def test_rows_that_are_being_read_are_nobody_elses(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """data_set.py 3: two scripts that name the same folder, of which neither has made it yet."""
    first, second = (trainer(chat_model, tmp_path / "out", train_dataset=[CHAT] * rows) for rows in (1, 2))
    rows, read = path_of("train_dataset", [CHAT], tmp_path / "out"), list[str]()

    def command(*_: Any) -> None:
        with pytest.raises(ConfigError, match=r"out belongs to a fine-tuning that is going on; wait for its"):
            second.train()
        read.append(rows.read_text())

    monkeypatch.setattr("quartet.sft.trainer.run_command", command)
    first.train()
    assert read == [json.dumps(CHAT) + "\n"]
    monkeypatch.undo()
    with written({"train_dataset": [CHAT] * 2, "eval_dataset": None}, tmp_path / "out"):
        assert len(rows.read_text().splitlines()) == 2, "once the first has ended"
    with written({"train_dataset": "rows.jsonl"}, tmp_path / "files"):
        assert not path_of("train_dataset", [], tmp_path / "files").parent.exists()


def trainer(chat_model: Path, output: Path, **more: Any) -> SFTTrainer:
    args = SFTConfig(str(output), max_steps=2, assistant_only_loss=True)
    return SFTTrainer(**{"model": str(chat_model), "args": args, "train_dataset": [CHAT]} | more)


def test_a_trainer_refuses_what_it_cannot_hear(chat_model: Path, tmp_path: Path) -> None:
    for given, why in (
        ({"callbacks": [1]}, r"callbacks\[0\] = 1 is refused: give an object with methods of transformers'"),
        ({"callbacks": 1}, "callbacks = 1 is refused: give a list of them"),
        ({"formatting_func": str}, "apply it to the rows"),
        ({"eval_data": "x"}, "did you mean 'eval_dataset'"),
        ({"tokenizer": "x"}, r"SFTTrainer\(tokenizer=...\): .* it is called processing_class now"),
        ({"train_dataset": None}, "train_dataset is missing"),
        ({"args": 5}, "args = int is refused"),
        ({"model": 5}, "model = int is refused: the services load the model themselves"),
        ({"train_dataset": {"train": []}}, "train_dataset = dict is refused"),
    ):
        with pytest.raises(ConfigError, match=why):
            trainer(chat_model, tmp_path / "out", **given)
    made = trainer(chat_model, tmp_path / "out", data_collator=None, optimizers=(None, None))
    with pytest.raises(
        AttributeError, match="SFTTrainer has no 'data_collator' here: the training loop is in"
    ):
        _ = made.data_collator
    with pytest.raises(ConfigError, match="evaluate: nothing was measured"):
        made.evaluate()
    for folder in (None, tmp_path / "model"):
        with pytest.raises(ConfigError, match=r"save_model: there is no fine-tuning in .*out; call train"):
            made.save_model(folder)
    with pytest.raises(ConfigError, match="it goes on from its own newest state"):
        made.train(resume_from_checkpoint=str(tmp_path))
    assert SFTTrainer(model=str(chat_model), train_dataset=[CHAT]).args.output_dir == "model-SFT"


def test_promise_1_what_the_command_says_is_raised(
    chat_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(chat_model, tmp_path / "out", train_dataset=[{"messages": 5}, {"x": 1}])
    with pytest.raises(ConfigError) as caught:
        made.train()
    first, second = str(caught.value).splitlines()
    assert "line 1: messages is 5; write a list of messages" in first and "line 2: it has the keys" in second
    assert not (tmp_path / "out").exists()
    for taken in (chat_model / "config.json", chat_model / "config.json" / "below"):
        with pytest.raises(ConfigError, match=r"args\.output_dir = '.+' cannot be used: .+Not a directory"):
            trainer(chat_model, taken).train()
    (tmp_path / "out").mkdir()
    rows = path_of("train_dataset", made.train_dataset, tmp_path / "out")
    rows.write_text("what it was begun with")
    for held, advice in (
        ({}, ", and was not written by quartet sft; name another args.output_dir"),
        (
            {"data": "rows.jsonl"},
            "; call train(resume_from_checkpoint=True) to go on with its fine-tuning, or name another "
            "args.output_dir",
        ),
    ):
        (tmp_path / "out" / "run.json").write_text(json.dumps(held))
        with pytest.raises(ConfigError) as caught:
            made.train()
        assert str(caught.value) == f"output folder {tmp_path / 'out'} is not empty{advice}"
    assert rows.read_text() == "what it was begun with"
    with pytest.raises(TuningFailed, match="ended with 3"):
        run_command([sys.executable, "-c", "raise SystemExit(3)"], print, TuningFailed)
    with pytest.raises(
        ConfigError, match=r"save_model: the fine-tuning in .*out is not complete; name a folder"
    ):
        made.save_model()
    (tmp_path / "out" / "checkpoint").mkdir()
    with caplog.at_level(logging.WARNING, "quartet.sft"):
        made.save_model()
        made.train(resume_from_checkpoint=True)
    checkpoint = tmp_path / "out" / "checkpoint"
    assert f"the model of a complete fine-tuning is in {checkpoint}" in caplog.text
    assert (
        f"is complete; nothing is left to do. To train on from its model, give {checkpoint} as" in caplog.text
    )


def test_what_a_command_says_after_an_error_is_said_once_and_little_of_it_kept() -> None:
    """process.py 2."""
    lines = ["up", f"{ERROR}first", *(str(number) for number in range(500))]
    said: list[str] = []
    with pytest.raises(ConfigError) as caught:
        printed = f"print(*{lines}, sep='\\n'); raise SystemExit(2)"
        run_command([sys.executable, "-c", printed], said.append, TuningFailed)
    assert said == ["up", *lines[1 + MAX_ERROR_LINES :]]
    assert str(caught.value).splitlines() == ["first", *lines[2 : 1 + MAX_ERROR_LINES]]
    said.clear()
    run_command([sys.executable, "-c", f"print(*{lines}, sep='\\n')"], said.append, TuningFailed)
    assert sorted(said) == sorted(lines), "of one that did not fail"
    every = [ConfigError(str(number)) for number in range(90)]
    assert len(str(together(every)).splitlines()) == MAX_ERROR_LINES


def test_a_command_is_not_left_behind_by_whoever_cannot_say_its_lines() -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"

    def say(line: str) -> None:
        raise BrokenPipeError(line)

    with pytest.raises(BrokenPipeError) as caught:
        run_command([sys.executable, "-c", code], say, TuningFailed)
    assert not Path(f"/proc/{int(str(caught.value))}").exists()


def test_promise_3_ctrl_c_reaches_the_command_and_is_raised(tmp_path: Path) -> None:
    """One that ends by it at its own pace, and a script in a terminal of its own."""
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import time\ntry:\n    print('up', flush=True)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('kept', flush=True)\n"
    )
    script = (
        "import os, signal, sys\nfrom quartet.scripts.process import run_command\n"
        "def say(line):\n    print(line, flush=True)\n"
        "    if line == 'up':\n        os.kill(os.getpid(), signal.SIGINT)\n"
        f"try:\n    run_command([sys.executable, {str(slow)!r}], say, ValueError)\n"
        "except KeyboardInterrupt:\n    print('raised')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["up", "kept", "raised"], done.stderr


def test_every_argument_is_in_the_document() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/python.md").read_text()
    words = set(re.findall(r"`(\w+)`", page[page.index("## Scripts for SFTTrainer") :]))
    assert [name for name in SFTConfig.names() if name not in words and name not in IN_WORDS] == []
    whys = {known.why for known in SFTConfig.known().values()}
    assert [why for why in whys if f"| {why} |" not in page] == []


def test_importing_it_takes_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "grpc", "pyarrow")
    program = f"import sys, quartet.sft; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
