"""A run whose model has another tokenizer or template than the replicas is told so, and taken."""

from __future__ import annotations

import pytest
from orch_world import RUN, assert_complete, notes
from quartet.v1 import inference_service_pb2 as ipb
from quartet.v1.common_pb2 import ChatIdentity
from quartet_orchestrator.chats import warning

MODEL = ChatIdentity(model="models/run", tokenizer_digest=b"1", template_digest=b"1")
OTHER = ChatIdentity(model="models/tiny", tokenizer_digest=b"1", template_digest=b"2")


def test_who_differs_in_what_is_said_with_a_remedy():
    assert warning(MODEL, {}) == "" and warning(MODEL, {"a:1": MODEL}) == ""
    assert warning(ChatIdentity(), {"a:1": OTHER}) == "" and warning(MODEL, {"a:1": ChatIdentity()}) == ""
    said = warning(MODEL, {"a:1": MODEL, "b:2": OTHER})
    assert said.startswith(
        "the replica at b:2 ('models/tiny') has another chat template than the run's model ('models/run'): "
    )
    assert "(chat.template_file)" in said and "a:1" not in said
    OTHER_TOKENS = ChatIdentity(model="m", tokenizer_digest=b"2", template_digest=b"2")
    said = warning(MODEL, {"b:2": OTHER_TOKENS})
    assert "has another tokenizer and another chat template than" in said and "template_file" not in said


@pytest.mark.parametrize("theirs", [OTHER, MODEL])
async def test_a_run_with_another_template_is_taken_and_warned(world, monkeypatch, theirs):
    async def serves(self, request, context):
        for run_id, version in self.trainer.latest.items():
            return ipb.GetModelResponse(run_id=run_id, policy_version=version, chat=theirs)
        return ipb.GetModelResponse(chat=theirs)

    world.trainer.chat = MODEL
    monkeypatch.setattr("orch_fakes.FakePolicy.GetModel", serves)
    await world.serve("policy")
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=1), dry_run=False)
        assert_complete(world, await world.rest(runs), steps=1)
        told = [one for one in await notes(runs) if "chat template" in one]
        assert len(told) == (1 if theirs is OTHER else 0)
