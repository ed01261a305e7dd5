"""Requests that come twice, in another order, or too late."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1 import trainer_service_pb2_grpc as rpc
from quartet_tinker import bodies
from quartet_tinker import tinker_wire_pb2 as wire
from quartet_tinker.config import GatewayConfig
from quartet_tinker.gateway import Gateway
from quartet_tinker.promises import Promise
from quartet_tinker.refusal import Refused
from quartet_tinker.training import Run, Training

from .tinker_calls import datum, gradients, lora, post, state_of
from .tinker_stack import Stack, gateway


def test_a_request_that_comes_twice_is_done_once(tinker: Any, client: Any, services: Stack) -> None:
    model_id = lora(client).model_id
    body = gradients(model_id, 1)
    first, again = (post(services.gateway, "forward_backward", body) for _ in range(2))
    assert first == again == (200, {"request_id": f"{model_id}:1"})
    answers = [post(services.gateway, "retrieve_future", first[1]) for _ in range(2)]
    assert answers[0] == answers[1] and answers[0][0] == 200
    step = {"model_id": model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.01}, "type": "optim_step"}
    promised = [post(services.gateway, "optim_step", step) for _ in range(3)]
    metrics = [post(services.gateway, "retrieve_future", one)[1]["metrics"] for _, one in promised]
    assert [one["policy_version"] for one in metrics] == [1.0] * 3
    other = {**step, "adam_params": {"learning_rate": 0.02}}
    status, said = post(services.gateway, "optim_step", other)
    assert (status, "came before with other contents" in said["detail"]) == (400, True)
    with grpc.insecure_channel(services.trainer) as channel:
        stub: Any = rpc.TrainerServiceStub(channel)
        run = stub.GetRun(pb.GetRunRequest(run_id=model_id.replace(":", ".")), timeout=20).run
    assert (run.applied_seq_id, run.policy_version) == (2, 1)


def test_requests_are_done_in_their_order(tinker: Any, client: Any, services: Stack) -> None:
    """The step comes before its gradients, and waits for them."""
    model_id = lora(client).model_id
    step = {"model_id": model_id, "seq_id": 3, "adam_params": {"learning_rate": 0.01}, "type": "optim_step"}
    _, stepped = post(services.gateway, "optim_step", step)
    _, second = post(services.gateway, "forward_backward", gradients(model_id, 2))
    _, first = post(services.gateway, "forward_backward", gradients(model_id, 1))
    metrics = post(services.gateway, "retrieve_future", stepped)[1]["metrics"]
    assert metrics["policy_version"] == 1.0
    outputs = []
    for one in (first, second):
        output = wire.ForwardBackwardOutput()
        output.ParseFromString(post(services.gateway, "retrieve_future", one)[1])
        outputs.append(output.metrics["loss:sum"])
    assert outputs[0] == outputs[1]  # the same weights


@contextmanager
def dropping(target: str, path: str) -> Iterator[tuple[str, list[str]]]:
    """A way to the gateway on which the first answer to this path is lost, after the gateway has it."""
    from aiohttp import ClientSession, web

    seen: list[str] = []
    loop, started, address = asyncio.new_event_loop(), threading.Event(), ""

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(request.path)
        headers = {key: value for key, value in request.headers.items() if key.lower() != "host"}
        async with (
            ClientSession() as session,
            session.request(
                request.method,
                f"http://{target}{request.path_qs}",
                data=await request.read(),
                headers=headers,
            ) as answer,
        ):
            body = await answer.read()
        if request.path.endswith(path) and seen.count(request.path) == 1:
            assert request.transport is not None
            request.transport.abort()
        return web.Response(body=body, status=answer.status, content_type=answer.content_type)

    application = web.Application(client_max_size=2**26)
    application.router.add_route("*", "/{rest:.*}", handle)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1)

    async def serve() -> None:
        nonlocal address
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"127.0.0.1:{runner.addresses[0][1]}"
        started.set()

    serving = loop.create_task(serve())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    assert started.wait(20) and serving.done()
    try:
        yield address, seen
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()


@pytest.mark.parametrize("path", ["forward_backward", "optim_step", "save_weights_for_sampler"])
def test_an_answer_that_is_lost_is_asked_for_again_and_applied_once(
    tinker: Any, services: Stack, path: str
) -> None:
    """The SDK's own repetition, through a way that loses the first answer."""
    with dropping(services.gateway, path) as (address, seen):
        client = tinker.ServiceClient(base_url=f"http://{address}")
        training = lora(client)
        training.forward_backward([datum(tinker)], "cross_entropy").result(60)
        assert (
            training.optim_step(tinker.AdamParams(learning_rate=0.01)).result(60).metrics["policy_version"]
            == 1
        )
        training.save_weights_and_get_sampling_client().result(60)
        state = state_of(services, training)
        client.close("success").result(60)
    assert seen.count(f"/api/v1/{path}") == 2
    assert (state.applied_seq_id, state.policy_version, state.published_version) == (3, 1, 1)


AT_ONCE: dict[str, tuple[str, dict[str, Any], str]] = {
    "a field of a later SDK": ("optim_step", {"adam_params": {}, "foreach": True}, "foreach is not served"),
    "a wrong type": ("save_weights", {"path": "x", "ttl_seconds": "soon"}, "ttl_seconds is refused"),
    "a wrong word": ("save_weights_for_sampler", {"kind": "frozen"}, "kind is refused"),
    "fields that exclude each other": (
        "load_weights",
        {"path": "tinker://x/weights/y", "optimizer": True, "session_id": "s"},
        "session_id is not served beside model_id",
    ),
    "a route that is not served": ("save_weights_external", {"path": "x"}, "is not served here"),
}


@pytest.mark.parametrize("case", AT_ONCE)
def test_the_number_of_a_request_that_is_refused_at_once_is_spent(
    client: Any, services: Stack, case: str
) -> None:
    """As the SDK counts: it sends the next one after a refusal, and no later one waits for this."""
    route, fields, said = AT_ONCE[case]
    model_id = lora(client).model_id
    refused = {"model_id": model_id, "seq_id": 2, **fields}
    sent = [post(services.gateway, route, refused) for _ in range(2)]
    assert sent[0] == sent[1] and sent[0][0] in (400, 404) and said in sent[0][1]["detail"]
    passes = [post(services.gateway, "forward_backward", gradients(model_id, seq))[1] for seq in (3, 1)]
    for promised in passes:
        status, answer = post(services.gateway, "retrieve_future", promised)
        assert status == 200 and isinstance(answer, bytes), answer
    later = {"model_id": model_id, "seq_id": 2, "path": "another"}
    status, answer = post(services.gateway, "save_weights", later)
    assert (status, "came before with other contents" in answer["detail"]) == (400, True)


def test_a_request_whose_predecessor_never_comes_is_given_up(
    tinker: Any, services: Stack, tmp_path: Path
) -> None:
    with gateway(tmp_path, services.trainer, services.inference, "--gap-seconds", "1") as address:
        client = tinker.ServiceClient(base_url=f"http://{address}")
        model_id = lora(client).model_id
        _, promised = post(address, "forward_backward", gradients(model_id, 2))
        _, answer = post(address, "retrieve_future", promised)
        assert answer["category"] == "user" and "request 1 of this model never came" in answer["error"]
        status, said = post(address, "forward_backward", gradients(model_id, 1))
        assert (status, "done or given up" in said["detail"]) == (400, True)
        client.close("success").result(60)


@pytest.mark.parametrize(("bound", "room"), [("training.MAX_WAITING", 2), ("gateway.MAX_WAITING_BYTES", 20)])
async def test_the_next_request_of_a_model_comes_in_where_later_ones_fill_all_room(
    monkeypatch: pytest.MonkeyPatch, bound: str, room: int
) -> None:
    """Otherwise these wait for it, and it for them, until it is given up."""
    monkeypatch.setattr(f"quartet_tinker.{bound}", room)
    gateway = Gateway(
        GatewayConfig(trainer="127.0.0.1:1", inference=["127.0.0.1:2"]), cast(Any, None), cast(Any, None)
    )
    session_id = gateway.create_session(bodies.CreateSession())["session_id"]
    model_id = f"{session_id}:train:0"
    training = Training(Run("run", model_id, "model", pb.RunSpec()), cast(Any, None), 600, lambda run: None)
    gateway.sessions.find(session_id).models[model_id] = training
    training.begin(pb.RunState())

    def send(seq_id: int) -> Promise:
        request = wire.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
        return gateway.forward_backward(request, b"ten bytes.")

    later = [send(3), send(2)]
    with pytest.raises(Refused) as full:
        send(4)
    assert full.value.status == 429
    promised = [send(1), *later]
    assert send(2) is later[1], "a repetition takes no room"
    async with asyncio.timeout(20):
        for promise in promised:
            await promise.done.wait()
            assert promise.answer is not None and b"data is empty" in promise.answer.body
    send(4)
    await training.close()
