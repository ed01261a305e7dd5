"""The state of a run: the fold of its journal's records, and nothing else.

1. `apply` is the only way to change it; the same records give the same state, before and after a restart. (A
   rollout changes only its own group, while that is open. So after a restart those of open groups are enough,
   and they may come last.) What cannot follow `check` refuses, before anything is changed or written down.
2. Rollouts themselves stay in the journal; the state knows only which members of an open group are done.
3. Phases change along TRANSITIONS; another change is our bug and fails loudly.
4. A run that was COMPLETED goes on with the configuration that its next phase tells, whose max_steps is
   larger; nothing else of it changes. How a run is carried out changes where a record says so, and with it
   when its state is saved: of the steps that are not applied yet.
5. The record by which a run is FAILED for good gives up its open groups, too: there is no moment between, in
   which a run that can go on has lost them.

Pure.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from sys import intern

from quartet.v1 import journal_pb2 as jpb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1.envhost_service_pb2 import EnvironmentInfo

from quartet_orchestrator.advice import REMEMBERED
from quartet_orchestrator.by_replica import OTHERS
from quartet_orchestrator.calls import Saving
from quartet_orchestrator.difficulty import REPLACED
from quartet_orchestrator.eval_metrics import by_agent
from quartet_orchestrator.ledger import Ledger
from quartet_orchestrator.metrics import OF_REPLICAS
from quartet_orchestrator.pace import Place
from quartet_orchestrator.parts import rewards_by_role

UNSPECIFIED = pb.RUN_PHASE_UNSPECIFIED
PENDING, EVALUATING, TRAINING = pb.RUN_PHASE_PENDING, pb.RUN_PHASE_EVALUATING, pb.RUN_PHASE_TRAINING
STOPPING, STOPPED = pb.RUN_PHASE_STOPPING, pb.RUN_PHASE_STOPPED
COMPLETED, FAILED = pb.RUN_PHASE_COMPLETED, pb.RUN_PHASE_FAILED

TRANSITIONS: dict[pb.RunPhase, frozenset[pb.RunPhase]] = {
    UNSPECIFIED: frozenset({PENDING}),
    PENDING: frozenset({EVALUATING, TRAINING, COMPLETED, STOPPING, FAILED}),
    EVALUATING: frozenset({TRAINING, COMPLETED, STOPPING, FAILED}),
    TRAINING: frozenset({EVALUATING, COMPLETED, STOPPING, FAILED}),
    STOPPING: frozenset({STOPPED, COMPLETED, FAILED}),
    STOPPED: frozenset({PENDING}),
    # Of a run that is extended.
    COMPLETED: frozenset({PENDING}),
    # Of a run that sampled nothing since it began or was gone on with.
    FAILED: frozenset({PENDING}),
}
# And one of which a kill left a part, where rewards compare all of it.
TORN = "torn"
# And one whose task's prompt has more tokens than the run takes.
LONG_PROMPT = "long_prompt"
# And one that was open when its run FAILED for good.
RUN_FAILED = "run_failed"
# In these a run does nothing until somebody asks.
RESTING = frozenset({STOPPED, COMPLETED, FAILED})


@dataclass
class Group:
    """A group that is neither trained nor discarded."""

    number: int
    place: Place
    environment: int
    task_index: int
    members: int
    done: set[int] = field(default_factory=set)
    # Whether a foreign trainer has it and is not to get it again.
    acked: bool = False
    # Of the members that are done, in the order they came: their rewards, and what is compared (parts.py).
    rewards: list[float] = field(default_factory=list)
    compared: dict[str, list[float]] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        """Members without a rollout that succeeded, in order."""
        return [member for member in range(self.members) if member not in self.done]


@dataclass
class RunState:
    """What the records of a run say of it so far."""

    run_id: str = ""
    config_toml: str = ""
    submitted_at_ms: int = 0
    environments: list[EnvironmentInfo] = field(default_factory=list)
    # Of the evaluations.
    eval_environments: list[EnvironmentInfo] = field(default_factory=list)
    # Of those, and of evaluations that have their own: what hosts described otherwise later, by the place in
    # `described`. What the run computes goes by what they were when it was submitted.
    met: dict[int, list[EnvironmentInfo]] = field(default_factory=dict)
    phase: pb.RunPhase = UNSPECIFIED
    error: str = ""
    model_path: str = ""
    # Steps applied, which is also the batch to train next.
    step: int = 0
    max_steps: int = 0
    # What max_steps was before each extension.
    earlier_ends: list[int] = field(default_factory=list)
    # When it saved its state before each change of that.
    earlier_saving: list[Saving] = field(default_factory=list)
    next_group: int = 0
    # What it was when this part of the run began.
    first_group: int = 0
    # How many tasks of each environment were dispatched or passed over.
    turns_of: Counter[int] = field(default_factory=Counter)
    # Of each environment whose tasks come again those whose prompts are too long.
    long_prompts: dict[int, set[int]] = field(default_factory=dict)
    # Of the places that are not trained: how often a group that teaches too little was taken out of
    # each.
    resampled: Counter[Place] = field(default_factory=Counter)
    groups: dict[int, Group] = field(default_factory=dict)
    # Closed and not yet applied.
    batches: dict[int, jpb.BatchClosed] = field(default_factory=dict)
    # The last call whose answer is written down.
    applied_seq_id: int = 0
    # Mean reward of each evaluation by the steps applied before it; None where nothing could be measured.
    evaluations: dict[int, float | None] = field(default_factory=dict)
    # Of those in which agents were rewarded apart the first one and the last: what each earned, by its
    # environment and role.
    agents: dict[int, dict[tuple[str, str], float]] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    # Of the last step and of the last evaluation; replaced whole, for who reads from another thread.
    metrics: dict[str, float] = field(default_factory=dict)
    eval_metrics: dict[str, float] = field(default_factory=dict)
    # Those of inference that metrics of steps told of by name (by_replica.py).
    replicas: frozenset[str] = frozenset()
    max_staleness: int = 0
    max_logprob_difference: float | None = None
    last_step_at_ms: int = 0
    # When it entered its phase.
    phase_at_ms: int = 0
    # Metrics of the last steps, oldest first.
    recent: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def check(self, record: jpb.JournalRecord) -> None:
        """Raises AssertionError where a record cannot follow: on disk the journal could not be read again."""
        match record.WhichOneof("kind"):
            case "dispatched":
                group = record.dispatched
                assert group.group == self.next_group and group.members > 0, f"group {group.group}"
            case "rollout":
                open_group, rollout = self.groups.get(record.rollout.group), record.rollout.rollout
                if open_group is not None and not rollout.HasField("failure"):
                    assert rollout.member in open_group.missing, (
                        f"group {open_group.number} member {rollout.member} twice"
                    )
            case "discarded":
                assert record.discarded.group in self.groups, f"group {record.discarded.group} is not open"
            case "acked":
                assert record.acked.group in self.groups, f"group {record.acked.group} is not open"
            case "call":
                assert record.call.seq_id == self.applied_seq_id + 1, record.call.seq_id
            case "step":
                assert record.step.step == self.step + 1, record.step.step
                assert self.step in self.batches, f"batch {self.step} is not closed"
                gone = [number for number in self.batches[self.step].groups if number not in self.groups]
                assert not gone, f"groups {gone} of batch {self.step} are not open"
            case "phase":
                run = record.phase.run
                assert run.phase in TRANSITIONS[self.phase], f"{self.phase} -> {run.phase}"
                if self.phase == COMPLETED:
                    assert run.max_steps > self.max_steps, f"{self.max_steps} -> {run.max_steps}"

    def apply(self, record: jpb.JournalRecord) -> None:
        """Takes the next record. Raises AssertionError where it cannot follow; nothing is changed then."""
        self.check(record)
        match record.WhichOneof("kind"):
            case "submitted":
                self.run_id = record.submitted.run_id
                self.config_toml = record.submitted.config_toml
                self.environments = list(record.submitted.environments)
                self.eval_environments = list(record.submitted.eval_environments) or self.environments
                self.submitted_at_ms = record.at_ms
            case "dispatched":
                self._dispatched(record.dispatched)
            case "rollout":
                self._rollout(record.rollout)
            case "discarded":
                group = self.groups.pop(record.discarded.group)
                self.ledger.discard(group.members, record.discarded.reason)
                if record.discarded.reason in REPLACED:
                    self.resampled[group.place] += 1
                elif record.discarded.reason == LONG_PROMPT:
                    self._has_long_prompt(group)
            case "acked":
                self.groups[record.acked.group].acked = True
            case "batch":
                self.batches[record.batch.batch] = record.batch
            case "call":
                self.applied_seq_id = record.call.seq_id
                self.model_path = record.call.save.state.model_path or self.model_path
            case "changed":
                was = record.changed
                self.earlier_saving.append(
                    Saving(self.step, was.ckpt_interval, was.ckpt_keep_last, was.ckpt_keep_interval)
                )
                self.config_toml = was.config_toml or self.config_toml
            case "met":
                for place in record.met.places:
                    self.met.setdefault(place, []).append(record.met.environment)
            case "step":
                self._step(record.step, record.at_ms)
            case "eval":
                self.eval_metrics = dict(record.eval.metrics)
                self.evaluations[record.eval.step] = self.eval_metrics.get("eval/reward")
                if agents := by_agent(self.eval_metrics):
                    before = {step: earned for step, earned in self.agents.items() if step == 0}
                    self.agents = before | {record.eval.step: agents}
            case "phase":
                run = record.phase.run
                if self.phase == COMPLETED:
                    self.earlier_ends.append(self.max_steps)
                    # Its trainer keeps the newest states, and the models beside them.
                    self.config_toml, self.model_path = run.config_toml, ""
                self.phase, self.error, self.max_steps = run.phase, run.error, run.max_steps
                self.phase_at_ms = record.at_ms
                if self.phase == PENDING:
                    self.first_group = self.next_group
                elif self.phase == FAILED and self.dispatched_in_part:
                    self.ledger = self.ledger_after(FAILED)
                    self.groups.clear()

    @property
    def dispatched_in_part(self) -> bool:
        """Whether this part of the run dispatched a group."""
        return self.next_group > self.first_group

    def ledger_after(self, phase: pb.RunPhase) -> Ledger:
        """What the ledger is once the run enters that phase."""
        if phase != FAILED or not self.dispatched_in_part or not self.groups:
            return self.ledger
        return self.ledger.after_discarding(sum(one.members for one in self.groups.values()), RUN_FAILED)

    @property
    def described(self) -> list[EnvironmentInfo]:
        """As they were when the run was submitted: those of training, then what only evaluations have."""
        own = self.eval_environments is not self.environments
        return [*self.environments, *(self.eval_environments if own else ())]

    def batch_groups(self, batch: int) -> list[Group]:
        """The batch's open groups in order of their places."""
        mine = (group for group in self.groups.values() if group.place.batch == batch)
        return sorted(mine, key=lambda group: group.place)

    def to_proto(self, last_event: int) -> pb.Run:
        """The run as callers get it; `last_event` is the number of its newest event."""
        run = pb.Run(
            run_id=self.run_id,
            phase=self.phase,
            step=self.step,
            max_steps=self.max_steps,
            ledger=self.ledger.to_proto(),
            max_off_policy_steps_seen=self.max_staleness,
            max_logprob_difference=self.max_logprob_difference,
            error=self.error,
            config_toml=self.config_toml,
            submitted_at_ms=self.submitted_at_ms,
            model_path=self.model_path,
            last_event=last_event,
            reward_before=self.evaluations.get(0),
            environments=[self._environment(*one) for one in enumerate(self.described)],
        )
        # A run of no steps has one evaluation, which is both.
        after = self.evaluations.get(self.max_steps) if self.step == self.max_steps else None
        if after is not None:
            run.reward_after = after
        run.agents.extend(self._agents())
        return run

    def _agents(self) -> list[pb.RunAgent]:
        before = self.agents.get(0, {})
        after = self.agents.get(self.max_steps, {}) if self.step == self.max_steps else {}
        return [
            pb.RunAgent(
                environment=one[0], agent=one[1], reward_before=before.get(one), reward_after=after.get(one)
            )
            for one in sorted(before | after)
        ]

    def _environment(self, place: int, info: EnvironmentInfo) -> pb.RunEnvironment:
        told = [one.digest for one in (info, *self.met.get(place, ())) if one.digest]
        return pb.RunEnvironment(
            id=info.id, version=info.version, digest=told[0] if told else "", later_digests=told[1:]
        )

    def _has_long_prompt(self, group: Group) -> None:
        if not self.environments[group.environment].infinite:  # else the task never comes again
            self.long_prompts.setdefault(group.environment, set()).add(group.task_index)

    def _dispatched(self, group: jpb.GroupDispatched) -> None:
        self.next_group += 1
        self.turns_of[group.environment] += 1 + group.passed_over
        self.ledger.dispatch(group.members)
        place = Place(group.batch, group.place)
        self.groups[group.group] = Group(
            group.group, place, group.environment, group.task_index, group.members
        )

    def _rollout(self, event: pb.RolloutEvent) -> None:
        group = self.groups.get(event.group)
        if group is None:
            return  # it ended after its group had been given up
        rollout = event.rollout
        if not rollout.HasField("failure"):
            group.done.add(rollout.member)
            group.rewards.append(rollout.reward)
            for role, rewards in rewards_by_role([rollout]).items():
                group.compared.setdefault(role, []).extend(rewards)

    def _step(self, event: pb.StepEvent, at_ms: int) -> None:
        batch = self.batches.pop(self.step)
        self.resampled = Counter({p: n for p, n in self.resampled.items() if p.batch != self.step})
        for number in batch.groups:
            self.ledger.train(self.groups.pop(number).members)
        self.step = event.step
        # One string for a name: every run of the folder has as many as REMEMBERED steps of them.
        self.metrics = {intern(name): value for name, value in event.metrics.items()}
        self.last_step_at_ms = at_ms
        self.recent.append(self.metrics)
        told = [name for name in self.metrics if name.startswith(OF_REPLICAS)]
        self.replicas |= {name.removeprefix(f"{OF_REPLICAS}/") for name in told} - {OTHERS}
        self.max_staleness = max(self.max_staleness, int(event.metrics.get("staleness/max", 0)))
        difference = event.metrics.get("train/logprob_difference_max")
        if difference is not None:
            self.max_logprob_difference = max(difference, self.max_logprob_difference or 0.0)
