"""All runs of this orchestrator: submitted, found again after a restart, stopped, resumed.

1. A run exists from the moment its first records are on disk.
2. On `start` every unfinished run goes on by itself. One that cannot keeps no other from it: with a book
   that cannot be read it is listed as FAILED, and with one that cannot be opened now, or is to be read after
   others, as PENDING until it is (shelf.py, set_aside.py); with a configuration that this version refuses it
   is STOPPED (execution.py), and so it is with a journal that can be read and not written (a full disk), as
   soon as that can be (ending.py). Where a fault of the orchestrator meets it, it is listed as FAILED, and
   goes on with one that is mended.
3. A run is submitted once however often it is asked for: who asks meanwhile waits for that submission, and
   nobody for the submission of another run.
4. What rests is resumed, or submitted again with more steps (going_on.py), and is the same run then: the same
   book, and the same run of the trainer, which stands where it ended; or it is deleted (deletion.py).
5. A run says what it does, and what keeps it from that, for as long as something works at it (`doing`). One
   that rests says that it is started again, where the orchestrator was started for that, until it was asked
   for.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog
from quartet.errors import QuartetError
from quartet.kit.build import build_of
from quartet.run.config import RunConfig
from quartet.run.operation import computes_the_same
from quartet.run.written_out import is_same_run
from quartet.v1 import orchestrator_service_pb2 as pb

from quartet_orchestrator import admission, deletion, execution, exported, going_on, journal, shelf, state
from quartet_orchestrator.assembly import Services
from quartet_orchestrator.book import Book
from quartet_orchestrator.foreign import RolloutStream
from quartet_orchestrator.gauges import Glance
from quartet_orchestrator.held import Held
from quartet_orchestrator.on_demand import EvaluationOnDemand
from quartet_orchestrator.own_advantages import check_named
from quartet_orchestrator.roll_call import roll_call
from quartet_orchestrator.set_aside import SetAside
from quartet_orchestrator.state import RunState
from quartet_orchestrator.unread import unread
from quartet_orchestrator.watchdog import Moving

#: What a run that rests does where somebody is about to go on with it.
STARTED_AGAIN = "is being started again"

log = structlog.get_logger()


class Runs:
    """The runs of one folder, by their names."""

    def __init__(self, folder: Path, services: Services, goes_on_with: str = "") -> None:
        """`goes_on_with`: the run that whoever starts this is about to go on with."""
        self._folder = folder
        self._services = services
        self._goes_on_with = goes_on_with
        self._shelf: shelf.Shelf | None = None
        self._held: dict[str, Held] = {}
        # Of each name that is being submitted, when that is over.
        self._submitting: dict[str, asyncio.Event] = {}
        self._deletions = deletion.Deletions(folder, services.trainer)
        self._set_aside = SetAside(folder, self._take_up, self._deletions.alone)

    def start(self) -> None:
        """Opens the runs and goes on with those that are not finished. Raises ConfigError."""
        found = self._shelf = shelf.open_all(self._folder)
        self._deletions.start()
        # In the order in which they take turns: who had begun, then who came first.
        books = sorted(
            found.books.items(), key=lambda one: (one[1].state.step == 0, one[1].state.submitted_at_ms)
        )
        for run_id, book in books:
            self._take_up(run_id, book)
        self._set_aside.start(found)

    def _take_up(self, run_id: str, book: Book) -> bool:
        """Goes on with a run that was found; else it is set aside."""
        config, refusal = None, ""
        try:
            try:
                config = self._parse(book.state.config_toml)
            except QuartetError as error:
                refusal = f"its configuration is refused by this version of Quartet: {error.message}"
            held = Held(book, config)
            execution.take_up(held, self._services, refusal)
        except Exception as error:
            log.error("run not taken up", run_id=run_id, exc_info=error)
            book.close()
            # It keeps no other from going on. It is not tried again: each attempt may add to its journal.
            self._set_aside.put(run_id, shelf.faulty(run_id, error))
            return False
        self._held[run_id] = held
        return True

    async def submit(self, run_id: str, config_toml: str, *, dry_run: bool) -> pb.Run:
        """The run, new unless an equal one is here; a dry run is only checked. Raises QuartetError."""
        admission.check_run_id(run_id)
        config = self._parse(config_toml)
        while run_id in self._submitting:
            await self._submitting[run_id].wait()
        over = self._submitting[run_id] = asyncio.Event()
        try:
            if self._deletions.pending(run_id):
                await self._deletions.finish(run_id)
            if run_id in self._held or run_id in self._set_aside:
                run = await self._submit_again(self._find(run_id), config_toml, config, dry_run=dry_run)
            else:
                run = await self._submit(run_id, config_toml, config, dry_run=dry_run)
            if run.phase not in (state.STOPPED, state.FAILED):  # these are resumed next
                self._gone_on_with(run_id)
            return run
        finally:
            del self._submitting[run_id]
            over.set()

    async def _submit_again(
        self, held: Held, config_toml: str, config: RunConfig, *, dry_run: bool
    ) -> pb.Run:
        """The run that is here, made longer or carried out otherwise where that is what is asked for."""
        book, known = held.book, held.config
        if known is not None and computes_the_same(known, config):
            if not (dry_run or is_same_run(known, config)):
                await execution.carry_out_otherwise(held, self._services, config_toml, config)
            return book.run()
        going_on.check_extends(book.state, known, config)
        assert known is not None

        def extend() -> None:
            going_on.change(book, known, "", config)
            book.extend(config_toml, config.max_steps)

        if not dry_run and await going_on.begin(book, extend):
            held.config = config
            execution.launch(held, self._services)
        return book.run()

    async def _submit(self, run_id: str, config_toml: str, config: RunConfig, *, dry_run: bool) -> pb.Run:
        await admission.check_teacher(config, self._services.teachers, self._services.policies)
        # At once; a host may have to start workers for an environment, which takes minutes.
        unseen = await admission.check_at_trainer(config, self._services.trainer, self._services.policies)
        environments = await admission.describe_environments(config, self._services.hosts)
        if dry_run:
            return pb.Run(run_id=run_id, config_toml=config_toml, max_steps=config.max_steps)
        book = shelf.new_book(self._folder / run_id, config_toml, config, environments)
        held = Held(book, config)
        try:
            await shelf.settled(book, unseen, unread(config, run_id))
        finally:
            # Also when the caller has left meanwhile: the run exists.
            self._held[run_id] = held
            execution.launch(held, self._services)
        return held.book.run()

    def get(self, run_id: str) -> Book:
        """Its book. Raises RUN_UNKNOWN, or why the run was set aside."""
        return self._find(run_id).book

    def status(self, run_id: str) -> pb.Run:
        """The run; one that was set aside is FAILED, with the reason, or PENDING where it will be opened."""
        if self._set_aside.waits(run_id):
            return pb.Run(run_id=run_id, phase=state.PENDING, doing=self._set_aside[run_id].message)
        if run_id in self._set_aside:
            return pb.Run(run_id=run_id, phase=state.FAILED, error=self._set_aside[run_id].message)
        held = self._find(run_id)
        run = held.book.run()
        if run.phase in state.RESTING:
            run.doing = STARTED_AGAIN if run_id == self._goes_on_with else ""
            return run
        if held.book.waits:
            run.doing = f"{held.book.waits}; tried again every {journal.AGAIN_S:g} s"
        elif held.run is not None:
            run.doing = held.run.told(self._services.turns.before(run_id))
        return run

    async def delete(self, run_id: str, *, dry_run: bool) -> pb.DeleteRunResponse:
        """Removes a run that rests, or that cannot be opened, for good, or says what would go. Raises
        QuartetError."""
        return await self._deletions.delete(
            run_id, lambda: self._resting(run_id), lambda: self._forget(run_id), dry_run=dry_run
        )

    def _resting(self, run_id: str) -> Held | None:
        if self._set_aside.is_unread(run_id):
            raise self._set_aside[run_id]
        if not self._set_aside.waits(run_id):
            deletion.check_rests(self.status(run_id))
        return self._held.get(run_id)

    def _forget(self, run_id: str) -> None:
        self._set_aside.forget(run_id)
        self._held.pop(run_id, None)

    def all(self) -> list[pb.Run]:
        """Newest first."""
        runs = [self.status(run_id) for run_id in (*self._held, *self._set_aside)]
        return sorted(runs, key=lambda run: (run.submitted_at_ms, run.run_id), reverse=True)

    async def roll_call(self, *, ready: bool) -> list[pb.ServiceStatus]:
        """The services behind the runs, and the orchestrator itself, which is in service or not."""
        return await roll_call(self._services, build_of(__package__), ready=ready)

    def glances(self) -> list[Glance]:
        """Of every run, also of those that were set aside; to read from any thread."""
        # In this order: one that is opened meanwhile is told, and told once.
        names, held = list(self._set_aside), dict(self._held)
        aside = [
            RunState(run_id=run_id, phase=state.PENDING if self._set_aside.waits(run_id) else state.FAILED)
            for run_id in names
            if run_id not in held
        ]
        return [one.glance() for one in held.values()] + [Glance(one) for one in aside]

    def moving(self) -> list[Moving]:
        """The runs that should move."""
        found = (held.moving() for held in self._held.values())
        return [one for one in found if one is not None]

    def evaluation(self, run_id: str, config_toml: str) -> EvaluationOnDemand:
        """Of the policy that the run has published last, to be asked for its responses."""
        held = self._find(run_id)
        config = admission.parse_evaluation(config_toml)
        return EvaluationOnDemand(held.measurable(), config)

    def rollout_stream(self, run_id: str) -> RolloutStream | None:
        """Of the batches of a run that somebody else trains; None where all are trained."""
        return self._find(run_id).stream()

    def keeper_of(self, run_id: str) -> exported.Keeper:
        """Who has its states; also of a run that was set aside, but for one that is not read yet: what it was
        created with is known then. Raises QuartetError."""
        if self._set_aside.is_unread(run_id):
            raise self._set_aside[run_id]
        held = None if run_id in self._set_aside else self._find(run_id)
        if held is None:
            return exported.keeper_of(run_id, None, (), self._services.trainer)
        return exported.keeper_of(run_id, held.config, held.book.state.earlier_ends, self._services.trainer)

    def _parse(self, config_toml: str) -> RunConfig:
        """The run's configuration, where this orchestrator can run it."""
        config = admission.parse(config_toml)
        admission.check_trainer(config, self._services.trainer is not None, bool(self._services.policies))
        check_named(config, self._services.advantages)
        return config

    def stop(self, run_id: str) -> pb.Run:
        """Asks the run to stop, and does not wait for it; nothing where it rests. Raises QuartetError."""
        if run_id in self._set_aside and not self._set_aside.waits(run_id):
            return self.status(run_id)
        held = self._find(run_id)
        if held.book.state.phase not in state.RESTING and held.book.state.phase != state.STOPPING:
            with going_on.written(run_id):
                held.book.enter(state.STOPPING)
            if held.run is not None:
                held.run.stop()
        return held.book.run()

    async def resume(self, run_id: str) -> pb.Run:
        """Goes on with a stopped run, after waiting for a stop under way; one that works stays as it is.
        Raises QuartetError: INVALID_REQUEST where the run is COMPLETED, FAILED with rollouts, or stopping for
        longer than going_on.STOP_S."""
        try:
            return await self._resume(run_id)
        finally:
            self._gone_on_with(run_id)

    async def _resume(self, run_id: str) -> pb.Run:
        held = self._find(run_id)
        await going_on.stopped(
            held.book, lambda: "its trainer has to hear of it" if held.run is None else held.run.told(())
        )
        going_on.check_resumable(held.book.state)
        if held.book.state.phase in state.RESTING:
            held.config = held.config or self._parse(held.book.state.config_toml)
            asked = going_on.asked_of_trainer(held.config, held.book.state.step)
            await admission.check_at_trainer(asked, self._services.trainer)
            # It may have been gone on with meanwhile, even to its end.
            going_on.check_resumable(held.book.state)
        if held.book.state.phase not in state.RESTING:
            return held.book.run()
        try:
            begins = await going_on.begin(held.book, lambda: held.book.enter(state.PENDING))
        except QuartetError:
            self._find(run_id)  # it may have been deleted meanwhile
            raise
        if begins:
            execution.launch(held, self._services)
        return held.book.run()

    def _gone_on_with(self, run_id: str) -> None:
        """It was asked for: from here on it rests where it rests."""
        if run_id == self._goes_on_with:
            self._goes_on_with = ""

    async def close(self) -> None:
        """Ends all work where it stands; the journals say where."""
        await self._deletions.close()
        await self._set_aside.close()
        tasks = [held.task for held in self._held.values() if held.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for held in self._held.values():
            held.book.close()
        self._held.clear()
        if self._shelf is not None:
            self._shelf.close()

    def _find(self, run_id: str) -> Held:
        if run_id in self._set_aside:
            raise self._set_aside[run_id]
        held = self._held.get(run_id)
        if held is None:
            raise QuartetError("RUN_UNKNOWN", f"there is no run {run_id!r} here", run_id=run_id)
        return held
