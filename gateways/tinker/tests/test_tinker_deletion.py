"""A saved state that is deleted while its model works, or the one who asked waits no more."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from quartet.errors import QuartetError
from quartet.v1 import trainer_service_pb2 as pb
from quartet_tinker.promises import Answer, answered
from quartet_tinker.refusal import Refused

from .told_trainer import Trainer, gateway_with


async def test_who_asks_late_whether_a_state_is_deleted_hears_that_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The SDK waited no more, and asks again; and a trainer that cannot is not asked for a minute."""

    class Slow(Trainer):
        states_left = 1

        async def delete_state(self, run_id: str, spec: pb.RunSpec, name: str) -> bool:
            if name == "no":
                raise QuartetError("NOT_IMPLEMENTED", "Method not found!", grpc_code="UNIMPLEMENTED")
            await asyncio.sleep(0.01)
            self.states_left -= 1
            return self.states_left == 0

    gateway, session = await gateway_with(trainer := Slow(), 1)
    delete = partial(gateway.checkpoints.delete, f"{session.session_id}:train:0", "weights")
    sdk_seconds = partial(monkeypatch.setattr, "quartet_tinker.checkpoints.SDK_SECONDS")
    sdk_seconds(0.001)
    await delete("kept")
    sdk_seconds(60.0)
    await delete("kept")
    sdk_seconds(0.001)
    with pytest.raises(Refused, match="has no state 'kept'"):
        await delete("kept")
    with pytest.raises(Refused, match="of an earlier release, which deletes no single state") as refused:
        await delete("no")
    assert refused.value.status == 404
    trainer.may.set()
    await gateway.close()


async def test_a_deletion_is_asked_for_again_before_it_is_done() -> None:
    """It waits for the request under way, for longer than the SDK does: both hear that it is done."""

    class Deleting(Trainer):
        states_left = 1

        async def delete_state(self, run_id: str, spec: pb.RunSpec, name: str) -> bool:
            self.states_left -= 1
            return self.states_left == 0

    gateway, session = await gateway_with(trainer := Deleting(), 1)
    model_id, ended = f"{session.session_id}:train:0", asyncio.Event()

    async def work() -> Answer:
        await ended.wait()
        return answered()

    training = gateway.sessions.model(model_id)[1]
    training.submit(1, gateway.promises.make(f"{model_id}:1", b"", session.session_id)[0], work)
    await asyncio.sleep(0)
    asked = [asyncio.create_task(gateway.checkpoints.delete(model_id, "weights", "kept")) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert trainer.states_left == 1, "between two requests"
    ended.set()
    await asyncio.wait_for(asyncio.gather(*asked), 20)
    with pytest.raises(Refused, match="has no state 'kept'"):
        await gateway.checkpoints.delete(model_id, "weights", "kept")
    trainer.may.set()
    await gateway.close()
