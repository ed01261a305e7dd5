"""What the trainers of a run have in common: a script's run, as four services of this machine.

1. What failed is a RunFailed, what is refused a ConfigError. The process is never ended.
2. A run is what `quartet rl` would run (quartet.cli.rl), in the folder args.output_dir: its state, metrics
   and model are in files, so a script that is started again goes on with resume_from_checkpoint.
3. Ctrl-C stops the run after the step under way, and raises KeyboardInterrupt.
4. A callback that wants the end stops it so, and train() returns. One that raises ends it at once, and
   train() raises that.
5. What `beside` holds is there as long as the services are. Where that says that they have to end, they do at
   once, and train() raises what it said.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from quartet.config.model import ConfigError
from quartet.grpo.background import Background
from quartet.grpo.history import Growing, History
from quartet.grpo.translate import Translation
from quartet.kit.standard_streams import say
from quartet.scripts.loop import Length, Moment
from quartet.scripts.outcome import CHECKPOINT, Row, TrainerState, TrainOutput, mean_loss, metrics_rows
from quartet.scripts.process import refuse_launcher
from quartet.scripts.reports import project_of
from quartet.scripts.saved import copy_model, export_model
from quartet.scripts.trainer import ScriptTrainer
from quartet.scripts.waiting import wait_in_slices

#: Of an id of a run, as far as it is made of a name.
NAME_LENGTH = 64


class RunTrainer(ScriptTrainer, ABC):
    """One run of a model."""

    #: How a model is measured that is of no completed run.
    MEASURED_ELSEWHERE: ClassVar[str] = "measure that with 'quartet eval'"

    @property
    @abstractmethod
    def history(self) -> History:
        """By which names its metrics are told."""

    @abstractmethod
    def translated(self, wandb_project: str | None = None) -> Translation:
        """The run that the arguments describe as they stand, reported to a project. Raises ConfigError."""

    @contextmanager
    def beside(self, run: Translation, end: Callable[[BaseException], None]) -> Iterator[None]:
        """What this process does for the services of a run while inside; `end` ends these (5)."""
        yield

    def wait(self, ended: threading.Event, look: Callable[[], object]) -> None:
        """What the thread that calls train() does until that is set; now and then it looks."""
        wait_in_slices(ended, look)

    def why_not(self, refused: ConfigError, run: Translation) -> ConfigError:
        """Why it does not run, as a script calls it."""
        return refused

    def in_words(self, told: str) -> str:
        """What the run says, as a script calls it."""
        return told

    def steps_of_epoch(self, run: Translation) -> int | None:
        """Optimizer steps of a pass over what it is trained on; None where nobody knows."""
        return None

    def moments(self, run: Translation) -> Callable[[Row], Moment]:
        """What a line of metrics says, of all in their order."""
        return Growing(self.history, run.steps_per_batch, run.logging).after

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutput:
        """Run it to its end. Raises ConfigError, RunFailed, KeyboardInterrupt."""
        # Here and not above: the module is imported by scripts that only look.
        from quartet.cli.checked import check_services
        from quartet.cli.extras import need
        from quartet.cli.job import Words
        from quartet.cli.job_arguments import own_tables
        from quartet.cli.rl import RunFailed, completed_before, launch, prepared, report_again
        from quartet.grpo.lines import Lines
        from quartet.local.hosts import check_alone

        started = time.monotonic()
        refuse_launcher(os.environ)
        need("matplotlib")
        run = self.translated(project_of(self.args, self.logger))
        self.warn_of(run.notes)
        words = Words(
            resume="train(resume_from_checkpoint=True)",
            overwrite="args.overwrite_output_dir = True",
            elsewhere="another args.output_dir",
            run_id="args.run_name",
            go_on="trainer.train(resume_from_checkpoint=True)",
            by_file=False,
            say_again="give the arguments that made it so",
            begin_with='args.overrides = {{"initial_state": {folder!r}}}',
        )
        resume = self.resumes(resume_from_checkpoint)
        overwrite = self.args.overwrite_output_dir and not resume
        check_alone(own_tables(run.config))
        try:
            job = prepared(
                run.config, self.folder, self._run_id(), resume=resume, overwrite=overwrite, words=words
            )
        except ConfigError as refused:
            raise self.why_not(refused, run) from None
        if (done := completed_before(job)) is not None:
            self.logger.warning(
                "the run in %s is completed; nothing is left to do; with a larger args.max_steps it goes on",
                job.folder,
            )
            if shown := report_again(job, done):
                self.logger.warning("%s", shown)
            return self._output(done, run)
        background: Background[dict[str, Any]] = Background()
        following = self.following()

        def display() -> Lines:
            # The folder is this run's from here on, and holds what was before.
            following.open(self._length(run), self.moments(run))
            return Lines(run.logging, self.in_words, following.begin)

        def then() -> str:
            if resume or following.has_begun:
                return f"go on with {words.going_on(job.folder)}"
            # What it was to overwrite is in the folder again, and would be gone on with.
            return "it has not begun: begin it with trainer.train()"

        def look() -> None:
            following.look(background.stop, background.end)

        def work() -> dict[str, Any]:
            check_services(job, apart=True)
            ended = launch(job, display, started, background.listen)
            if ended.shown:
                say(ended.shown, sys.stdout)
            return ended.summary

        try:
            with following.to_its_end(), self.beside(run, background.end):
                summary = background.run(work, lambda ended: self.wait(ended, look))
        except KeyboardInterrupt:
            self.logger.warning("stopped; %s", then())
            raise
        except Exception as error:
            if error is background.ended_with:
                what = type(error).__name__
                self.logger.warning("ended by the %s that follows; mend that, and %s", what, then())
            elif isinstance(error, RunFailed):
                error.args = (self.in_words(str(error)),)
            raise
        if summary["phase"] != "completed":
            self.logger.warning("the run is %s; go on with %s", summary["phase"], words.going_on(job.folder))
        elif (model := self._model_of_end()) is not None:
            say(f"the model is in {model}; trainer.save_model(FOLDER) copies it", sys.stdout)
        return self._output(summary, run)

    @property
    def state(self) -> TrainerState:
        """Where the run stands, also while another thread trains."""
        run = self.translated()
        rows = metrics_rows(self.folder)
        steps = _steps_of(rows)
        per_batch = run.steps_per_batch
        history = [moment.row for moment in map(self.moments(run), rows) if moment.row is not None]
        return TrainerState(steps * per_batch, run.config.max_steps * per_batch, history)

    def evaluate(self) -> dict[str, float]:
        """What the trained model earns, or the model where nothing was trained yet: each evaluation example,
        sampled as in evaluations of the run. Raises ConfigError, RunFailed."""
        from quartet.grpo.measuring import measured

        model = self.model_to_measure()
        return measured(self.translated().config, model, self.folder.parent)

    def model_to_measure(self) -> str:
        """The folder of the trained model, or of the model where nothing was trained yet. Raises
        ConfigError."""
        from quartet.cli.extras import need

        need("rich")
        checkpoint = self._model_of_end()
        if checkpoint is None and self.state.global_step:
            raise ConfigError(
                f"evaluate: the run in {self.folder} is not completed; write its model with "
                f"trainer.save_model(FOLDER), and {self.MEASURED_ELSEWHERE}"
            )
        return self.model.folder if checkpoint is None else str(checkpoint)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the trained model as a Hugging Face folder: of a completed run its model, of one that was
        stopped that of its newest state. Raises ConfigError, RunFailed."""
        checkpoint = self._model_of_end()
        if output_dir is None and checkpoint is None:
            raise ConfigError(
                f"save_model: there is no completed run in {self.folder}; name a folder, which gets the "
                "model of the newest state, where there is one"
            )
        if output_dir is None:
            self.logger.warning("the model of a completed run is in %s", checkpoint)
        elif checkpoint is not None:
            copy_model(checkpoint, output_dir)
        else:
            self._export(Path(output_dir))

    def _model_of_end(self) -> Path | None:
        """The model of a completed run; None where it has come to no end, or has gone on since."""
        from quartet.cli.summary import is_completed, summary_of

        checkpoint = self.folder / CHECKPOINT
        at_end = is_completed(summary_of(self.folder), _steps_of(metrics_rows(self.folder)))
        return checkpoint if at_end and checkpoint.is_dir() else None

    def _export(self, target: Path) -> None:
        from quartet.cli.job import RECORD
        from quartet.cli.rl import RunFailed

        if not (self.folder / RECORD).is_file():
            raise ConfigError(f"save_model: there is no run in {self.folder}; call train() first")
        export_model(self.folder, target, self.logger.info, RunFailed)

    def _length(self, run: Translation) -> Length:
        per_batch, last = run.steps_per_batch, run.config.max_steps

        def is_measured_after(step: int) -> bool:
            batch, within = divmod(step, per_batch)
            return not within and run.config.eval.is_due(batch, last)

        return Length(last * per_batch, self.steps_of_epoch(run), is_measured_after)

    def _run_id(self) -> str | None:
        """Of run_name what may be in a name of a run; where it is empty or not given, that of the folder."""
        return re.sub(r"[^A-Za-z0-9_.-]", "-", self.args.run_name or "")[:NAME_LENGTH] or None

    def _output(self, summary: Mapping[str, Any], run: Translation) -> TrainOutput:
        loss = mean_loss(metrics_rows(self.folder))
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
