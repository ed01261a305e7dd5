"""Rollouts of a hosted environment, by the host's own policy or by a client's.

1. Every member of every task that is asked for ends exactly once: as a result or as a typed failure.
2. At most `max_concurrent` rollouts are under way; where members of a group are compared, a whole group.
3. Of one that has no place a place is asked again as long as another of these requests stands there: the one
   host, asked over one connection, refuses in their order, so that has a place. Behind an address of several
   hosts it may be refused, too, and the first that stands fails as under 4. It is said once that lasts
   FULL_SECONDS.
4. A host that goes away is asked again for the members that are missing, ATTEMPTS times, each time once it is
   back or BACK_SECONDS have passed; those that are still missing then end as HOST failures. Whatever will not
   pass (an unknown environment, refused arguments, an endpoint that will never answer) ends all of them:
   QuartetError, ConfigError.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from quartet.cli.eval.config import ALL, Trial
from quartet.cli.eval.player import Player
from quartet.errors import QuartetError
from quartet.interact import interact
from quartet.kit.awake import awake_s
from quartet.kit.call import RETRYABLE, RetryBudget, stream, unary
from quartet.kit.stream import IDLE_TIMEOUT_SECONDS
from quartet.run.sampling import sampling_params
from quartet.template_settings import written
from quartet.v1 import envhost_service_pb2 as pb
from quartet.v1.rollout_pb2 import FAILURE_KIND_HOST, Rollout, RolloutFailure, Task

#: The first call loads the environment: the host says how long that may take (load_timeout_seconds), and this
#: bounds a host that does not. As long as the orchestrator allows the same call.
LOAD_SECONDS = 3600.0
#: With their data these are far below the limit of a message for most environments.
TASKS_AT_ONCE = 64
ATTEMPTS = 4
#: A host that died is started again, and imports Verifiers first: without a wait every rollout that is left
#: would fail meanwhile.
BACK_SECONDS = 30.0
#: Until it is said that a host is full: of others' rollouts it may be for hours.
FULL_SECONDS = 60.0
SPLITS = {"train": pb.SPLIT_TRAIN, "eval": pb.SPLIT_EVAL}

Note = Callable[[Task, Rollout], None]


def reference(trial: Trial) -> pb.EnvironmentRef:
    """The environment of a trial."""
    args = trial.hosted.args
    return pb.EnvironmentRef(id=trial.hosted.id, args_json=json.dumps(args, sort_keys=True) if args else "")


async def describe(host: Any, ref: pb.EnvironmentRef) -> pb.EnvironmentInfo:
    """Load an environment. Raises QuartetError."""
    request = pb.DescribeEnvironmentRequest(environment=ref)
    answer = await unary(
        host.DescribeEnvironment, request, timeout_s=LOAD_SECONDS, budget=RetryBudget(), wait_for_ready=True
    )
    info: pb.EnvironmentInfo = answer.environment
    return info


async def tasks_of(host: Any, trial: Trial) -> list[Task]:
    """The examples of a trial, with their data. Raises QuartetError."""
    info = await describe(host, reference(trial))
    if trial.num_examples == ALL and info.infinite:
        raise QuartetError(
            "INVALID_CONFIG", f"environment {trial.hosted.id!r} has no last example; set num_examples"
        )
    tasks: list[Task] = []
    count = TASKS_AT_ONCE
    while trial.num_examples == ALL or len(tasks) < trial.num_examples:
        left = count if trial.num_examples == ALL else min(count, trial.num_examples - len(tasks))
        request = pb.GetTasksRequest(
            environment=reference(trial), split=SPLITS[trial.split], start=len(tasks), count=left,
            include_data=True,
        )  # fmt: skip
        try:
            page = await unary(host.GetTasks, request, timeout_s=LOAD_SECONDS, budget=RetryBudget())
        except QuartetError as error:
            if error.metadata.get("field") != "count" or left == 1:
                raise
            count = left // 2  # long texts: fewer fit into a message
            continue
        tasks.extend(page.tasks)
        if len(page.tasks) < left:
            break
    if not tasks:
        raise QuartetError(
            "INVALID_CONFIG", f"environment {trial.hosted.id!r} has no example in its {trial.split} split"
        )
    return tasks


@dataclass
class _There:
    """What of one `play` is at the host."""

    #: The ids of those that are there, or are being refused, in the order in which they were asked.
    ids: dict[str, None] = field(default_factory=dict)
    is_told_full: bool = False

    def tell_full(self, since_s: float, why: str) -> None:
        """Once, where that has lasted."""
        if not self.is_told_full and awake_s() - since_s >= FULL_SECONDS:
            self.is_told_full = True
            print(f"the host is full, waiting for a place there: {why}", file=sys.stderr)


async def play(
    host: Any, trial: Trial, wanted: Mapping[int, Sequence[int]], tasks: Sequence[Task], note: Note,
    policy: Player | None = None, *, whole_groups: bool = False,
) -> None:  # fmt: skip
    """Run the wanted members of each task, by index; each is noted as it ends. Raises QuartetError.

    With `whole_groups` (the environment's rewards compare the members of a group) a group is one request, and
    is noted once all of it has ended.
    """
    group = trial.rollouts_per_example
    width = group if whole_groups else min(group, trial.max_concurrent)
    groups = list(_groups(wanted, tasks, width))
    left = iter(groups)
    there = _There()

    async def some() -> None:
        for task, members in left:
            await _group(host, trial, task, members, note, policy, there, whole_groups)

    count = min(len(groups), max(1, trial.max_concurrent // width))
    workers = [asyncio.create_task(some()) for _ in range(count)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def _groups(
    wanted: Mapping[int, Sequence[int]], tasks: Sequence[Task], width: int
) -> Iterator[tuple[Task, list[int]]]:
    for task in tasks:
        members = iter(wanted.get(task.index, ()))
        while part := list(itertools.islice(members, width)):
            yield task, part


async def _group(
    host: Any,
    trial: Trial,
    task: Task,
    members: Sequence[int],
    note: Note,
    policy: Player | None,
    there: _There,
    whole: bool,
) -> None:
    """One request, and further ones for what is missing: of a whole group that is all of it."""
    missing = dict.fromkeys(members)
    ended: list[Rollout] = []
    budget, why = RetryBudget(), ""
    attempt = refused = 0
    full_since_s = 0.0
    while attempt < ATTEMPTS:
        request = rollouts_request(trial, task, members if whole else list(missing))
        ended.clear()
        is_full = False
        there.ids[request.request_id] = None
        try:
            async with aclosing(_ask(host, request, policy)) as rollouts:
                async for rollout in rollouts:
                    if whole:
                        ended.append(rollout)
                    else:
                        del missing[rollout.member]
                        note(task, rollout)
        except QuartetError as error:
            if error.reason not in RETRYABLE | {"DEADLINE"}:
                raise
            # One that came before this one and still stands is no longer being refused.
            has_some = next(iter(there.ids)) != request.request_id
            why, is_full = str(error), has_some and error.reason == "OVERLOADED"
        finally:
            del there.ids[request.request_id]
        if not missing or len(ended) == len(members):  # also where the stream broke after the last one
            break
        if is_full:
            full_since_s = full_since_s if refused else awake_s()
            refused += 1
            there.tell_full(full_since_s, why)
            await asyncio.sleep(budget.delay_s(refused, QuartetError("NOT_READY", why)))
            continue
        attempt += 1
        await asyncio.sleep(budget.delay_s(attempt, QuartetError("NOT_READY", why)))
        if attempt < ATTEMPTS:
            await _back(host, trial)
    else:
        ended = [_away(member, why) for member in missing]
    for rollout in ended:
        note(task, rollout)


async def _back(host: Any, trial: Trial) -> None:
    """Until the host answers; what it says of the environment then, it says of the rollouts, too."""
    request = pb.DescribeEnvironmentRequest(environment=reference(trial))
    with suppress(QuartetError):
        await unary(host.DescribeEnvironment, request, timeout_s=BACK_SECONDS, wait_for_ready=True)


def _away(member: int, why: str) -> Rollout:
    failure = RolloutFailure(kind=FAILURE_KIND_HOST, message=why, retryable=True)
    return Rollout(member=member, failure=failure)


async def _ask(
    host: Any, request: pb.RunRolloutsRequest, policy: Player | None
) -> AsyncGenerator[Rollout, None]:
    if policy is not None:
        async with aclosing(interact(host, request, policy)) as rollouts:
            async for rollout in rollouts:
                if policy.fatal is not None:
                    raise policy.fatal
                yield rollout
        return
    beating: Any = stream(host.RunRollouts(request), idle_timeout_s=IDLE_TIMEOUT_SECONDS)
    async with aclosing(beating) as frames:
        async for frame in frames:
            if frame.HasField("rollout"):
                yield frame.rollout


def rollouts_request(trial: Trial, task: Task, members: Sequence[int]) -> pb.RunRolloutsRequest:
    """Everything of it, under an id of its own."""
    return pb.RunRolloutsRequest(
        run_id="",
        request_id=f"{trial.name}-{task.index}-{uuid.uuid4().hex[:12]}",
        environment=reference(trial),
        split=SPLITS[trial.split],
        task_index=task.index,
        members=members,
        sampling=sampling_params(trial.sampling, trial.sampling.seed),
        template_settings=written(trial.sampling.template_settings or {}),
        timeout_ms=round(trial.hosted.timeout_seconds * 1000),
        messages_of_members=max(members) + 1,
        max_retries=trial.hosted.max_retries,
    )
