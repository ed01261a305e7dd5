"""Router replay: log-probabilities and gradients against the routers' formulas, written down again here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from quartet.v1 import rollout_pb2
from quartet.v1 import trainer_service_pb2 as pb
from quartet_trainer.packing import pack
from quartet_trainer.replay import Replay, Shape, _shape_of, replayed_share
from quartet_trainer.routing import routers_of
from quartet_trainer.sample import make_sample
from quartet_trainer.wire.sample import training_sample
from torch import Tensor

Make = Callable[..., Any]
VOCAB, EXPERTS, SLOTS = 96, 8, 2

PLAIN: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32, "num_experts_per_tok": SLOTS,
    "max_position_embeddings": 128, "initializer_range": 0.2, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": 2,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": EXPERTS, "moe_intermediate_size": 16, "norm_topk_prob": True, "num_hidden_layers": 3,
        "mlp_only_layers": [1],
    },
    "mixtral": {"num_local_experts": EXPERTS},
    "gpt_oss": {"num_local_experts": EXPERTS},
    "deepseek_v3": {
        "n_routed_experts": EXPERTS, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
        "n_group": 4, "topk_group": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 2, "routed_scaling_factor": 2.5,
    },
}  # fmt: skip
ROUTERS = {"qwen3_moe": 2, "mixtral": 2, "gpt_oss": 2, "deepseek_v3": 1}


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Small random models by kind."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            torch.manual_seed(3)
            config = transformers.AutoConfig.for_model(kind, **PLAIN | SETTINGS[kind])
            model = transformers.AutoModelForCausalLM.from_config(config)
            for module in model.modules():
                bias = getattr(module, "e_score_correction_bias", None)
                if bias is not None:
                    bias.uniform_(-0.2, 0.2)
            made[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[kind])
        return made[kind]

    return folder


def weights_by_formula(kind: str, router: Any, logits_TE: Tensor, chosen_Tk: Tensor) -> Tensor:
    """What the experts that take a token weigh."""
    if kind == "gpt_oss":
        return logits_TE.gather(1, chosen_Tk).softmax(-1)
    p_TE = logits_TE.sigmoid() if kind == "deepseek_v3" else logits_TE.softmax(-1)
    p_Tk = p_TE.gather(1, chosen_Tk)
    return p_Tk / p_Tk.sum(-1, keepdim=True) * getattr(router, "routed_scaling_factor", 1.0)


@contextmanager
def sent(kind: str, model: Any, experts_TNk: Tensor) -> Iterator[None]:
    """The model, whose routers send tokens there."""
    target = model.base_model._can_record_outputs["router_logits"].target_class
    routers = [module for module in model.modules() if isinstance(module, target)]
    for number, router in enumerate(routers):

        def forward(hidden: Tensor, router: Any = router, chosen: Tensor = experts_TNk[:, number]) -> Any:
            bias = getattr(router, "bias", None)
            logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight, bias)
            return logits, weights_by_formula(kind, router, logits, chosen), chosen

        router.forward = forward
    try:
        yield
    finally:
        for router in routers:
            del router.forward


def told(sample: pb.TrainingSample, experts_TNk: np.ndarray[Any, Any]) -> pb.TrainingSample:
    """The sample, with experts of its tokens but the last."""
    tokens, layers, slots = experts_TNk.shape
    width = experts_TNk.itemsize
    experts = rollout_pb2.RoutedExperts(
        layers=layers, slots=slots, width=width, numbers=experts_TNk.tobytes()
    )
    assert tokens == len(sample.sample.token_ids) - 1
    copy = pb.TrainingSample()
    copy.CopyFrom(sample)
    copy.sample.experts.CopyFrom(experts)
    return copy


def drawn(samples: list[pb.TrainingSample], layers: int, seed: int = 0) -> list[pb.TrainingSample]:
    """Samples with experts that no router would choose; those of a group's prompt are alike."""
    made = []
    for one in samples:
        start = one.sample.spans[0].start
        prompt = np.random.default_rng([seed, *one.sample.token_ids[:start]])
        tail = np.random.default_rng([seed, *one.sample.token_ids])
        rows = [
            [rng.choice(EXPERTS, SLOTS, replace=False) for _ in range(layers)]
            for rng in [prompt] * start + [tail] * (len(one.sample.token_ids) - 1 - start)
        ]
        made.append(told(one, np.array(rows, dtype=np.uint8)))
    return made


def experts_of(sample: pb.TrainingSample) -> Tensor:
    numbers = np.frombuffer(sample.sample.experts.numbers, np.uint8)
    shape = (-1, sample.sample.experts.layers, sample.sample.experts.slots)
    return torch.from_numpy(numbers.astype(np.int64).reshape(shape))


@pytest.mark.parametrize("kind", SETTINGS)
async def test_tokens_go_to_the_experts_that_are_told(
    serve_trainer: Make, make_samples: Make, mixtures: Make, kind: str
) -> None:
    """Guarantee 1 of replay.py: log-probabilities and the gradients' norm are those of the formulas, the
    routers' own gradients included; with shared prompts, padding, and samples that tell nothing beside."""
    samples = drawn(make_samples(groups=3, members=3), ROUTERS[kind])
    silent = make_samples(groups=1, members=2, seed=9)
    model = transformers.AutoModelForCausalLM.from_pretrained(mixtures(kind)).float()
    total = torch.zeros(())
    expected = []
    for one in samples:
        ids = torch.tensor([list(one.sample.token_ids)])
        with sent(kind, model, experts_of(one)):
            logp = torch.log_softmax(model(ids[:, :-1]).logits[0].float(), -1)
        start = one.sample.spans[0].start
        covered = logp[start - 1 :].gather(1, ids[0, start:, None])[:, 0]
        expected.append(covered.detach().numpy())
        total = total - one.advantages[0] * covered.sum()
    total.backward()
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None))
    routers = [
        p.grad.norm()
        for name, p in model.named_parameters()
        if name.endswith(("gate.weight", "router.weight"))
    ]
    assert len(routers) == ROUTERS[kind] and min(routers) > 0
    loss = pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT, ratio=pb.RATIO_TREATMENT_NONE)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(mixtures(kind)), max_grad_norm=1e9)
        plain = await trainer.forward(silent)
        found = await trainer.forward([*samples, *silent])
        done = await trainer.forward_backward(1, samples, loss=loss, normalizer=1.0)
        stepped = await trainer.optim_step(2)
    for ours, theirs in zip(found, [*expected, *plain], strict=True):
        assert np.abs(np.array(ours) - theirs).max() < 2e-5
    assert stepped.grad_norm == pytest.approx(float(norm), rel=2e-4)
    assert done.diagnostics["replayed_fraction"] == 1.0


async def test_what_is_told_of_the_first_tokens_is_replayed_there(
    serve_trainer: Make, make_samples: Make, mixtures: Make
) -> None:
    """Guarantee 1 of replay.py: behind them the routers choose."""
    (whole,) = drawn(make_samples(groups=1, members=1, seed=3), 2)
    start = whole.sample.spans[0].start
    covered = len(whole.sample.token_ids) - start
    assert covered > 2
    row = 2 * SLOTS
    cut = pb.TrainingSample()
    cut.CopyFrom(whole)
    cut.sample.experts.numbers = whole.sample.experts.numbers[: (start + 1) * row]
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(mixtures("qwen3_moe")))
        (some,), (everything,) = await trainer.forward([cut]), await trainer.forward([whole])
        done = await trainer.forward_backward(1, [cut])
    assert some[:2] == pytest.approx(everything[:2], abs=1e-6)
    assert np.abs(np.array(some[2:]) - everything[2:]).max() > 1e-3
    assert done.diagnostics["replayed_fraction"] == pytest.approx(2 / covered)


async def test_what_routers_choose_anyway_changes_no_bit(
    serve_trainer: Make, make_samples: Make, mixtures: Make
) -> None:
    """With layers computed anew in the backward pass, too."""
    model = transformers.AutoModelForCausalLM.from_pretrained(mixtures("qwen3_moe"))
    samples = make_samples(groups=3, members=3)
    chosen = []
    for one in samples:
        with torch.no_grad():
            logits = model(
                torch.tensor([list(one.sample.token_ids)[:-1]]), output_router_logits=True
            ).router_logits
        chosen.append(told(one, torch.stack(logits, 1).topk(SLOTS, -1).indices.numpy().astype(np.uint8)))
    steps = []
    for number, (batch, recompute) in enumerate([(samples, False), (chosen, False), (chosen, True)]):
        async with serve_trainer() as trainer:
            await trainer.create(base_model=str(mixtures("qwen3_moe")), gradient_checkpointing=recompute)
            steps.append(await trainer.one_step(1, batch))
        assert number == 0 or steps[number] == steps[0]


async def test_layers_computed_anew_go_the_same_way(
    serve_trainer: Make, make_samples: Make, mixtures: Make
) -> None:
    """Guarantee 1 of replay.py: in the backward pass."""
    samples, steps = drawn(make_samples(), 2), []
    for recompute in (False, True):
        async with serve_trainer() as trainer:
            await trainer.create(base_model=str(mixtures("qwen3_moe")), gradient_checkpointing=recompute)
            steps.append(await trainer.one_step(1, samples))
    assert steps[0] == steps[1]


async def test_older_versions_are_told_too(serve_trainer: Make, make_samples: Make, mixtures: Make) -> None:
    """Verification and the proximal policy: what the sampler computed with them is computed again so."""
    samples = drawn(make_samples(), 2)
    correction = pb.MismatchCorrection(mode=pb.CORRECTION_MODE_TRUNCATE, cap=100.0)
    loss = pb.LossSpec(
        kind=pb.LOSS_KIND_POLICY_GRADIENT,
        ratio=pb.RATIO_TREATMENT_PPO,
        proximal_version=0,
        correction=correction,
    )
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(mixtures("qwen3_moe")), retain_versions=2, learning_rate=1e-2)
        await trainer.publish(1)
        for sample, logprobs in zip(samples, await trainer.forward(samples), strict=True):
            sample.sample.logprobs[:] = logprobs
        await trainer.one_step(2, samples)  # the live weights are others from here on
        verified = await trainer.forward_backward(5, samples, verify_logprobs=True)
        corrected = await trainer.forward_backward(6, samples, loss=loss)
    assert verified.verification.tokens_compared > 0 and verified.verification.max_difference < 2e-5
    assert corrected.diagnostics["correction_mean"] == pytest.approx(1, abs=1e-4)


def test_a_pass_that_fails_leaves_the_routers_as_they_were(mixtures: Make) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(mixtures("qwen3_moe"))
    replay = Replay(model)
    experts_TNk = np.zeros((4, 2, SLOTS), np.uint8) + np.arange(SLOTS, dtype=np.uint8)
    sample = make_sample(0, [1, 2, 3, 4], [(1, 3, 0)], [], [], experts_TNk=experts_TNk)
    (batch,) = pack([sample], [0], 100, 100)
    with pytest.raises(RuntimeError), replay.replaying(batch, torch.device("cpu")):
        assert all("forward" in vars(router) for router in routers_of(model))
        raise RuntimeError
    assert not any("forward" in vars(router) for router in routers_of(model))


def test_routers_of_one_group_are_told_too() -> None:
    """As in Moonlight and Kimi K2: to rank their one group is to rank all experts, but it chooses none."""
    one_group = SETTINGS["deepseek_v3"] | {"n_group": 1, "topk_group": 1}
    config = transformers.AutoConfig.for_model("deepseek_v3", **PLAIN | one_group)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    replay = Replay(model)
    assert replay.shape == Shape(1, EXPERTS, SLOTS)
    experts_TNk = np.array([[[5, 3]], [[0, 7]], [[7, 1]], [[2, 4]]], np.uint8)
    (batch,) = pack([make_sample(0, [1, 2, 3, 4, 5], [(1, 4, 0)], [], [], [], experts_TNk)], [0], 100, 100)
    chosen: list[Any] = []
    (router,) = routers_of(model)
    router.register_forward_hook(lambda module, inputs, output: chosen.extend(output[2].tolist()))
    with torch.no_grad(), replay.replaying(batch, torch.device("cpu")):
        model(input_ids=torch.from_numpy(batch.token_ids_RL))
    assert chosen[:4] == experts_TNk[:, 0].tolist()


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_router_that_does_not_rank_its_experts_once_cannot_be_told(times: int) -> None:
    """Guarantee 2 of replay.py: which of two choices were it?"""

    class Router(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(EXPERTS, config.hidden_size))

        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            scores = hidden @ self.weight.T
            for _ in range(times):
                torch.topk(scores, SLOTS)
            order = scores.argsort(-1)[:, :SLOTS]
            return scores, scores.gather(-1, order), order

    config = transformers.AutoConfig.for_model("mixtral", **PLAIN)
    shape = _shape_of(config, [Router(config)])
    assert shape == (Shape(1, EXPERTS, SLOTS) if times == 1 else None)


def test_the_share_that_is_replayed_is_of_all_covered_tokens() -> None:
    experts_TNk = np.zeros((4, 1, SLOTS), np.uint8)
    told = make_sample(0, [1, 2, 3, 4, 5], [(2, 3, 0)], [], [], [], experts_TNk)
    silent = make_sample(1, [1, 2, 3, 4, 5, 6, 7], [(2, 5, 0)], [], [])
    assert replayed_share([told, silent]) == 3 / 8
    assert replayed_share([]) == replayed_share([silent]) == 0.0


async def test_a_reference_routes_by_itself(serve_trainer: Make, make_samples: Make, mixtures: Make) -> None:
    """Guarantee 3 of reference.py: its log-probabilities do not hang on what is told."""
    loss = pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT, kl_coef=0.1)
    found = []
    samples = make_samples()
    for batch in (samples, drawn(samples, 2)):
        async with serve_trainer() as trainer:
            await trainer.create(base_model=str(mixtures("qwen3_moe")), reference=pb.ReferenceSpec())
            found.append((await trainer.forward_backward(1, batch, loss=loss)).diagnostics["reference_kl"])
    assert found[0] < 1e-9 and found[1] > 1e-3


def test_prompts_that_went_other_ways_are_not_shared() -> None:
    """Promise 1 of packing.py."""
    prompt = list(range(12))

    def sample(index: int, first: int) -> Any:
        experts_TNk = np.full((14, 2, 2), 1, np.uint8)
        experts_TNk[0] = first
        return make_sample(
            index, [*prompt, 20 + index, 21, 22], [(12, 3, 0)], [], [], experts_TNk=experts_TNk
        )

    same, other = [sample(0, 1), sample(1, 1)], [sample(0, 1), sample(1, 2)]
    (one,) = pack(same, range(2), 1000, 100)
    assert len(one.token_ids_RL) == 1 and one.routes is not None
    assert one.routes.told_T.sum() == 12 + 2 * 2
    (two,) = pack(other, range(2), 1000, 100)
    assert len(two.token_ids_RL) == 2 and two.routes is not None
    at = two.token_ids_RL.shape[1]
    assert {int(two.routes.experts_TNk[0, 0, 0]), int(two.routes.experts_TNk[at, 0, 0])} == {1, 2}


async def test_experts_of_another_model_are_refused(
    serve_trainer: Make, make_samples: Make, mixtures: Make, folder: Path
) -> None:
    """Guarantee 2 of replay.py; the run goes on."""
    samples = make_samples(groups=1, members=2)
    tokens = len(samples[0].sample.token_ids) - 1

    def with_experts(**changes: Any) -> list[pb.TrainingSample]:
        fields = {"layers": 2, "slots": SLOTS, "width": 1} | changes
        if "numbers" not in fields:
            fields["numbers"] = bytes(tokens * fields["layers"] * fields["slots"] * fields["width"])
        experts = rollout_pb2.RoutedExperts(**fields)
        copy = pb.TrainingSample()
        copy.CopyFrom(samples[0])
        copy.sample.experts.CopyFrom(experts)
        return [copy, samples[1]]

    cases = [
        (with_experts(layers=3), "2 in each of 3 layers; this model's are 2 in each of 2"),
        (with_experts(slots=1), "1 in each of 2 layers"),
        (with_experts(numbers=bytes([EXPERTS]) * (tokens * 4)), f"{EXPERTS}; this model has {EXPERTS}"),
        (with_experts(numbers=bytes(tokens * 4 - 1)), "numbers of 1 or 2 bytes for each token"),
        (with_experts(numbers=b""), "of one token at least, or none"),
        (with_experts(layers=2**32 - 1, slots=2**32 - 1, numbers=b"1"), "for each token"),
        (with_experts(start=1), "from position 0 on"),
        (with_experts(width=3), "1 or 2 bytes"),
        (with_experts(width=0), "1 or 2 bytes"),
    ]
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(mixtures("qwen3_moe")))
        for batch, why in cases:
            refused = await trainer.refused(trainer.forward_backward(1, batch), "INVALID_REQUEST")
            assert why in refused.message, refused.message
            assert "samples[0].sample.experts" in refused.metadata["field"] or "experts" in refused.message
        await trainer.refused(trainer.forward(cases[0][0]), "INVALID_REQUEST")
        await trainer.forward_backward(1, drawn(samples, 2))
        await trainer.create("dense", base_model=str(folder))
        refused = await trainer.refused(
            trainer.forward_backward(1, with_experts(), run_id="dense"), "INVALID_REQUEST"
        )
        assert "the routers of Qwen3ForCausalLM cannot be told; leave them out" in refused.message


async def test_ranks_send_tokens_the_same_way(
    serve_trainer: Make, call_ranks: Make, make_samples: Make, mixtures: Make
) -> None:
    """Spread over two ranks, samples that tell nothing among them."""
    samples = [*drawn(make_samples(), 2), *make_samples(groups=1, seed=5)]
    found = []
    for trainer_of in (serve_trainer, call_ranks):
        async with trainer_of() as trainer:
            await trainer.create(base_model=str(mixtures("qwen3_moe")))
            logprobs = np.concatenate(await trainer.forward(samples))
            found.append((logprobs, *(await trainer.one_step(1, samples))[:2]))
    (alone, *steps), (spread, *spread_steps) = found
    assert np.abs(alone - spread).max() < 1e-5
    assert steps == pytest.approx(spread_steps, rel=1e-5)


async def test_experts_are_bounded_apart_from_the_samples(
    serve_trainer: Make, make_samples: Make, mixtures: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 8, and intake.py 3: of a call, and over all calls; what was held is given back."""
    samples = drawn(make_samples(), 2)
    told = sum(len(one.sample.experts.numbers) for one in samples)
    monkeypatch.setattr(
        "quartet_trainer.intake.MAX_CALL_BYTES", sum(one.ByteSize() for one in samples) - told
    )
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(mixtures("qwen3_moe")))
        with monkeypatch.context() as less:
            less.setattr("quartet.experts.MAX_CALL_BYTES", told - 1)
            refused = await trainer.refused(trainer.forward_backward(1, samples), "INVALID_REQUEST")
            assert f"at most {told - 1} bytes of experts" in refused.message
        with monkeypatch.context() as less:
            less.setattr("quartet_trainer.intake.MAX_BUFFERED_EXPERTS_BYTES", told - 1)
            await trainer.refused(trainer.forward_backward(1, samples), "OVERLOADED")
        assert (await trainer.forward_backward(1, samples)).loss_tokens > 0


def test_two_bytes_are_little_endian() -> None:
    sample = pb.TrainingSample(sample=rollout_pb2.Sample(token_ids=[1, 2]), advantages=[])
    sample.sample.experts.CopyFrom(
        rollout_pb2.RoutedExperts(layers=1, slots=2, width=2, numbers=b"\x01\x00\x02\x01")
    )
    experts_TNk = training_sample(0, sample).experts_TNk
    assert experts_TNk is not None and experts_TNk.tolist() == [[[1, 258]]]
