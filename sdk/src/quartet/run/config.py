"""What a run is: the TOML dialect of `quartet rl @ run.toml` and of SubmitRun.

1. A RunConfig that validates can be run: every bound that one service would trip over later is checked here.
2. All that is wrong is refused at once, each in one sentence: key, value, what would be right.
3. The deployment tables ([trainer], [orchestrator], [inference], [envhost]) are carried, not read: the local
   launcher hands them to the services, which know their own keys. [wandb] and [tensorboard] are for whoever
   follows the run, [slurm] for whoever queues it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import pydantic
from pydantic import Field
from pydantic_core import PydanticCustomError

from quartet.config import Config
from quartet.config.load import parse_toml, validate
from quartet.config.model import NOT_GIVEN, rule
from quartet.run.algorithm import TWO_NAMES, AlgorithmConfig
from quartet.run.batch import BatchConfig
from quartet.run.difficulty import DifficultyFilterConfig
from quartet.run.evaluation import EVAL_TEMPERATURES, EvalConfig, EvalTrial, of_evaluations
from quartet.run.hosted import MAX_ENVIRONMENTS, NamedConfig, as_array, distinct
from quartet.run.kl_penalty import (
    KlPenaltyConfig,
    of_one_kl_penalty,
    outdone_by_kl_penalty,
    with_kl_penalty,
)
from quartet.run.learning import (
    MAX_STEPS,
    OF_THE_TRAINER,
    CheckpointConfig,
    LearningConfig,
    of_the_optimizer,
    of_the_schedule,
)
from quartet.run.lora import LoraConfig
from quartet.run.mlflow import MlflowConfig
from quartet.run.other_names import AS_TABLES, REMEDIES, TABLES_OF_OTHERS
from quartet.run.presets import is_preset, outdone_by, outdone_by_epsilon, outdone_by_loss
from quartet.run.sampling import SamplingConfig, of_room, over, penalties
from quartet.run.service_tables import ServiceTable, is_misplaced
from quartet.run.slurm import SlurmConfig
from quartet.run.switched import outdone_by_a_key_of_it
from quartet.run.tensorboard import TensorboardConfig
from quartet.run.values import Positive, PositiveCount, Text
from quartet.run.wandb import WandbConfig


class EnvConfig(NamedConfig):
    """One environment and its share of the rollouts."""

    #: Its share of the rollouts, relative to the others'.
    weight: Positive = 1.0


class ChecksConfig(Config):
    """What a run verifies about itself."""

    #: The trainer recomputes what the engine said of every sampled token.
    verify_logprobs: bool = False


#: Keys that belong to whoever follows or queues a run: others, or none, are the same run.
SHOWN: Final = ("keep_rollouts", "mlflow", "slurm", "tensorboard", "wandb")


class RunConfig(LearningConfig, BatchConfig):
    """A run."""

    OTHER_NAMES: ClassVar = REMEDIES
    AS_TABLES: ClassVar = AS_TABLES
    TABLES_OF_OTHERS: ClassVar = TABLES_OF_OTHERS

    #: Where a host's environment is not what the run began with; default: "warn", and go on.
    on_environment_change: Literal["warn", "stop"] | None = None
    #: Steps, and evaluations, whose rollouts stay in the folder of whoever follows the run; default: all. No
    #: part of the run.
    keep_rollouts: PositiveCount | None = None
    #: Of a mixture of experts: its routers stay as they are.
    freeze_routers: bool = False
    #: Of another run: a saved state on the trainer, or here its output folder, whose newest state is meant.
    #: The run begins with its weights and its optimizer's moments, and with nothing else of it.
    initial_state: Text | None = None
    #: Of initial_state: "continued", with its moments; or "fresh", from zero, for its weights alone.
    initial_optimizer: Literal["continued", "fresh"] = "continued"
    #: What the trainer computes in; default: float32 on a CPU, bfloat16 (with float32 masters) on a GPU.
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    #: What it publishes; default: what it computes in.
    served_dtype: Literal["float32", "bfloat16"] | None = None
    #: Somebody else's program takes the batches (OrchestratorService.StreamRollouts) and pushes the weights.
    external_trainer: bool = False
    sampling: SamplingConfig = SamplingConfig()
    # The default is refused by _distinct, which knows better than "required" what to write.
    env: Annotated[tuple[EnvConfig, ...], Field(max_length=MAX_ENVIRONMENTS)] = ()
    lora: LoraConfig = LoraConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    kl_penalty: KlPenaltyConfig = KlPenaltyConfig()
    difficulty_filter: DifficultyFilterConfig = DifficultyFilterConfig()
    eval: EvalConfig = EvalConfig()
    ckpt: CheckpointConfig = CheckpointConfig()
    checks: ChecksConfig = ChecksConfig()
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    tensorboard: TensorboardConfig = TensorboardConfig()
    slurm: SlurmConfig = SlurmConfig()
    #: The trainer's own configuration, and the launcher's gpus and nodes.
    trainer: ServiceTable
    #: The orchestrator's own configuration.
    orchestrator: ServiceTable
    #: Inference's own configuration, and the launcher's replicas, python, gpus and nodes.
    inference: ServiceTable
    #: The environment host's own configuration.
    envhost: ServiceTable

    @classmethod
    def is_others(cls, name: str) -> bool:
        """Those too that their programs' tables have."""
        return super().is_others(name) or is_misplaced(name)

    @classmethod
    def outdone(cls, key: str, value: Any, before: Mapping[str, Any]) -> tuple[str, ...]:
        """Without examples there are no evaluations, a preset, or another loss, is what it says, an epsilon
        alone sets both clips, of two names of one setting one is gone, and no table is off in silence."""
        if key in ("algorithm.preset", "algorithm.loss"):
            of_it = outdone_by if key == "algorithm.preset" else outdone_by_loss
            return tuple(f"algorithm.{one}" for one in of_it(value, before))
        if key == "algorithm.epsilon":
            return tuple(f"algorithm.{one}" for one in outdone_by_epsilon(before))
        for names in (EVAL_TEMPERATURES, *TWO_NAMES):
            if key in names:
                return tuple(one for one in names if one != key)
        if key == "eval.num_examples" and value == 0:
            return ("eval.interval", "eval.env")
        return outdone_by_kl_penalty(key, value, before) or outdone_by_a_key_of_it(cls, key, before)

    @classmethod
    def outdone_by_a_file(cls, key: str, value: Any, before: Mapping[str, Any]) -> tuple[str, ...]:
        """Another preset, or loss, is what it says there, too, and no table is off in silence."""
        if key == "algorithm.preset" and is_preset(value, before):
            return ()
        if key in ("algorithm.preset", "algorithm.loss"):
            return cls.outdone(key, value, before)
        return outdone_by_a_key_of_it(cls, key, before)

    @property
    def versions_per_step(self) -> int:
        """Optimizer steps on one batch, which is how far the policy's version goes on with each."""
        return self.algorithm.steps_per_batch

    @property
    def resamples(self) -> int:
        """How often a place of a batch gets a fresh group because the one before it teaches too little."""
        chosen = self.difficulty_filter
        return chosen.max_resample if chosen.enabled else self.algorithm.resamples

    @property
    def environment_ids(self) -> list[str]:
        """All that the run asks its hosts for, each once."""
        return list(dict.fromkeys(env.id for env in (*self.env, *self.eval.env)))

    @property
    def trials(self) -> list[EvalTrial]:
        """What each evaluation measures; empty where there is none."""
        return self.eval.trials(self.env, self.sampling)

    def sampling_of(self, env: EnvConfig) -> SamplingConfig:
        """How rollouts of one of its environments are sampled, to learn from."""
        return over(self.sampling, env.sampling)

    @property
    def longest_answer(self) -> int | None:
        """Tokens of one answer of any environment, at most; None where only the context bounds one."""
        longest = [self.sampling_of(env).max_tokens for env in self.env]
        bounded = [length for length in longest if length is not None]
        return max(bounded) if bounded == longest else None

    @property
    def constant_tokens(self) -> int | None:
        """What each rollout adds to a constant normaliser: as long as an answer of any environment may be."""
        return self.algorithm.constant_tokens or self.longest_answer

    @pydantic.model_validator(mode="before")
    @classmethod
    def _with_kl_penalty(cls, data: Any) -> Any:
        return with_kl_penalty(data) if isinstance(data, dict) else data

    @rule
    def _has_one_kl_penalty(self) -> Iterator[str]:
        yield from of_one_kl_penalty(self.kl_penalty, self.algorithm)

    @pydantic.field_validator("warmup_steps")
    @classmethod
    def _warmup_ends(cls, warmup_steps: int, info: pydantic.ValidationInfo) -> int:
        if warmup_steps > info.data.get("max_steps", warmup_steps):
            raise ValueError(f"the run ends before, at max_steps = {info.data['max_steps']}; set it to less")
        return warmup_steps

    @rule
    def _decay_has_room(self) -> Iterator[str]:
        if not self.external_trainer:  # it has a schedule of its own
            yield from of_the_schedule(self, self.max_steps)

    @rule
    def _optimizer_has_it(self) -> Iterator[str]:
        if not self.external_trainer:
            yield from of_the_optimizer(self)

    @rule
    def _begins_with_something(self) -> Iterator[str]:
        if self.initial_optimizer == "fresh" and self.initial_state is None:
            yield 'initial_optimizer = "fresh" is about initial_state, which is not set; remove it'
        if self.initial_state is not None and self.lora.enabled and self.lora.initial_adapter is not None:
            yield "initial_state and lora.initial_adapter both say what the adapter begins with; remove one"

    @rule
    def _routers_may_move(self) -> None:
        if self.freeze_routers and self.lora.enabled:
            raise ValueError("freeze_routers is for whole models: an adapter moves no router; remove it")

    @pydantic.field_validator("env", mode="before")
    @classmethod
    def _is_an_array(cls, env: Any) -> Any:
        return as_array(env, "env")

    @pydantic.field_validator("env")
    @classmethod
    def _distinct(cls, env: tuple[EnvConfig, ...]) -> tuple[EnvConfig, ...]:
        if not env:
            raise PydanticCustomError(
                NOT_GIVEN, 'a run needs an environment; add a table [[env]] with id = "..."'
            )
        return distinct(env)

    @rule
    def _credit_is_defined(self) -> Iterator[str]:
        advantage = self.algorithm.advantage
        if self.algorithm.compares and advantage != "custom" and self.rollouts_per_example < 2:
            yield (
                f"rollouts_per_example = 1 is refused: algorithm.advantage = {advantage!r} compares rollouts "
                'of one task; set at least 2, or algorithm.advantage to "none"'
            )
        if self.algorithm.normalised_by == "constant" and self.constant_tokens is None:
            key = "aggregation" if self.algorithm.aggregation else "advantage"
            yield (
                f'sampling.max_tokens is not set, and algorithm.{key} = "{getattr(self.algorithm, key)}" '
                "divides by it; set it, or that of each environment, or algorithm.constant_tokens"
            )

    @rule
    def _resamples_by_one_rule(self) -> Iterator[str]:
        if self.difficulty_filter.enabled and self.algorithm.max_resample is not None:
            yield (
                f"algorithm.max_resample = {self.algorithm.max_resample} is not read where difficulty_filter "
                "is enabled; set difficulty_filter.max_resample"
            )
        variance = self.difficulty_filter.min_reward_variance
        if self.difficulty_filter.enabled and variance and not self.algorithm.compares:
            yield (
                f"difficulty_filter.min_reward_variance = {variance} looks for rewards that differ, and "
                f'algorithm.advantage = "{self.algorithm.advantage}" learns without; remove it'
            )

    @rule
    def _minibatches_are_equal(self) -> None:
        if self.groups_per_batch % self.algorithm.num_minibatches:
            raise ValueError(
                f"algorithm.num_minibatches = {self.algorithm.num_minibatches} does not divide the "
                f"{self.groups_per_batch} groups of a batch (batch_size / rollouts_per_example); set it to a "
                "number that does"
            )

    @rule
    def _steps_can_be_counted(self) -> None:
        if self.max_steps * self.versions_per_step > MAX_STEPS:
            raise ValueError(
                f"max_steps = {self.max_steps}, each of {self.versions_per_step} optimizer steps "
                "(algorithm.num_iterations times algorithm.num_minibatches), are more than the "
                f"{MAX_STEPS} that can be counted; set max_steps to at most "
                f"{MAX_STEPS // self.versions_per_step}"
            )

    @rule
    def _leaves_training_to_its_trainer(self) -> None:
        fields = type(self).model_fields
        defaults = {key: fields[key].get_default(call_default_factory=True) for key in OF_THE_TRAINER}
        given = [key for key, default in defaults.items() if getattr(self, key) != default]
        if self.external_trainer and given:
            are = "is a setting" if len(given) == 1 else "are settings"
            raise ValueError(
                f"{', '.join(given)} {are} of Quartet's trainer, and external_trainer = true; remove that "
                "here, and set it in the program that trains"
            )

    @rule
    def _teacher_is_comparable(self) -> None:
        reference = self.algorithm.reference
        if reference is not None and reference.address and self.sampling.temperature != 1.0:
            raise ValueError(
                f"sampling.temperature = {self.sampling.temperature} is refused: algorithm.reference.address "
                "scores at temperature 1; set it to 1, or let the trainer hold the model"
            )

    @rule
    def _evaluates_something(self) -> Iterator[str]:
        yield from of_evaluations(self.eval)

    @rule
    def _evaluation_fits(self) -> Iterator[str]:
        for trial in self.trials:
            if self.at_once < trial.rollouts_per_example:
                yield (
                    f"max_concurrent = {self.at_once} is less than eval.rollouts_per_example = "
                    f"{trial.rollouts_per_example}, which run together; set max_concurrent to at least "
                    f"{trial.rollouts_per_example}"
                )

    @rule
    def _answers_have_room(self) -> Iterator[str]:
        tables = (self.sampling, self.eval.sampling, *(env.sampling for env in (*self.env, *self.eval.env)))
        if any(list(of_room(table)) for table in tables if table is not None):
            return  # which says so itself
        trained = [(env.label, self.sampling_of(env)) for env in self.env]
        said = [one for name, how in trained for one in of_room(how, f"of the environment {name!r}: ")]
        yield from said
        for trial in self.trials if not said else ():
            yield from of_room(trial.sampling, f"of the evaluation of {trial.name!r}: ")

    @rule
    def _can_verify(self) -> None:
        # The sampler's log-probabilities are those after penalties; the trainer's forward knows no penalties.
        given = penalties("sampling", self.sampling)
        for number, env in enumerate(self.env):
            given += penalties(f"env.{number}.sampling", env.sampling)
        if self.checks.verify_logprobs and given:
            make = "makes" if len(given) == 1 else "make"
            raise ValueError(
                f"{' and '.join(given)} {make} log-probabilities that the trainer cannot verify; remove "
                "that, or set checks.verify_logprobs to false"
            )


def parse_run(toml_text: str) -> RunConfig:
    """Read a run's TOML. Raises ConfigError with one sentence: key, value, remedy."""
    return validate(RunConfig, parse_toml(toml_text, "the run"))
