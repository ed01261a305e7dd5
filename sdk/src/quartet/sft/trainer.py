"""SFTTrainer: a script's fine-tuning, by the command `quartet sft` as a process of its own.

1. What the arguments say that is refused is refused when the trainer is made, what is wrong with the data
   when train() is called: as a ConfigError. What failed is a TuningFailed. The script's process is never
   ended.
2. A fine-tuning is what `quartet sft` would do, in the folder args.output_dir: a script that is started again
   goes on with resume_from_checkpoint.
3. Ctrl-C ends it behind the step under way, whose state is saved, a second one at once; either way it raises
   KeyboardInterrupt. Where the script dies, it dies, too.
4. A callback that wants the end, or raises, ends it as the first Ctrl-C does; train() then returns, or raises
   what it raised.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from os import PathLike
from pathlib import Path
from typing import Any

from quartet.config.model import ConfigError
from quartet.kit.folder import check_folder
from quartet.kit.standard_streams import say
from quartet.local.toml_text import dumps
from quartet.run.sft import SftConfig
from quartet.scripts.models import Model, Tokenizer
from quartet.scripts.outcome import CHECKPOINT, TrainerState, TrainOutput, mean_loss, metrics_rows
from quartet.scripts.process import in_a_script, run_command
from quartet.scripts.reports import project_of
from quartet.scripts.saved import copy_model, export_model
from quartet.scripts.trainer import INSIDE, OF_TRANSFORMERS, ScriptTrainer
from quartet.sft.arguments import SFTConfig
from quartet.sft.begun import Begun, length_of, moment_of
from quartet.sft.data_set import path_of, written
from quartet.sft.translate import Translation, translate

GIVEN = (*("model", "args", "train_dataset", "eval_dataset", "processing_class", "callbacks", "peft_config"),)
GOING_ON = "go on with trainer.train(resume_from_checkpoint=True)"


class TuningFailed(Exception):
    """A fine-tuning came to no end; its saved states are kept."""


class SFTTrainer(ScriptTrainer):
    """One fine-tuning of a model on data."""

    logger = logging.getLogger("quartet.sft")
    ELSEWHERE = {  # noqa: RUF012 - as the base class has it
        **OF_TRANSFORMERS,
        **dict.fromkeys(
            ("data_collator", "compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"), INSIDE
        ),
        "formatting_func": "apply it to the rows, and give what comes out as train_dataset",
        "quantization_config": "the trainer computes in bfloat16 or float32; leave it out",
    }
    args: SFTConfig

    def __init__(
        self,
        model: Model | str | PathLike[str],
        args: SFTConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Tokenizer | None = None,
        peft_config: Any = None,
        callbacks: Any = None,
        **unknown: Any,
    ) -> None:
        """Check everything that can be told without reading the data. Raises ConfigError."""
        self.refuse_arguments(unknown, GIVEN)
        if args is not None and not isinstance(args, SFTConfig):
            raise ConfigError(f"args = {type(args).__name__} is refused: give quartet.sft.SFTConfig")
        super().__init__(model, processing_class, peft_config)
        self.args = args or SFTConfig(output_dir=f"{Path(self.model.name).name}-SFT")
        if train_dataset is None:
            raise ConfigError("train_dataset is missing: give the path of a file, rows, or a data set")
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.translated()
        self.take_callbacks(callbacks)

    def translated(self, wandb_project: str | None = None) -> Translation:
        """The fine-tuning that the arguments describe as they stand. Raises ConfigError."""
        data = path_of("train_dataset", self.train_dataset, self.folder)
        measured = self.eval_dataset
        validation = None if measured is None else path_of("eval_dataset", measured, self.folder)
        return translate(
            self.args, self.model, data, validation, self.peft_config, wandb_project=wandb_project
        )

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutput:
        """Run it to its end. Raises ConfigError, TuningFailed, KeyboardInterrupt."""
        started = time.monotonic()
        run = self.translated(project_of(self.args, self.logger))
        self.warn_of(run.notes)
        resume = self.resumes(resume_from_checkpoint)
        if resume and (self.folder / CHECKPOINT).is_dir():
            self.logger.warning(
                "the fine-tuning in %s is complete; nothing is left to do. To train on from its model, "
                "give %s as model, and another args.output_dir",
                self.folder,
                self.folder / CHECKPOINT,
            )
            return self._output(started)
        if not resume:
            self._check_new(run.config)  # before rows are written beside it
        given = {"train_dataset": self.train_dataset, "eval_dataset": self.eval_dataset}
        with (
            tempfile.TemporaryDirectory(prefix="quartet-sft-") as scratch,
            written(given, self.folder, goes_on=resume),
        ):
            file = Path(scratch) / "sft.toml"
            values = run.config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
            file.write_text(dumps(values), encoding="utf-8")
            command = [sys.executable, "-m", "quartet.cli", "sft", "@", str(file)]
            command += ["--output-dir", str(self.folder), *(["--resume"] if resume else [])]
            following = self.following()

            def look(stop: Callable[[], None]) -> None:
                if not following.is_open and (steps := begun.steps()) is not None:
                    following.open(length_of(run.config, steps), moment_of, begun.before)
                    following.begin()
                following.look(stop, lambda _: stop())

            try:
                with closing(Begun(self.folder)) as begun, following.to_its_end():
                    run_command(command, lambda line: say(line, sys.stdout), TuningFailed, look)
            except KeyboardInterrupt:
                self.logger.warning("stopped; %s", GOING_ON)
                raise
        if not (self.folder / CHECKPOINT).is_dir():
            self.logger.warning("the fine-tuning was stopped by a callback; %s", GOING_ON)
        return self._output(started)

    def _check_new(self, config: SftConfig) -> None:
        """Whether a new fine-tuning may have the folder. Raises ConfigError."""
        from quartet.cli.sft.place import check_place

        check_folder("args.output_dir", self.folder)
        try:
            check_place(self.folder, config, resume=False)
        except ConfigError as error:
            raise ConfigError(in_a_script(str(error))) from None

    @property
    def state(self) -> TrainerState:
        """Where it stands, also while another thread trains; max_steps is -1 as long as epochs say how long
        it is, and nobody has read the data."""
        from quartet.cli.sft.place import begun_steps

        rows = metrics_rows(self.folder)
        history = [row for row in (moment_of(row).row for row in rows) if row is not None]
        done, steps = max((row["step"] for row in rows), default=0), begun_steps(self.folder)
        return TrainerState(done, self.args.max_steps if steps is None else steps, history)

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
        from quartet.cli.job import RECORD

        checkpoint = self.folder / CHECKPOINT
        if not (self.folder / RECORD).is_file():
            raise ConfigError(f"save_model: there is no fine-tuning in {self.folder}; call train() first")
        if output_dir is None and not checkpoint.is_dir():
            raise ConfigError(
                f"save_model: the fine-tuning in {self.folder} is not complete; name a folder, which gets "
                "the model of its newest state"
            )
        if output_dir is None:
            self.logger.warning("the model of a complete fine-tuning is in %s", checkpoint)
        elif checkpoint.is_dir():
            copy_model(checkpoint, output_dir)
        else:
            export_model(self.folder, Path(output_dir), self.logger.info, TuningFailed)

    def _output(self, started: float) -> TrainOutput:
        loss = mean_loss(metrics_rows(self.folder))
        metrics = {"train_loss": loss, "train_runtime": time.monotonic() - started}
        return TrainOutput(self.state.global_step, loss, metrics)
