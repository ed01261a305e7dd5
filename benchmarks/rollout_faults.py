"""Workers killed at random while rollouts run: every rollout ends once, as a result or as a typed failure,
and no reward of 0 is caused by a kill. Half of rollouts and kills are of a classic environment, half of v1.

The environment's reward is always 1, so a reward of 0 can only come from a kill. Groups of the four-turn
environment go through a real host; at random moments the SIGKILL of a random worker falls. Half of the groups
may be tried again, half may not: the second half shows the failures as they are.

    python benchmarks/rollout_faults.py [--rollouts 2000] [--kills 50] [--seed N] [--json FILE]
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

from figures import Figure, arguments, report
from quartet.kit.logs import configure
from quartet.v1 import rollout_pb2
from rollouts import GENERATIONS, GROUP, Road, policy, road

WORKERS = 4
AT_ONCE = 64
# A turn takes so long, so that kills find rollouts under way.
TURN_S = 0.05


class Killer:
    """Kills a random worker whenever its share of the rollouts has ended."""

    def __init__(self, ours: Road, kills: int, rollouts: int, chance: random.Random) -> None:
        """Nothing is killed before `ended` is told."""
        self._ours, self._chance = ours, chance
        # The kills are spread over the run but for its end: each falls when so many rollouts have ended.
        self._due = sorted(chance.sample(range(rollouts - 2 * AT_ONCE), kills))
        self._ended = 0
        self.kills = 0

    def ended(self) -> None:
        """A rollout has ended."""
        self._ended += 1

    async def run(self) -> None:
        """Until all kills have fallen."""
        for due in self._due:
            await _until(lambda due=due: self._ended >= due and self._ours.workers)
            await asyncio.sleep(self._chance.uniform(0, TURN_S))
            victim = self._chance.choice(self._ours.workers)
            os.kill(victim.pid, signal.SIGKILL)
            self.kills += 1
            # Until the host has seen it: a kill of what is dead already would be none.
            await _until(lambda victim=victim: victim not in self._ours.workers)


async def _until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for happens in other processes too
        await asyncio.sleep(0.005)


async def one_group(
    ours: Road, retries: int, places: asyncio.Semaphore, killer: Killer
) -> list[rollout_pb2.Rollout]:
    """A group, whatever becomes of it."""
    async with places:
        ended = []
        async for rollout in ours.run(GROUP, max_retries=retries):
            ended.append(rollout)
            killer.ended()
        assert sorted(rollout.member for rollout in ended) == list(range(GROUP)), "each member once"
        return ended


async def measure(generation: str, rollouts: int, kills: int, seed: int) -> list[Figure]:
    """One generation."""
    chance = random.Random(seed)
    with policy("--delay", str(TURN_S)) as addresses:
        async with road(generation, addresses["grpc"], workers=WORKERS) as ours:
            killer = Killer(ours, kills, rollouts, chance)
            killing = asyncio.create_task(killer.run())
            places = asyncio.Semaphore(AT_ONCE // GROUP)
            groups = [one_group(ours, 3 * (index % 2), places, killer) for index in range(rollouts // GROUP)]
            ended = [rollout for group in await asyncio.gather(*groups) for rollout in group]
            killing.cancel()
    failed = Counter(
        rollout_pb2.FailureKind.Name(one.failure.kind).removeprefix("FAILURE_KIND_")
        for one in ended
        if one.HasField("failure")
    )
    results = [one for one in ended if not one.HasField("failure")]
    return [
        Figure(f"{generation}: workers killed", killer.kills, "", f">= {kills}"),
        Figure(f"{generation}: rollouts without an end, or with two", rollouts - len(ended), "", "== 0"),
        Figure(f"{generation}: results", len(results), ""),
        Figure(f"{generation}: failures typed HOST", failed.pop("HOST", 0), "", ">= 1"),
        Figure(f"{generation}: other failures", sum(failed.values()), "", "== 0"),
        Figure(
            f"{generation}: results that are not whole or not rewarded",
            sum(one.reward != 1.0 or one.num_turns != 4 for one in results),
            "",
            "== 0",
        ),
    ]


async def run(options: Any) -> list[Figure]:
    """Both generations."""
    rollouts = options.rollouts // len(GENERATIONS) // GROUP * GROUP
    figures = []
    for generation in GENERATIONS:
        figures += await measure(generation, rollouts, options.kills // len(GENERATIONS), options.seed)
    return figures


def main() -> None:
    """Run and report."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    configure("benchmark", "error")
    print(f"seed={options.seed}", flush=True)
    report(asyncio.run(run(options)), options.json, seed=options.seed)


if __name__ == "__main__":
    main()
