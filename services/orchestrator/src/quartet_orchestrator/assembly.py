"""Assembly: the parts of a run, put together from its book, its configuration and the services it may
call."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from quartet.errors import QuartetError
from quartet.run.batch import MIN_AT_ONCE
from quartet.run.config import RunConfig

from quartet_orchestrator.activity import named
from quartet_orchestrator.book import Book
from quartet_orchestrator.calls import CallPlan
from quartet_orchestrator.compaction import Compaction, covered_by_acks, covered_by_states
from quartet_orchestrator.config import OrchestratorConfig
from quartet_orchestrator.envhosts import EnvHosts
from quartet_orchestrator.evaluation import Evaluation
from quartet_orchestrator.failures import Failures
from quartet_orchestrator.foreign import ForeignTraining
from quartet_orchestrator.hold import Hold
from quartet_orchestrator.keeping_up import KeepingUp
from quartet_orchestrator.line import Line
from quartet_orchestrator.mixture import Mixture
from quartet_orchestrator.on_demand import Measurable
from quartet_orchestrator.outage import Outage
from quartet_orchestrator.own_advantages import OwnAdvantage, load_advantages
from quartet_orchestrator.own_weights import OwnWeights
from quartet_orchestrator.pace import Pace
from quartet_orchestrator.permits import Permits
from quartet_orchestrator.policies import Policies
from quartet_orchestrator.prompts import Prompts, Source
from quartet_orchestrator.reach import Reach
from quartet_orchestrator.rollouts import Rollouts
from quartet_orchestrator.run import TrainingRun
from quartet_orchestrator.sameness import Sameness
from quartet_orchestrator.sampling import Sampling
from quartet_orchestrator.specs import publishes_adapters
from quartet_orchestrator.teacher import Teachers
from quartet_orchestrator.trainer_client import TrainerClient
from quartet_orchestrator.training import Training
from quartet_orchestrator.trouble import Note
from quartet_orchestrator.turns import Turns

# As notes call them.
HOST, MODEL = "the environment host", "the model"
# Why a run waits for others.
ONE_MODEL = (
    "a replica of inference serves one run that trains the whole model, or runs that publish adapters; it "
    "starts when those before it have ended or are stopped"
)
NO_ROOM = (
    "the trainer has no room for more runs at once (its max_runs); it starts when one of those that go on "
    "has ended or is stopped"
)


@dataclass(frozen=True)
class Services:
    """The other three, shared by all runs."""

    #: None where every run brings its own.
    trainer: TrainerClient | None
    hosts: EnvHosts
    policies: Policies
    teachers: Teachers
    turns: Turns
    patience_s: float
    journal_keep_bytes: int
    #: Those of the configuration, by name.
    advantages: Mapping[str, OwnAdvantage]
    started_at: float = field(default_factory=time.monotonic)

    def outage(self, service: str, note: Note) -> Outage:
        """Of a run's calls to one of them."""
        return Outage(service, self.patience_s, note, started_at=self.started_at)

    @classmethod
    def connect(cls, config: OrchestratorConfig) -> Services:
        """Clients of the services that the configuration names; none is called yet. Raises ConfigError."""
        return cls(
            TrainerClient(config.trainer_address, config.security) if config.trainer_address else None,
            EnvHosts(config.envhost_addresses, config.security),
            Policies(config.inference_addresses, config.security),
            Teachers(config.security, {*config.inference_addresses, *config.teacher_addresses}),
            Turns(config.whole_model_runs),
            config.patience_seconds,
            config.journal_keep_bytes,
            load_advantages(config.advantages),
        )

    async def close(self) -> None:
        """Closes every connection; calls under way are cancelled."""
        if self.trainer is not None:
            await self.trainer.close()
        await self.hosts.close()
        await self.policies.close()
        await self.teachers.close()


def assemble(book: Book, config: RunConfig, services: Services) -> TrainingRun:
    """The run, to be executed; until then nothing is sent for it."""
    host, model = services.outage(HOST, book.note), services.outage(MODEL, book.note)
    outages = [host, model]
    judge = None
    reference = config.algorithm.reference
    if reference is not None and reference.address:
        outages.append(services.outage("the teacher", book.note))
        run_id = book.state.run_id
        judge = services.teachers.at(reference.address, run_id, outages[-1], book.note).judge
    reach = Reach(book.note, services.hosts.addresses)
    # A limit that somebody wrote is the limit.
    permits = Permits(config.at_once, config.max_concurrent or MIN_AT_ONCE)
    keeps_short = () if config.max_concurrent else (permits.limit_to,)
    line = Line(book.note, services.hosts.addresses, *keeps_short)
    training: Training | ForeignTraining

    def replays() -> bool:
        return training.replays

    sameness = Sameness(book, config, services.hosts.describe_at)
    failures = Failures(book.note, replays)
    trainer = services.outage("the trainer", book.note)
    own_weights = _own_weights(book, config, services, trainer)
    heard = reach, sameness, failures, own_weights, line, replays
    sampling = Sampling(services.hosts, permits, host, model, judge, *heard)
    # No teacher judges what is not trained on.
    measuring = Sampling(services.hosts, permits, host, model, None, *heard)
    mixture = Mixture([env.weight for env in config.env])
    rollouts = Rollouts(book, config, _pace(book, config), mixture, _prompts(book, config), sampling)

    policy = _Policy(services, book.state.run_id, config)
    standing = partial(services.policies.standing, book.state.run_id)
    keeping_up = KeepingUp(
        policy.serving, policy.still_serving, policy.never, standing, services.patience_s, book.note
    )
    waiting = _Waiting(book, services.turns, policy.is_adapter, not config.external_trainer)
    training, covered = _training(
        book, config, services, policy.serving, keeping_up, waiting, trainer, own_weights
    )

    async def policy_ready() -> None:
        """Waits until the published version is served somewhere, so that no rollout is spent on finding
        out."""
        version = book.state.step * config.versions_per_step
        # Its digest is asked for each time: meanwhile it may have been published again.
        await model.through(lambda: policy.serving(version, training.first_digest))

    def troubles() -> list[str]:
        # Of inference is told once: keeping_up knows what each replica says.
        told = [one for one in outages if one is not model or not keeping_up.trouble]
        away = [one.trouble for one in told if one.trouble]
        return [*training.troubles, *away, *reach.troubles, *line.troubles, *rollouts.troubles]

    return TrainingRun(
        book,
        config,
        training,
        rollouts,
        Evaluation(book, config, measuring),
        Measurable(book, config, services.hosts, Hold(), partial(_on_demand, services, own_weights, replays)),
        waiting.turn,
        policy_ready,
        Compaction(book, covered, services.journal_keep_bytes).run,
        troubles,
    )


def _pace(book: Book, config: RunConfig) -> Pace:
    return Pace(
        max_off_policy_steps=config.max_off_policy_steps,
        groups_per_batch=config.groups_per_batch,
        max_steps=config.max_steps,
        published=book.state.step,
        versions_per_step=config.versions_per_step,
    )


def _prompts(book: Book, config: RunConfig) -> Prompts:
    sources = [
        Source(env.label, None if info.infinite else info.train_size)
        for env, info in zip(config.env, book.state.environments, strict=True)
    ]
    return Prompts(sources, config.seed)


def _own_weights(book: Book, config: RunConfig, services: Services, outage: Outage) -> OwnWeights | None:
    """None where a foreign trainer makes them."""
    client = services.trainer
    if config.external_trainer or client is None:
        return None
    return OwnWeights(
        book, config, lambda version: outage.through(partial(client.digest, book.state.run_id, version))
    )


def _on_demand(
    services: Services, own_weights: OwnWeights | None, replays: Callable[[], bool], permits: Permits
) -> Sampling:
    """For measurements that somebody asks for. Its outages are its own, told to nobody: an environment that
    only the caller asked for is not the run's."""
    host, model = (Outage(service, services.patience_s, _untold) for service in (HOST, MODEL))
    return Sampling(services.hosts, permits, host, model, own_weights=own_weights, replays=replays)


def _untold(message: str, *, warning: bool = False) -> None:
    """A note that is written nowhere."""


@dataclass(frozen=True)
class _Policy:
    """The run's policy at the replicas of inference."""

    services: Services
    run_id: str
    config: RunConfig

    @property
    def is_adapter(self) -> bool:
        """Whether its versions are adapters, so that replicas serve other runs beside it."""
        return publishes_adapters(self.config)

    async def serving(self, version: int, digest: bytes | None = None) -> None:
        """As `Policies.serving`."""
        await self.services.policies.serving(self.run_id, version, adapter=self.is_adapter, digest=digest)

    async def still_serving(self, version: int) -> None:
        """Raises where nobody serves it any more."""
        if self.is_adapter:
            await self.services.policies.answering(self.run_id)
        else:
            await self.serving(version)

    async def never(self, version: int) -> str:
        """Why no replica will ever serve it; empty where one may."""
        trainer, policies = self.services.trainer, self.services.policies
        assert trainer is not None, "a foreign trainer's versions are its own affair"
        try:
            # Each half may have another reason: a trainer that computes no canaries, damage in a replica.
            if not await policies.found_wrong(self.run_id, version):
                return ""
            if await trainer.has_canary(self.run_id, version):
                return ""
        except QuartetError:
            return ""
        remedy = f"look at what the run begins with, model = {self.config.model!r}"
        if version:
            rate = self.config.learning_rate
            remedy = f"training has diverged at learning_rate = {rate:g}: lower it and submit a new run"
        return (
            f"the weights of version {version} give log-probabilities that are no numbers, and no replica "
            f"will ever serve them; {remedy}"
        )


@dataclass
class _Waiting:
    """A run's place in the line. For whom it waits is told once, however often it looks again."""

    book: Book
    turns: Turns
    #: Whether it has its turn together with other runs that share theirs.
    shares: bool
    trains_here: bool
    said: str = ""

    async def turn(self) -> None:
        """Waits until the replicas of inference are the run's, or runs that publish adapters share them."""
        why = NO_ROOM if self.turns.is_full else ONE_MODEL
        await self.turns.take(
            self.book.state.run_id,
            partial(self._waits, why),
            shares=self.shares,
            trains_here=self.trains_here,
        )

    def gives_way(self) -> bool:
        """Whether the run waits for others, because the trainer has no room for it beside them."""
        others = self.turns.give_way(self.book.state.run_id)
        if others:
            self._waits(NO_ROOM, others)
        return bool(others)

    def _waits(self, why: str, others: list[str]) -> None:
        said = f"waits for {named(others)}: {why}"
        if said != self.said:
            self.said = said
            self.book.note(said)


def _training(
    book: Book,
    config: RunConfig,
    services: Services,
    serving: Callable[[int], Awaitable[None]],
    keeping_up: KeepingUp,
    waiting: _Waiting,
    outage: Outage,
    own_weights: OwnWeights | None,
) -> tuple[Training | ForeignTraining, Callable[[], int]]:
    """What trains the run, and the steps whose rollouts it cannot ask for again."""
    own = services.advantages.get(config.algorithm.custom_advantage or "")
    if config.external_trainer:
        return ForeignTraining(book, config, serving, services.patience_s, own), covered_by_acks(book)
    assert services.trainer is not None and own_weights is not None, "checked when the run was taken"
    plan = CallPlan.of(config, book.state.earlier_ends, book.state.earlier_saving)
    unserve = partial(services.policies.unserve, book.state.run_id)
    on_opened = partial(services.turns.opened, book.state.run_id)
    training = Training(
        book,
        config,
        services.trainer,
        outage,
        keeping_up,
        unserve,
        waiting.gives_way,
        on_opened,
        own_weights.published,
        own,
    )
    return training, covered_by_states(book, plan)
