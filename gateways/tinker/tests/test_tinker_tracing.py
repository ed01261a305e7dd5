"""Spans of the gateway: what the SDK asks for, and below it what that takes of the services."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from span_collector import collecting_here

from .tinker_calls import datum, lora
from .tinker_stack import Stack, gateway

SERVICE = "quartet.v1.TrainerService"


def test_the_calls_of_a_request_are_below_it(
    tinker: Any, services: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        collecting_here(monkeypatch) as collector,
        gateway(tmp_path, services.trainer, services.inference) as address,
    ):
        client = tinker.ServiceClient(base_url=f"http://{address}")
        training = lora(client)
        training.forward_backward([datum(tinker)], "cross_entropy").result(60)
        with pytest.raises(tinker.RequestFailedError):
            training.forward_backward([datum(tinker, weights=[1.0])], "cross_entropy").result(60)
        client.close("success").result(60)
    failed = [one for one in collector.named("promise") if one.status]
    assert [one.status for one in failed] == ["ERROR"], "what was refused"
    told = {one.name: one for one in collector.spans}
    for call, request in (("CreateRun", "create_model"), ("ForwardBackward", "forward_backward")):
        above = collector.above(told[f"{SERVICE}/{call}"])
        assert above == ["quartet-tinker INTERNAL promise", f"quartet-tinker SERVER POST /api/v1/{request}"]
        assert told[f"POST /api/v1/{request}"].attributes["http.response.status_code"] == 200
    assert not {"retrieve_future", "session_heartbeat", "telemetry"} & {
        name.rpartition("/")[2] for name in told
    }, "which ask again and again, and are no work"
