"""The base model before any script has published, and samplers of weights that are the base model's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from quartet.errors import QuartetError
from quartet.v1 import inference_service_pb2 as inference_pb
from quartet.v1 import trainer_service_pb2 as trainer_pb
from quartet_tinker import base_model
from quartet_tinker.base_model import BaseModel
from quartet_tinker.config import GatewayConfig
from quartet_tinker.promises import Promises, answered
from quartet_tinker.refusal import Refused
from quartet_tinker.runs import Runs
from quartet_tinker.samplers import Samplers
from quartet_tinker.sampling import Sampler
from quartet_tinker.sampling_bodies import Prompt, SampleBody, SamplingParams, TextChunk
from quartet_tinker.served import ServedModel
from quartet_tinker.sessions import Sessions
from quartet_tinker.specs import Notes


class BaseStack:
    """A trainer and an inference service: this one serves the base model once an adapter has arrived."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.why_not: Refused | QuartetError | None = None
        self.served = inference_pb.GetModelResponse(base_model="models/small", max_model_len=64)
        self.may = asyncio.Event()

    async def model(self) -> Any:
        return self.served

    async def create(self, run_id: str, spec: Any) -> None:
        self.calls.append(f"create rank {spec.lora.rank} of {spec.base_model}")
        await self.may.wait()

    async def publish(self, run_id: str, seq_id: int) -> Any:
        self.calls.append(f"publish {seq_id}")
        return trainer_pb.PublishWeightsResponse(digest=b"d")

    async def arrival(self, run_id: str, digest: bytes, timeout_s: float) -> None:
        self.calls.append(f"arrival of {digest!r}")
        if self.why_not is not None:
            raise self.why_not
        self.served.policy_version = 0

    async def close(self, run_id: str) -> None:
        self.calls.append("close")


def base_model_of(stack: BaseStack, notes: Notes) -> BaseModel:
    config = GatewayConfig(trainer="127.0.0.1:1", inference=["127.0.0.1:2"])
    anyone = cast(Any, None)  # nobody else has a run, and none has a sampler
    runs = Runs(config, cast(Any, stack), Sessions(1), anyone, notes, anyone)
    model = ServedModel(config, cast(Any, stack))
    return BaseModel(model, cast(Any, stack), cast(Any, stack), 5.0, runs.lend)


async def test_the_base_model_is_served_before_any_script_has_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """base_model.py: by a run of the gateway's own, once, however many ask."""
    stack, notes = BaseStack(), Notes(tmp_path)
    base = base_model_of(stack, notes)
    with pytest.raises(Refused, match="base_model = 'another' is not served here"):
        await base.ready("another")
    monkeypatch.setattr(base_model, "WAIT_SECONDS", 0.0)
    with pytest.raises(Refused, match="not loaded yet") as later:
        await base.ready("models/small")
    assert later.value.status == 429, "the SDK asks again"
    assert len(notes.left_open()) == 1, "what a gateway that is killed now leaves, the next one closes"
    monkeypatch.setattr(base_model, "WAIT_SECONDS", 60.0)
    stack.may.set()
    await asyncio.gather(*(base.ready("models/small") for _ in range(3)))
    await base.ready("models/small")
    assert stack.calls == ["create rank 1 of models/small", "publish 1", "arrival of b'd'", "close"]
    assert notes.left_open() == []
    stack.served.run_id = "whole"
    with pytest.raises(Refused, match="inference serves run whole, not the base model"):
        await base.ready("models/small")


async def test_why_the_base_model_is_not_served_is_told_though_nobody_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """base_model.py 2: the SDK asks again some time after it was told to; then it is tried once more."""
    stack = BaseStack()
    base = base_model_of(stack, Notes(None))
    stack.why_not = Refused("no replica serves the weights: replica x: it does not fit")
    monkeypatch.setattr(base_model, "WAIT_SECONDS", 0.0)
    with pytest.raises(Refused, match="not loaded yet"):
        await base.ready("models/small")
    stack.may.set()
    assert base._publishing is not None
    await asyncio.wait({base._publishing})
    monkeypatch.setattr(base_model, "WAIT_SECONDS", 60.0)
    with pytest.raises(Refused, match="it does not fit"):
        await base.ready("models/small")
    stack.why_not = QuartetError("RUN_UNKNOWN", "run tk-0.base is not open")
    with pytest.raises(Refused, match="the trainer was started again meanwhile") as later:
        await base.ready("models/small")
    assert later.value.status == 429, "the script's own runs are not meant"
    stack.why_not = None
    stack.may.clear()
    monkeypatch.setattr(base_model, "WAIT_SECONDS", 0.0)
    with pytest.raises(Refused, match="not loaded yet"):
        await base.ready("models/small")
    stack.may.set()
    assert base._publishing is not None
    await asyncio.wait({base._publishing})
    monkeypatch.setattr(base_model, "WAIT_SECONDS", 60.0)
    await base.ready("models/small")
    assert stack.calls.count("close") == 3
    stack.served.ClearField("policy_version")
    await base.ready("models/small")
    assert stack.calls.count("close") == 4, "whoever serves was started again"


async def test_samplers_of_before_a_return_to_a_state_are_answered_where_their_weights_are_known() -> None:
    """Untrained ones: they are the base model's. Those that move on: by the newest, whatever its number."""
    asked: list[Sampler] = []

    class Asked:
        async def sample(self, sampler: Sampler, body: SampleBody, timeout_s: float) -> Any:
            asked.append(sampler)
            return answered()

    config = GatewayConfig(trainer="127.0.0.1:1", inference=["127.0.0.1:2"])
    sessions, promises, nobody = Sessions(1), Promises(), cast(Any, None)
    samplers = Samplers(config, cast(Any, Asked()), sessions, promises, nobody, nobody)
    session = sessions.make()
    made = [samplers.now("r", 0, untrained=True), samplers.now("r", 3, inflight=True), samplers.now("r", 3)]
    names = [session.add(f"{number}", one, None) for number, one in enumerate(made)]
    samplers.count_again("r")
    prompt, params = Prompt(chunks=[TextChunk(tokens=[1])]), SamplingParams()
    bodies = [
        SampleBody(sampling_session_id=name, seq_id=1, prompt=prompt, sampling_params=params)
        for name in names
    ]
    for one in bodies[:2]:
        await samplers.sample(one, b"")[0].done.wait()
    with pytest.raises(Refused, match="has returned to a saved state since"):
        samplers.sample(bodies[2], b"")
    assert [(one.version, one.untrained) for one in asked] == [(0, True), (0, False)]
