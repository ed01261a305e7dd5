"""States of two ranks and of one process: each goes on from the other's, and from its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from quartet.v1 import trainer_service_pb2 as pb
from quartet.weights.fetch import fetch_version
from quartet_trainer.export import export
from safetensors.torch import load_file, save_file

from .ranked import Ranked

SPECS = {
    "whole": {"max_grad_norm": 1.0, "retain_versions": 2, "reference": pb.ReferenceSpec(sync_steps=2)},
    "adapter": {"lora": pb.LoraSpec(rank=4, alpha=8.0), "retain_versions": 2},
    "merged": {"lora": pb.LoraSpec(rank=4, alpha=8.0, publish_merged=True), "retain_versions": 2},
}
#: Later calls of a run, after the state at call 7.
SAVED_AT = 7
#: Optimizer steps on a batch: the state is taken in the middle of the first one.
STEPS_OF_BATCH = 3


class Running:
    """One run of a trainer, by name."""

    def __init__(
        self, trainer: Any, run_id: str, folder: Path, spec: dict[str, Any], *, proximal: bool = False
    ) -> None:
        self.trainer, self.run_id, self._proximal = trainer, run_id, proximal
        self._spec = {"base_model": str(folder), "learning_rate": 1e-4, **spec}

    async def create(self) -> Any:
        return await self.trainer.create(self.run_id, **self._spec)

    async def step(self, seq_id: int, samples: Any, loss: pb.LossSpec | None = None) -> Any:
        """Three calls: (loss, digest of what was published)."""
        stub, run_id = self.trainer.stub, self.run_id
        done = await self.trainer.forward_backward(seq_id, samples, run_id, loss=loss, verify_logprobs=True)
        await stub.OptimStep(pb.OptimStepRequest(run_id=run_id, seq_id=seq_id + 1))
        published = await stub.PublishWeights(pb.PublishWeightsRequest(run_id=run_id, seq_id=seq_id + 2))
        return done.loss, published.digest, done.verification

    def _loss(self, step: int) -> pb.LossSpec | None:
        """Of an optimizer step, from 0."""
        batch, number = divmod(step, STEPS_OF_BATCH)
        if not self._proximal:
            return None
        return pb.LossSpec(
            kind=pb.LOSS_KIND_POLICY_GRADIENT,
            ratio=pb.RATIO_TREATMENT_PPO,
            proximal_version=STEPS_OF_BATCH * batch,
            proximal_returns=number + 1 < STEPS_OF_BATCH,
        )

    async def save(self, seq_id: int, name: str = "a", export: bool = False) -> Any:
        request = pb.SaveStateRequest(run_id=self.run_id, seq_id=seq_id, name=name, export_model=export)
        return (await self.trainer.stub.SaveState(request)).state

    async def load(self, seq_id: int, name: str = "a") -> Any:
        request = pb.LoadStateRequest(run_id=self.run_id, seq_id=seq_id, name=name)
        return (await self.trainer.stub.LoadState(request)).run

    async def upto_saved(self, make_samples: Any) -> Any:
        """Two steps, half a third one, a state."""
        await self.create()
        for number in range(2):
            samples = make_samples(seed=number, version=number)
            await self.step(3 * number + 1, samples, self._loss(number))
        assert (await self.save(SAVED_AT)).seq_id == SAVED_AT

    async def after_saved(self, make_samples: Any) -> Any:
        return [
            await self.step(SAVED_AT + 1 + 3 * n, make_samples(seed=9 + n, version=1 + n), self._loss(2 + n))
            for n in range(2)
        ]


def near(one: Any, other: Any) -> None:
    for (loss, _, seen), (loss2, _, seen2) in zip(one, other, strict=True):
        assert abs(loss - loss2) <= 1e-5 * max(1.0, abs(loss))
        assert (seen.tokens_compared, seen.tokens_skipped) == (seen2.tokens_compared, seen2.tokens_skipped)
        assert abs(seen.max_difference - seen2.max_difference) < 1e-4
    assert any(seen.tokens_compared for _, _, seen in one)


@pytest.mark.parametrize("kind", list(SPECS))
async def test_states_go_from_ranks_to_one_process_and_back(
    serve_trainer: Callable[..., Any],
    call_ranks: Callable[..., Any],
    folder: Path,
    tmp_path: Path,
    make_samples: Any,
    kind: str,
) -> None:
    there, here = f"{kind}-there", f"{kind}-here"
    async with call_ranks() as group:
        run = Running(group, there, folder, SPECS[kind], proximal=True)
        await run.upto_saved(make_samples)
        copied = shutil.copytree(group.state_dir / there, tmp_path / "states" / there)
        straight = await run.after_saved(make_samples)
        # Returning to it in the same group gives the same bits.
        assert (await run.load(SAVED_AT + 7)).applied_seq_id == SAVED_AT
        again = await run.after_saved(make_samples)
        assert [one[:2] for one in again] == [one[:2] for one in straight]
        if kind != "adapter":
            assert sorted(copied.glob("*/*/shard-*.safetensors")), "each rank wrote its part"
            harmed = min(group.state_dir.glob(f"{there}/*/*/shard-00002-*"))
            harmed.write_bytes(harmed.read_bytes() + b"?")
            error = await group.refused(run.load(SAVED_AT + 7), "CHECKSUM_MISMATCH")
            assert error.metadata["what"] == str(harmed), "as the second rank found it"
    async with serve_trainer() as alone:
        run = Running(alone, there, folder, SPECS[kind], proximal=True)
        assert (await run.create()).applied_seq_id == SAVED_AT
        near(await run.after_saved(make_samples), straight)
        run = Running(alone, here, folder, SPECS[kind], proximal=True)
        await run.upto_saved(make_samples)
        straight = await run.after_saved(make_samples)
        states = alone.state_dir
    async with call_ranks() as group:
        shutil.copytree(states / here, group.state_dir / here)
        run = Running(group, here, folder, SPECS[kind], proximal=True)
        assert (await run.create()).applied_seq_id == SAVED_AT
        near(await run.after_saved(make_samples), straight)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


async def test_ranks_export_a_folder_that_loads(
    call_ranks: Callable[..., Any], folder: Path, make_samples: Any, tmp_path: Path
) -> None:
    async with call_ranks() as group:
        run = Running(group, "exported", folder, {"learning_rate": 1e-2})
        await run.create()
        samples = make_samples(groups=1)
        await run.step(1, samples)
        saved = await run.save(4, export=True)
        frames = group.frames(pb.ForwardRequest, pb.ForwardStart(run_id="exported"), samples)
        live = [list(one.logprobs) async for one in group.stub.Forward(frames)]
    model = transformers.AutoModelForCausalLM.from_pretrained(saved.model_path, dtype=torch.float32).eval()
    for one, logprobs in zip(samples, live, strict=True):
        ids = torch.tensor([list(one.sample.token_ids)])
        with torch.no_grad():
            logp = torch.log_softmax(model(ids).logits[0], -1)
        start = one.sample.spans[0].start
        plain = logp[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
        assert torch.allclose(plain, torch.tensor(logprobs), atol=1e-5)
    # One process reads what the ranks wrote in parts.
    export(Path(saved.path), tmp_path / "model")
    assert contents(tmp_path / "model") == contents(Path(saved.model_path))


async def test_a_run_of_ranks_begins_with_an_adapter_that_the_first_alone_can_read(
    two_ranks: Ranked,
    serve_trainer: Callable[..., Any],
    call_ranks: Callable[..., Any],
    folder: Path,
    make_samples: Any,
) -> None:
    """initial_adapter.py 1, 2: as one process does, in every rank; one that does not fit none takes."""
    shape = {"rank": 4, "alpha": 8.0}
    async with call_ranks() as group, serve_trainer() as alone:
        made = Running(alone, "adapted-made", folder, {"lora": pb.LoraSpec(**shape), "learning_rate": 1e-2})
        await made.create()
        for number in range(3):
            await made.step(1 + 3 * number, make_samples(seed=number, version=number))
        begins = Path((await made.save(10, export=True)).model_path) / "adapter"
        # As a folder on the first of several machines.
        first_only = f"/proc/self/task/{two_ranks.rank_pid(0)}/root{begins}"
        found: list[list[tuple[float, bytes]]] = []
        for trainer, place in ((alone, str(begins)), (group, first_only)):
            narrow = pb.LoraSpec(**shape, target_modules=["q_proj"], initial_adapter=place)
            refused = trainer.create("adapted-begun", base_model=str(folder), lora=narrow)
            error = await trainer.refused(refused, "INVALID_CONFIG")
            assert error.metadata["key"] == "lora.target_modules"
            lora = pb.LoraSpec(**shape, initial_adapter=place)
            begun = Running(trainer, "adapted-begun", folder, {"lora": lora})
            assert (await begun.create()).policy_version == 0
            version = pb.PublishWeightsRequest(run_id="adapted-begun", seq_id=1)
            digest = (await trainer.stub.PublishWeights(version)).digest
            steps = [await begun.step(2 + 3 * n, make_samples(seed=3 + n, version=n)) for n in range(2)]
            found.append([(loss, digest) for loss, _, _ in steps])
    for (ours, ours_begin), (theirs, theirs_begin) in zip(*found, strict=True):
        assert abs(ours - theirs) <= 1e-5 * max(1.0, abs(ours))
        assert ours_begin == theirs_begin


async def test_copies_of_a_base_that_is_shared_out_are_left_out(
    call_ranks: Callable[..., Any], untied: Path, tmp_path: Path
) -> None:
    """initial_adapter.py 4: no rank has all of the head, of which the adapter has a copy."""
    shape: dict[str, Any] = {"target_modules": ["q_proj", "lm_head"]}
    begins, copy = tmp_path / "adapter", "base_model.model.lm_head.base_layer.weight"
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, init_lora_weights=False, **shape)
    model = transformers.AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float32)
    peft.get_peft_model(model, config).save_pretrained(begins)
    file = begins / "adapter_model.safetensors"
    held = load_file(file)
    lora = pb.LoraSpec(rank=4, alpha=8.0, **shape, initial_adapter=str(begins))
    async with call_ranks() as group:
        run = Running(group, "copied", untied, {"lora": lora})
        assert (await run.create()).policy_version == 0
        version = pb.PublishWeightsRequest(run_id="copied", seq_id=1)
        await group.stub.PublishWeights(version)
        fetched = await fetch_version(group.channel, "copied", 0)
        assert fetched.tensors.keys() == held.keys() - {copy}
        changed = held[copy].clone()
        changed[-1, -1] += 1.0  # in the last rank's part
        save_file({**held, copy: changed}, file)
        refused = group.create("other", base_model=str(untied), lora=lora)
        error = await group.refused(refused, "INVALID_CONFIG")
        assert f"its {copy} has other values than base_model" in error.message
        await group.stub.CloseRun(pb.CloseRunRequest(run_id="copied"))


@pytest.mark.parametrize("kind", ["whole", "adapter"])
async def test_a_run_of_ranks_begins_with_a_state_of_one_process_and_the_other_way_round(
    serve_trainer: Callable[..., Any],
    call_ranks: Callable[..., Any],
    folder: Path,
    make_samples: Any,
    kind: str,
) -> None:
    spec = {name: value for name, value in SPECS[kind].items() if name != "reference"}

    async def goes_on_and_begins(there: Any, here: Any) -> None:
        first = Running(there, f"{kind}-first", folder, spec)
        await first.upto_saved(make_samples)
        straight = await first.after_saved(make_samples)
        state = there.state_dir / f"{kind}-first" / f"a@{SAVED_AT}"
        begun = Running(here, f"{kind}-begun", folder, {**spec, "initial_state": str(state)})
        assert (await begun.create()).policy_version == 0
        for number, (loss, _, _) in enumerate(straight):
            samples = make_samples(seed=9 + number, version=number)
            ours, _, _ = await begun.step(1 + 3 * number, samples)
            assert abs(ours - loss) <= 1e-5 * max(1.0, abs(loss)), number
        await begun.trainer.stub.CloseRun(pb.CloseRunRequest(run_id=begun.run_id))
        await there.stub.CloseRun(pb.CloseRunRequest(run_id=first.run_id))

    async with call_ranks() as group, serve_trainer() as alone:
        await goes_on_and_begins(alone, group)
        await goes_on_and_begins(group, alone)
