"""The trainer's runs: opened, passed from model to model, closed.

1. A run has one model at a time. Making a client from a state takes the run from the model that had it, if
   that is of the same session, or its session falls silent for takeover_seconds. From one that is heard of it
   is not taken: the client gets a run of its own, which begins with the state.
2. A state that is not there is refused before the run is taken from anybody.
3. A run that no model has is closed: others wait for its place on the trainer. One that the trainer could not
   close, being away, is closed once it is back.
4. Where the trainer is full, sessions that are silent for takeover_seconds are ended, the longest silent one
   first, until there is a place, or one is on its way: most scripts end without a word. Whose script is heard
   of keeps its places.
5. A run of the gateway's own (`lend`) gets its place as a script's does; whoever has none waits for its end.
6. Silence is counted by time in which the gateway ran (quartet.kit.awake): after a stretch in which it did
   not, the heartbeats of that time are still to be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, TypeVar
from weakref import WeakValueDictionary

import structlog
from quartet.errors import QuartetError
from quartet.kit.awake import awake_s
from quartet.v1 import trainer_service_pb2 as pb

from quartet_tinker.adam import Adam
from quartet_tinker.bodies import LoadWeights
from quartet_tinker.config import GatewayConfig
from quartet_tinker.paths import run_id
from quartet_tinker.refusal import Refused
from quartet_tinker.samplers import Samplers
from quartet_tinker.sessions import Session, Sessions
from quartet_tinker.specs import Notes
from quartet_tinker.trainer import CLOSE_SECONDS, Trainer
from quartet_tinker.training import Run, Training

#: Between two looks at whether a session is still heard of.
LOOK_SECONDS: Final = 0.5

T = TypeVar("T")

log = structlog.get_logger()


class Runs:
    """Who has which. For one event loop."""

    def __init__(
        self,
        config: GatewayConfig,
        trainer: Trainer,
        sessions: Sessions,
        samplers: Samplers,
        notes: Notes,
        end: Callable[[str, str], Awaitable[None]],
    ) -> None:
        """`end` ends a session, for a reason."""
        self._config, self._trainer, self._end = config, trainer, end
        self._sessions, self._samplers, self._notes = sessions, samplers, notes
        # Of each run that is being passed on or closed: one after the other.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        # Those that the trainer did not close when it was asked to.
        self._unclosed: dict[str, Run] = {}
        # Those that it is asked to close now: their places will be free.
        self._closing: set[str] = set()
        # Those of the gateway's own.
        self._lent: set[str] = set()
        # Of those who make room: what one has made, another does not take. Waited for without a run's lock.
        self._room = asyncio.Lock()

    async def open(self, session: Session, run: Run) -> None:
        """Create a run for a model of a session. Raises Refused, QuartetError."""
        training = self._training(run)
        session.check_room()
        self._notes.keep(run)
        try:
            state = await self._with_room(session, run, lambda: self._trainer.create(run.run_id, run.spec))
            training.begin(state)
        except BaseException:  # its session has ended; or nobody was told whether it is open
            await self.close(run)
            raise
        session.models[run.origin] = training

    async def go_on(self, session: Session, model_id: str, body: LoadWeights) -> None:
        """Let a new model of a session go on from a state. Raises Refused, QuartetError."""
        path = body.state()
        run = self._notes.find(path.origin)
        if body.base_model not in (None, run.base_model):
            raise Refused(f"base_model = {body.base_model!r} is not the state's, {run.base_model!r}")
        if not body.optimizer:
            await self._begin_with_weights(session, model_id, run, path.name, body.user_metadata)
            return

        async def passed() -> bool:
            async with self._lock(run):
                if self._is_heard(session, run):  # another was as quick, and came first
                    return False
                try:
                    await self._pass(session, model_id, run, path.name, body.user_metadata)
                except BaseException:
                    await self._close(run)
                    raise
                return True

        while not await self._is_kept(session, run):
            if await self._with_room(session, run, passed):
                return
        await self.open(session, await self._beginning(model_id, run, path.name, body.user_metadata))

    async def lend(self, run: Run, work: Callable[[], Awaitable[None]]) -> None:
        """Have a run, which is of no session, for as long as the work takes. Raises Refused, QuartetError."""
        self._notes.keep(run)
        self._lent.add(run.run_id)
        try:
            await self._with_room(None, run, lambda: self._trainer.create(run.run_id, run.spec))
            await work()
        finally:
            await self.close(run)
            self._lent.discard(run.run_id)

    async def close(self, run: Run) -> None:
        """Free the place on the trainer of a run that no model has any more."""
        async with self._lock(run):
            await self._close(run)

    async def tidy(self) -> None:
        """Close the runs that a gateway before this one left open, but for those that have a model again."""
        for run in self._notes.left_open():
            await self.close(run)

    async def close_again(self) -> None:
        """Close those that the trainer did not close when asked, but for those that have a model again."""
        for run in list(self._unclosed.values()):
            await self.close(run)

    async def _close(self, run: Run) -> None:
        if self._sessions.models_of(run.run_id):
            return
        self._closing.add(run.run_id)
        try:
            await self._trainer.close(run.run_id)
            self._notes.keep(run, is_open=False)
            self._unclosed.pop(run.run_id, None)
        except (QuartetError, Refused) as error:  # the latter of a full disk
            if run.run_id not in self._unclosed:
                log.warning("run not closed; it is asked for again", run_id=run.run_id, why=str(error))
            self._unclosed[run.run_id] = run
        finally:
            self._closing.discard(run.run_id)

    async def _pass(
        self, session: Session, model_id: str, run: Run, name: str, user_metadata: dict[str, str] | None
    ) -> None:
        session.check_room()
        self._notes.keep(run)
        # Of a run that is open nothing changes; another is opened at its newest state.
        await self._trainer.create(run.run_id, run.spec)
        await self._state(run, name)
        for other, other_id in self._sessions.models_of(run.run_id):
            await other.models.pop(other_id).close(settled=True)
        run = replace(run, user_metadata=user_metadata or run.user_metadata)
        training = self._training(run)
        training.begin(await self._trainer.get(run.run_id))
        try:
            self._samplers.count_again(run.run_id)
            await training.load_state(name)
            self._notes.keep(run)
        except BaseException:
            await training.close()
            raise
        session.models[model_id] = training

    async def _begin_with_weights(
        self, session: Session, model_id: str, run: Run, name: str, user_metadata: dict[str, str] | None
    ) -> None:
        """Open a run that begins with the weights of a state and with moments of its own."""

        async def found() -> Run:
            async with self._lock(run):
                try:
                    if not self._sessions.models_of(run.run_id):  # states are listed of open runs
                        self._notes.keep(run)
                        await self._trainer.create(run.run_id, run.spec)
                    return await self._beginning(model_id, run, name, user_metadata)
                finally:
                    await self._close(run)

        made = await self._with_room(session, run, found)
        made.spec.fresh_optimizer = True
        made.spec.optimizer.CopyFrom(Adam(**self._config.adam.model_dump()).spec())
        await self.open(session, made)

    async def _state(self, run: Run, name: str) -> pb.SavedState:
        """Of an open run. Raises Refused."""
        states = {state.name: state for state in await self._trainer.states(run.run_id)}
        if name not in states:
            raise Refused(f"the run has no state {name!r}, it has {', '.join(states) or 'none'}", status=404)
        return states[name]

    async def _beginning(
        self, model_id: str, run: Run, name: str, user_metadata: dict[str, str] | None
    ) -> Run:
        """A run that begins with a state of another, which is open. Raises Refused."""
        spec = pb.RunSpec()
        spec.CopyFrom(run.spec)
        spec.initial_state = (await self._state(run, name)).path
        spec.fresh_optimizer = False  # of a run that itself began with weights alone
        metadata = user_metadata or run.user_metadata
        return Run(run_id(model_id), model_id, run.base_model, spec, metadata)

    async def _with_room(self, session: Session | None, run: Run, work: Callable[[], Awaitable[T]]) -> T:
        """Do what opens a run; where the trainer is full, again when a place was given up. Raises Refused."""

        async def tried() -> T | QuartetError:
            try:
                return await work()
            except QuartetError as error:
                if error.reason != "OVERLOADED":
                    raise
                return error

        made = await tried()
        if not isinstance(made, QuartetError):
            return made
        async with self._room:
            give_up = awake_s() + 1.5 * self._config.takeover_seconds
            before = self._beside(session, run)
            while before:
                is_coming = bool(self._closing - {run.run_id})
                if self._beside(session, run) < before:
                    made = await tried()
                    if not isinstance(made, QuartetError):
                        return made
                # A place on its way is waited for, for as long as a close that has begun may take: nobody
                # else has to go.
                if awake_s() > give_up + (CLOSE_SECONDS if is_coming else 0.0):
                    break
                if not is_coming:
                    await self._end_silent(session, run)
                await asyncio.sleep(LOOK_SECONDS)
        raise Refused(
            f"the trainer takes no other run: {made.message}. A script gives its places back with "
            f"ServiceClient.close(), or when it is not heard of for {self._config.takeover_seconds:g} s",
            status=429,
        ) from made

    def _beside(self, session: Session | None, run: Run) -> int:
        """How many runs of others have a place that they may give up."""
        others = (self._lent | self._closing) - {run.run_id}
        return self._sessions.models_beside(session, run.run_id) + len(others)

    async def _end_silent(self, session: Session | None, run: Run) -> None:
        """End the session that is silent for longest, if it is for takeover_seconds and holds places."""
        others = self._sessions.with_models(session, run.run_id)
        longest = min(others, key=lambda other: other.heard, default=None)
        if longest is not None and longest.heard + self._config.takeover_seconds < awake_s():
            await self._end(longest.session_id, "its script is silent, and another has no place")

    async def _is_kept(self, session: Session, run: Run) -> bool:
        """Whether another session trains the run, and is heard of for as long as one would be silent."""
        give_up = awake_s() + 1.5 * self._config.takeover_seconds
        while self._is_heard(session, run):
            if awake_s() > give_up:
                return True
            await asyncio.sleep(LOOK_SECONDS)
        return False

    def _is_heard(self, session: Session, run: Run) -> bool:
        """Whether another session that trains the run was heard of lately."""
        lately = awake_s() - self._config.takeover_seconds
        others = [other for other, _ in self._sessions.models_of(run.run_id) if other is not session]
        return any(lately < other.heard for other in others)

    def _lock(self, run: Run) -> asyncio.Lock:
        return self._locks.setdefault(run.run_id, asyncio.Lock())

    def _training(self, run: Run) -> Training:
        return Training(run, self._trainer, self._config.gap_seconds, self._notes.keep)
