"""Whether the environments of a run stay what they were: their code, their data, their versions.

1. With the rollouts of an environment its host tells a digest of what it has loaded (envhosts.py 5). One that
   the run has not met is described by that host and written down, with a warning that says what is different
   and where, before a rollout of it counts. Each is met once, whichever hosts have it.
2. With on_environment_change = "stop" the run is RunInterrupted instead: no rollout of it counts, and it is
   met again as long as the run does not go on with "warn".
3. Where the run knows no digest (an earlier release described the environment), the first one is no change; a
   host that tells none (such a release) is passed.
4. MAX_MET digests of an environment are written down: one that is another at every load is told so often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

from quartet.errors import QuartetError
from quartet.run.config import RunConfig
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import orchestrator_service_pb2 as pb

from quartet_orchestrator.book import Book
from quartet_orchestrator.envhosts import Loaded
from quartet_orchestrator.outage import RunInterrupted
from quartet_orchestrator.requests import environment_ref

# A fleet that is updated in waves has a handful in a run.
MAX_MET = 8
# Files that a sentence names.
MAX_NAMED = 4

#: Describes an environment at the host of an address.
Describe = Callable[[str, epb.EnvironmentRef], Awaitable[epb.EnvironmentInfo]]


class Sameness:
    """Of the environments of one run."""

    def __init__(self, book: Book, config: RunConfig, describe: Describe) -> None:
        self._book = book
        self._describe = describe
        self._stops = config.on_environment_change == "stop"
        # By what a host is asked for: equal ones are one environment.
        self._places: dict[tuple[str, str], list[int]] = {}
        self._labels: dict[tuple[str, str], str] = {}
        for place, env in enumerate((*config.env, *config.eval.env)):
            key = _key(environment_ref(env))
            self._places.setdefault(key, []).append(place)
            self._labels.setdefault(key, env.label)
        # One asks; the others of its kind are told by the book.
        self._asking = asyncio.Lock()

    async def met(self, environment: epb.EnvironmentRef, loaded: Loaded) -> None:
        """A host is about to tell rollouts of an environment as it has loaded it. Raises RunInterrupted."""
        key = _key(environment)
        if self._knows(key, loaded.digest):
            return
        async with self._asking:
            if not self._knows(key, loaded.digest):
                self._take(key, loaded, await self._described(environment, loaded))

    def _knows(self, key: tuple[str, str], digest: str) -> bool:
        known = [info.digest for info in self._known(key)]
        return digest in known or (len(known) > MAX_MET and not self._stops)

    def _known(self, key: tuple[str, str]) -> Sequence[epb.EnvironmentInfo]:
        """The descriptions so far, the first one being that of the submission."""
        place = self._places[key][0]
        return [self._book.state.described[place], *self._book.state.met.get(place, ())]

    async def _described(self, environment: epb.EnvironmentRef, loaded: Loaded) -> epb.EnvironmentInfo:
        try:
            found = await self._describe(loaded.address, environment)
        except QuartetError:  # it has gone since; the digest says enough
            found = epb.EnvironmentInfo()
        if found.digest != loaded.digest:
            found = epb.EnvironmentInfo(id=environment.id, digest=loaded.digest)
        return found

    def _take(self, key: tuple[str, str], loaded: Loaded, found: epb.EnvironmentInfo) -> None:
        """Writes it down, or stops the run for it."""
        known = self._known(key)
        before = next((info for info in known if info.digest), None)
        named = f"environment {self._labels[key]!r} at the host {loaded.address}"
        if before is None:
            self._write(key, loaded, found, pb.NOTE_LEVEL_INFO, f"{named} has the digest {found.digest}")
            return
        changed = f"{named} is not what the run began with: {', '.join(differences(before, found))}"
        if self._stops:
            raise RunInterrupted(
                f'{changed}; nothing of it was trained on (on_environment_change = "stop"): put back what '
                'was there and resume the run, or go on with on_environment_change = "warn"'
            )
        last = "; it is another at every load, and further ones are not told" if len(known) == MAX_MET else ""
        meaning = "rewards from here on may mean something else than those before; the run goes on"
        self._write(key, loaded, found, pb.NOTE_LEVEL_WARNING, f"{changed}; {meaning}{last}")

    def _write(
        self, key: tuple[str, str], loaded: Loaded, found: epb.EnvironmentInfo, level: pb.NoteLevel, said: str
    ) -> None:
        self._book.meet(self._places[key], found, loaded.address, pb.NoteEvent(level=level, message=said))


def differences(before: epb.EnvironmentInfo, now: epb.EnvironmentInfo) -> list[str]:
    """What is different between two descriptions of one environment, for a person."""
    return [*_differences(before, now), f"digest {before.digest} -> {now.digest}"]


def _differences(before: epb.EnvironmentInfo, now: epb.EnvironmentInfo) -> Iterator[str]:
    if not now.api:
        return  # nobody described it
    if before.version != now.version:
        yield f"version {before.version or 'none'} -> {now.version or 'none'}"
    if before.verifiers_version != now.verifiers_version:
        yield f"Verifiers {before.verifiers_version} -> {now.verifiers_version}"
    if before.examples_digest != now.examples_digest:
        sizes = ((info.train_size, info.eval_size) for info in (before, now))
        (train, evaluation), (train_now, evaluation_now) = sizes
        counts = f" ({train} and {evaluation} -> {train_now} and {evaluation_now})"
        yield f"its examples{counts if (train, evaluation) != (train_now, evaluation_now) else ''}"
    earned, earned_now = (", ".join([*info.rewards, *info.metrics]) for info in (before, now))
    if earned != earned_now:
        yield f"its rewards ({earned or 'none'} -> {earned_now or 'none'})"
    names = sorted(before.files.keys() | now.files.keys())
    changed = [name for name in names if before.files.get(name) != now.files.get(name)]
    if changed:
        more = f" and {len(changed) - MAX_NAMED} more" if len(changed) > MAX_NAMED else ""
        yield f"source changed ({', '.join(changed[:MAX_NAMED])}{more})"


def _key(environment: epb.EnvironmentRef) -> tuple[str, str]:
    return environment.id, environment.args_json
