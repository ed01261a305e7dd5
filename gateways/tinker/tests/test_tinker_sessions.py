"""Sessions and the runs in them: their end, their scripts' end, and the gateway's."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from loopback import LOOPBACK
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1 import trainer_service_pb2_grpc as rpc

from .tinker_calls import MODEL, TEXT, datum, lora, post, state_of
from .tinker_stack import Stack, gateway


def test_a_finished_session_gives_its_runs_back(tinker: Any, services: Stack) -> None:
    client = tinker.ServiceClient(base_url=f"http://{services.gateway}")
    training = lora(client)
    session = training.model_id.partition(":")[0]
    assert state_of(services, training).applied_seq_id == 0
    client.close("success").result(60)
    with pytest.raises(grpc.RpcError, match=r"RUN_UNKNOWN|is not open here"):
        state_of(services, training)
    status, said = post(services.gateway, "session_heartbeat", {"session_id": session})
    assert (status, "it ends when its script is silent for long" in said["detail"]) == (404, True)


def test_a_run_goes_on_under_another_gateway(tinker: Any, services: Stack, tmp_path: Path) -> None:
    """Killed or ended, the next gateway knows the run by runs_dir: its states are the trainer's."""
    runs = ("--runs-dir", str(tmp_path / "runs"))
    adam = tinker.AdamParams(learning_rate=0.01, eps=1e-8)
    with gateway(tmp_path, services.trainer, services.inference, *runs) as address:
        training = lora(tinker.ServiceClient(base_url=f"http://{address}"))
        training.forward_backward([datum(tinker)], "cross_entropy").result(60)
        training.optim_step(adam).result(60)
        path = training.save_state("kept").result(60).path
        loss = training.forward([datum(tinker)], "cross_entropy").result(60).metrics["loss:sum"]
    with gateway(tmp_path, services.trainer, services.inference, *runs) as address:
        client = tinker.ServiceClient(base_url=f"http://{address}")
        fresh = client.create_training_client_from_state(path).result(
            60
        )  # of a run that is closed, and stays so
        assert fresh.forward([datum(tinker)], "cross_entropy").result(60).metrics["loss:sum"] == loss
        assert not is_open(services, training)
        again = client.create_training_client_from_state_with_optimizer(path).result(60)
        assert again.forward([datum(tinker)], "cross_entropy").result(60).metrics["loss:sum"] == loss
        again.forward_backward([datum(tinker)], "cross_entropy").result(60)
        assert again.optim_step(adam).result(60).metrics["policy_version"] == 2
        with pytest.raises(tinker.RequestFailedError, match="no run of tinker://elsewhere"):
            client.create_training_client_from_state_with_optimizer("tinker://elsewhere/weights/x").result(60)
        client.close("success").result(60)


def test_the_runs_of_a_killed_gateway_are_closed_by_the_next(
    tinker: Any, services: Stack, tmp_path: Path
) -> None:
    runs = ("--runs-dir", str(tmp_path / "runs"))
    with gateway(tmp_path, services.trainer, services.inference, *runs, kill=True) as address:
        training = lora(tinker.ServiceClient(base_url=f"http://{address}"))
    assert state_of(services, training).applied_seq_id == 0, "nobody has closed it"
    with gateway(tmp_path, services.trainer, services.inference, *runs):
        give_up = time.monotonic() + 60
        while is_open(services, training):
            assert time.monotonic() < give_up, "the run is still open"
            time.sleep(0.1)


def test_a_run_is_taken_from_a_script_that_is_gone_and_another_keeps_its_own(
    tinker: Any, services: Stack, tmp_path: Path
) -> None:
    seconds = ("--takeover-seconds", "6", "--runs-dir", str(tmp_path / "runs"))
    with gateway(tmp_path, services.trainer, services.inference, *seconds) as address:
        # A script whose heartbeats we are.
        made = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"}
        session = post(address, "create_session", made)[1]["session_id"]
        created = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": MODEL,
            "lora_config": {"rank": 4},
            "type": "create_model",
        }
        model_id = post(address, "retrieve_future", post(address, "create_model", created)[1])[1]["model_id"]
        saving = {"model_id": model_id, "seq_id": 1, "path": "kept", "type": "save_weights"}
        path = post(address, "retrieve_future", post(address, "save_weights", saving)[1])[1]["path"]
        client = tinker.ServiceClient(base_url=f"http://{address}")
        gone = threading.Event()

        def beat() -> None:
            while not gone.wait(1):
                post(address, "session_heartbeat", {"session_id": session})

        beating = threading.Thread(target=beat)
        beating.start()
        beside = client.create_training_client_from_state_with_optimizer(path).result(60)
        loss = beside.forward_backward([datum(tinker)], "cross_entropy").result(60).metrics["loss:sum"]
        assert beside.optim_step(tinker.AdamParams()).result(60).metrics["policy_version"] == 1
        more = beside.save_state("more").result(60).path
        assert more == f"tinker://{beside.model_id}/weights/more" != path, "a run of its own"
        note = json.loads((tmp_path / "runs" / f"{beside.model_id.replace(':', '.')}.json").read_text())
        assert note["spec"]["initial_state"].endswith("/kept@1")
        status, said = post(address, "get_info", {"model_id": model_id, "type": "get_info"})
        assert (status, said["model_id"]) == (200, model_id), "and the first keeps its own"
        gone.set()
        beating.join()
        taken = client.create_training_client_from_state_with_optimizer(path).result(60)
        passes = taken.forward_backward([datum(tinker)], "cross_entropy").result(60)
        assert passes.metrics["loss:sum"] == loss, "both begin where the state was saved"
        status, said = post(address, "save_weights", {**saving, "seq_id": 2, "path": "more"})
        assert (status, "ends when another client goes on with its run" in said["detail"]) == (404, True)
        client.close("success").result(60)


def test_a_run_that_the_trainer_has_lost_is_said(tinker: Any, client: Any, services: Stack) -> None:
    """As after a restart of the trainer: the script goes on from its state."""
    training = lora(client)
    path = training.save_state("kept").result(60).path
    training.forward_backward([datum(tinker)], "cross_entropy").result(60)
    with grpc.insecure_channel(services.trainer) as channel:
        stub: Any = rpc.TrainerServiceStub(channel)
        stub.CloseRun(pb.CloseRunRequest(run_id=training.model_id.replace(":", ".")), timeout=20)
    for _ in range(2):
        with pytest.raises(tinker.RequestFailedError, match="the trainer has this run no more"):
            training.optim_step(tinker.AdamParams()).result(60)
    again = client.create_training_client_from_state_with_optimizer(path).result(60)
    again.forward_backward([datum(tinker)], "cross_entropy").result(60)
    assert again.optim_step(tinker.AdamParams()).result(60).metrics["policy_version"] == 1


def is_open(services: Stack, training: Any) -> bool:
    """Whether the trainer has the run of a client."""
    try:
        state_of(services, training)
    except grpc.RpcError as error:
        assert "is not open here" in str(error)
        return False
    return True


def test_a_state_that_is_not_there_takes_nothing_away(tinker: Any, client: Any, services: Stack) -> None:
    """The client that has the run keeps it; a run that nobody had is closed again."""
    training = lora(client)
    path = training.save_state("kept").result(60).path
    training.forward_backward([datum(tinker)], "cross_entropy").result(60)
    with pytest.raises(tinker.RequestFailedError, match="the run has no state 'kepr', it has kept"):
        client.create_training_client_from_state_with_optimizer(path.replace("kept", "kepr")).result(60)
    assert training.optim_step(tinker.AdamParams()).result(60).metrics["policy_version"] == 1

    other = tinker.ServiceClient(base_url=f"http://{services.gateway}")
    gone = lora(other)
    path = gone.save_state("kept").result(60).path
    other.close("success").result(60)
    assert not is_open(services, gone)
    with pytest.raises(tinker.RequestFailedError, match="the run has no state 'kepr'"):
        client.create_training_client_from_state_with_optimizer(path.replace("kept", "kepr")).result(60)
    assert not is_open(services, gone)
    client.create_training_client_from_state_with_optimizer(path).result(60)
    assert is_open(services, gone)


def test_a_script_goes_on_after_its_gateway_was_started_again(
    tinker: Any, services: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told at once, with what to do; saved weights are there again when their run is."""
    runs = ("--runs-dir", str(tmp_path / "runs"))
    monkeypatch.setenv("no_proxy", LOOPBACK)
    with gateway(tmp_path, services.trainer, services.inference, *runs, address=f"{LOOPBACK}:0") as address:
        client = tinker.ServiceClient(base_url=f"http://{address}")
        training, prompt = lora(client), tinker.ModelInput.from_ints(TEXT)
        early = training.save_state("early").result(60).path
        weights = training.save_weights_for_sampler("x").result(60).path
        state = training.save_state("kept").result(60).path
        sampler = client.create_sampling_client(weights).result(60)
    with gateway(tmp_path, services.trainer, services.inference, *runs, address=address):
        began = time.monotonic()
        with pytest.raises(tinker.NotFoundError, match=r"a restart forgets it.*another ServiceClient"):
            training.forward([datum(tinker)], "cross_entropy").result(60)
        with pytest.raises(tinker.NotFoundError, match="a restart forgets it"):
            sampler.compute_logprobs(prompt).result(60)
        asked = {"request_id": f"{training.model_id}:3"}
        status, said = post(address, "retrieve_future", asked)
        assert (status, "a restart forgets it, and a result is kept" in said["detail"]) == (404, True)
        assert time.monotonic() - began < 50  # of the minute that each answer is waited for
        again = tinker.ServiceClient(base_url=f"http://{address}")
        with pytest.raises(tinker.BadRequestError, match="is not open: its client was closed, or"):
            again.create_sampling_client(weights).result(60)
        rest = tinker.RestClient(base_url=f"http://{address}")
        with pytest.raises(tinker.BadRequestError, match="the trainer lists states of open ones"):
            rest.list_checkpoints(training.model_id).result(60)
        onward = again.create_training_client_from_state_with_optimizer(early).result(60)
        with pytest.raises(tinker.BadRequestError, match="'x' is not the newest version of its run"):
            again.create_sampling_client(weights).result(60)
        kept = rest.list_checkpoints(onward.model_id).result(60).checkpoints
        assert {one.tinker_path for one in kept} == {early, state}
        again.create_training_client_from_state_with_optimizer(state).result(60)
        sampler = again.create_sampling_client(weights).result(60)
        assert sampler.compute_logprobs(prompt).result(60)[0] is None
        again.close("success").result(60)
