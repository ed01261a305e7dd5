"""Training through the gateway with the unmodified SDK: supervised, by reinforcement, with one's own loss."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1 import trainer_service_pb2_grpc as rpc

from .tinker_stack import Stack

MODEL = "tiny/random"
TEXT = list(b"the quick brown fox jumps over the lazy dog")


def supervised(tokens: list[int], weights: list[float] | None = None) -> Any:
    """A datum as the cookbook makes it: targets are the inputs shifted by one."""
    from tinker import types

    length = len(tokens) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:], dtype=np.int64),
            "weights": np.array(weights or [1.0] * length, dtype=np.float32),
        },
    )


def sampled(prompt: list[int], sequence: Any, advantage: float) -> Any:
    """As the cookbook's rl_loop makes it: the prompt has no targets, log-probabilities or advantages."""
    from tinker import types

    tokens, before = [*prompt, *sequence.tokens], len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array([0] * before + list(sequence.tokens), dtype=np.int64),
            "logprobs": np.array([0.0] * before + list(sequence.logprobs), dtype=np.float32),
            "advantages": np.array([0.0] * before + [advantage] * len(sequence.tokens), dtype=np.float32),
        },
    )


def logprobs_of(result: Any, index: int = 0) -> np.ndarray[Any, Any]:
    """Of one datum of an answer."""
    return np.asarray(result.loss_fn_outputs[index]["logprobs"].to_numpy())


def lora(client: Any, seed: int = 1, **more: Any) -> Any:
    return client.create_lora_training_client(MODEL, rank=8, seed=seed, **more).result(120)


def test_supervised_training_learns(tinker: Any, client: Any) -> None:
    training = lora(client)
    losses = []
    for _ in range(12):
        # Both before either is awaited, as the cookbook does.
        passes = training.forward_backward([supervised(TEXT), supervised(TEXT[:20])], "cross_entropy")
        step = training.optim_step(tinker.AdamParams(learning_rate=1e-2))
        result = passes.result(60)
        losses.append(result.metrics["loss:sum"])
        assert losses[-1] == pytest.approx(-sum(logprobs_of(result, i).sum() for i in range(2)), rel=1e-5)
        assert step.result(60).metrics["skipped_nonfinite"] == 0
    assert losses[-1] < 0.5 * losses[0]
    assert step.result().metrics["policy_version"] == 12


def test_weights_are_carried_exactly(tinker: Any, client: Any) -> None:
    """A half weight is half the loss, a zero none, and the log-probabilities are those of all positions."""
    training = lora(client)
    weights = [0.0] * 10 + [0.5, 0.0, -2.0] + [1.0] * (len(TEXT) - 14)
    result = training.forward([supervised(TEXT, weights)], "cross_entropy").result(60)
    logprobs = logprobs_of(result)
    assert logprobs.shape == (len(TEXT) - 1,)
    losses = result.loss_fn_outputs[0]["elementwise_loss"].to_numpy()
    np.testing.assert_allclose(losses, -np.array(weights, dtype=np.float32) * logprobs, rtol=1e-6)
    assert result.metrics["tokens:sum"] == np.count_nonzero(weights)


def test_reinforcement_moves_the_version_and_the_reward(tinker: Any, client: Any) -> None:
    """Sample, credit, train, publish: letters become likelier; what was sampled is what is trained on."""
    training = lora(client, seed=2)
    prompt = list(b"say: ")
    rewards, versions = [], []
    sampler = training.save_weights_and_get_sampling_client().result(120)
    for step in range(20):
        params = tinker.SamplingParams(max_tokens=12, temperature=1.0, seed=step)
        group = sampler.sample(tinker.ModelInput.from_ints(prompt), 32, params).result(60).sequences
        earned = [sum(97 <= token < 123 for token in one.tokens) / len(one.tokens) for one in group]
        rewards.append(float(np.mean(earned)))
        data = [sampled(prompt, one, reward - rewards[-1]) for one, reward in zip(group, earned, strict=True)]
        passes = training.forward_backward(data, "importance_sampling")
        done = training.optim_step(tinker.AdamParams(learning_rate=2e-2))
        result = passes.result(60)
        for index, one in enumerate(group):
            of_prompt, trained = np.split(logprobs_of(result, index), [len(prompt) - 1])
            assert np.isnan(of_prompt).all() and len(trained) == len(one.tokens)
            assert np.abs(trained - np.array(one.logprobs)).max() <= 2e-5, (step, index)
        versions.append(done.result(60).metrics["policy_version"])
        sampler = training.save_weights_and_get_sampling_client().result(60)
    assert versions == [float(n) for n in range(1, 21)]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1, rewards


def test_scores_are_those_of_the_trainer(tinker: Any, client: Any) -> None:
    training = lora(client, seed=3)
    training.forward_backward([supervised(TEXT)], "cross_entropy").result(60)
    training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result(60)
    sampler = training.save_weights_and_get_sampling_client().result(120)
    trained = logprobs_of(training.forward([supervised(TEXT)], "cross_entropy").result(60))
    scored = sampler.compute_logprobs(tinker.ModelInput.from_ints(TEXT)).result(60)
    assert scored[0] is None
    np.testing.assert_allclose(scored[1:], trained, atol=2e-5)
    last = sampler.compute_logprobs(tinker.ModelInput.from_ints(TEXT), prompt_logprobs_last_n=5).result(60)
    assert last[:-5] == [None] * (len(TEXT) - 5)
    np.testing.assert_allclose(last[-5:], trained[-5:], atol=2e-5)
    base = client.create_sampling_client(base_model=MODEL).result(60)
    plain = base.compute_logprobs(tinker.ModelInput.from_ints(TEXT)).result(60)
    assert np.abs(np.array(plain[1:]) - trained).max() > 0.1


def credited(seed: int = 0) -> tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A datum with a sampler that was elsewhere, so that ratios are on both sides of every clip."""
    from tinker import types

    rng, length = np.random.default_rng(seed), len(TEXT) - 1
    logprobs = (-5.0 + rng.normal(0, 1.5, length)).astype(np.float32)
    advantages = rng.normal(0, 1, length).astype(np.float32)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(TEXT[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(TEXT[1:], dtype=np.int64),
            "logprobs": logprobs,
            "advantages": advantages,
        },
    )
    return datum, logprobs, advantages


def native_step(services: Stack, spec: pb.RunSpec, run_id: str, loss: pb.LossSpec) -> tuple[float, float]:
    """Loss and gradient norm by the trainer's own loss, on a run of its own."""
    _, logprobs, advantages = credited()
    sample = pb.TrainingSample(advantages=advantages.tolist())
    sample.sample.token_ids.extend(TEXT)
    sample.sample.logprobs.extend(logprobs.tolist())
    sample.sample.spans.add(start=1, length=len(TEXT) - 1)
    with grpc.insecure_channel(services.trainer) as channel:
        stub: Any = rpc.TrainerServiceStub(channel)
        stub.CreateRun(pb.CreateRunRequest(run_id=run_id, spec=spec), timeout=60)
        frames = [
            pb.ForwardBackwardRequest(
                start=pb.ForwardBackwardStart(run_id=run_id, seq_id=1, loss=loss, normalizer=1.0)
            ),
            pb.ForwardBackwardRequest(batch=pb.SampleBatch(samples=[sample])),
            pb.ForwardBackwardRequest(commit=pb.StreamCommit(sample_count=1, token_count=len(TEXT))),
        ]
        done = stub.ForwardBackward(iter(frames), timeout=60)
        step = stub.OptimStep(pb.OptimStepRequest(run_id=run_id, seq_id=2, learning_rate=1e-2), timeout=60)
        stub.CloseRun(pb.CloseRunRequest(run_id=run_id), timeout=60)
    return done.loss, step.grad_norm


@pytest.mark.parametrize(
    ("loss_fn", "config", "spec"),
    [
        (
            "ppo",
            {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4},
            {"ratio": pb.RATIO_TREATMENT_PPO, "clip_low": 0.3, "clip_high": 0.4},
        ),
        # No lower clip, and an upper one that nothing reaches: the plain ratio.
        (
            "importance_sampling",
            None,
            {"ratio": pb.RATIO_TREATMENT_PPO, "clip_low": 0.999999, "clip_high": 1e6},
        ),
    ],
)
def test_a_loss_is_the_one_that_the_trainer_has(
    tinker: Any, client: Any, services: Stack, loss_fn: str, config: dict[str, float] | None, spec: Any
) -> None:
    """What the gateway makes of it has the value and the gradient of the trainer's own LossSpec."""
    training = lora(client, seed=4)
    datum, _, _ = credited()
    passes = training.forward_backward([datum], loss_fn, config).result(60)
    step = training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result(60)
    run = pb.RunSpec(
        base_model=str(services.model),
        lora=pb.LoraSpec(rank=8, alpha=32),
        optimizer=pb.OptimizerSpec(learning_rate=1e-4),
        seed=4,
    )
    loss = pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT, **spec)
    value, norm = native_step(services, run, f"native-{loss_fn}", loss)
    assert passes.metrics["loss:sum"] == pytest.approx(value, rel=1e-5)
    assert step.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_loss_of_ones_own_runs_in_the_script(tinker: Any, client: Any) -> None:
    """forward_backward_custom needs nothing of a server but cross-entropy."""
    import torch

    training = lora(client, seed=5)

    def doubled(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        loss = -2.0 * torch.stack([one.sum() for one in logprobs]).sum()
        return loss, {"mine": loss.item()}

    result = training.forward_backward_custom([supervised(TEXT)], doubled).result(60)
    own = training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result(60).metrics["grad_norm"]
    other = lora(client, seed=5)
    other.forward_backward([supervised(TEXT, [2.0] * (len(TEXT) - 1))], "cross_entropy").result(60)
    plain = other.optim_step(tinker.AdamParams(learning_rate=1e-2)).result(60).metrics["grad_norm"]
    assert result.metrics["mine"] == result.metrics["loss:sum"] > 0
    assert own == pytest.approx(plain, rel=1e-6)


def test_a_large_batch_is_cut_and_is_one_gradient(tinker: Any, client: Any) -> None:
    """1,030 datums are two requests, sent at once and out of order: the same step as in one."""
    data = [supervised(TEXT[i % 20 : i % 20 + 6]) for i in range(1030)]
    norms = []
    for pieces in ([data], [data[:500], data[500:]]):
        training = lora(client, seed=6)
        passes = [training.forward_backward(piece, "cross_entropy") for piece in pieces]
        step = training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result(120)
        results = [one.result(120) for one in passes]
        assert sum(len(one.loss_fn_outputs) for one in results) == 1030
        norms.append((sum(one.metrics["loss:sum"] for one in results), step.metrics["grad_norm"]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_the_first_step_says_adams_constants(tinker: Any, client: Any) -> None:
    """Other constants than the SDK's defaults hold from the first step on, with the gradients kept."""
    ours = {"beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "grad_clip_norm": 1.0}
    training = lora(client, seed=7)
    training.save_weights_and_get_sampling_client().result(120)  # a version that the run has again afterwards
    training.forward_backward([supervised(TEXT)], "cross_entropy").result(60)
    training.forward_backward([supervised(TEXT[:9])], "cross_entropy").result(60)
    with pytest.raises(tinker.RequestFailedError, match=r"beta1 = 1\.0 is refused"):
        training.optim_step(tinker.AdamParams(learning_rate=1e-2, beta1=1.0)).result(60)
    training.forward([supervised(TEXT)], "cross_entropy").result(60)  # the run is there, as it was
    first = training.optim_step(tinker.AdamParams(learning_rate=1e-2, **ours)).result(60)
    assert first.metrics["policy_version"] == 1

    plain = lora(client, seed=7)
    plain.forward_backward([supervised(TEXT), supervised(TEXT[:9])], "cross_entropy").result(60)
    same = plain.optim_step(tinker.AdamParams(learning_rate=1e-2)).result(60)
    assert first.metrics["grad_norm"] == pytest.approx(same.metrics["grad_norm"], rel=1e-5)

    training.forward_backward([supervised(TEXT)], "cross_entropy").result(60)
    with pytest.raises(
        tinker.RequestFailedError, match=r"beta1 = 0\.9 is not what the run has, beta1 = 0\.8"
    ):
        training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result(60)
    # Nothing was stepped, nothing is lost: the right constants go on.
    second = training.optim_step(tinker.AdamParams(learning_rate=2e-2, **ours)).result(60).metrics
    assert (second["policy_version"], second["learning_rate"]) == (2.0, 2e-2)


def test_a_state_before_the_first_step_is_there_with_the_constants_of_that(tinker: Any, client: Any) -> None:
    """The cookbook saves one in its asynchronous training, and steps with an epsilon of its own."""
    theirs = tinker.AdamParams(learning_rate=1e-2, eps=1e-8)
    training = lora(client, seed=9)
    training.forward_backward([supervised(TEXT[:9])], "cross_entropy").result(60)
    path = training.save_state("000000").result(60).path
    training.forward_backward([supervised(TEXT)], "cross_entropy").result(60)
    norms = [training.optim_step(theirs).result(60).metrics["grad_norm"]]
    again = client.create_training_client_from_state_with_optimizer(path).result(60)
    again.forward_backward([supervised(TEXT)], "cross_entropy").result(60)
    norms.append(again.optim_step(theirs).result(60).metrics["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5), "the gradients before the state are in it"
    with pytest.raises(tinker.RequestFailedError, match=r"eps = 1e-12 is not what the run has, eps = 1e-08"):
        again.optim_step(tinker.AdamParams(learning_rate=1e-2)).result(60)


def test_training_goes_on_from_a_state(tinker: Any, client: Any, services: Stack) -> None:
    """A client of a saved state stands where it stood: equal losses, equal steps after it."""
    training = lora(client, seed=8)
    adam = tinker.AdamParams(learning_rate=1e-2, eps=1e-8)

    def step(one: Any) -> float:
        passes = one.forward_backward([supervised(TEXT)], "cross_entropy")
        one.optim_step(adam).result(60)
        return float(passes.result(60).metrics["loss:sum"])

    step(training)
    path = training.save_state("half").result(60).path
    with pytest.raises(tinker.RequestFailedError, match="saved a state 'half' before"):
        training.save_state("half").result(60)
    onward = [step(training) for _ in range(3)]
    again = client.create_training_client_from_state_with_optimizer(path).result(60)
    assert [step(again) for _ in range(3)] == onward
    assert again.get_info().lora_rank == 8
    with pytest.raises(tinker.NotFoundError, match="is not known to this gateway"):
        step(training)  # its run was taken by the other client
    assert again.save_state("half").result(60).path == path  # as a resumed loop of the cookbook does
    names = [one.tinker_path for one in _checkpoints(tinker, services, training.model_id)]
    assert names == [path]
    rest = tinker.RestClient(base_url=f"http://{services.gateway}")
    assert rest.get_weights_info_by_tinker_path(path).result(60).lora_rank == 8
    assert rest.get_training_run_by_tinker_path(path).result(60).base_model == MODEL
    with pytest.raises(tinker.RequestFailedError, match="never to its weights alone"):
        again.load_state(path).result(60)


def test_training_begins_with_the_weights_of_a_state(tinker: Any, client: Any) -> None:
    """As from supervised training to reinforcement learning: the moments are new, the constants those of its
    own first step, and whose state it is keeps its run."""
    training = lora(client, seed=8)
    data = [supervised(TEXT)]

    def step(one: Any, **adam: Any) -> tuple[float, float, float]:
        passes = one.forward_backward(data, "cross_entropy")
        done = one.optim_step(tinker.AdamParams(learning_rate=1e-2, **adam)).result(60).metrics
        return float(passes.result(60).metrics["loss:sum"]), done["policy_version"], done["grad_norm"]

    for _ in range(3):
        step(training)
    path = training.save_state("learned").result(60).path
    fresh = client.create_training_client_from_state(path, user_metadata={"of": "rl"}).result(60)
    assert fresh.model_id != training.model_id
    continued = step(training)
    began = step(fresh, beta2=0.999)
    assert (began[0], began[2]) == (continued[0], continued[2]), "the same weights"
    assert (began[1], continued[1]) == (1, 4)
    assert step(fresh, beta2=0.999)[0] != step(training)[0], "and other moments"
    onward = client.create_training_client_from_state(fresh.save_state("own").result(60).path).result(60)
    assert step(onward, eps=1e-8)[1] == 1
    with pytest.raises(tinker.RequestFailedError, match="has no state 'other', it has learned"):
        client.create_training_client_from_state(path.replace("learned", "other")).result(60)


def _checkpoints(tinker: Any, services: Stack, model_id: str) -> list[Any]:
    rest = tinker.RestClient(base_url=f"http://{services.gateway}")
    return list(rest.list_checkpoints(model_id).result(60).checkpoints)


def test_the_capabilities_name_the_model(tinker: Any, services: Stack) -> None:
    rest = tinker.RestClient(base_url=f"http://{services.gateway}")
    [model] = rest.get_server_capabilities().result(60).supported_models
    assert (model.model_name, model.max_context_length) == (MODEL, 1024)


def test_the_tokenizer_is_the_models(client: Any) -> None:
    tokenizer = lora(client, seed=9).get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("a fox")) == "a fox"
    assert tokenizer.eos_token_id == 257


def test_the_example_is_a_script_of_the_sdk(tinker: Any, services: Stack) -> None:
    """examples/tinker_sft learns its three answers by heart."""
    script = Path(__file__).resolve().parents[3] / "examples/tinker_sft/train.py"
    environment = {**os.environ, "TINKER_BASE_URL": f"http://{services.gateway}", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for line in ("france?  paris.", "italy?  rome.", "japan?  tokyo."):
        assert line in done.stdout, done.stdout
