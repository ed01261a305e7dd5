"""Every field that the SDK may send: served, refused in a sentence, or taken unheeded and said so."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from quartet_tinker import adam, bodies, sampling_bodies
from quartet_tinker import datum as datums
from quartet_tinker import tinker_wire_pb2 as wire
from quartet_tinker.gateway import UNHEEDED
from quartet_tinker.refusal import Refused

from .tinker_calls import MODEL, TEXT, datum, gradients, lora, post, state_of
from .tinker_stack import Stack

# What is not a field of ours is refused by its name (extra="forbid").
OURS = {
    "ClientConfigRequest": bodies.ClientConfig,
    "CreateSessionRequest": bodies.CreateSession,
    "SessionHeartbeatRequest": bodies.Heartbeat,
    "CreateModelRequest": bodies.CreateModel,
    "LoraConfig": bodies.Lora,
    "GetInfoRequest": bodies.GetInfo,
    "UnloadModelRequest": bodies.Unload,
    "SaveWeightsRequest": bodies.SaveWeights,
    "SaveWeightsForSamplerRequest": bodies.SaveForSampler,
    "LoadWeightsRequest": bodies.LoadWeights,
    "FutureRetrieveRequest": bodies.RetrieveFuture,
    "CreateSamplingSessionRequest": sampling_bodies.CreateSamplingSession,
    "JoinSamplingSessionRequest": sampling_bodies.JoinSamplingSession,
    "SampleRequest": sampling_bodies.SampleBody,
    "SamplingParams": sampling_bodies.SamplingParams,
    "ModelInput": sampling_bodies.Prompt,
    "EncodedTextChunk": sampling_bodies.TextChunk,
}
# The SDK never sends these: it samples by sessions.
NOT_OURS = {"SampleRequest": {"base_model", "model_path"}}


@pytest.mark.parametrize("name", OURS)
def test_every_field_of_the_sdk_is_known(tinker: Any, name: str) -> None:
    """A field that a later SDK adds is found here, before a script sends it."""
    import tinker.types
    from tinker.types import client_config_request, future_retrieve_request

    modules = (tinker.types, client_config_request, future_retrieve_request)
    theirs = next(getattr(module, name) for module in modules if hasattr(module, name))
    assert set(theirs.model_fields) - NOT_OURS.get(name, set()) == set(OURS[name].model_fields)


def test_every_constant_of_adam_is_known(tinker: Any) -> None:
    ours = {one.name: one.default for one in dataclasses.fields(adam.Adam)}
    assert {"learning_rate": 1e-4, **ours} == tinker.AdamParams().model_dump()


SAVE = {"model_id": "s:train:0", "seq_id": 1}
LOAD = {"path": "tinker://s:train:0/weights/x", "optimizer": True}
OF_MODEL, OF_SESSION = {"model_id": "s:train:0", "seq_id": 1}, {"session_id": "s", "model_seq_id": 0}
SAMPLE = {
    "sampling_session_id": "s:a",
    "seq_id": 0,
    "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
    "sampling_params": {},
}
DIMUON = {"type": "dimuon", "learning_rate": 0.1}
REFUSED: list[tuple[type[bodies.Body], dict[str, Any], str]] = [
    (bodies.CreateSession, {"project_id": "p"}, "project_id = 'p' is refused: there are no projects"),
    (bodies.CreateSession, {"user_metadata": {"a": "x" * 1025}}, "user_metadata.a is refused"),
    (bodies.CreateSession, {"tags": ["x"] * 65}, "tags is refused"),
    (bodies.Finish, {"reason": {"type": "bored"}}, r"reason.type is refused: .*'interrupted'"),
    (bodies.GetInfo, {"model_id": "s:train:0", "type": "unload_model"}, "type is refused"),
    (bodies.OptimStep, {**SAVE, "adam_params": {}, "optimizer_params": DIMUON}, "optimizer_params, of other"),
    (bodies.OptimStep, SAVE, "adam_params is missing"),
    (bodies.SaveWeights, {**SAVE, "user_metadata": {"a": "b"}}, "user_metadata of saved weights is not kept"),
    (bodies.SaveForSampler, {**SAVE, "user_metadata": {"a": "b"}}, "user_metadata of saved weights"),
    (
        bodies.SaveForSampler,
        {**SAVE, "path": "x", "kind": "inflight"},
        "kind = 'inflight' is not for weights",
    ),
    (bodies.SaveForSampler, {**SAVE, "path": "x", "sampling_session_seq_id": 0}, "give one of them"),
    (bodies.SaveForSampler, {**SAVE, "path": "a/b"}, "path = 'a/b' is refused; give 1 to 64 letters"),
    (bodies.LoadWeights, {**LOAD, **OF_MODEL, "session_id": "s"}, "session_id is not served beside model_id"),
    (bodies.LoadWeights, {**LOAD, **OF_MODEL, "user_metadata": {}}, "user_metadata is not served beside"),
    (bodies.LoadWeights, {**LOAD, **OF_MODEL, "base_model": "m"}, "base_model is not served beside model_id"),
    (bodies.LoadWeights, {**LOAD, **OF_SESSION, "seq_id": 1}, "seq_id is not served beside session_id"),
    (bodies.LoadWeights, {**LOAD, "model_id": "s:train:0"}, "seq_id is missing; give model_id and seq_id"),
    (bodies.LoadWeights, {**LOAD, "session_id": "s"}, "model_seq_id is missing"),
    (
        bodies.LoadWeights,
        {**LOAD, **OF_SESSION, "optimizer_config": {"type": "adamw"}},
        "optimizer_config is refused: a state has its own",
    ),
    (bodies.LoadWeights, {**LOAD, **OF_MODEL, "optimizer": False}, "optimizer here, never to its weights"),
    (
        bodies.LoadWeights,
        {**LOAD, **OF_SESSION, "optimizer": False, "optimizer_config": {"type": "muon"}},
        "optimizer = 'muon' is not served here",
    ),
    (bodies.LoadWeights, {**LOAD, **OF_SESSION, "weights_access_token": "t"}, "weights_access_token is not"),
    (bodies.CancelFuture, {"request_id": "a", "allow_metadata_only": True}, "allow_metadata_only is not"),
    (sampling_bodies.SampleBody, {**SAMPLE, "base_model": "m"}, "base_model is not served here"),
    (sampling_bodies.SampleBody, {**SAMPLE, "prompt_logprobs_last_n": 1}, "without prompt_logprobs = True"),
    (
        sampling_bodies.SampleBody,
        {**SAMPLE, "prompt_logprobs": True, "prompt_logprobs_last_n": 3},
        "prompt_logprobs_last_n = 3 is refused; give 1 to 2",
    ),
    (sampling_bodies.SampleBody, {**SAMPLE, "target_prompt_logprobs": {}}, "target_prompt_logprobs is not"),
    (
        sampling_bodies.SampleBody,
        {**SAMPLE, "record_stability_info": True},
        "'stable_reinforce', which alone reads it; train with 'ppo'",
    ),
    (sampling_bodies.SampleBody, {**SAMPLE, "sampling_params": {"top_k": -2}}, "sampling_params.top_k is"),
    (
        sampling_bodies.SampleBody,
        {**SAMPLE, "prompt": {"chunks": [{"tokens": [1], "type": "image"}]}},
        "a chunk of type 'image'",
    ),
]


@pytest.mark.parametrize(("kind", "body", "said"), REFUSED)
def test_what_is_not_served_is_refused_by_name(
    kind: type[bodies.Body], body: dict[str, Any], said: str
) -> None:
    import json

    def read() -> None:
        parsed = bodies.parse(kind, json.dumps(body).encode())
        match parsed:
            case bodies.LoadWeights():
                parsed.address()
                parsed.state()
            case bodies.OptimStep():
                parsed.params()
            case bodies.CreateSession() | bodies.SaveWeights() | bodies.SaveForSampler():
                parsed.check()
            case sampling_bodies.SampleBody():
                parsed.check()

    with pytest.raises(Refused, match=said):
        read()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"type": "dimuon", "version": 1}, "'dimuon'"),
        ({"type": "adamw", "fused": True}, "optimizer_config.fused"),
    ],
)
def test_other_optimizers_and_their_fields_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=said):
        bodies.Optimizer.model_validate(config).check()
    bodies.Optimizer().check()


#: Field 15, which no message has, with the number 1.
UNKNOWN = b"\x78\x01"


def test_unknown_fields_of_a_datum_are_refused() -> None:
    sent = wire.ForwardBackwardRequest()
    sent.ParseFromString(gradients("s:train:0", 1))
    raw = sent.data[0].SerializeToString()
    read = wire.Datum()
    read.ParseFromString(raw)
    datums.read(0, read, "cross_entropy")
    read.ParseFromString(raw + UNKNOWN)
    with pytest.raises(Refused, match=r"data\[0\] has the field 15 of Datum, which is not served"):
        datums.read(0, read, "cross_entropy")


def test_unknown_fields_of_a_request_are_refused_in_their_turn(
    tinker: Any, client: Any, services: Stack
) -> None:
    training = lora(client)
    sent = post(services.gateway, "forward_backward", gradients(training.model_id, 1) + UNKNOWN)[1]
    _, answer = post(services.gateway, "retrieve_future", sent)
    assert "field 15 of ForwardBackwardRequest" in answer["error"]
    sent = post(services.gateway, "forward_backward", gradients(training.model_id, 2))[1]
    assert post(services.gateway, "retrieve_future", sent)[0] == 200


def test_what_is_taken_unheeded_is_said_when_a_session_begins(
    tinker: Any, services: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    """And the cookbook's requests with it are done: provenance and ttl_seconds, by default."""
    client = tinker.ServiceClient(
        base_url=f"http://{services.gateway}", user_metadata={"recipe": "x"}, display_name="mine"
    )
    training = lora(client, train_unembed=True)
    assert UNHEEDED in caplog.text
    spans = ([tinker.PromptProvenanceSpan(sequence_id="a", length=18)],) * 2
    plain, with_spans = (
        training.forward([one], "cross_entropy").result(60).metrics
        for one in (datum(tinker), datum(tinker).with_provenance(*spans))
    )
    assert plain == with_spans
    training.save_state("kept", ttl_seconds=3600).result(60)
    # In its turn, so that the client goes on.
    with pytest.raises(tinker.RequestFailedError, match="user_metadata of saved weights is not kept"):
        training.save_state("other", user_metadata={"a": "b"}).result(60)
    training.save_state("other").result(60)
    client.close("errored", detail="a reason").result(60)


def test_a_name_that_is_refused_saves_and_publishes_nothing(
    tinker: Any, client: Any, services: Stack
) -> None:
    training = lora(client)
    with pytest.raises(tinker.RequestFailedError, match="give 1 to 64 letters"):
        training.save_weights_for_sampler("a/b").result(60)
    for _ in range(2):
        with pytest.raises(tinker.RequestFailedError, match="name 'a/b' is not 1-64 of"):
            training.save_state("a/b").result(60)
    assert state_of(services, training).applied_seq_id == 0


def test_how_a_script_ended_is_cut_to_a_line_of_the_log() -> None:
    body = bodies.parse(bodies.Finish, b'{"reason": {"type": "errored"}, "detail": "%s"}' % (b"x" * 9000))
    assert body.why() == "errored: " + "x" * bodies.MAX_NOTE_CHARS


def test_the_metadata_of_a_run_is_noted(tinker: Any, client: Any, services: Stack) -> None:
    """The cookbook looks there for the renderer of a checkpoint; a client that goes on may say it anew."""
    rest = tinker.RestClient(base_url=f"http://{services.gateway}")
    training = lora(client, user_metadata={"renderer_name": "qwen3"})
    path = training.save_state("kept").result(60).path

    def metadata() -> dict[str, str] | None:
        found = rest.get_training_run_by_tinker_path(path, access_scope="accessible").result(60)
        return dict(found.user_metadata)

    assert metadata() == {"renderer_name": "qwen3"}
    again = client.create_training_client_from_state_with_optimizer(path, user_metadata={}).result(60)
    assert metadata() == {"renderer_name": "qwen3"}
    client.create_training_client_from_state_with_optimizer(path, user_metadata={"a": "b"}).result(60)
    assert metadata() == {"a": "b"}
    run = rest.get_training_run(
        client.create_training_client_from_state_with_optimizer(path).result(60).model_id
    )
    assert run.result(60).training_run_id == training.model_id
    with pytest.raises(tinker.NotFoundError):
        rest.get_training_run(again.model_id).result(60)


def test_a_large_answer_is_fetched_in_two_steps(tinker: Any, client: Any, services: Stack) -> None:
    """The SDK hears of its size first, and waits until its memory has room."""
    training = lora(client)
    long = (TEXT * 60)[:1000]
    result = training.forward([datum(tinker, long)] * 140, "cross_entropy").result(120)
    assert len(result.loss_fn_outputs) == 140
    asked = {"request_id": f"{training.model_id}:1"}
    status, said = post(services.gateway, "retrieve_future", {**asked, "allow_metadata_only": True})
    whole = post(services.gateway, "retrieve_future", asked)[1]
    size = said["response_payload_size"]
    assert (status, said["status"], size) == (200, "complete_metadata", len(whole))
    assert size > 2**20
    training.forward([datum(tinker)], "cross_entropy").result(60)
    asked = {"request_id": f"{training.model_id}:2", "allow_metadata_only": True}
    assert isinstance(post(services.gateway, "retrieve_future", asked)[1], bytes), "a small one comes at once"


def test_a_sampler_of_saved_weights_is_of_the_named_model(tinker: Any, client: Any) -> None:
    path = lora(client).save_weights_for_sampler("x").result(60).path
    with pytest.raises(tinker.BadRequestError, match="base_model = 'another' is not served here"):
        client.create_sampling_client(path, base_model="another").result(60)
    assert client.create_sampling_client(path, base_model=MODEL).result(60).get_base_model() == MODEL


def test_what_stands_behind_an_address_is_not_ignored(tinker: Any, client: Any, services: Stack) -> None:
    import json
    import urllib.error
    import urllib.request

    model_id = lora(client).model_id

    def get(query: str) -> tuple[int, str]:
        url = f"http://{services.gateway}/api/v1/training_runs/{model_id}{query}"
        request = urllib.request.Request(url, headers={"X-API-Key": "tml-x"})
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                return response.status, ""
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())["detail"]

    assert get("?access_scope=owned") == (200, "")
    assert get("?access_scope=all") == (400, "access_scope = 'all' is not served here; leave it out")
    assert get("?limit=3")[0] == 400
