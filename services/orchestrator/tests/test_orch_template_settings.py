"""Variables of the chat template that a run chooses go with every request of its rollouts."""

from __future__ import annotations

from orch_world import RUN, assert_complete
from quartet.v1 import envhost_service_pb2 as epb

CHOSEN = """
[sampling.template_settings]
enable_thinking = false
style = "brief"
[eval.sampling.template_settings]
enable_thinking = true
"""


async def test_training_and_evaluations_have_their_own(world):
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=2) + CHOSEN, dry_run=False)
        assert_complete(world, await world.rest(runs), steps=2)
    asked = {(one.split, one.template_settings) for one in world.host.requests}
    assert asked == {
        (epb.SPLIT_TRAIN, '{"enable_thinking": false, "style": "brief"}'),
        (epb.SPLIT_EVAL, '{"enable_thinking": true, "style": "brief"}'),
    }
