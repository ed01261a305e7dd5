"""SFTTrainer: a script's fine-tuning, by the command `quartet sft` as a process of its own.

1. What the arguments say that is refused is refused when the trainer is made, what is wrong with the data
   when train() is called: as a ConfigError. What failed is a TuningFailed. The script's process is never
   ended.
2. A fine-tuning is what `quartet sft` would do, in the folder args.output_dir: a script that is started again
   goes on with resume_from_checkpoint.
3. Ctrl-C ends it, and raises KeyboardInterrupt; saved states are kept. Where the script dies, it dies, too.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quartet.config.model import ConfigError
from quartet.config.refusals import MAX_TOLD, together
from quartet.grpo.argument_list import nearest
from quartet.grpo.handles import Model, Tokenizer
from quartet.grpo.history import metrics_rows
from quartet.grpo.reports import project_of
from quartet.grpo.trainer import (
    CHECKPOINT,
    METRICS,
    TrainerState,
    TrainOutput,
    check_tokenizer,
    model_of,
    refuse_launcher,
)
from quartet.local.tether import tethered
from quartet.local.toml_text import dumps
from quartet.sft.arguments import SFTConfig
from quartet.sft.data_set import path_of, write
from quartet.sft.translate import Translation, translate

logger = logging.getLogger("quartet.sft")

_INSIDE = "the training loop is in another process; leave it out, and read trainer.state or metrics.jsonl"
#: What TRL's SFTTrainer takes besides: why it is not here.
ELSEWHERE = {
    **dict.fromkeys(
        (
            *("data_collator", "compute_loss_func", "compute_metrics", "callbacks"),
            *("preprocess_logits_for_metrics", "add_callback", "remove_callback"),
        ),
        _INSIDE,
    ),
    **dict.fromkeys(
        ("optimizers", "optimizer_cls_and_kwargs"),
        "the trainer makes its own; set args.optim and its settings",
    ),
    "formatting_func": "apply it to the rows, and give what comes out as train_dataset",
    "quantization_config": "the trainer computes in bfloat16 or float32; leave it out",
    "push_to_hub": "nothing is uploaded; 'hf upload' sends the folder of trainer.save_model",
}
GIVEN = ("model", "args", "train_dataset", "eval_dataset", "processing_class", "peft_config")
#: Names of metrics.jsonl, by those of TRL.
NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "entropy": "train/entropy",
    "eval_loss": "val/loss",
    "eval_mean_token_accuracy": "val/token_accuracy",
    "eval_perplexity": "val/perplexity",
}
ERROR = "error: "
#: Of the lines from the first such on: as many as refusals that are told together have.
MAX_ERROR_LINES = MAX_TOLD + 1


class TuningFailed(Exception):
    """A fine-tuning came to no end; its saved states are kept."""


class SFTTrainer:
    """One fine-tuning of a model on data."""

    def __init__(
        self,
        model: Model | str,
        args: SFTConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Tokenizer | None = None,
        peft_config: Any = None,
        **unknown: Any,
    ) -> None:
        """Check everything that can be told without reading the data. Raises ConfigError."""
        if given := [name for name, value in unknown.items() if value not in (None, (None, None))]:
            raise together(_no_argument(name) for name in given)
        if args is not None and not isinstance(args, SFTConfig):
            raise ConfigError(f"args = {type(args).__name__} is refused: give quartet.sft.SFTConfig")
        refuse_launcher(os.environ)
        self.model = model_of(model)
        self.args = args or SFTConfig(output_dir=f"{Path(self.model.name).name}-SFT")
        check_tokenizer(processing_class, self.model)
        self.processing_class, self.peft_config = processing_class, peft_config
        if train_dataset is None:
            raise ConfigError("train_dataset is missing: give the path of a file, rows, or a data set")
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.translated()

    def __getattr__(self, name: str) -> Any:
        why = ELSEWHERE.get(name, "the training loop is in another process; docs/python.md has what there is")
        raise AttributeError(f"SFTTrainer has no {name!r} here: {why}")

    def translated(self, wandb_project: str | None = None) -> Translation:
        """The fine-tuning that the arguments describe as they stand. Raises ConfigError."""
        data = path_of("train_dataset", self.train_dataset, self._folder)
        measured = self.eval_dataset
        validation = None if measured is None else path_of("eval_dataset", measured, self._folder)
        return translate(
            self.args, self.model, data, validation, self.peft_config, wandb_project=wandb_project
        )

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutput:
        """Run it to its end. Raises ConfigError, TuningFailed, KeyboardInterrupt."""
        started = time.monotonic()
        run = self.translated(project_of(self.args, logger))
        for note in run.notes:
            logger.warning("%s", note)
        resume = self._resumes(resume_from_checkpoint)
        if resume and (self._folder / CHECKPOINT).is_dir():
            logger.warning("the fine-tuning in %s is complete; nothing is left to do", self._folder)
            return self._output(started)
        if not resume and self._folder.is_dir() and any(self._folder.iterdir()):
            raise ConfigError(
                f"args.output_dir = {str(self._folder)!r} is not empty; go on with what it holds by "
                "train(resume_from_checkpoint=True), or name another"
            )
        for name in ("train_dataset", "eval_dataset"):
            if (given := getattr(self, name)) is not None:
                write(name, given, self._folder, goes_on=resume)
        with tempfile.TemporaryDirectory(prefix="quartet-sft-") as scratch:
            file = Path(scratch) / "sft.toml"
            values = run.config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
            file.write_text(dumps(values), encoding="utf-8")
            command = [sys.executable, "-m", "quartet.cli", "sft", "@", str(file)]
            command += ["--output-dir", str(self._folder), *(["--resume"] if resume else [])]
            _run(command, print)
        return self._output(started)

    @property
    def state(self) -> TrainerState:
        """Where it stands, also while another thread trains; max_steps is -1 where epochs say how long it
        is."""
        rows = metrics_rows(self._folder / METRICS)
        history = [
            {"step": row["step"], **{name: row[key] for name, key in NAMES.items() if key in row}}
            for row in rows
        ]
        return TrainerState(max((row["step"] for row in rows), default=0), self.args.max_steps, history)

    def evaluate(self) -> dict[str, float]:
        """What the trained model makes of eval_dataset: measured after the last step. Raises ConfigError."""
        measured = [row for row in self.state.log_history if "eval_loss" in row]
        if not measured:
            raise ConfigError(
                "evaluate: nothing was measured; give SFTTrainer an eval_dataset, and call train()"
            )
        return {name: value for name, value in measured[-1].items() if name.startswith("eval_")}

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the trained model as a Hugging Face folder: of one that was stopped that of its newest state.
        Raises ConfigError, TuningFailed."""
        from quartet.cli.export import export_command

        checkpoint = self._folder / CHECKPOINT
        if output_dir is None:
            logger.warning("the model of a complete fine-tuning is in %s", checkpoint)
        elif checkpoint.is_dir():
            shutil.copytree(checkpoint, output_dir, dirs_exist_ok=True)
        else:
            _run(export_command(self._folder, Path(output_dir)), logger.info)

    @property
    def _folder(self) -> Path:
        return Path(self.args.output_dir).absolute()

    def _resumes(self, asked: bool | str | Path | None) -> bool:
        if isinstance(asked, str | Path) and Path(asked).absolute() != self._folder:
            raise ConfigError(
                f"resume_from_checkpoint = {str(asked)!r} is refused: it goes on from its own newest state; "
                "set args.output_dir to its folder, and give True"
            )
        return bool(asked)

    def _output(self, started: float) -> TrainOutput:
        state = self.state
        losses = [row["loss"] for row in state.log_history if "loss" in row]
        loss = sum(losses) / len(losses) if losses else float("nan")
        metrics = {"train_loss": loss, "train_runtime": time.monotonic() - started}
        return TrainOutput(state.global_step, loss, metrics)


def _run(command: Sequence[str], say: Callable[[str], object]) -> None:
    """Run a command of `quartet` to its end, and say each of its lines. Raises ConfigError, TuningFailed,
    KeyboardInterrupt."""
    from quartet.cli import exits

    # In a session of its own: Ctrl-C of a terminal is for this process, which hands it on.
    process = subprocess.Popen(
        tethered(list(command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    refused: list[str] = []
    interrupted = False
    while True:
        try:
            for line in process.stdout:
                say(line.rstrip("\n"))
                is_error = line.startswith(ERROR) or bool(refused)
                if is_error and len(refused) < MAX_ERROR_LINES:
                    refused.append(line.removeprefix(ERROR).rstrip("\n"))
            code = process.wait()
            break
        except KeyboardInterrupt:
            process.send_signal(signal.SIGKILL if interrupted else signal.SIGINT)
            interrupted = True
    process.stdout.close()
    if interrupted:
        raise KeyboardInterrupt
    why = "\n".join(refused) or f"'quartet' ended with {code}"
    if code == exits.REFUSED:
        raise ConfigError(why)
    if code:
        raise TuningFailed(why)


def _no_argument(name: str) -> ConfigError:
    return ConfigError(
        f"SFTTrainer({name}=...): there is no such argument; {ELSEWHERE.get(name) or nearest(name, GIVEN)}"
    )
