"""Runs that begin with another one's state: bit for bit what that comes to, in a run of its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quartet.v1 import trainer_service_pb2 as pb
from safetensors.torch import load_file

SPECS: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay": 0.1},
    "sgd": {"kind": pb.OPTIMIZER_KIND_SGD, "momentum": 0.9},
    "muon": {"kind": pb.OPTIMIZER_KIND_MUON},
    "adapter": {"lora": pb.LoraSpec(rank=3, alpha=5.0)},
}
#: Of the first run, before the state.
STEPS = 3


class Runner:
    """Steps of one run of a trainer, whose calls are counted."""

    def __init__(self, trainer: Any, run_id: str, applied: int = 0) -> None:
        self.trainer, self.run_id, self.applied = trainer, run_id, applied

    def seq_id(self) -> int:
        self.applied += 1
        return self.applied

    async def step(self, samples: Any) -> pb.OptimStepResponse:
        await self.trainer.forward_backward(self.seq_id(), samples, self.run_id)
        request = pb.OptimStepRequest(run_id=self.run_id, seq_id=self.seq_id())
        return await self.trainer.stub.OptimStep(request)

    async def save(self, name: str) -> pb.SavedState:
        request = pb.SaveStateRequest(run_id=self.run_id, seq_id=self.seq_id(), name=name)
        return (await self.trainer.stub.SaveState(request)).state


def assert_same_bits(one: pb.SavedState, other: pb.SavedState) -> None:
    for stem in ("weights", "moments"):
        ours, theirs = (load_file(Path(state.path) / f"{stem}.safetensors") for state in (one, other))
        assert ours.keys() == theirs.keys() and ours
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), stem


@pytest.mark.parametrize("kind", SPECS)
async def test_it_comes_to_what_the_other_run_comes_to(
    kind: str, folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    """beginning.py 1 and 2, also where it is restored on the way, and begins a third one."""
    spec = {"base_model": str(folder), "max_grad_norm": 1.0, **SPECS[kind]}
    async with serve_trainer(keep_last=3) as trainer:
        await trainer.create("first", **spec)
        first = Runner(trainer, "first")
        for number in range(STEPS):
            await first.step(make_samples(seed=number))
        state = await first.save("there")
        created = await trainer.create("second", initial_state=state.path, **spec)
        assert (created.applied_seq_id, created.policy_version) == (0, 0)
        second = Runner(trainer, "second")
        for number in (7, 8):
            await first.step(make_samples(seed=number))
            done = await second.step(make_samples(seed=number))
        assert done.policy_version == 2, "its own"
        end, ours = await first.save("end"), await second.save("ours")
        assert_same_bits(end, ours)
    # Restored, by which time the state that it began with is gone, and begun with in its turn.
    shutil.rmtree(state.path)
    async with serve_trainer(keep_last=3) as trainer:
        assert (await trainer.create("first", **spec)).policy_version == STEPS + 2
        restored = await trainer.create("second", initial_state=state.path, **spec)
        assert (restored.applied_seq_id, restored.policy_version) == (second.applied, 2)
        await trainer.create("third", initial_state=ours.path, **spec)
        found = []
        for run_id, applied in (("first", first.applied), ("second", second.applied), ("third", 0)):
            runner = Runner(trainer, run_id, applied)
            await runner.step(make_samples(seed=9))
            found.append(await runner.save("last"))
        assert_same_bits(found[0], found[1])
        assert_same_bits(found[0], found[2])


async def test_the_rest_is_its_own(folder: Path, serve_trainer: Any, make_samples: Any) -> None:
    schedule = {"schedule": pb.SCHEDULE_LINEAR, "total_steps": 4}
    spec = {"base_model": str(folder), "reference": pb.ReferenceSpec(), **schedule}
    loss = pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT, kl_coef=0.1, kl_estimator=pb.KL_ESTIMATOR_K3)
    async with serve_trainer() as trainer:
        await trainer.create("first", learning_rate=1e-2, **spec)
        first = Runner(trainer, "first")
        for number in range(STEPS):
            await first.step(make_samples(seed=number))
        state = await first.save("there")
        await trainer.create("second", initial_state=state.path, learning_rate=4e-3, **spec)
        second = Runner(trainer, "second")
        done = await trainer.forward_backward(second.seq_id(), make_samples(seed=5), "second", loss=loss)
        assert done.diagnostics["reference_kl"] > 1e-3, "the reference is the base model"
        request = pb.OptimStepRequest(run_id="second", seq_id=second.seq_id())
        assert (await trainer.stub.OptimStep(request)).learning_rate == pytest.approx(4e-3)


@pytest.mark.parametrize("kind", SPECS)
async def test_with_a_fresh_optimizer_it_has_the_weights_alone(
    kind: str, folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    """beginning.py 4: bit for bit a run whose base has these weights; also by another optimizer."""
    spec = {"base_model": str(folder), "max_grad_norm": 1.0, **SPECS[kind]}
    other = {**spec, "kind": pb.OPTIMIZER_KIND_ADAMW if kind in ("sgd", "muon") else pb.OPTIMIZER_KIND_SGD}
    other.pop("momentum", None)
    async with serve_trainer(keep_last=3) as trainer:
        await trainer.create("first", **spec)
        first = Runner(trainer, "first")
        for number in range(STEPS):
            await first.step(make_samples(seed=number))
        state = await first.save("there")
        begins = {"initial_state": state.path, "fresh_optimizer": True}
        created = await trainer.create("second", **begins, **spec)
        assert (created.applied_seq_id, created.policy_version) == (0, 0)
        second = Runner(trainer, "second")
        empty = await second.save("empty")
        assert not (Path(empty.path) / "moments.safetensors").exists()
        ours, theirs = (load_file(Path(one.path) / "weights.safetensors") for one in (state, empty))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        await trainer.create("third", initial_state=empty.path, **spec)
        third = Runner(trainer, "third")
        await trainer.create("continued", initial_state=state.path, **spec)
        continued = Runner(trainer, "continued")
        ends = []
        for runner in (second, third, continued):
            await runner.step(make_samples(seed=7))
            ends.append(await runner.save("end"))
        assert_same_bits(ends[0], ends[1])
        found = [load_file(Path(one.path) / "weights.safetensors") for one in (ends[0], ends[2])]
        assert any(not torch.equal(found[0][name], found[1][name]) for name in found[0]), "moments count"
        for run_id in ("second", "third", "continued"):
            await trainer.stub.CloseRun(pb.CloseRunRequest(run_id=run_id))
        assert (await trainer.create("other", **begins, **other)).policy_version == 0
        await Runner(trainer, "other").step(make_samples(seed=7))
        restored = await trainer.create("second", **begins, **spec)
        assert (restored.applied_seq_id, restored.policy_version) == (second.applied, 1)


async def test_a_fresh_optimizer_needs_a_state(folder: Path, serve_trainer: Any) -> None:
    async with serve_trainer() as trainer:
        asked = trainer.create(base_model=str(folder), fresh_optimizer=True)
        error = await trainer.refused(asked, "INVALID_CONFIG")
        assert error.metadata["key"] == "fresh_optimizer"
        assert "without initial_state every optimizer is fresh; leave it out" in error.message


async def test_what_it_cannot_begin_with_is_refused(
    folder: Path, serve_trainer: Any, make_samples: Any, tmp_path: Path
) -> None:
    async with serve_trainer() as trainer:
        await trainer.create("first", base_model=str(folder))
        first = Runner(trainer, "first")
        await first.step(make_samples())
        path = (await first.save("there")).path

        async def refused(reason: str, **spec: Any) -> Any:
            spec = {"base_model": str(folder), "initial_state": path, **spec}
            return await trainer.refused(trainer.create("second", **spec), reason)

        gone = await refused("INVALID_CONFIG", initial_state=str(folder))
        assert gone.metadata["key"] == "initial_state" and "there is no complete state" in gone.message
        unnamed = await refused("INVALID_CONFIG", initial_state="x" * 5000)
        assert unnamed.metadata["key"] == "initial_state" and "name too long" in unnamed.metadata["remedy"]
        # Cannot be read, whoever runs the tests.
        other = tmp_path / "other@3"
        shutil.copytree(path, other)
        (other / "weights.safetensors").unlink()
        (other / "weights.safetensors").symlink_to("elsewhere")
        unreadable = await refused("INVALID_CONFIG", initial_state=str(other))
        assert f"this user cannot read {other / 'weights.safetensors'}" in unreadable.message
        assert "leave one of them out" in (await refused("INVALID_CONFIG", from_scratch=True)).message
        sgd = await refused("INVALID_CONFIG", kind=pb.OPTIMIZER_KIND_SGD)
        assert "its moments are those of adamw, and the run has sgd" in sgd.message
        adapter = await refused("INVALID_CONFIG", lora=pb.LoraSpec(rank=2, alpha=2.0))
        assert "it is of the whole model, and the run trains an adapter; train the whole" in adapter.message
        (Path(path) / "run.json").write_text("{}")
        assert "is harmed" in (await refused("CHECKSUM_MISMATCH")).message
        created = await trainer.create("second", base_model=str(folder))
        assert (created.applied_seq_id, created.policy_version) == (0, 0), "none of it is left"
        check = pb.CheckRunRequest(spec=pb.RunSpec(base_model=str(folder), initial_state="/nowhere"))
        check.spec.optimizer.learning_rate = 1e-3
        assert "/nowhere" in (await trainer.refused(trainer.stub.CheckRun(check), "INVALID_CONFIG")).message


async def test_an_adapter_is_scaled_as_it_was(folder: Path, serve_trainer: Any, make_samples: Any) -> None:
    """beginning.py 5: its matrices would fit any alpha, and be another adapter; what differs is told."""
    async with serve_trainer() as trainer:
        lora = {"rank": 3, "alpha": 5.0}
        await trainer.create("first", base_model=str(folder), lora=pb.LoraSpec(**lora))
        first = Runner(trainer, "first")
        await first.step(make_samples())
        path = (await first.save("there")).path
        begins = {"base_model": str(folder), "initial_state": path}
        for key, other, held in (
            ("alpha", 6.0, "5.0"),
            ("rslora", True, "False"),
            ("rank", 4, "3"),
            ("modules_to_save", ["o_proj"], "[]"),
        ):
            merged = {"publish_merged": key == "modules_to_save"}
            created = trainer.create("second", lora=pb.LoraSpec(**(lora | merged | {key: other})), **begins)
            error = await trainer.refused(created, "INVALID_CONFIG")
            assert error.metadata["key"] == f"lora.{key}" and f"has {held}; set that" in error.message
        narrow = pb.LoraSpec(**lora, target_modules=["q_proj"])
        error = await trainer.refused(trainer.create("second", lora=narrow, **begins), "CHECKSUM_MISMATCH")
        assert "An adapter's target_modules have to be those of the state" in error.message
        await trainer.create("second", lora=pb.LoraSpec(**lora), **begins)
