"""GRPOTrainer: a script's run, as four services of this machine.

1. What can be refused is refused when the trainer is made, as a ConfigError; what failed is a RunFailed. The
   process is never ended.
2. A run is what `quartet rl` would run (quartet.cli.rl), in the folder args.output_dir: its state, metrics
   and model are in files, so a script that is started again goes on with resume_from_checkpoint.
3. Ctrl-C stops the run after the step under way, and raises KeyboardInterrupt.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quartet.config.model import ConfigError
from quartet.config.refusals import together
from quartet.grpo.argument_list import nearest
from quartet.grpo.arguments import GRPOConfig
from quartet.grpo.handles import Environment, Model, Tokenizer, get_model
from quartet.grpo.history import log_history, metrics_rows
from quartet.grpo.of_trl import TRAINER
from quartet.grpo.reports import project_of
from quartet.grpo.translate import Translation, translate
from quartet.local.ranks import rank_said

logger = logging.getLogger("quartet.grpo")

CALLBACKS = (
    "callbacks run inside a training loop, and that of a run is in another process; leave them out, and read "
    "trainer.state or metrics.jsonl from another thread"
)
#: What transformers' Trainer has and a script may ask for: why it is not here.
ELSEWHERE = {
    **dict.fromkeys(("add_callback", "pop_callback", "remove_callback", "callback_handler"), CALLBACKS),
    "push_to_hub": "nothing is uploaded; 'hf upload' sends the folder of trainer.save_model",
    **dict.fromkeys(
        ("log", "log_metrics", "save_metrics"),
        "a run writes metrics.jsonl and summary.json to args.output_dir",
    ),
}

#: Of an id of a run, as far as it is made of a name.
NAME_LENGTH = 64
#: What a run's folder has (quartet.cli.outputs).
METRICS, CHECKPOINT = "metrics.jsonl", "checkpoint"


class TrainOutput(NamedTuple):
    """What train() returns. `metrics` are summary.json, and the names of transformers."""

    global_step: int
    training_loss: float
    metrics: dict[str, Any]


@dataclass(frozen=True)
class TrainerState:
    """Where a run stands, in optimizer steps."""

    global_step: int
    max_steps: int
    log_history: list[dict[str, Any]]


class GRPOTrainer:
    """One run of a model on an environment."""

    def __init__(
        self,
        model: Model | str,
        env: Environment | Sequence[Environment] | None = None,
        args: GRPOConfig | None = None,
        processing_class: Tokenizer | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        **unknown: Any,
    ) -> None:
        """Check everything that can be told without starting anything. Raises ConfigError."""
        if unknown:
            raise together(_no_argument(name) for name in unknown)
        if callbacks:
            raise ConfigError(CALLBACKS)
        if tuple(optimizers) != (None, None):
            raise ConfigError(
                "optimizers is refused: the trainer makes its own; set args.optim and its settings"
            )
        if not isinstance(args, GRPOConfig):
            raise ConfigError(
                f"args = {type(args).__name__} is refused: give vf.grpo_defaults(...) or vf.GRPOConfig"
            )
        refuse_launcher(os.environ)
        self.args, self.peft_config = args, peft_config
        self.model = model_of(model)
        self.processing_class = processing_class
        if env is None:
            raise ConfigError('env is missing: give vf.load_environment("..."), or a list of these')
        self.env = env
        check_tokenizer(processing_class, self.model)
        self.translated()

    def __getattr__(self, name: str) -> Any:
        why = ELSEWHERE.get(name, "the training loop is in another process; docs/python.md has what there is")
        raise AttributeError(f"GRPOTrainer has no {name!r} here: {why}")

    def translated(self, wandb_project: str | None = None) -> Translation:
        """The run that the arguments describe as they stand, reported to a project. Raises ConfigError."""
        environments = [self.env] if isinstance(self.env, Environment) else self.env
        if not isinstance(environments, list | tuple) or not all(
            isinstance(one, Environment) for one in environments
        ):
            raise ConfigError(
                f"env = {self.env!r} is refused: environments run in the environment host; give "
                'vf.load_environment("..."), or a list of these'
            )
        if not environments:
            raise ConfigError('env = []: a run needs an environment; give vf.load_environment("...")')
        return translate(
            self.args,
            self.model,
            environments,
            self.peft_config,
            context=self.model.context,
            wandb_project=wandb_project,
        )

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutput:
        """Run it to its end. Raises ConfigError, RunFailed, KeyboardInterrupt."""
        # Here and not above: the module is imported by scripts that only look.
        from quartet.cli.checked import check_services
        from quartet.cli.extras import need
        from quartet.cli.job import Words
        from quartet.cli.job_arguments import own_tables
        from quartet.cli.rl import completed_before, launch, prepared, report_again
        from quartet.grpo.background import Background
        from quartet.grpo.lines import Lines
        from quartet.local.hosts import check_alone

        started = time.monotonic()
        refuse_launcher(os.environ)
        need("matplotlib")
        run = self.translated(project_of(self.args, logger))
        for note in run.notes:
            logger.warning("%s", note)
        words = Words(
            resume="train(resume_from_checkpoint=True)",
            overwrite="args.overwrite_output_dir = True",
            elsewhere="another args.output_dir",
            run_id="args.run_name",
            go_on="trainer.train(resume_from_checkpoint=True)",
        )
        resume = self._resumes(resume_from_checkpoint)
        overwrite = self.args.overwrite_output_dir and not resume
        check_alone(own_tables(run.config))
        job = prepared(
            run.config, self._folder, self._run_id(), resume=resume, overwrite=overwrite, words=words
        )
        if (done := completed_before(job)) is not None:
            logger.warning(
                "the run in %s is completed; nothing is left to do; with a larger args.max_steps it goes on",
                job.folder,
            )
            if shown := report_again(job, done):
                logger.warning("%s", shown)
            return self._output(done, run)
        background: Background[dict[str, Any]] = Background()

        def work() -> dict[str, Any]:
            check_services(job, apart=True)
            ended = launch(job, lambda: Lines(run.logging), started, background.listen)
            if ended.shown:
                print(ended.shown)
            return ended.summary

        try:
            summary = background.run(work)
        except KeyboardInterrupt:
            logger.warning("stopped; go on with %s", words.going_on(job.folder))
            raise
        if summary["phase"] != "completed":
            logger.warning("the run is %s; go on with %s", summary["phase"], words.going_on(job.folder))
        return self._output(summary, run)

    @property
    def state(self) -> TrainerState:
        """Where the run stands, also while another thread trains."""
        run = self.translated()
        rows = metrics_rows(self._folder / METRICS)
        steps = _steps_of(rows)
        per_batch = run.steps_per_batch
        history = log_history(rows, per_batch, run.logging)
        return TrainerState(steps * per_batch, run.config.max_steps * per_batch, history)

    def evaluate(self) -> dict[str, float]:
        """What the trained model earns, or the model where nothing was trained yet: each evaluation example
        once, sampled as in training. Raises ConfigError, RunFailed."""
        from quartet.cli.extras import need
        from quartet.grpo.measuring import measured

        need("rich")
        checkpoint = self._model_of_end()
        if checkpoint is None and self.state.global_step:
            raise ConfigError(
                f"evaluate: the run in {self._folder} is not completed; write its model with "
                "trainer.save_model(FOLDER), and measure that with 'quartet eval'"
            )
        model = self.model.folder if checkpoint is None else str(checkpoint)
        return measured(self.translated().config, model, self._folder.parent)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the trained model as a Hugging Face folder: of a completed run its model, of one that was
        stopped that of its newest state. Raises ConfigError, RunFailed."""
        if output_dir is None:
            logger.warning("the model of a completed run is in %s", self._folder / CHECKPOINT)
        elif (checkpoint := self._model_of_end()) is not None:
            shutil.copytree(checkpoint, output_dir, dirs_exist_ok=True)
        else:
            self._export(Path(output_dir))

    def _model_of_end(self) -> Path | None:
        """The model of a completed run; None where it has come to no end, or has gone on since."""
        from quartet.cli.summary import is_completed, summary_of

        checkpoint = self._folder / CHECKPOINT
        at_end = is_completed(summary_of(self._folder), _steps_of(metrics_rows(self._folder / METRICS)))
        return checkpoint if at_end and checkpoint.is_dir() else None

    def _export(self, target: Path) -> None:
        from quartet.cli.export import export_command
        from quartet.cli.job import RECORD
        from quartet.cli.rl import RunFailed

        if not (self._folder / RECORD).is_file():
            raise ConfigError(f"save_model: there is no run in {self._folder}; call train() first")
        done = subprocess.run(
            export_command(self._folder, target), capture_output=True, text=True, check=False
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise RunFailed(f"save_model: {lines[-1].removeprefix('error: ')}")

    @property
    def _folder(self) -> Path:
        return Path(self.args.output_dir).absolute()

    def _run_id(self) -> str | None:
        """Of run_name what may be in a name of a run; where it is not given, that of the folder."""
        name = self.args.run_name
        return None if name is None else re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:NAME_LENGTH]

    def _resumes(self, asked: bool | str | Path | None) -> bool:
        if isinstance(asked, str | Path):
            if Path(asked).absolute() != self._folder:
                raise ConfigError(
                    f"resume_from_checkpoint = {str(asked)!r} is refused: a run goes on from its own newest "
                    "state; set args.output_dir to its folder, and give True"
                )
            return True
        return bool(asked)

    def _output(self, summary: Mapping[str, Any], run: Translation) -> TrainOutput:
        rows = [row for row in metrics_rows(self._folder / METRICS) if "train/loss" in row]
        losses = [row["train/loss"] for row in rows]
        loss = sum(losses) / len(losses) if losses else float("nan")
        seconds, steps = float(summary["wall_seconds"]), int(summary["steps"])
        metrics = {
            **summary,
            "train_loss": loss,
            "train_runtime": seconds,
            "train_samples_per_second": steps * run.config.batch_size / seconds,
            "train_steps_per_second": steps * run.steps_per_batch / seconds,
        }
        return TrainOutput(steps * run.steps_per_batch, loss, metrics)


def _steps_of(rows: Sequence[Mapping[str, Any]]) -> int:
    """Batches that were trained."""
    return max((int(row["step"]) for row in rows if "train/reward" in row), default=0)


def _no_argument(name: str) -> ConfigError:
    instead = TRAINER.get(name) or nearest(name, ("model", "env", "args", "processing_class", "peft_config"))
    return ConfigError(f"GRPOTrainer({name}=...): there is no such argument; {instead}")


def model_of(model: Any) -> Model:
    if isinstance(model, str):
        return get_model(model)
    if not isinstance(model, Model):
        raise ConfigError(
            f"model = {type(model).__name__} is refused: the services load the model themselves; give its "
            "folder, or what get_model_and_tokenizer returns"
        )
    return model


def check_tokenizer(tokenizer: Any, model: Model) -> None:
    if tokenizer is None:
        return
    if not isinstance(tokenizer, Tokenizer):
        named = getattr(tokenizer, "name_or_path", "")
        if isinstance(named, str) and named and Path(named).absolute() == Path(model.folder).absolute():
            return  # as AutoTokenizer loads it from there
        raise ConfigError(
            f"processing_class = {type(tokenizer).__name__} is refused: the services load the tokenizer of "
            f"the model's folder, {model.folder}; leave it out, or load it from there"
        )
    if tokenizer.folder != model.folder:
        raise ConfigError(
            f"processing_class = {tokenizer.name!r} is the tokenizer of another model than {model.name!r}; "
            "copy its files into a folder with that model, and name it"
        )


def refuse_launcher(environment: Mapping[str, str]) -> None:
    """A launcher of ranks starts a script in each: each would start a run of its own. Raises ConfigError."""
    if (said := rank_said(environment)) is not None:
        rank, world = said
        ranks = world if world.isdigit() else 2
        raise ConfigError(
            f"this script runs as rank {rank} of {world} (RANK, WORLD_SIZE), and each rank "
            "would start a run of its own: start it with python, not with accelerate or torchrun, and set "
            f"args.num_processes = {ranks}, the ranks of its trainer (docs/ranks.md)"
        )
