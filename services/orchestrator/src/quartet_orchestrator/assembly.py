"""Assembly: the parts of a run, put together from its book, its configuration and the services it may
call."""

from __future__ import annotations

from dataclasses import dataclass

from quartet.run.config import RunConfig

from quartet_orchestrator.book import Book
from quartet_orchestrator.calls import CallPlan
from quartet_orchestrator.compaction import Compaction
from quartet_orchestrator.config import OrchestratorConfig
from quartet_orchestrator.envhosts import EnvHosts
from quartet_orchestrator.evaluation import Evaluation
from quartet_orchestrator.mixture import Mixture
from quartet_orchestrator.outage import Outage
from quartet_orchestrator.pace import Pace
from quartet_orchestrator.permits import Permits
from quartet_orchestrator.policies import Policies
from quartet_orchestrator.prompts import Prompts, Source
from quartet_orchestrator.rollouts import Rollouts
from quartet_orchestrator.run import TrainingRun
from quartet_orchestrator.sampling import Sampling
from quartet_orchestrator.teacher import Teachers
from quartet_orchestrator.trainer_client import TrainerClient
from quartet_orchestrator.training import Training


@dataclass(frozen=True)
class Services:
    """The other three, shared by all runs."""

    trainer: TrainerClient
    hosts: EnvHosts
    policies: Policies
    teachers: Teachers
    patience_s: float
    journal_keep_bytes: int

    @classmethod
    def connect(cls, config: OrchestratorConfig) -> Services:
        return cls(
            TrainerClient(config.trainer_address, config.security),
            EnvHosts(config.envhost_addresses, config.security),
            Policies(config.inference_addresses, config.security),
            Teachers(config.security),
            config.patience_seconds,
            config.journal_keep_bytes,
        )

    async def close(self) -> None:
        await self.trainer.close()
        await self.hosts.close()
        await self.policies.close()
        await self.teachers.close()


def assemble(book: Book, config: RunConfig, services: Services) -> TrainingRun:
    def outage(service: str) -> Outage:
        return Outage(service, services.patience_s, book.note)

    model = outage("the model")
    permits, host = Permits(config.max_concurrent), outage("the environment host")
    reference = config.algorithm.reference
    teacher = None
    if reference is not None and reference.address:
        teacher = services.teachers.at(reference.address, outage("the teacher"))
    pace = Pace(
        max_off_policy_steps=config.max_off_policy_steps,
        groups_per_batch=config.groups_per_batch,
        max_steps=config.max_steps,
        published=book.state.step,
        versions_per_step=config.versions_per_step,
    )
    sources = [
        Source(env.id, None if info.infinite else info.train_size)
        for env, info in zip(config.env, book.state.environments, strict=True)
    ]
    training = Training(book, config, services.trainer, outage("the trainer"))
    sampling = Sampling(services.hosts, permits, host, model, teacher.judge if teacher else None)
    mixture = Mixture([env.weight for env in config.env])
    rollouts = Rollouts(book, config, pace, mixture, Prompts(sources, config.seed), sampling)
    evaluation = Evaluation(book, config, Sampling(services.hosts, permits, host, model))

    async def policy_ready() -> None:
        """Waits until the published version is served somewhere, so that no rollout is spent on finding
        out."""
        run_id, version = book.state.run_id, book.state.step * config.versions_per_step
        adapter = config.lora.enabled and config.lora.publish == "adapter"
        await model.through(lambda: services.policies.serving(run_id, version, adapter=adapter))

    compaction = Compaction(book, CallPlan.of(config), services.journal_keep_bytes)
    return TrainingRun(book, config, training, rollouts, evaluation, policy_ready, compaction.run)
