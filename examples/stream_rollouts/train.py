"""A trainer of one page: takes groups from Quartet, one gradient step for each batch, pushes the weights.

python examples/stream_rollouts/train.py [--model models/tiny] [--state state.pt] [--learning-rate 3e-4]

Its loop is plain PyTorch. What it uses of Quartet are `connect`, `push_version`, and one RPC, StreamRollouts.
It may be killed at any moment: started again, it goes on from its file, and gets again what it had not
acknowledged.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from quartet.errors import QuartetError
from quartet.kit.call import stream
from quartet.kit.channel import connect
from quartet.v1.orchestrator_service_pb2 import (
    CreditedGroup,
    CreditedRollout,
    StreamRolloutsRequest,
    StreamRolloutsStart,
)
from quartet.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from quartet.v1.rollout_pb2 import Sample
from quartet.weights.push import push_version
from quartet.weights.tensor import Tensor
from transformers import AutoModelForCausalLM

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
IDLE_SECONDS = 15.0  # three heartbeats
CLIP = 4.0  # of the importance ratio: the batch may be one version old


@dataclass
class Group:
    """A group and its rollouts, as they came."""

    head: CreditedGroup
    rollouts: list[CreditedRollout] = field(default_factory=list)


class Trainer:
    """The weights, and the file that survives."""

    def __init__(self, model: str, state: Path, learning_rate: float) -> None:
        """As the file says; without one, the model as it is."""
        self.model = AutoModelForCausalLM.from_pretrained(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.0)
        self.version = 0
        self.file = state
        if state.exists():
            saved = torch.load(state)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.version = saved["version"]

    def step(self, groups: list[Group]) -> float:
        """One optimizer step on a whole batch, on disk before anybody hears of it."""
        self.optimizer.zero_grad()
        total = 0.0
        for group in groups:
            for credited in group.rollouts:
                for sample, advantage in zip(credited.rollout.samples, credited.advantages, strict=True):
                    loss = self.loss(sample, advantage) / group.head.normalizer
                    loss.backward()
                    total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.version += 1
        saved = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "version": self.version,
        }
        torch.save(saved, f"{self.file}.new")
        os.replace(f"{self.file}.new", self.file)  # one file or the other, whenever it dies
        return total

    def loss(self, sample: Sample, advantage: float) -> torch.Tensor:
        """CISPO: the clipped ratio weighs the gradient of each sampled token's log-probability."""
        covered = [place for span in sample.spans for place in range(span.start, span.start + span.length)]
        tokens = torch.tensor([list(sample.token_ids)])
        logits = self.model(input_ids=tokens).logits[0, torch.tensor(covered) - 1]
        logprobs = torch.log_softmax(logits.float(), -1).gather(-1, tokens[0, covered].unsqueeze(-1))[:, 0]
        ratio = (logprobs.detach() - torch.tensor(list(sample.logprobs))).exp().clamp(max=CLIP)
        return -(ratio * advantage * logprobs).sum()

    def weights(self) -> dict[str, Tensor]:
        """A copy of the parameters, tied ones once, under the names that they have in the checkpoint."""
        return {
            name: Tensor(
                DTYPES[parameter.dtype],
                tuple(parameter.shape),
                # A copy, for the optimizer changes parameters in place, and the next delta is made from it.
                parameter.detach().to("cpu", copy=True).contiguous().view(torch.uint8).numpy(),
            )
            for name, parameter in self.model.named_parameters()
        }


async def groups_of(
    stub: OrchestratorServiceStub, said: asyncio.Queue[StreamRolloutsRequest | None]
) -> AsyncIterator[Group | None]:
    """The groups of the run, each once it is whole; None where there was nothing for some seconds."""

    async def says() -> AsyncIterator[StreamRolloutsRequest]:
        while (request := await said.get()) is not None:
            yield request

    group: Group | None = None
    try:
        async for frame in stream(stub.StreamRollouts(says()), idle_timeout_s=IDLE_SECONDS, sends=True):
            match frame.WhichOneof("frame"):
                case "group":
                    group = Group(frame.group)
                case "rollout":
                    assert group is not None
                    group.rollouts.append(frame.rollout)
                case "heartbeat":
                    yield None
            if group is not None and len(group.rollouts) == group.head.rollouts:
                yield group
                group = None
    finally:
        said.put_nowait(None)


async def train(trainer: Trainer, run_id: str, orchestrator: Any, inference: Any) -> None:
    """Take, train, push, acknowledge; until the run is over."""
    said: asyncio.Queue[StreamRolloutsRequest | None] = asyncio.Queue()
    said.put_nowait(StreamRolloutsRequest(start=StreamRolloutsStart(run_id=run_id)))
    said.put_nowait(StreamRolloutsRequest(credits=1))
    step: list[Group] = []
    base = await push_version(inference, run_id, trainer.version, trainer.weights())
    async for group in groups_of(OrchestratorServiceStub(orchestrator), said):
        if group is None:
            # Costs nothing where the replica has it, and one that was started again has not.
            base = await push_version(inference, run_id, trainer.version, trainer.weights())
            continue
        done = [group]  # trained on already, where this program died before it could say so
        if group.head.step > trainer.version:
            step.append(group)
            done = []
        if len(step) == group.head.groups_of_step:
            loss = await asyncio.to_thread(trainer.step, step)
            rewards = [one.rollout.reward for group in step for one in group.rollouts]
            print(f"step {trainer.version}  loss {loss:+.4f}  reward {fmean(rewards):.3f}", flush=True)
            # With the version that was pushed before as base, only what changed travels.
            base = await push_version(inference, run_id, trainer.version, trainer.weights(), base=base)
            done, step = step, []
        for one in done:
            said.put_nowait(StreamRolloutsRequest(ack=one.head.group))
        said.put_nowait(StreamRolloutsRequest(credits=1))


async def main() -> None:
    """Train, and call again while the orchestrator is away."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/tiny")
    parser.add_argument("--run", default="foreign")
    parser.add_argument("--state", type=Path, default=Path("state.pt"))
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--orchestrator", default="127.0.0.1:50061")
    parser.add_argument("--inference", default="127.0.0.1:50062")
    given = parser.parse_args()
    trainer = Trainer(given.model, given.state, given.learning_rate)
    async with connect(given.inference, bulk=True) as inference, connect(given.orchestrator) as orchestrator:
        while True:
            try:
                await train(trainer, given.run, orchestrator, inference)
                break
            except QuartetError as error:
                if error.reason not in ("NOT_READY", "DEADLINE", "RUN_UNKNOWN"):  # not yet, or not now
                    raise
                print(f"calling again: {error.message}", flush=True)
                await asyncio.sleep(1)
    # Out of the way of the next run, which begins anew.
    final = given.state.with_name(f"{given.state.stem}-final{given.state.suffix}")
    if given.state.exists():  # else the run was over before this began
        os.replace(given.state, final)
    weights = f"its weights are in {final}" if final.exists() else "nothing of it was trained here"
    print(f"the run is over; {weights}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
