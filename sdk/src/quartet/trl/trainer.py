"""GRPOTrainer of TRL: a script's reward functions and data set, trained on by four services of this machine.

1. Functions, tools, environments and data set stay in the script's process, which serves them
   (quartet.rewards) as long as the services run: the environment host asks for prompts, for the results of
   calls, and for the rewards of what was answered.
2. What can be refused is refused when the trainer is made, as a ConfigError; what failed is a RunFailed.
3. What a reward function raises ends the run at once, and train() raises that. What was trained is kept.
4. How it is trained, measured and saved is as of every run of a script (quartet.grpo.run_trainer).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any

from quartet.config.model import ConfigError
from quartet.grpo.history import History
from quartet.grpo.run_trainer import RunTrainer
from quartet.grpo.translate import Translation
from quartet.rewards.called import with_share
from quartet.scripts.loop import Moment
from quartet.scripts.models import Model, Tokenizer
from quartet.scripts.outcome import METRICS, Row
from quartet.scripts.waiting import nothing
from quartet.template_settings import written
from quartet.trl import address
from quartet.trl.advised import advised
from quartet.trl.arguments import GRPOConfig
from quartet.trl.changed import by_epochs, in_a_script
from quartet.trl.elsewhere import TRAINER
from quartet.trl.history import history_of, with_epoch
from quartet.trl.so_far import SoFar, TrainerState
from quartet.trl.translate import Data, OfTrl, translate

if TYPE_CHECKING:
    from quartet.rewards.own_tools import Tools
    from quartet.rewards.prompts import Prompts

#: Arguments that are taken, ...
GIVEN = (
    *("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    *("reward_processing_classes", "callbacks", "peft_config", "tools", "environment_factory"),
)
#: ... and what is done inside a loop, or with a model in memory.
NOT_HERE = ("optimizers", "quantization_config", "rollout_func")
#: Of a function that has not returned so long behind the end of a run, a person is told, ...
LATE_SECONDS = 2.0
#: ... and of one that has not returned for so long, and for twice what was told last.
HELD_SECONDS = 60.0


class GRPOTrainer(RunTrainer):
    """One run of a model on a script's prompts and rewards."""

    logger = logging.getLogger("quartet.trl")
    ELSEWHERE = TRAINER
    # Of its reward functions no command knows.
    MEASURED_ELSEWHERE = "measure that by evaluate() of another GRPOTrainer, with another args.output_dir"
    args: GRPOConfig

    def __init__(
        self,
        model: Model | str | PathLike[str],
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Tokenizer | None = None,
        reward_processing_classes: Any = None,
        callbacks: Any = None,
        optimizers: Any = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        **unknown: Any,
    ) -> None:
        """Check everything that can be told without starting anything. Raises ConfigError."""
        named = zip(NOT_HERE, (optimizers, quantization_config, rollout_func), strict=True)
        asked = {name: value for name, value in named if value != []}
        self.refuse_arguments({**unknown, **asked}, GIVEN)
        if args is not None and not isinstance(args, GRPOConfig):
            raise ConfigError(
                f"args = {type(args).__name__} is refused: give GRPOConfig of quartet.trl, which takes the "
                "same arguments"
            )
        super().__init__(model, processing_class, peft_config)
        self.args = args or GRPOConfig(f"{self.model.name.rstrip('/').rpartition('/')[2]}-GRPO")
        self.reward_funcs, self.train_dataset, self.eval_dataset = reward_funcs, train_dataset, eval_dataset
        self.tools, self.environment_factory = [] if tools is None else tools, environment_factory
        self._read(reward_processing_classes)
        self._fresh = address.fresh()
        self._so_far = self._read_from_here(self.translated())
        self.take_callbacks(callbacks)

    def _read(self, reward_processing_classes: Any) -> None:
        """Reads what is to be served. Raises ConfigError."""
        # Here and not above: the module is imported by scripts that only look, and these import gRPC.
        from quartet.rewards.environments import Environments
        from quartet.rewards.functions import RewardFunctions
        from quartet.rewards.tokenizer import TextTokenizer

        factory = self.environment_factory
        self._environments = None if factory is None else Environments(factory)
        own = None if self._environments is None else self._environments.reward
        if self.train_dataset is None:
            raise ConfigError(
                'train_dataset is missing: give a list of rows with a column "prompt", or one set of the '
                "library datasets; where reset() says it all, rows of an empty message (docs/trl.md)"
            )
        self._functions = RewardFunctions(
            self.reward_funcs,
            self.args.reward_weights,
            lambda: self._so_far.state(),
            reward_processing_classes,
            own,
        )
        self._tools = self._checked(self.tools)
        self._tokenizer = TextTokenizer(self.model.folder)
        self._train = self._prompts("train_dataset", self.train_dataset)
        given = self.eval_dataset
        self._evaluation = None if given is None else self._prompts("eval_dataset", given)

    def _checked(self, tools: Any) -> Tools | None:
        """Those that the model's chat template can show; None where there are none. Raises ConfigError."""
        from quartet.rewards.calling_template import check
        from quartet.rewards.own_tools import Tools

        methods = {} if self._environments is None else self._environments.methods
        found = Tools(tools, self._functions.turns, self._functions.loop, methods)
        if not found.definitions:
            return None
        check(self.model.folder)
        return found

    def _prompts(self, name: str, rows: Any) -> Prompts:
        """That functions and environments can be called with. Raises ConfigError."""
        from quartet.rewards.functions import ENVIRONMENTS
        from quartet.rewards.prompts import Prompts

        settings = self.args.chat_template_kwargs
        try:
            told = written(settings) if settings else ""
        except (TypeError, ValueError) as error:
            raise ConfigError(f"args.chat_template_kwargs = {settings!r} is refused: {error}") from error
        definitions = () if self._tools is None else self._tools.definitions
        opens, more = self._environments is not None, tuple[str, ...]()
        found = Prompts(name, rows, self._tokenizer, told, definitions, opens=opens)
        if self._environments is not None:
            self._environments.check(found.row(0))
            more = (ENVIRONMENTS,)
        self._functions.check((*found.columns, *more))
        return found

    @property
    def history(self) -> History:
        """By which names its metrics are told."""
        unweighted = [one.name for one in self._functions.functions if not one.weight]
        return history_of(self.args.loss_type, unweighted)

    def translated(self, wandb_project: str | None = None) -> OfTrl:
        """The run that the arguments describe as they stand, reported to a project. Raises ConfigError."""
        return self._translated(address.of_run(self.folder) or self._fresh, wandb_project)

    def _translated(self, at: str, wandb_project: str | None = None, evaluation: int | None = None) -> OfTrl:
        known = 0 if self._evaluation is None else len(self._evaluation)
        weights = {one.name: one.weight for one in self._functions.functions}
        return translate(
            self.args,
            self.model,
            Data(
                len(self._train),
                known if evaluation is None else evaluation,
                at,
                weights,
                has_tools=self._tools is not None,
            ),
            self.peft_config,
            context=self.model.context,
            wandb_project=wandb_project,
        )

    def why_not(self, refused: ConfigError, run: Translation) -> ConfigError:
        """Rows say how long epochs are."""
        if self.args.max_steps > 0 or "max_steps" in self.args.overrides:
            return refused
        return by_epochs(refused, self.args.num_train_epochs, len(self._train), run.steps_per_batch)

    @contextmanager
    def beside(self, run: Translation, end: Callable[[BaseException], None]) -> Iterator[None]:
        """Serves prompts and rewards where the run asks for them."""
        assert isinstance(run, OfTrl)
        with self._served(run, self._evaluation, end):
            yield

    @contextmanager
    def _served(
        self, run: OfTrl, evaluation: Prompts | None, failed: Callable[[BaseException], None]
    ) -> Iterator[None]:
        from quartet.rewards.conversation import Conversation
        from quartet.rewards.instances import Bounds
        from quartet.rewards.serving import served

        args, conversation, config = self.args, None, run.config
        at = config.env[0].args["address"]
        self._so_far = self._read_from_here(run)
        if self._tools is not None:
            limits = args.max_tool_calling_iterations, args.max_completion_length
            conversation = Conversation(self._tools, self._tokenizer, *limits)
        try:
            bounds = Bounds.of(config.at_once, config.env[0].timeout_seconds)
            more = conversation, self._environments, bounds
            with served(self._functions, self._train, evaluation, at, failed, *more):
                yield
        finally:
            address.remove(at)

    def in_words(self, told: str) -> str:
        """Of prompts and functions that are other ones, and of what it advises, by the arguments that have
        them."""
        prompts = ["train_dataset", *([] if self._evaluation is None else ["eval_dataset"])]
        called = ["reward_funcs", *(["tools"] if self.tools else [])]
        if self._environments is not None:
            called.append("environment_factory")
        return advised(in_a_script(told, prompts, called), has_turns=self._tools is not None)

    def wait(self, ended: threading.Event, look: Callable[[], object]) -> None:
        """Lends the thread to reward functions, which TRL calls in it, too."""
        left = threading.Event()
        teller = threading.Thread(target=self._tell_late, args=(ended, left), name="late", daemon=True)
        teller.start()
        try:
            self._functions.lend(ended, look)
        finally:
            left.set()

    def _tell_late(self, ended: threading.Event, left: threading.Event) -> None:
        """Says which function the others wait for, and why it is not over, where one goes on behind the
        end."""
        tell_at = HELD_SECONDS
        while not ended.wait(LATE_SECONDS):
            what, held_s = self._functions.turns.held_by
            if held_s < HELD_SECONDS:
                tell_at = HELD_SECONDS  # another call than was told of
            elif held_s >= tell_at:
                self.logger.warning(
                    "%s has not returned for %d s, and what else is called waits for it", what, held_s
                )
                tell_at = 2 * held_s
        if not left.wait(LATE_SECONDS):
            what, held_s = self._functions.turns.held_by
            self.logger.warning(
                "the run has ended, and %s has not returned for %d s; Ctrl-C breaks it off",
                what or "what train() waits for",
                held_s,
            )

    def steps_of_epoch(self, run: Translation) -> int:
        """As many as TRL counts."""
        assert isinstance(run, OfTrl)
        return run.steps_of_epoch

    def moments(self, run: Translation) -> Callable[[Row], Moment]:
        """With the passes over the prompts that were done by then, and the share of calls that failed."""
        moment_of, steps = super().moments(run), self.steps_of_epoch(run)
        return lambda row: with_epoch(moment_of(with_share(row)), steps)

    @property
    def state(self) -> TrainerState:
        """Where the run stands, also while another thread trains."""
        found, steps = super().state, self.translated().steps_of_epoch
        return TrainerState(found.global_step, found.max_steps, found.log_history, found.global_step / steps)

    def _read_from_here(self, run: OfTrl) -> SoFar:
        """What its reward functions are told of it."""
        most = run.config.max_steps * run.steps_per_batch
        return SoFar(self.folder / METRICS, self.moments(run), most, run.steps_of_epoch)

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """What the trained model earns on eval_dataset, or the model where nothing was trained yet, sampled
        as evaluations of the run. Raises ConfigError, RunFailed, and what a reward function raises."""
        from quartet.grpo.background import Background
        from quartet.grpo.measuring import measured

        if self._functions.turns.is_inside or self._functions.loop.is_inside:
            raise ConfigError(
                "evaluate: it is called inside a reward function or a tool, which it would wait for; call it "
                "in a callback, or behind train()"
            )
        evaluation = self._evaluation if eval_dataset is None else self._prompts("eval_dataset", eval_dataset)
        if evaluation is None:
            raise ConfigError("evaluate: there is no eval_dataset; give one to GRPOTrainer, or here")
        model, outputs = self.model_to_measure(), self.folder.parent
        # Not where the run is served: another thread may train it.
        at = address.fresh()
        run = self._translated(at, evaluation=len(evaluation))
        background: Background[dict[str, float]] = Background()
        with self._served(run, evaluation, background.end):
            found = with_share(
                background.run(
                    lambda: measured(run.config, model, outputs, background.command),
                    lambda ended: self.wait(ended, nothing),
                )
            )
        return {_called(name, self._functions.names, found): value for name, value in found.items()}


def _called(name: str, functions: Sequence[str], taken: Container[str]) -> str:
    """A figure of an evaluation as TRL calls it: of each reward function the mean, and what else was measured
    by its own name, where that is not taken."""
    own = name.removeprefix("eval_rewards/")
    if own == name:
        return name
    if own in functions:
        return f"{name}/mean"
    return name if f"eval_{own}" in taken else f"eval_{own}"
