"""Sessions and the runs in them: their end, their scripts' end, and the gateway's."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1 import trainer_service_pb2_grpc as rpc

from .tinker_calls import MODEL, datum, lora, post, state_of
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
    assert (status, "is not known to this gateway" in said["detail"]) == (404, True)


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
        give_up = time.monotonic() + 20
        while time.monotonic() < give_up:
            try:
                state_of(services, training)
            except grpc.RpcError as error:
                assert "is not open here" in str(error)
                break
            time.sleep(0.1)
        else:
            raise AssertionError("the run is still open")


def test_a_run_is_taken_from_a_script_that_is_gone_and_from_no_other(
    tinker: Any, services: Stack, tmp_path: Path
) -> None:
    seconds = ("--takeover-seconds", "4", "--runs-dir", str(tmp_path / "runs"))
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
        with pytest.raises(tinker.RequestFailedError, match="trains this run, and its script is there"):
            client.create_training_client_from_state_with_optimizer(path).result(60)
        gone.set()
        beating.join()
        taken = client.create_training_client_from_state_with_optimizer(path).result(60)
        taken.forward_backward([datum(tinker)], "cross_entropy").result(60)
        status, said = post(address, "save_weights", {**saving, "seq_id": 2, "path": "more"})
        assert (status, "is not known to this gateway" in said["detail"]) == (404, True)
        client.close("success").result(60)


def test_a_run_that_the_trainer_has_lost_is_said(tinker: Any, client: Any, services: Stack) -> None:
    """As after a restart of the trainer."""
    training = lora(client)
    training.forward_backward([datum(tinker)], "cross_entropy").result(60)
    with grpc.insecure_channel(services.trainer) as channel:
        stub: Any = rpc.TrainerServiceStub(channel)
        stub.CloseRun(pb.CloseRunRequest(run_id=training.model_id.replace(":", ".")), timeout=20)
    for _ in range(2):
        with pytest.raises(tinker.RequestFailedError, match="the trainer has this run no more"):
            training.optim_step(tinker.AdamParams()).result(60)
