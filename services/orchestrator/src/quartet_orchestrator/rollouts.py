"""Rollouts: keeps every admitted place of every batch under way until it holds a complete group.

1. A group is written down before it is sent out, each of its rollouts before it is looked at.
2. After a restart a group goes out again with its missing members only. One whose rewards compare its members
   is written down in one go; where a kill left a part of it, it is discarded (TORN), for a fresh one.
3. A group with a member that failed for good, or with a token outside the staleness bound, is discarded
   whole, with the reason, and a fresh group takes its place. (Training on the survivors would favour what
   fails seldom, e.g. short answers.)
4. A place keeps its environment (mixture.py), whatever happens to its groups.
5. With dynamic sampling or a difficulty filter a group that teaches too little (difficulty.py) is discarded,
   too, and a fresh one takes its place; `max_resample` times for one place, after which such a group is kept:
   a batch always gets full.
6. A group whose prompt has more tokens than `max_prompt_tokens`, or than the context, is discarded as soon as
   one of its rollouts shows it, and its task is never sampled again. Of an environment that has no other
   task, or had MAX_LONG_PROMPTS such in a row, the run fails; after the first MANY_LONG_PROMPTS in a row a
   person is warned, once. Without `max_prompt_tokens` a prompt that the
   context does not hold is a failure.
7. MAX_FAILED_GROUPS groups of one environment in a row (in_a_row.py) that failed or broke the bound stop the
   run, resumable: the environment is broken, its judge away, or the machine too slow, and whoever has mended
   that goes on. A group that somebody cancelled is not counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict

from quartet.kit import tracing
from quartet.kit.unknown import enum_name
from quartet.run.config import RunConfig
from quartet.v1 import common_pb2 as cpb
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import rollout_pb2 as rpb

from quartet_orchestrator.book import Book
from quartet_orchestrator.difficulty import REPLACED, verdict
from quartet_orchestrator.in_a_row import InARow
from quartet_orchestrator.mixture import Mixture
from quartet_orchestrator.outage import RunFailed, RunInterrupted
from quartet_orchestrator.pace import Pace, Place
from quartet_orchestrator.prompts import Prompts
from quartet_orchestrator.requests import rollouts_request
from quartet_orchestrator.sampling import Sampling
from quartet_orchestrator.state import LONG_PROMPT, TORN, Group

# Ten tasks in a row that fail for good are not bad luck.
MAX_FAILED_GROUPS = 10
# Of a thousand tasks in a row not one that the run was meant for.
MAX_LONG_PROMPTS = 1000
# So many in a row are seldom chance, and come within minutes, also where rollouts take long.
MANY_LONG_PROMPTS = 12
CANCELLED = "failed:CANCELLED"


class Rollouts:
    """The groups of a run that are sampled for training."""

    def __init__(
        self,
        book: Book,
        config: RunConfig,
        pace: Pace,
        mixture: Mixture,
        prompts: Prompts,
        sampling: Sampling,
    ) -> None:
        self._book = book
        self._config = config
        self._pace = pace
        self._mixture = mixture
        self._prompts = prompts
        self._sampling = sampling
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._taken_up = asyncio.Event()
        self._failed_in_a_row: defaultdict[int, InARow] = defaultdict(InARow)
        # Of each environment: how many groups in a row had prompts that are too long.
        self._long_in_a_row: Counter[int] = Counter()
        # And the least that such a prompt had, of those that were seen by this process.
        self._shortest_too_long: dict[int, int] = {}
        # Environments of which many in a row were told.
        self._told_too_long: set[int] = set()

    async def flow(self) -> None:
        """Sends groups out wherever the pace admits one, until it is cancelled."""
        try:
            await self._take_up()
            while True:
                while (place := self._pace.take()) is not None:
                    self._start(await self._new_group(place))
                await self._wake.wait()
                self._wake.clear()
                for task in [task for task in self._tasks if task.done()]:
                    self._tasks.discard(task)
                    task.result()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._tasks.clear()

    def published(self, version: int) -> None:
        """A version is out; more places may be admitted."""
        self._pace.publish(version)
        self._wake.set()

    @property
    def troubles(self) -> list[str]:
        """Of each environment whose last groups failed: how many, and why, for a person."""
        return [
            f"{row.latest[0]} groups in a row of environment {self._config.env[at].label!r} failed, the last "
            f"as {row.latest[1]}; {MAX_FAILED_GROUPS} stop the run, resumable"
            for at, row in self._failed_in_a_row.items()
            if row.latest is not None
        ]

    async def batch(self, batch: int) -> list[Group]:
        """The batch's groups, once all of them are complete and found to be good."""
        await self._taken_up.wait()
        while True:
            groups = self._book.state.batch_groups(batch)
            if len(groups) == self._config.groups_per_batch and not any(group.missing for group in groups):
                return groups
            await self._book.changed()

    async def _take_up(self) -> None:
        """What an earlier process left: places that are held, groups that miss members."""
        groups = sorted(self._book.state.groups.values(), key=lambda group: group.number)
        self._pace.restore(group.place for group in groups)
        # Of a long run they are so many that to count them takes seconds.
        first = self._book.state.step * self._config.groups_per_batch
        await asyncio.to_thread(self._mixture.environment, first)
        closed = self._book.state.batches
        for group in groups:
            if group.place.batch in closed:
                continue
            self._failed_in_a_row[group.environment].sent(group.number)
            # A batch may hold hundreds of MB of rollouts.
            done = await asyncio.to_thread(self._book.rollouts, group.number)
            reason = next(filter(None, (self._unfit(group, rollout) for rollout in done)), None)
            reason = reason or self._difficulty(group)
            if reason is None and group.done and group.missing and self._compares(group):
                reason = TORN
            if reason is not None:
                self._discard(group, reason)
            elif group.missing:
                self._start(group)
        self._taken_up.set()

    async def _new_group(self, place: Place) -> Group:
        environment = self._mixture.environment(place.batch * self._config.groups_per_batch + place.index)
        await self._shuffled(environment)
        number = self._book.state.next_group
        passed_over, task_index = self._next_task(environment)
        self._book.write(
            dispatched={
                "group": number,
                "batch": place.batch,
                "place": place.index,
                "environment": environment,
                "task_index": task_index,
                "members": self._config.rollouts_per_example,
                "passed_over": passed_over,
            }
        )
        self._failed_in_a_row[environment].sent(number)
        return self._book.state.groups[number]

    async def _shuffled(self, environment: int) -> None:
        """Returns once the tasks that come next have their order."""
        first = self._book.state.turns_of[environment]
        last = first + 2 * len(self._book.state.long_prompts.get(environment, ()))
        if not self._prompts.at_hand(environment, first, last):
            await asyncio.to_thread(self._prompts.shuffle, environment, first, last)

    def _next_task(self, environment: int) -> tuple[int, int]:
        """How many of the environment's next tasks are passed over, and the one after them."""
        state = self._book.state
        turn, too_long = state.turns_of[environment], state.long_prompts.get(environment, set())
        # Where an epoch ends, all of them may follow in its rest, and again at the beginning of the next.
        for passed_over in range(2 * len(too_long) + 1):
            task_index = self._prompts.task(environment, turn + passed_over)
            if task_index not in too_long:
                return passed_over, task_index
        raise self._all_too_long(environment, len(too_long))

    def _start(self, group: Group) -> None:
        task = asyncio.create_task(self._traced(group), name=f"group-{group.number}")
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._wake.set())

    async def _traced(self, group: Group) -> None:
        with tracing.span(
            "group",
            root=True,
            run_id=self._book.state.run_id,
            group=group.number,
            step=group.place.batch + 1,
            env=self._config.env[group.environment].label,
            task_index=group.task_index,
        ):
            await self._complete(group)

    async def _complete(self, group: Group) -> None:
        env = self._config.env[group.environment]
        request = rollouts_request(
            self._book.state.run_id,
            self._config.sampling_of(env),
            f"group-{group.number}",
            env,
            epb.SPLIT_TRAIN,
            group.task_index,
            self._config.messages_of_members,
        )
        request.min_policy_version = self._pace.min_policy_version(group.place.batch)
        request.routed_experts = self._config.algorithm.router_replay
        failed = await self._sampling.complete(
            request,
            group.missing,
            lambda rollout: self._ended(group, rollout),
            all_or_nothing=True,
            whole=self._compares(group),
            batch=group.place.batch,
        )
        if group.number not in self._book.state.groups:
            return  # discarded when its rollout was looked at
        if failed:
            failure = next(iter(failed.values()))
            kind = enum_name(rpb.FailureKind, failure.kind)
            self._discard(group, f"failed:{kind}", failure.message)
        else:
            self._failed_in_a_row[group.environment].went_well(group.number)
            self._long_in_a_row[group.environment] = 0

    def _ended(self, group: Group, rollout: rpb.Rollout) -> bool:
        env_id = self._config.env[group.environment].label
        self._book.write(
            rollout=pb.RolloutEvent(
                group=group.number,
                env_id=env_id,
                task_index=group.task_index,
                step=group.place.batch + 1,
                rollout=rollout,
            )
        )
        # Here, before anybody can take the group for complete.
        reason = self._unfit(group, rollout) or self._difficulty(group)
        if reason is not None:
            self._discard(group, reason)
        return reason is None

    def _difficulty(self, group: Group) -> str | None:
        """Why it is replaced, if it teaches too little: complete, in a place that may try again."""
        if group.missing or self._book.state.resampled[group.place] >= self._config.resamples:
            return None
        return verdict(
            self._config.difficulty_filter,
            group.rewards,
            group.compared.values(),
            needs_spread=self._config.algorithm.compares,
        )

    def _compares(self, group: Group) -> bool:
        """Whether its members are rewarded by comparison with each other."""
        return self._book.state.environments[group.environment].group_scoring

    def _unfit(self, group: Group, rollout: rpb.Rollout) -> str | None:
        """Why a rollout cannot be trained on, if it cannot, other than that it failed."""
        most = self._config.max_prompt_tokens
        if most is not None and (tokens := prompt_tokens(rollout)) > most:
            known = self._shortest_too_long.get(group.environment, tokens)
            self._shortest_too_long[group.environment] = min(known, tokens)
            return LONG_PROMPT
        if most is not None and fills_context(rollout):
            return LONG_PROMPT
        return None if rollout.HasField("failure") else self._violation(group, rollout)

    def _violation(self, group: Group, rollout: rpb.Rollout) -> str | None:
        versions = (span.policy_version for sample in rollout.samples for span in sample.spans)
        return self._pace.violation(group.place.batch, versions)

    def _discard(self, group: Group, reason: str, message: str = "") -> None:
        self._book.write(discarded={"group": group.number, "reason": reason})
        tracing.note(discarded=reason)
        self._pace.give_back(group.place)
        self._wake.set()
        row = self._failed_in_a_row[group.environment]
        if reason in (TORN, CANCELLED):  # by a kill, or by a person: that says nothing of the environment
            row.failed(group.number, None)
            return
        if reason == LONG_PROMPT:
            row.failed(group.number, None)
            self._long_in_a_row[group.environment] += 1
            if self._long_in_a_row[group.environment] >= MAX_LONG_PROMPTS:
                raise self._all_too_long(group.environment, MAX_LONG_PROMPTS)
            if self._long_in_a_row[group.environment] >= MANY_LONG_PROMPTS:
                self._tell_of_long_prompts(group.environment)
            return
        self._long_in_a_row[group.environment] = 0
        if reason in REPLACED:
            row.went_well(group.number)
            return
        why = f"{reason}: {message}" if message else reason
        if (failed := row.failed(group.number, why)) >= MAX_FAILED_GROUPS:
            env_id = self._config.env[group.environment].label
            raise RunInterrupted(
                f"{failed} groups in a row of environment {env_id!r} ended with nothing to train on, the "
                f"last as {why}; see to the environment, its host and the model, then resume the run"
            )

    def _tell_of_long_prompts(self, environment: int) -> None:
        if environment in self._told_too_long:
            return
        self._told_too_long.add(environment)
        self._book.note(
            f"{self._too_long(environment, self._long_in_a_row[environment])}: these tasks are passed over, "
            f"and {MAX_LONG_PROMPTS} in a row fail the run; stop it and begin another, with a larger "
            "max_prompt_tokens (and a context that holds them), unless others of its tasks are shorter",
            warning=True,
        )

    def _all_too_long(self, environment: int, tasks: int) -> RunFailed:
        return RunFailed(
            f"{self._too_long(environment, tasks)}; begin another run, with a larger max_prompt_tokens "
            "(and a context that holds them), or with tasks whose prompts are shorter"
        )

    def _too_long(self, environment: int, tasks: int) -> str:
        env_id, most = self._config.env[environment].label, self._config.max_prompt_tokens
        shortest = self._shortest_too_long.get(environment)
        seen = f", the shortest of them {shortest}" if shortest else ", or than the context holds"
        return (
            f"the prompts of {tasks} tasks of environment {env_id!r}, one after the other, have more than "
            f"max_prompt_tokens = {most} tokens{seen}"
        )


def fills_context(rollout: rpb.Rollout) -> bool:
    """Whether it failed because the prompt leaves no room in the context; in a later turn that is an end."""
    too_long = rollout.failure.reason == cpb.ERROR_REASON_PROMPT_TOO_LONG
    return too_long and not rollout.usage.completion_tokens


def prompt_tokens(rollout: rpb.Rollout) -> int:
    """Tokens before the first that the policy sampled; 0 where it sampled none."""
    spans = next((sample.spans for sample in rollout.samples if sample.spans), ())
    start = spans[0].start if spans else 0
    # The environment may mask an answer's first tokens. The usage, of all turns together, bounds one turn.
    return min(start, rollout.usage.prompt_tokens or start)
