"""GRPOTrainer: a script's run, as four services of this machine.

1. What can be refused is refused when the trainer is made, as a ConfigError; what failed is a RunFailed. The
   process is never ended.
2. How it is trained, measured and saved is as of every run of a script (run_trainer.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from os import PathLike
from typing import Any

from quartet.config.model import ConfigError
from quartet.grpo.advised import ARGUMENTS, by_arguments
from quartet.grpo.arguments import GRPOConfig
from quartet.grpo.environments import Environment
from quartet.grpo.history import OF_VERIFIERS, History
from quartet.grpo.of_trl import TRAINER
from quartet.grpo.run_trainer import RunTrainer
from quartet.grpo.translate import Translation, translate
from quartet.scripts.models import Model, Tokenizer
from quartet.scripts.trainer import OF_TRANSFORMERS

GIVEN = ("model", "env", "args", "processing_class", "peft_config", "callbacks")
#: What a run advises to change, by the names of verifiers.
ADVISED = {
    **ARGUMENTS,
    "sampling.max_tokens": "max_tokens",
    "max_prompt_tokens": "max_prompt_length",
    "timeout_seconds": "async_generation_timeout",
}


class GRPOTrainer(RunTrainer):
    """One run of a model on an environment."""

    logger = logging.getLogger("quartet.grpo")
    ELSEWHERE = {**OF_TRANSFORMERS, **TRAINER}  # noqa: RUF012 - as the base class has it
    args: GRPOConfig

    def __init__(
        self,
        model: Model | str | PathLike[str],
        env: Environment | Sequence[Environment] | None = None,
        args: GRPOConfig | None = None,
        processing_class: Tokenizer | None = None,
        peft_config: Any = None,
        callbacks: Any = None,
        **unknown: Any,
    ) -> None:
        """Check everything that can be told without starting anything. Raises ConfigError."""
        self.refuse_arguments(unknown, GIVEN)
        if not isinstance(args, GRPOConfig):
            raise ConfigError(
                f"args = {type(args).__name__} is refused: give vf.grpo_defaults(...) or vf.GRPOConfig"
            )
        self.args = args
        super().__init__(model, processing_class, peft_config)
        if env is None:
            raise ConfigError('env is missing: give vf.load_environment("..."), or a list of these')
        self.env = env
        self.translated()
        self.take_callbacks(callbacks)

    @property
    def history(self) -> History:
        """By which names its metrics are told."""
        return OF_VERIFIERS

    def in_words(self, told: str) -> str:
        """Of what it advises to change, the arguments."""
        return by_arguments(told, ADVISED)

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
