"""Ranks that share sequences compute what one process computes, or say why they cannot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from hypothesis import given, settings
from hypothesis import strategies as st
from quartet.errors import QuartetError
from quartet.v1 import rollout_pb2
from quartet.v1 import trainer_service_pb2 as pb
from quartet_trainer.packing import PADDING, pack
from quartet_trainer.placement import _shared_logprobs
from quartet_trainer.ranks.columns import columns_of
from quartet_trainer.ranks.context import Context

from .ranked import CONFIG, Ranked, alive, by_torchrun, calling, running
from .test_ranks_equal import TOLERANCE, trained
from .test_trainer_packing import ragged
from .test_trainer_replay import told

VOCAB, POSITIONS, STEPS = 96, 64, 4
#: A group ends within this. On a machine that is shared.
DEATH_SECONDS = 10.0
TINY: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **EXPERTS}
SHARED = {
    # A key head for each rank; one for both is the model of the other tests.
    "grouped": t.LlamaConfig(**TINY),
    "windowed": t.MistralConfig(**TINY, sliding_window=5),
    "some-windowed": t.Gemma3TextConfig(
        **TINY, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
    ),
    "experts": t.Qwen3MoeConfig(**TINY, **EXPERTS),
    # Heads whose keys are longer than their values.
    "latent": t.DeepseekV3Config(**{**TINY, **LATENT, **ROUTED, "head_dim": 8, "num_key_value_heads": 4}),
    "learned-positions": t.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS
    ),
}  # fmt: skip
REFUSED = {
    "the 3 heads of": t.Qwen3Config(**{**TINY, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "computes attention in code of its own": t.Gemma2Config(**TINY),
    "has layers that go through a sequence": t.Qwen3NextConfig(
        **TINY, **EXPERTS, linear_num_key_heads=2, linear_num_value_heads=2
    ),
}
#: The ratio of a whole answer: every rank needs what the other computed. With entropy, of all and of
#: those that are learned from, and a reference.
WHOLE_ANSWERS = pb.LossSpec(
    kind=pb.LOSS_KIND_POLICY_GRADIENT,
    ratio_level=pb.RATIO_LEVEL_SEQUENCE,
    temperature=1.0,
    entropy_coef=0.1,
    top_entropy_quantile=0.6,
    kl_coef=0.5,
    kl_estimator=pb.KL_ESTIMATOR_K3,
)
SPEC = {"learning_rate": 1e-4, "max_grad_norm": 1.0}


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranked]:
    """Two ranks that have halves of each sequence, as the key `ranks` starts them."""
    config = {**CONFIG, "max-runs": 32, "ranks": 2, "context-parallel": 2}
    with running(tmp_path_factory.mktemp("ranks"), ["-m", "quartet_trainer"], **config) as group:
        yield group


def written(config: Any, folder: Path) -> str:
    """A checkpoint of random weights."""
    torch.manual_seed(3)
    t.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


async def compare(
    alone: Any, group: Any, make_samples: Any, run_id: str, loss: Any = None, **spec: Any
) -> None:
    """Losses, norms and weights after some steps, and log-probabilities, in one process and in ranks."""
    seen, weights = await trained(alone, run_id, make_samples, STEPS, loss, **spec)
    seen2, weights2 = await trained(group, run_id, make_samples, STEPS, loss, **spec)
    apart = max(float(np.abs(weights[key] - weights2[key]).max()) for key in weights)
    samples = make_samples(seed=99)
    (one, two) = [await trainer.forward(samples, run_id=run_id) for trainer in (alone, group)]
    of_tokens = float(np.abs(np.concatenate(one) - np.concatenate(two)).max())
    print(f"{run_id}: weights apart {apart:.2g}, log-probabilities {of_tokens:.2g}")
    assert weights.keys() == weights2.keys()
    assert apart <= TOLERANCE
    assert of_tokens <= 10 * TOLERANCE
    assert (np.abs(seen - seen2).max(0) <= 10 * TOLERANCE * np.abs(seen).max(0)).all()


@pytest.mark.parametrize(
    ("name", "loss", "spec"),
    [
        ("adamw", None, SPEC),
        ("sgd", None, {**SPEC, "kind": pb.OPTIMIZER_KIND_SGD, "weight_decay": 0.1}),
        ("recomputed", None, {**SPEC, "gradient_checkpointing": True}),
        ("small-batches", None, {**SPEC, "microbatch_tokens": 24}),
        ("lora", None, {**SPEC, "lora": pb.LoraSpec(rank=4, alpha=8.0)}),
        ("whole-answers", WHOLE_ANSWERS, {**SPEC, "reference": pb.ReferenceSpec()}),
    ],
)
async def test_shared_sequences_equal_one_process(
    serve_trainer: Callable[..., Any],
    sharing: Ranked,
    folder: Path,
    make_samples: Any,
    name: str,
    loss: pb.LossSpec | None,
    spec: dict[str, Any],
) -> None:
    async with serve_trainer() as alone, calling(sharing) as group:
        await compare(alone, group, make_samples, name, loss, base_model=str(folder), **spec)


@pytest.mark.parametrize("kind", list(SHARED))
async def test_models_of_other_families_are_shared(
    serve_trainer: Callable[..., Any], sharing: Ranked, make_samples: Any, tmp_path: Path, kind: str
) -> None:
    model = written(SHARED[kind], tmp_path / "model")
    async with serve_trainer() as alone, calling(sharing) as group:
        await compare(alone, group, make_samples, kind, base_model=model, **SPEC)


@pytest.mark.parametrize("why", list(REFUSED))
async def test_a_model_that_ranks_cannot_share_is_refused(
    sharing: Ranked, tmp_path_factory: pytest.TempPathFactory, why: str
) -> None:
    # Not the test's own folder, which goes with it: the first rank refuses, and the other may still read.
    model = written(REFUSED[why], tmp_path_factory.mktemp("refused") / "model")
    async with calling(sharing) as group:
        error = await group.refused(group.create("refused", base_model=model), "INVALID_CONFIG")
        assert why in error.message
        assert error.message.endswith("set the trainer's context_parallel = 1")


def alone_in_its_row(tokens: int, seed: int = 5) -> list[pb.TrainingSample]:
    """A sample that is learned but for its first token."""
    rng = np.random.default_rng(seed)
    ids, span = rng.integers(0, VOCAB, tokens).tolist(), rollout_pb2.PolicySpan(start=1, length=tokens - 1)
    sample = rollout_pb2.Sample(token_ids=ids, spans=[span], logprobs=[-3.0] * (tokens - 1))
    return [pb.TrainingSample(sample=sample, advantages=[1.0])]


async def test_a_row_as_long_as_the_model_allows(
    serve_trainer: Callable[..., Any], sharing: Ranked, folder: Path
) -> None:
    """127 of 128 positions: with padding for two ranks there is no position left for what fills it up."""
    samples, found = alone_in_its_row(127), []
    async with serve_trainer() as alone, calling(sharing) as group:
        for trainer in (alone, group):
            await trainer.create("long", base_model=str(folder), **SPEC)
            found.append(np.concatenate(await trainer.forward(samples, run_id="long")))
    assert len(found[0]) == 126
    assert np.abs(found[0] - found[1]).max() <= 10 * TOLERANCE


@pytest.mark.parametrize("kind", ["windowed", "some-windowed"])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
async def test_windows_of_rows_of_one_sample(
    serve_trainer: Callable[..., Any], sharing: Ranked, tmp_path: Path, kind: str, compute_dtype: str
) -> None:
    """They are seen without a mask of segments. In bfloat16 what attends is another function."""
    model, run_id = written(SHARED[kind], tmp_path / "model"), f"{kind}-{compute_dtype}"
    spec = {**SPEC, "base_model": model, "compute_dtype": compute_dtype}
    found = []
    async with serve_trainer() as alone, calling(sharing) as group:
        for trainer in (alone, group):
            await trainer.create(run_id, **spec)
            done = await trainer.forward_backward(1, alone_in_its_row(61), run_id)
            step = await trainer.stub.OptimStep(pb.OptimStepRequest(run_id=run_id, seq_id=2))
            found.append((done.loss, step.grad_norm))
    # A window of another width moves both by a tenth and more.
    apart = 1e-5 if compute_dtype == "float32" else 0.03
    assert found[0] == pytest.approx(found[1], rel=apart)


def test_what_one_rank_alone_suffers_refuses_no_model() -> None:
    """Ranks would be out of step: whatever is not of the model ends them (ranks/lead.py 2)."""

    def raising(error: Exception) -> Callable[[], torch.Tensor]:
        def logprobs() -> torch.Tensor:
            raise error

        return logprobs

    for error in (torch.OutOfMemoryError("full"), RuntimeError("Connection reset by peer")):
        with pytest.raises(type(error)):
            _shared_logprobs(raising(error), "m")
    with pytest.raises(QuartetError, match=r"3 heads; set the trainer's context_parallel = 1"):
        _shared_logprobs(raising(ValueError("2 ranks cannot share 3 heads")), "m")


async def test_narrow_products_are_exchanged_as_they_are(
    serve_trainer: Callable[..., Any], sharing: Ranked, folder: Path, make_samples: Any
) -> None:
    async with serve_trainer() as alone, calling(sharing) as group:
        found = []
        for trainer in (alone, group):
            await trainer.create("bf16", base_model=str(folder), compute_dtype="bfloat16", **SPEC)
            found.append(np.concatenate(await trainer.forward(make_samples(seed=7), run_id="bf16")))
    assert np.abs(found[0] - found[1]).max() <= 0.05 * np.abs(found[0]).max()


async def test_metrics_of_ones_own_are_counted_once(
    serve_trainer: Callable[..., Any], sharing: Ranked, folder: Path, make_samples: Any
) -> None:
    """And so are the choices of a mixture's routers, of which each rank sees its own tokens."""
    async with calling(sharing) as group:
        await group.create("own", base_model=str(folder), **SPEC)
        samples = make_samples(seed=3)
        loss = pb.LossSpec(kind=pb.LOSS_KIND_CUSTOM, custom="picky")
        done = await group.forward_backward(1, samples, "own", loss=loss)
    covered = [len(one.sample.logprobs) for one in samples]
    mean = sum(one.advantages[0] * count for one, count in zip(samples, covered, strict=True)) / sum(covered)
    assert done.loss_tokens == sum(covered)
    assert done.diagnostics["advantage"] == pytest.approx(mean, rel=1e-5)


async def test_routers_of_a_shared_sequence(
    serve_trainer: Callable[..., Any], sharing: Ranked, make_samples: Any, tmp_path: Path
) -> None:
    """What they did is counted as in one process, and told experts are taken."""
    model, rng = written(SHARED["experts"], tmp_path / "model"), np.random.default_rng(0)
    samples = make_samples(seed=3)
    for at in range(0, len(samples), 2):
        tokens = len(samples[at].sample.token_ids) - 1
        chosen = np.stack([rng.permutation(4)[:2] for _ in range(tokens * 2)]).astype(np.uint8)
        samples[at] = told(samples[at], chosen.reshape(tokens, 2, 2))
    found = []
    async with serve_trainer() as alone, calling(sharing) as group:
        for trainer in (alone, group):
            await trainer.create("routed", base_model=model, **SPEC)
            done = await trainer.forward_backward(1, samples, "routed")
            found.append(
                (done.loss, {k: v for k, v in done.diagnostics.items() if k.startswith(("router", "repl"))})
            )
    assert found[0][1]["replayed_fraction"] > 0.2
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-5)
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)


def test_a_rank_that_dies_is_no_good_end(sharing: Ranked) -> None:
    """agent.py 1 and 3; the last one that needs them."""
    sharing.wait_served()
    os.kill(sharing.rank_pid(1), signal.SIGKILL)
    assert sharing.process.wait(DEATH_SECONDS) == 1


async def test_four_ranks_in_two_contexts(
    serve_trainer: Callable[..., Any], tmp_path: Path, folder: Path, make_samples: Any
) -> None:
    """And a signal to torchrun, as it was started by hand, ends all of them well."""
    config = {**CONFIG, "context-parallel": 2}
    with running(tmp_path / "ranks", by_torchrun(4), **config) as ranks:
        async with serve_trainer() as alone, calling(ranks) as group:
            await compare(alone, group, make_samples, "four", base_model=str(folder), **SPEC)
        pids = [ranks.rank_pid(rank) for rank in range(4)]
    said = ranks.log.read_text()
    assert "rank_ended" not in said and '"event": "stopped"' in said
    assert not alive(pids)


BY_TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0"}


@pytest.mark.parametrize(
    ("environment", "keys", "refusal"),
    [
        ({}, ["--ranks", "3"], "does not divide the 3 ranks"),
        ({**BY_TORCHRUN, "WORLD_SIZE": "3"}, [], "does not divide the 3 ranks"),
        ({**BY_TORCHRUN, "WORLD_SIZE": "1"}, [], "is for several ranks, and there is one"),
    ],
)
def test_ranks_that_cannot_share_are_refused_before_anything_large_is_imported(
    environment: dict[str, str], keys: list[str], refusal: str, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    words = ["-m", "quartet_trainer", *keys, "--context-parallel", "2", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, *words, "--state-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 2
    assert f"context_parallel = 2 {refusal}" in done.stderr


@pytest.mark.parametrize(
    ("ranks", "key_heads", "groups", "copies"), [(2, 4, 2, 0), (2, 1, 2, 2), (8, 4, 8, 2), (4, 2, 3, 3)]
)
def test_key_heads_are_sent_as_often_as_it_takes(
    ranks: int, key_heads: int, groups: int, copies: int
) -> None:
    assert Context(ranks, 0, None)._copies(key_heads, groups) == copies


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(2, 5))
def test_parts_of_a_micro_batch_are_all_of_it_once(seed: int, size: int) -> None:
    samples = ragged(seed)
    for batch in pack(samples, range(len(samples)), 300, 64):
        parts = [columns_of(batch, place, size) for place in range(size)]
        width = batch.token_ids_RL.shape[1]
        for field in ("token_ids_RL", "position_ids_RL", "segments_RL"):
            joined = np.concatenate([getattr(part, field) for part in parts], axis=1)
            assert (joined[:, :width] == getattr(batch, field)).all()
            if field == "token_ids_RL":  # a model may embed another token as zero
                assert (joined[:, width:] == joined[:, width - 1 : width]).all()
            if field == "segments_RL":
                assert (joined[:, width:] == PADDING).all() and (joined == parts[0].whole.segments_RW).all()
        assert len({part.token_ids_RL.shape for part in parts}) == 1
        seen = np.concatenate([part.whole.own_k for part in parts])
        assert sorted(seen.tolist()) == list(range(len(batch.targets_K)))
        for part in parts:
            own = part.whole.own_k
            assert (part.targets_K == batch.targets_K[own]).all()
            # The token that a predictor stands on is the same, here and there.
            assert (
                part.token_ids_RL.reshape(-1)[part.predictors_K]
                == batch.token_ids_RL.reshape(-1)[batch.predictors_K[own]]
            ).all()
