"""Samplers: what they draw, which version answers, how many at once, how they are cancelled."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from quartet.v1 import inference_service_pb2 as inference_pb
from quartet.v1 import inference_service_pb2_grpc as inference_rpc

from .tinker_calls import MODEL, TEXT, datum, lora, post
from .tinker_stack import Stack, gateway, replica, write_model


def test_stops_and_seeds_are_the_inference_services(tinker: Any, client: Any) -> None:
    training = lora(client)
    sampler = training.save_weights_and_get_sampling_client().result(60)
    prompt = tinker.ModelInput.from_ints(TEXT)

    def tokens(**params: Any) -> list[list[int]]:
        asked = tinker.SamplingParams(**{"max_tokens": 40, "temperature": 1.0, "seed": 5, **params})
        return [list(one.tokens) for one in sampler.sample(prompt, 2, asked).result(60).sequences]

    plain = tokens(stop=[])
    assert plain == tokens(stop=[]) and plain[0] != plain[1]
    assert [len(one) for one in plain] == [40, 40]
    stopped = tokens(stop=[plain[0][7]])
    assert stopped[0] == plain[0][: plain[0].index(plain[0][7]) + 1]
    assert tokens(temperature=0.0, seed=1)[0] == tokens(temperature=0.0, seed=2)[1]


def test_sampling_that_is_cancelled_stops(tinker: Any, client: Any, services: Stack) -> None:
    sampler = lora(client).save_weights_and_get_sampling_client().result(60)
    asked = {
        "sampling_session_id": sampler._sampling_session_id,
        "seq_id": 7,
        "num_samples": 64,
        "prompt": {"chunks": [{"tokens": TEXT, "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 900, "stop": []},
        "type": "sample",
    }
    _, promised = post(services.gateway, "asample", asked)
    assert promised["sample_sequence_ids"][63] == f"{promised['request_id']}:63"
    assert running(services) == 64
    name = {"request_id": promised["request_id"]}
    assert post(services.gateway, "cancel_future", name) == (200, {})
    assert post(services.gateway, "retrieve_future", name)[1]["error"] == "the request was cancelled"
    assert running(services, until=0) == 0


def running(services: Stack, until: int = 64) -> int:
    """Sequences that the engine decodes, once they are so many or time is up."""
    with grpc.insecure_channel(services.inference) as channel:
        stub: Any = inference_rpc.InferenceServiceStub(channel)
        give_up = time.monotonic() + 60
        while True:
            count = int(stub.GetModel(inference_pb.GetModelRequest(), timeout=20).running)
            if count == until or time.monotonic() > give_up:
                return count
            time.sleep(0.02)


def test_more_samples_than_there_is_room_for_come_later(tinker: Any, services: Stack, tmp_path: Path) -> None:
    """And, of a gateway that is told so, weights that were replaced are answered by those that did."""
    said = ("--max-samples", "2", "--replaced-samplers", "newest")
    with gateway(tmp_path, services.trainer, services.inference, *said) as address:
        client = tinker.ServiceClient(base_url=f"http://{address}")
        training = lora(client)
        training.forward_backward([datum(tinker)], "cross_entropy").result(60)
        training.optim_step(tinker.AdamParams(learning_rate=0.01)).result(60)
        sampler = training.save_weights_and_get_sampling_client().result(60)
        prompt, params = tinker.ModelInput.from_ints(TEXT), tinker.SamplingParams(max_tokens=200, stop=[])
        body = {
            "sampling_session_id": sampler._sampling_session_id,
            "num_samples": 16,
            "prompt": {"chunks": [{"tokens": TEXT, "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 900, "stop": []},
        }
        sent = [post(address, "asample", {**body, "seq_id": 10**9 + number}) for number in range(3)]
        assert [status for status, _ in sent] == [200, 200, 429]
        assert post(address, "asample", {**body, "seq_id": 10**9})[0] == 200, "it is there already"
        for _, promised in sent[:2]:
            post(address, "cancel_future", {"request_id": promised["request_id"]})
        asked = [sampler.sample(prompt, 1, params) for _ in range(6)]
        assert [len(one.result(60).sequences[0].tokens) for one in asked] == [200] * 6
        training.forward_backward([datum(tinker)], "cross_entropy").result(60)
        training.optim_step(tinker.AdamParams(learning_rate=0.01)).result(60)
        newest = training.save_weights_and_get_sampling_client().result(60)
        scores = [one.compute_logprobs(prompt).result(60)[1:] for one in (sampler, newest)]
        assert scores[0] == scores[1]
        assert len(sampler.sample(prompt, 1, params).result(60).sequences[0].tokens) == 200
        client.close("success").result(60)


def test_a_snapshot_is_answered_while_it_is_the_newest(tinker: Any, client: Any) -> None:
    """An untrained one also afterwards: the base model has its weights."""
    training = lora(client)
    prompt, params = tinker.ModelInput.from_ints(TEXT), tinker.SamplingParams(max_tokens=3)

    def step() -> None:
        training.forward_backward([datum(tinker)], "cross_entropy").result(60)
        training.optim_step(tinker.AdamParams(learning_rate=0.01)).result(60)

    untrained = training.save_weights_and_get_sampling_client().result(60)
    scores = untrained.compute_logprobs(prompt).result(60)
    step()
    snapshot = training.save_weights_and_get_sampling_client().result(60)
    inflight = training.save_weights_and_get_sampling_client(kind="inflight").result(60)
    path = training.save_weights_for_sampler("before").result(60).path
    assert path.startswith(f"tinker://{training.model_id}/sampler_weights/before@1-")
    named = client.create_sampling_client(path).result(60)
    assert named.get_base_model() == MODEL
    for sampler in (snapshot, inflight, named):
        sampler.sample(prompt, 1, params).result(60)
    step()
    newest = training.save_weights_and_get_sampling_client().result(60)
    for sampler in (inflight, newest, untrained):
        sampler.sample(prompt, 1, params).result(60)
    assert (
        untrained.compute_logprobs(prompt).result(60) == scores != newest.compute_logprobs(prompt).result(60)
    )
    for sampler in (snapshot, named):
        with pytest.raises(tinker.RequestFailedError, match="version 1 and the replicas serve version 2"):
            sampler.sample(prompt, 1, params).result(60)
        with pytest.raises(tinker.RequestFailedError, match="version 1 and the replicas serve version 2"):
            sampler.compute_logprobs(prompt).result(60)
    with pytest.raises(tinker.BadRequestError, match="is not the newest version of its run"):
        client.create_sampling_client(path).result(60)


def test_versions_that_are_counted_again_are_not_confused(tinker: Any, client: Any) -> None:
    """After a return to a state version 1 is made again, of other weights: answers are of the right ones."""
    training = lora(client)
    state = training.save_state("start").result(60).path
    prompt = tinker.ModelInput.from_ints(TEXT)

    def scores(one: Any, rate: float) -> tuple[Any, list[float], list[float]]:
        passes = one.forward_backward([datum(tinker)], "cross_entropy")
        one.optim_step(tinker.AdamParams(learning_rate=rate)).result(60)
        passes.result(60)
        sampler = one.save_weights_and_get_sampling_client().result(60)
        trained = one.forward([datum(tinker)], "cross_entropy").result(60).loss_fn_outputs[0]["logprobs"]
        return sampler, sampler.compute_logprobs(prompt).result(60)[1:], trained.tolist()

    first, seen, trained = scores(training, 0.01)
    np.testing.assert_allclose(seen, trained, atol=2e-5)
    for rate in (0.02, 0.03, 0.04):
        training = client.create_training_client_from_state_with_optimizer(state).result(60)
        _, again, trained = scores(training, rate)
        np.testing.assert_allclose(again, trained, atol=2e-5)
        assert np.abs(np.array(again) - np.array(seen)).max() > 1e-3
        with pytest.raises(tinker.BadRequestError, match="has returned to a saved state since"):
            first.compute_logprobs(prompt).result(60)
        seen = again


def test_a_return_that_is_refused_leaves_samplers_as_they_are(tinker: Any, client: Any) -> None:
    training = lora(client)
    state = training.save_state("start").result(60).path
    untrained = training.save_weights_and_get_sampling_client().result(60)
    training.forward_backward([datum(tinker)], "cross_entropy").result(60)
    training.optim_step(tinker.AdamParams(learning_rate=0.01)).result(60)
    sampler = training.save_weights_and_get_sampling_client().result(60)
    with pytest.raises(tinker.RequestFailedError, match="stars"):
        training.load_state_with_optimizer(state.replace("start", "stars")).result(60)
    prompt = tinker.ModelInput.from_ints(TEXT)
    assert sampler.compute_logprobs(prompt).result(60)[0] is None
    training.load_state_with_optimizer(state).result(60)
    with pytest.raises(tinker.BadRequestError, match="has returned to a saved state since"):
        sampler.compute_logprobs(prompt).result(60)
    assert untrained.compute_logprobs(prompt).result(60)[0] is None, "the base model answers"


def test_two_models_of_one_script_have_samplers_of_their_own(tinker: Any, client: Any) -> None:
    prompt, scores = tinker.ModelInput.from_ints(TEXT), []
    for seed in (1, 2):
        training = lora(client, seed)
        training.forward_backward([datum(tinker)], "cross_entropy").result(60)
        training.optim_step(tinker.AdamParams(learning_rate=0.05 * seed)).result(60)
        scores.append(training.save_weights_and_get_sampling_client().result(60))
    first, second = (one.compute_logprobs(prompt).result(60)[1:] for one in scores)
    assert np.abs(np.array(first) - np.array(second)).max() > 1e-2


def test_weights_reach_every_replica_and_one_that_is_gone_holds_nobody_up(
    tinker: Any, services: Stack, tmp_path: Path
) -> None:
    prompt = tinker.ModelInput.from_ints(TEXT)

    def step(training: Any) -> Any:
        training.forward_backward([datum(tinker)], "cross_entropy").result(60)
        training.optim_step(tinker.AdamParams(learning_rate=0.01)).result(60)
        return training.save_weights_and_get_sampling_client().result(60)

    with ExitStack() as others:
        second = others.enter_context(replica(tmp_path, services))
        both = f"{services.inference},{second}"
        with gateway(tmp_path, services.trainer, both) as address:
            client = tinker.ServiceClient(base_url=f"http://{address}")
            training = lora(client)
            run_id = training.model_id.replace(":", ".")
            step(training)
            assert [version_of(one, run_id) for one in (services.inference, second)] == [1, 1]
            others.close()
            began = time.monotonic()
            sampler = step(training)
            assert (
                len(sampler.sample(prompt, 2, tinker.SamplingParams(max_tokens=2)).result(60).sequences) == 2
            )
            assert sampler.compute_logprobs(prompt).result(60)[0] is None
            assert time.monotonic() - began < 50  # of the minute in which a step is given up
            assert version_of(services.inference, run_id) == 2
            client.close("success").result(60)


def test_weights_that_a_canary_refuses_are_said_with_the_replica_and_the_reason(
    tinker: Any, services: Stack, tmp_path: Path
) -> None:
    """Upon a model of the same shape that is another: at once, alone; beside a right one it is left out."""
    with replica(tmp_path, services, write_model(tmp_path / "other", seed=1)) as wrong:
        names = ("--tokenizer", str(services.model), "--model", str(services.model))
        with gateway(tmp_path, services.trainer, wrong, *names) as address:
            client = tinker.ServiceClient(base_url=f"http://{address}")
            training = lora(client)
            for _ in range(2):
                with pytest.raises(tinker.RequestFailedError) as failure:
                    training.save_weights_and_get_sampling_client().result(120)  # of publish_seconds, 300
                said = str(failure.value)
                assert f"no replica serves the weights: replica {wrong}: adapter unloaded" in said
                assert "of its canary are" in said and "off in the mean (tolerance" in said
                assert "with the run's model, or submit a run of the replica's" in said
            client.close("success").result(60)
        with gateway(tmp_path, services.trainer, f"{services.inference},{wrong}", *names) as address:
            client = tinker.ServiceClient(base_url=f"http://{address}")
            training = lora(client)
            path = training.save_weights_for_sampler("x").result(120).path
            sampler = client.create_sampling_client(path).result(60)
            prompt = tinker.ModelInput.from_ints(TEXT)
            for _ in range(2):
                assert sampler.compute_logprobs(prompt).result(60)[0] is None
            client.close("success").result(60)


def version_of(address: str, run_id: str) -> int:
    """Of the adapter of a run, at one replica."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = inference_rpc.InferenceServiceStub(channel)
        model = stub.GetModel(inference_pb.GetModelRequest(), timeout=20)
    return next(int(one.policy_version) for one in model.adapters if one.run_id == run_id)


def test_a_sampler_is_used_from_another_process(tinker: Any, client: Any) -> None:
    """By its handle, as the cookbook's workers do: clones have numbers of their own."""
    sampler = lora(client).save_weights_and_get_sampling_client().result(60)
    clones = [tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle()) for _ in range(2)]
    prompt, params = tinker.ModelInput.from_ints(TEXT), tinker.SamplingParams(max_tokens=3, seed=1)
    names = set()
    for one in (sampler, *clones):
        [sequence] = one.sample(prompt, 1, params).result(60).sequences
        names.add(sequence.sequence_id)
    assert len(names) == 3
