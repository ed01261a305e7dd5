"""Every named algorithm, and settings beyond them, for two steps: the real orchestrator, the real trainer on
a tiny random model, and a host that samples at random.

What is shown is that each of them goes all the way: a run is accepted, its batches are trained, the weights
move, what it reads of other models is there. That they compute the right thing is shown beside the trainer.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from quartet.kit.channel import ClientSecurity
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.run.presets import PRESETS
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import inference_service_pb2 as ipb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import rollout_pb2 as rpb
from quartet.v1.envhost_service_pb2_grpc import EnvHostServiceServicer, add_EnvHostServiceServicer_to_server
from quartet.v1.inference_service_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)

VOCAB, STEPS, LIMIT = 64, 2, 6
TIMEOUT_S = 60.0


class RandomHost(EnvHostServiceServicer):
    """Rollouts of random tokens, some of them cut by the limit, with random rewards."""

    async def DescribeEnvironment(self, request: Any, context: Any) -> epb.DescribeEnvironmentResponse:
        info = epb.EnvironmentInfo(id=request.environment.id, train_size=50, eval_size=6)
        return epb.DescribeEnvironmentResponse(environment=info)

    async def RunRollouts(self, request: Any, context: Any) -> AsyncIterator[epb.RunRolloutsResponse]:
        for member in request.members:
            dice = random.Random(f"{request.task_index}/{member}/{request.min_policy_version}")
            length = dice.randint(1, LIMIT)
            rollout = rpb.Rollout(member=member, reward=dice.choice([0.0, 0.5, 1.0]), num_turns=1)
            rollout.truncated = length == LIMIT
            sample = rollout.samples.add(token_ids=[dice.randrange(VOCAB) for _ in range(9 + length)])
            sample.spans.add(start=9, length=length, policy_version=request.min_policy_version)
            sample.logprobs.extend(dice.uniform(-5.0, -3.0) for _ in range(length))
            rollout.usage.completion_tokens = length
            yield epb.RunRolloutsResponse(rollout=rollout)


class Teacher(InferenceServiceServicer):
    """Likes every second token."""

    asked = 0

    async def Score(self, request: Any, context: Any) -> ipb.ScoreResponse:
        self.asked += len(request.samples)
        assert not any(sample.logprobs for sample in request.samples)
        covered = [
            [t for s in one.spans for t in one.token_ids[s.start : s.start + s.length]]
            for one in request.samples
        ]
        return ipb.ScoreResponse(
            samples=[ipb.ScoredSample(logprobs=[-1.0 - 8.0 * (t % 2) for t in tokens]) for tokens in covered]
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_qwen3: Any) -> Path:
    """The folder of the policy; its teacher's is beside it."""
    tiny = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tiny |= {"head_dim": 8, "intermediate_size": 32, "max_position_embeddings": 64}
    made = tmp_path_factory.mktemp("presets")
    write_qwen3(made / "teacher", seed=12, **tiny)
    return write_qwen3(made / "model", seed=11, **tiny)


@asynccontextmanager
async def world(trainer_address: str, data_dir: Path) -> AsyncIterator[tuple[Any, str, Teacher]]:
    """(the orchestrator's runs, the address of the teacher, the teacher)."""
    from quartet_orchestrator.assembly import Services
    from quartet_orchestrator.config import OrchestratorConfig
    from quartet_orchestrator.runs import Runs

    teacher, here = Teacher(), ServerConfig(address="127.0.0.1:0")
    servers = [
        await start([Service("host", add_EnvHostServiceServicer_to_server, RandomHost())], here, Health()),
        await start([Service("teacher", add_InferenceServiceServicer_to_server, teacher)], here, Health()),
    ]
    services = Services.connect(
        OrchestratorConfig(
            trainer_address=trainer_address,
            envhost_addresses=[servers[0].address],
            security=ClientSecurity(),
            patience_seconds=TIMEOUT_S,
        )
    )
    runs = Runs(data_dir, services)
    try:
        runs.start()
        yield runs, servers[1].address, teacher
    finally:
        await runs.close()
        await services.close()
        for server in servers:
            await server.stop(0)


def twice_the_likelihood(spec: Any, tokens: Any) -> Any:
    return -2.0 * tokens.advantages_K * tokens.logp_K


@pytest.fixture
def steps_of(tmp_path_factory: pytest.TempPathFactory, folder: Path, serving_trainer: Any) -> Any:
    """`await steps_of(algorithm)`: the metrics of the steps of a run, once it is complete."""

    async def run(algorithm: str) -> list[dict[str, float]]:
        work = tmp_path_factory.mktemp("run")
        losses = {"mine": f"{__name__}:twice_the_likelihood"}
        async with serving_trainer(work / "states", losses=losses) as address:
            return await steps_at(address, work / "runs", folder, algorithm)

    return run


async def steps_at(trainer: str, data_dir: Path, folder: Path, algorithm: str) -> list[dict[str, float]]:
    async with world(trainer, data_dir) as (runs, address, teacher):
        toml = f"""
            model = "{folder}"
            max_steps = {STEPS}
            batch_size = 8
            rollouts_per_example = 4
            learning_rate = 1e-2
            [sampling]
            max_tokens = {LIMIT}
            [eval]
            num_examples = 0
            [[env]]
            id = "dice"
            [algorithm]
            {algorithm.replace("ADDRESS", address).replace("TEACHER", str(folder.with_name("teacher")))}
            """
        await runs.submit("run", toml, dry_run=False)
        book = runs.get("run")
        async with asyncio.timeout(TIMEOUT_S):
            while book.state.phase not in (pb.RUN_PHASE_COMPLETED, pb.RUN_PHASE_FAILED, pb.RUN_PHASE_STOPPED):
                await book.changed()
        assert book.state.phase == pb.RUN_PHASE_COMPLETED, book.state.error
        assert (teacher.asked == STEPS * 8) == ("ADDRESS" in algorithm)
        published = {
            record.call.publish.digest
            for record in book.journal.select("call")
            if record.call.HasField("publish")
        }
        assert len(published) == STEPS + 1, "every step moves the weights"
        return [dict(record.step.metrics) for record in book.journal.select("step")]


SETTINGS = {
    **{name: f'preset = "{name}"' for name in PRESETS if name != "opd"},
    "opd": 'preset = "opd"\nreference = { model = "TEACHER" }',
    "opd from a service": 'preset = "opd"\nreference = { address = "ADDRESS" }',
    "grpo of the paper": 'preset = "grpo"\nbeta = 0.04\nepsilon = 0.1\ndelta = 4.0',
    "adaptive divergence": (
        'preset = "dapo"\nkl_coef = 0.1\ntarget_kl = 0.01\nkl_estimator = "k2"\n'
        "reference = { sync_steps = 1, mixup_alpha = 0.6 }\nentropy_coef = 0.01\n"
        "target_entropy = 50.0\ntop_entropy_quantile = 0.3"
    ),
    "several iterations": 'preset = "grpo"\nnum_iterations = 3',
    "mini-batches": 'preset = "grpo"\nnum_minibatches = 2\nnum_iterations = 2\nproximal = true',
    "decoupled": (
        'preset = "gspo"\nepsilon = 0.9\nnum_iterations = 2\nproximal = true\n'
        'correction = { mode = "mask", level = "token", cap = 3.0, floor = 0.2 }'
    ),
    "old rollouts": (
        'preset = "luspo"\nkl_coef = 0.1\nkl_weighted = true\noff_policy_mask = 0.001\nproximal = true'
    ),
    "a kernel of one's own": 'preset = "vespo"\nkernel = { k_positive = 1.0, lambda_negative = 3.0 }',
    "a loss of one's own": 'loss = "custom"\ncustom = "mine"',
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
async def test_a_run_of_two_steps(steps_of: Any, name: str) -> None:
    steps = await steps_of(SETTINGS[name])
    assert len(steps) == STEPS
    for number, step in enumerate(steps):
        assert all(map(math.isfinite, step.values()))
        assert step["train/grad_norm"] > 0 and step["train/skipped_steps"] == 0
        assert 0 <= step["staleness/max"] <= 1, "counted in steps, whatever the iterations"
        assert ("train/reference_kl" in step) == (
            name.startswith("opd") or "divergence" in name or "paper" in name or "old" in name
        )
        if name == "adaptive divergence" and number:
            assert step["train/kl_coef"] != pytest.approx(0.1)
        if name == "adaptive divergence":
            assert step["train/entropy_coef"] == pytest.approx(0.015 if number else 0.0)
            assert 0.3 <= step["train/top_entropy_fraction"] < 0.4
        assert ("train/off_policy_masked_fraction" in step) == (name == "old rollouts")
        if name == "decoupled":
            assert 0 < step["train/correction_mean"] <= 3
            assert step["train/ratio_max"] > 1, "the second iteration has moved"
        if name == "several iterations":
            assert step["train/clipped_fraction"] > 0


async def test_what_a_step_is_divided_by(steps_of: Any) -> None:
    """Overlong filtering leaves cut rollouts out of the loss and its normaliser, not out of the rewards."""
    plain = await steps_of('preset = "dapo"\noverlong_filtering = false')
    filtered = await steps_of('preset = "dapo"')
    assert plain[0]["train/reward"] == filtered[0]["train/reward"]
    cut = plain[0]["rollout/truncated_fraction"] * 8 * LIMIT
    assert cut > 0 and filtered[0]["train/loss_tokens"] == plain[0]["train/loss_tokens"] - cut
