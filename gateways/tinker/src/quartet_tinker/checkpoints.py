"""What a RestClient asks about runs and their saved states, and that one be deleted."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from quartet.errors import QuartetError, has_no_method

from quartet_tinker import paths
from quartet_tinker.refusal import Refused
from quartet_tinker.sessions import Sessions
from quartet_tinker.specs import Notes
from quartet_tinker.trainer import Trainer
from quartet_tinker.training import Run

#: The SDK wants one; nobody here keeps it.
NO_TIME: Final = "1970-01-01T00:00:00Z"
#: It waits for an answer for so long, and then asks again.
SDK_SECONDS: Final = 60.0


class Checkpoints:
    """Reads what is noted of runs, and asks the trainer for their states, and to delete one."""

    def __init__(self, trainer: Trainer, sessions: Sessions, notes: Notes) -> None:
        self._trainer, self._sessions, self._notes = trainer, sessions, notes
        # By run and name, those that are being deleted.
        self._deleting: dict[tuple[str, str], asyncio.Task[bool]] = {}
        # When those were that nobody may have heard of; of the last SDK_SECONDS.
        self._deleted_late: dict[tuple[str, str], float] = {}

    def weights_info(self, path: str) -> dict[str, Any]:
        """What a saved state is of."""
        run = self._notes.find(paths.read(path).origin)
        targets = set(run.spec.lora.target_modules)
        return {
            "base_model": run.base_model,
            "is_lora": True,
            "lora_rank": run.spec.lora.rank,
            "train_unembed": False,
            "train_mlp": not targets or "up_proj" in targets,
            "train_attn": not targets or "q_proj" in targets,
        }

    def training_run(self, model_id: str) -> dict[str, Any]:
        """What a model's run is of."""
        return _about(self._run(model_id))

    async def training_runs(self, offset: int, limit: int) -> tuple[list[dict[str, Any]], int]:
        """Of the runs that this gateway knows, the newest first, those of a page; and how many there are."""
        runs, total = await self._notes.page(offset, limit)
        return [_about(run) for run in runs], total

    async def states(self, model_id: str) -> list[dict[str, Any]]:
        """The states of a model's run that can be loaded. Raises Refused, QuartetError."""
        run = self._run(model_id)
        try:
            return await self._states(run)
        except QuartetError as error:
            if error.reason != "RUN_UNKNOWN":
                raise
            raise Refused(
                f"the run of {run.origin} is not open, and the trainer lists states of open ones; "
                "make a client of a state that you know"
            ) from error

    async def all_states(self) -> list[dict[str, Any]]:
        """The states of all runs that models train, the newest first. Raises QuartetError."""
        states = []
        for run in self._sessions.runs():
            try:
                states += reversed(await self._states(run))
            except QuartetError as error:
                if error.reason != "RUN_UNKNOWN":  # it was closed meanwhile
                    raise
        return states

    async def delete(self, model_id: str, kind: str, name: str) -> None:
        """Delete a state of a model's run, open or not. Raises Refused, QuartetError.

        It waits for the request under way, for longer than the SDK does: who asks again waits for it, too, or
        hears that it was done meanwhile.
        """
        if kind != "weights":
            raise Refused(
                "weights for samplers are a version of an open run, and not deleted one by one: they go when "
                "later ones replace them, or the run is closed",
                status=404,
            )
        paths.check_name(name)
        run = self._run(model_id)
        key = (run.run_id, name)
        deleting = self._deleting.get(key)
        if deleting is None:
            deleting = self._deleting[key] = asyncio.create_task(self._delete(run, name))
            deleting.add_done_callback(lambda _: self._deleting.pop(key))
        if not await asyncio.shield(deleting) and not self._was_late(key):
            raise Refused(f"the run of {run.origin} has no state {name!r}", status=404)

    async def _delete(self, run: Run, name: str) -> bool:
        began, key = time.monotonic(), (run.run_id, name)
        try:
            models = [session.models[its_id] for session, its_id in self._sessions.models_of(run.run_id)]
            if models:
                found = await models[0].delete_state(name)
            else:
                found = await self._trainer.delete_state(run.run_id, run.spec, name)
        except QuartetError as error:
            if has_no_method(error):
                told = "the trainer is of an earlier release, which deletes no single state; upgrade it"
                raise Refused(told, status=404) from error
            raise
        if found and time.monotonic() > began + SDK_SECONDS:
            kept = {one: when for one, when in self._deleted_late.items() if self._was_late(one)}
            self._deleted_late = kept | {key: time.monotonic()}
        return found

    def _was_late(self, key: tuple[str, str]) -> bool:
        """Whether it was deleted of late, when the SDK waited no more."""
        return key in self._deleted_late and time.monotonic() < self._deleted_late[key] + SDK_SECONDS

    async def _states(self, run: Run) -> list[dict[str, Any]]:
        return [
            {
                "checkpoint_id": f"weights/{state.name}",
                "checkpoint_type": "training",
                "time": NO_TIME,
                "tinker_path": f"tinker://{run.origin}/weights/{state.name}",
                "size_bytes": state.size_bytes,
            }
            for state in await self._trainer.states(run.run_id)
        ]

    def _run(self, model_id: str) -> Run:
        """Of a model: one that goes on with another's run has no note of its own."""
        return self._sessions.run_of(model_id) or self._notes.find(model_id)


def _about(run: Run) -> dict[str, Any]:
    return {
        "training_run_id": run.origin,
        "base_model": run.base_model,
        "model_owner": "quartet",
        "is_lora": True,
        "lora_rank": run.spec.lora.rank,
        "last_request_time": NO_TIME,
        "user_metadata": run.user_metadata,
    }
