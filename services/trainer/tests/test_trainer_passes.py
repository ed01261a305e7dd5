"""Passes over samples: what scoring leaves alone, and what is heard of a long one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from quartet.errors import QuartetError
from quartet.v1 import trainer_service_pb2 as pb
from quartet.weights.store import WeightStore
from quartet_trainer import passes, run
from quartet_trainer.bases import Bases
from quartet_trainer.logprobs import PolicyForward
from quartet_trainer.loss import token_losses
from quartet_trainer.machine import Machine
from quartet_trainer.model import load_model
from quartet_trainer.passes import Passes
from quartet_trainer.sample import Sample, make_sample
from quartet_trainer.spec import LoraSpec, OptimizerSpec, ReferenceSpec, RunSpec

CPU = torch.device("cpu")


def passes_over(model: Any, budget: int, heard: list[int]) -> Passes:
    machine = Machine(CPU, budget, 256, False)
    return Passes(PolicyForward(model, CPU, None), machine, budget, lambda: heard.append(1))


def samples() -> list[Sample]:
    return [
        make_sample(i, [(7 * i + 3 * t) % 96 for t in range(10 + i)], [(4, 6 + i, 0)], [], [])
        for i in range(5)
    ]


def test_promise_2_scoring_other_weights_touches_neither_model_nor_gradients(folder: Path) -> None:
    model = load_model(folder, "m", device=CPU)
    other = load_model(folder, "m", device=CPU, seed=3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    before = {name: (one.detach().clone(), one.grad) for name, one in model.named_parameters()}
    scored = passes_over(model, 1000, []).score(samples(), dict(other.named_parameters()), 1.0)
    expected = passes_over(other, 1000, []).score(samples(), None, 1.0)
    live = passes_over(model, 1000, []).score(samples(), None, 1.0)
    for ours, theirs, mine in zip(scored, expected, live, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert np.abs(ours - mine).max() > 0.1
    for name, one in model.named_parameters():
        assert torch.equal(one, before[name][0]) and one.grad is before[name][1]


def test_a_sample_may_reach_the_last_position_that_the_model_has(tmp_path: Path) -> None:
    """packing.py 5: no row is padded beyond it, where a model of learned positions has none."""
    config = transformers.GPT2Config(
        vocab_size=96, n_positions=300, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = load_model(tmp_path, "m", device=CPU)
    longest = make_sample(0, [t % 96 for t in range(300)], [(4, 296, 0)], [], [])
    (found,) = passes_over(model, 1000, []).score([longest], None, 1.0)
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(longest.tokens_T)[None]).logits[0]
    logp = torch.log_softmax(logits, -1)[np.arange(3, 299), longest.tokens_T[4:]]
    np.testing.assert_allclose(found, logp.numpy(), atol=1e-5)


def test_promise_3_progress_is_heard_after_every_micro_batch(folder: Path) -> None:
    model = load_model(folder, "m", device=CPU)
    for budget, micro_batches in ((1, 5), (1000, 1)):
        heard: list[int] = []
        passes_over(model, budget, heard).score(samples(), None, 1.0)
        assert len(heard) == micro_batches


@pytest.mark.parametrize(("asked", "micro_batches"), [(1, 5), (0, 1)])
def test_a_run_says_how_large_its_micro_batches_are(folder: Path, asked: int, micro_batches: int) -> None:
    """Or leaves it to the trainer."""
    heard: list[int] = []
    spec = RunSpec(
        base_model=str(folder), optimizer=OptimizerSpec(learning_rate=1e-2), microbatch_tokens=asked
    )
    machine = Machine(CPU, 1000, 256, False)
    made = run.Run("r", spec, machine, WeightStore(1), lambda: heard.append(1), Bases())
    heard.clear()
    made.forward(samples(), None, 1.0)
    assert len(heard) == micro_batches


def test_a_run_that_cannot_be_made_takes_its_adapter_out_of_the_base(folder: Path) -> None:
    """policy.py 1: whoever trains another one on it would carry it along."""
    spec = RunSpec(
        base_model=str(folder),
        optimizer=OptimizerSpec(learning_rate=1e-2),
        lora=LoraSpec(rank=2, alpha=4.0),
    )
    machine, store, bases = Machine(CPU, 1000, 256, False), WeightStore(1), Bases()
    beside = run.Run("beside", spec, machine, store, lambda: None, bases)
    taught = spec.model_copy(update={"reference": ReferenceSpec(model=str(folder / "nowhere"))})
    with pytest.raises(QuartetError, match=r"reference\.model"):
        run.Run("r", taught, machine, store, lambda: None, bases)
    beside.forward(samples(), None, 1.0)
    adapters = {name.split(".lora_A.")[1] for name, _ in beside._model.named_parameters() if "lora_A" in name}
    assert adapters == {"adapter0.weight"}


async def test_a_batch_beyond_the_memory_leaves_the_run_as_it_was(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker promise 4, Gradients promise 1, run.py 1: sent again when there is room, it is applied whole."""
    losses: list[torch.Tensor] = []

    def beyond_the_memory(*arguments: Any) -> torch.Tensor:
        losses.append(token_losses(*arguments))
        return losses[-1] if len(losses) == 1 else torch.empty(2**50)

    norms = []
    for fails in (True, False):
        async with serve_trainer(microbatch_tokens=16) as trainer:
            await trainer.create(str(fails), base_model=str(folder))
            if fails:
                with monkeypatch.context() as patched:
                    patched.setattr(passes, "token_losses", beyond_the_memory)
                    first = trainer.forward_backward(1, make_samples(), run_id=str(fails))
                    error = await trainer.refused(first, "OVERLOADED")
                assert len(losses) == 2 and "microbatch_tokens" in error.message
            await trainer.forward_backward(1, make_samples(), run_id=str(fails))
            step = pb.OptimStepRequest(run_id=str(fails), seq_id=2)
            norms.append((await trainer.stub.OptimStep(step)).grad_norm)
    assert norms[0] == norms[1]


@pytest.mark.parametrize("dropout", [None, 0.5])
async def test_a_batch_whose_verification_fails_was_not_applied(
    folder: Path,
    serve_trainer: Any,
    make_samples: Any,
    monkeypatch: pytest.MonkeyPatch,
    dropout: float | None,
) -> None:
    """Invariant 2, Sequence promise 3 and Gradients promise 1: sent again, its gradients count once."""
    plain, norms = run.verify, []

    def beyond_the_memory(*arguments: Any) -> Any:
        monkeypatch.setattr(run, "verify", plain)
        return torch.empty(2**50)

    lora = None if dropout is None else pb.LoraSpec(rank=4, alpha=8.0, dropout=dropout)
    for fails in (True, False):
        async with serve_trainer() as trainer:
            name = f"{fails}"
            await trainer.create(name, base_model=str(folder), lora=lora)
            await trainer.stub.PublishWeights(pb.PublishWeightsRequest(run_id=name, seq_id=1))

            async def batch(name: str = name, trainer: Any = trainer) -> Any:
                return await trainer.forward_backward(2, make_samples(), run_id=name, verify_logprobs=True)

            if fails:
                monkeypatch.setattr(run, "verify", beyond_the_memory)
                await trainer.refused(batch(), "OVERLOADED")
            done = await batch()
            assert done.verification.tokens_compared
            step = pb.OptimStepRequest(run_id=name, seq_id=3)
            norms.append((done.loss, (await trainer.stub.OptimStep(step)).grad_norm))
    assert norms[0] == norms[1]


@pytest.mark.parametrize(
    "kind",
    [pb.OPTIMIZER_KIND_ADAMW, pb.OPTIMIZER_KIND_MUON, pb.OPTIMIZER_KIND_SGD],
    ids=["adamw", "muon", "sgd"],
)
async def test_a_step_that_fails_half_way_leaves_no_mixture(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    """Invariant 2 and Roster promise 4: the run is closed, and goes on from its state as if never tried."""
    plain, digests = run.Optimizer.step, []

    def half(optimizer: Any, *arguments: Any) -> None:
        plain(optimizer, *arguments)  # all of it, which is the worst
        torch.empty(2**50)

    async with serve_trainer() as trainer:
        for fails in (True, False):
            name = f"{fails}"
            await trainer.create(name, base_model=str(folder), kind=kind)

            async def call(method: str, seq_id: int, run_id: str = name, **more: Any) -> Any:
                request = getattr(pb, f"{method}Request")(run_id=run_id, seq_id=seq_id, **more)
                return await getattr(trainer.stub, method)(request)

            await call("SaveState", 1, name="begun")
            await trainer.forward_backward(2, make_samples(), run_id=name)
            if fails:
                with monkeypatch.context() as patched:
                    patched.setattr(run.Optimizer, "step", half)
                    await trainer.refused(call("OptimStep", 3), "OVERLOADED")
                await trainer.refused(call("OptimStep", 3), "RUN_UNKNOWN")
                assert (await trainer.create(name, base_model=str(folder), kind=kind)).applied_seq_id == 1
                await trainer.forward_backward(2, make_samples(), run_id=name)
            await call("OptimStep", 3)
            digests.append((await call("PublishWeights", 4)).digest)
    assert digests[0] == digests[1]
