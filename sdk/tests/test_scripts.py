"""What scripts of both kinds stand on (quartet.scripts): which way imports go, and what all trainers say."""

from __future__ import annotations

import ast
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quartet
import quartet.trl
from quartet.cli.sft.place import taken
from quartet.cli.sft.stopping import Stopped
from quartet.config import ConfigError
from quartet.grpo import GRPOConfig, GRPOTrainer
from quartet.run.sft import SftConfig
from quartet.scripts import known
from quartet.scripts.adapter import LoraConfig, unnamed_modules
from quartet.scripts.argument_list import ArgumentList
from quartet.scripts.outcome import TrainerState, mean_loss
from quartet.scripts.process import in_a_script, run_command
from quartet.scripts.trainer import OF_TRANSFORMERS, ScriptTrainer
from quartet.sft import SFTConfig, SFTTrainer
from sft_chats import CHAT, written

PACKAGE = Path(quartet.__path__[0])
# Scripts of TRL stand on all.
OTHERS = {
    "scripts": ("grpo", "sft", "trl"),
    "grpo": ("sft", "trl", "rewards"),
    "sft": ("grpo", "trl", "rewards"),
    "rewards": ("grpo", "sft", "trl"),
}


@pytest.mark.parametrize("package", OTHERS)
def test_promise_1_neither_kind_stands_on_the_other(package: str) -> None:
    files = sorted((PACKAGE / package).rglob("*.py"))
    found = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            named += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            found += [
                name for name in named if name.split(".")[:2] in [["quartet", o] for o in OTHERS[package]]
            ]
    assert files and found == []


def test_promise_1_and_what_both_stand_on_names_neither() -> None:
    for file in (PACKAGE / "scripts").glob("*.py"):
        text = file.read_text(encoding="utf-8").lower()
        assert "grpo" not in text and "sft" not in text, file


@pytest.mark.parametrize("kind", [GRPOTrainer, SFTTrainer, quartet.trl.GRPOTrainer])
def test_what_scripts_of_transformers_do_when_they_have_trained(
    kind: type[ScriptTrainer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As the examples of transformers and TRL end; the files are transformers'."""
    monkeypatch.setattr(kind, "folder", tmp_path / "out")
    monkeypatch.setattr(kind, "state", TrainerState(2, 3, [{"loss": 0.5}]))
    trainer: Any = object.__new__(kind)
    trainer.accelerator.wait_for_everyone()
    assert trainer.is_world_process_zero() and trainer.is_local_process_zero()
    assert trainer.accelerator.is_main_process and trainer.accelerator.num_processes == 1
    trainer.accelerator.print("Training", "completed.")
    trainer.log_metrics("train", {"train_loss": 0.5, "phase": "completed"})
    told = "Training completed.\n***** train metrics *****\n  phase      = completed\n  train_loss = 0.5\n"
    assert capsys.readouterr().out == told
    trainer.save_metrics("eval", {"eval_reward": 0.1})
    beside = {file.name for file in (tmp_path / "evals" / "out").iterdir()}
    assert beside == {"eval_results.json", "all_results.json"}
    (tmp_path / "out").mkdir()  # by train(), which wants it empty
    (tmp_path / "out" / "run.json").write_text("{}")
    trainer.save_metrics("train", {"train_loss": 0.5})
    trainer.save_metrics("eval", {"eval_reward": 1.0})
    trainer.save_metrics("test", {"test_reward": 1.0}, combined=False)
    trainer.save_state()
    trainer.end()
    found = {file.name: json.loads(file.read_text()) for file in (tmp_path / "out").iterdir()}
    assert found == {
        "run.json": {},
        "train_results.json": {"train_loss": 0.5},
        "eval_results.json": {"eval_reward": 1.0},
        "test_results.json": {"test_reward": 1.0},
        "all_results.json": {"train_loss": 0.5, "eval_reward": 1.0},
        "trainer_state.json": {"global_step": 2, "max_steps": 3, "log_history": [{"loss": 0.5}]},
    }


@pytest.mark.parametrize("kind", [GRPOTrainer, SFTTrainer, quartet.trl.GRPOTrainer])
def test_every_trainer_says_what_is_done_inside_a_loop_that_is_elsewhere(kind: type[ScriptTrainer]) -> None:
    made = object.__new__(kind)
    for name, why in OF_TRANSFORMERS.items():
        with pytest.raises(AttributeError) as caught:
            getattr(made, name)
        assert str(caught.value) == f"{kind.__name__} has no {name!r} here: {why}"


@pytest.mark.parametrize("kind", [GRPOConfig, SFTConfig, quartet.trl.GRPOConfig])
def test_what_is_known_of_transformers_is_known_to_all(kind: type[ArgumentList]) -> None:
    args: Any = kind("out")
    for name, one in {**known.WITHOUT_EFFECT, **known.REFUSED}.items():
        assert kind.known()[name].why == one.why and getattr(args, name) == kind.known()[name].default
    assert args.without_effect() == [] and args.refuse() is None
    args.num_processes = 2
    assert (args.process_index, args.world_size, args.should_save) == (0, 2, True), "callbacks ask for that"
    with pytest.raises(quartet.config.ConfigError, match=r"args\.world_size: there is no such argument"):
        args.world_size = 3
    args.disable_tqdm, args.neftune_noise_alpha = True, 0.1
    (said,) = args.without_effect()
    assert said.startswith("args.disable_tqdm = True is without effect: a line is printed for each")
    assert args.without_effect({"disable_tqdm": True}) == []
    with pytest.raises(quartet.config.ConfigError, match=r"args\.neftune_noise_alpha = 0\.1 is refused"):
        args.refuse()


def test_an_adapter_of_all_modules_is_said() -> None:
    assert unnamed_modules({}) and not unnamed_modules({"target_modules": ["q_proj"]})
    assert LoraConfig().lora_alpha == 8


def test_the_mean_loss_is_over_steps() -> None:
    assert mean_loss([{"train/loss": 1.0}, {"val/loss": 9.0}, {"train/loss": 3.0}]) == 2.0
    assert mean_loss([]) != mean_loss([]), "nan before the first"


def test_what_a_command_advises_is_said_as_one_writes_it_in_a_script(
    chat_model: Path, tmp_path: Path
) -> None:
    """process.py 2: all that the folder of a fine-tuning is refused for."""
    data, output = written(tmp_path, {"messages": CHAT}), tmp_path / "out"
    config = SftConfig(model=str(chat_model), data=data)

    def refused(*, resume: bool, **changed: Any) -> str:
        with (
            pytest.raises(ConfigError) as caught,
            taken(output, config.model_copy(update=changed), resume=resume),
        ):
            pass
        told = in_a_script(str(caught.value))
        assert "--" not in told, told
        return told

    assert refused(resume=True).startswith(f"train(resume_from_checkpoint=True): {output} holds no")
    with taken(output, config, resume=False):
        pass
    on = "call train(resume_from_checkpoint=True) to go on with its fine-tuning"
    told = f"output folder {output} is not empty; {on}, or name another args.output_dir"
    assert refused(resume=False) == told
    assert refused(resume=True, batch_size=5).endswith(
        "another batch_size (32, and not 5); give what it was begun with, or name another args.output_dir"
    )
    (output / "checkpoint").mkdir()
    assert "is complete; name another args.output_dir, with model" in refused(resume=True)
    for folder in (tmp_path, tmp_path / "with space"):
        told = in_a_script(Stopped(3).told(folder))
        assert told.splitlines() == [
            "stopped after step 3; go on with: trainer.train(resume_from_checkpoint=True)",
            "or write the model as it is: trainer.save_model(MODEL_FOLDER)",
        ]


def test_a_command_is_looked_after_and_can_be_stopped(tmp_path: Path) -> None:
    """process.py 4: in this thread, while it says nothing and while it says much."""
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import sys, time\ntry:\n    print('up', flush=True)\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    time.sleep(0.5)\n    print('kept', end='')\n    sys.exit(int(sys.argv[1]))\n"
    )
    said: list[str] = []
    looks: list[int] = []

    def look(stop: Callable[[], None]) -> None:
        looks.append(threading.get_ident())
        if len(looks) > 3 and "up" in said:
            stop()  # each time; it is interrupted once

    run_command([sys.executable, str(slow), "130"], said.append, ValueError, look)
    assert said == ["up", "kept"] and set(looks) == {threading.get_ident()}
    said.clear()
    with pytest.raises(ValueError, match="ended with 1"):
        run_command([sys.executable, str(slow), "1"], said.append, ValueError, look)
    looks.clear()
    many = "import time\nfor _ in range(30):\n    print('x', flush=True)\n    time.sleep(0.01)"
    run_command([sys.executable, "-c", many], said.append, ValueError, lambda stop: looks.append(len(said)))
    assert len(looks) > 3, "between lines, too"


def test_a_refusal_of_a_command_is_in_its_error_alone() -> None:
    """process.py 2."""
    said: list[str] = []
    printed = "print('up'); print('error: --resume: no'); raise SystemExit({})"
    for code, kind in ((2, ConfigError), (1, ValueError)):
        with pytest.raises(kind, match=r"^train\(resume_from_checkpoint=True\): no$"):
            run_command([sys.executable, "-c", printed.format(code)], said.append, ValueError)
    assert said == ["up", "up"]
