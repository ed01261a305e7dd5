"""What the gateway does not take, and who may not come in: each in a sentence that the SDK raises."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from quartet.v1 import trainer_service_pb2 as pb
from quartet_tinker.specs import Notes
from quartet_tinker.training import Run

from .tinker_calls import MODEL, TEXT, datum, lora, state_of
from .tinker_stack import Stack, gateway

REFUSED_DATA = {
    "targets are not the inputs": (
        {"target_tokens": [1] * 18},
        "targets that count must be the inputs shifted by one",
    ),
    "too few weights": ({"weights": [1.0] * 3}, "has 3 values for 18 input tokens"),
    "not finite": ({"weights": [float("nan")] * 18}, "not finite"),
    "no advantages": ({"weights": None, "logprobs": [0.0] * 18}, "importance_sampling needs advantages"),
    "another array": (
        {"logprobs": [0.0] * 18, "advantages": [0.0] * 18, "weights": None, "mask": [1.0] * 18},
        "does not read mask",
    ),
    "two targets": (
        {"target_tokens": [[1, 2]] * 18, "weights": [[1.0, 1.0]] * 18},
        "no dense array of one dimension",
    ),
    "an overflow": (
        {"weights": None, "logprobs": [-1e4] * 18, "advantages": [1.0] * 18},
        "not a finite number",
    ),
}


@pytest.mark.parametrize("case", REFUSED_DATA)
def test_data_that_cannot_be_expressed_is_refused_in_a_sentence(
    tinker: Any, client: Any, services: Stack, case: str
) -> None:
    """The caller's fault: nothing is applied, the step after it is refused, and then all goes on."""
    inputs, said = REFUSED_DATA[case]
    loss_fn = "cross_entropy" if inputs.get("weights", 1) is not None else "importance_sampling"
    if case == "two targets":
        loss_fn = "cross_entropy"
    training = lora(client)
    passes = training.forward_backward([datum(tinker, **inputs)], loss_fn)
    step = training.optim_step(tinker.AdamParams(learning_rate=0.01))
    with pytest.raises(tinker.RequestFailedError, match=said) as failure:
        passes.result(60)
    assert failure.value.category == "user"
    with pytest.raises(tinker.RequestFailedError, match="nothing is stepped"):
        step.result(60)
    assert state_of(services, training).applied_seq_id == 0
    training.forward_backward([datum(tinker)], "cross_entropy").result(60)
    assert (
        training.optim_step(tinker.AdamParams(learning_rate=0.01)).result(60).metrics["policy_version"] == 1
    )


def test_what_is_not_served_is_said(tinker: Any, client: Any, services: Stack) -> None:
    from tinker import types

    refused: Any = tinker.RequestFailedError
    with pytest.raises(refused, match="base_model = 'another' is not served here; give 'tiny/random'"):
        client.create_lora_training_client("another").result(60)
    with pytest.raises(refused, match="train_unembed alone"):
        client.create_lora_training_client(MODEL, train_mlp=False, train_attn=False).result(60)
    with pytest.raises(refused, match="'dimuon' is not served here"):
        client.create_lora_training_client(MODEL, optimizer=types.DimuonOptimizerConfig()).result(60)
    training = lora(client, train_mlp=False)
    for loss_fn, config, said in (
        ("stable_reinforce", None, "loss_fn = 'stable_reinforce' is not served here"),
        ("ppo", {"clip": 0.2}, "clip is no setting of ppo; it takes clip_low_threshold, clip_high"),
        ("dro", {"beta": "x"}, "beta = 'x' is refused; give a finite number"),
    ):
        with pytest.raises(refused, match=said):
            training.forward([datum(tinker)], loss_fn, config).result(60)
    long = list(range(97, 117)) * 60
    with pytest.raises(refused, match="1200 tokens"):
        training.forward([datum(tinker, long)], "cross_entropy").result(60)
    with pytest.raises(refused, match="vocabulary"):
        training.forward([datum(tinker, [97, 300])], "cross_entropy").result(60)
    with pytest.raises(refused, match=r"no gradients|nothing"):
        training.optim_step(tinker.AdamParams()).result(60)
    image = types.ImageChunk(data=b"x", format="png", expected_tokens=3)
    with pytest.raises(refused, match="a chunk that is not text"):
        training.forward(
            [
                types.Datum(
                    model_input=types.ModelInput(chunks=[image]), loss_fn_inputs={"target_tokens": [1, 2, 3]}
                )
            ],
            "cross_entropy",
        ).result(60)
    sampler = training.save_weights_and_get_sampling_client().result(60)
    prompt, params = tinker.ModelInput.from_ints(TEXT), tinker.SamplingParams(max_tokens=2)
    with pytest.raises(tinker.BadRequestError, match="topk_sample_logprobs is not served here"):
        sampler.sample(prompt, 1, params, topk_sample_logprobs=3).result(60)
    with pytest.raises(tinker.BadRequestError, match="num_samples"):
        sampler.sample(prompt, 1000, params).result(60)
    with pytest.raises(tinker.RequestFailedError, match="temperature"):
        sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=2, temperature=-1.0)).result(60)
    with pytest.raises(tinker.NotFoundError, match="save_weights_external is not served here: save a state"):
        training.save_weights_external("x").result(60)
    # None of this has spoiled the client, nor does it wait for the number of what was refused at once.
    assert training.save_state("x").result(20).path.endswith("/weights/x")
    assert len(sampler.sample(prompt, 3, params).result(60).sequences) == 3


def test_only_the_key_comes_in(tinker: Any, services: Stack, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("tml-secret\n")
    with gateway(tmp_path, services.trainer, services.inference, "--api-key-file", str(key_file)) as address:
        url = f"http://{address}"
        with pytest.raises(tinker.AuthenticationError, match="set TINKER_API_KEY"):
            tinker.RestClient(base_url=url, api_key="tml-wrong").get_server_capabilities().result(60)
        rest = tinker.RestClient(base_url=url, api_key="tml-secret")
        assert rest.get_server_capabilities().result(60).supported_models[0].model_name == MODEL
        request = urllib.request.Request(f"{url}/api/v1/healthz")
        assert urllib.request.urlopen(request, timeout=20).status == 200


def test_a_url_names_no_file_outside_the_folder_of_runs(services: Stack, tmp_path: Path) -> None:
    """An escaped "/" is one again when the gateway reads it."""
    folder = tmp_path / "runs"
    Notes(tmp_path).keep(Run("note", "s:train:a", "model", pb.RunSpec(), {"of": "somebody else"}))
    with gateway(tmp_path, services.trainer, services.inference, "--runs-dir", str(folder)) as address:
        folder.mkdir(exist_ok=True)
        for name in ("..%2Fnote", quote(str(tmp_path / "note"), safe="")):
            for rest in ("", "/checkpoints"):
                with pytest.raises(urllib.error.HTTPError) as refused:
                    urllib.request.urlopen(f"http://{address}/api/v1/training_runs/{name}{rest}", timeout=20)
                assert refused.value.code == 404
                assert "somebody else" not in refused.value.read().decode()
