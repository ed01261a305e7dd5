"""Every RPC of the contract, called once on the running services.

1. An RPC answers OK, or with exactly one ErrorInfo of domain "quartet" whose reason is in the closed list.
2. The RPCs that this build does not serve are exactly those of NOT_SERVED: no more, and no fewer.
3. A malformed or an oversized message gets a typed error, tells nothing of the inside, and changes nothing.
"""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from quartet.v1 import common_pb2

# Push is served where it is asked for.
NOT_SERVED = {
    "inference": {"WeightService.Push"},
    "trainer": {"WeightService.Push"},
    "envhost": set(),
    "orchestrator": set(),
}
REASONS = {
    name.removeprefix("ERROR_REASON_") for name, number in common_pb2.ErrorReason.items() if number != 0
}
MESSAGE_LIMIT_BYTES = 4 * 1024 * 1024
MALFORMED = b"\x0a\xff\xff\xff\xff\x0f"  # field 1 claims four gigabytes, and nothing follows
TELLTALE = ("Traceback", "site-packages", ".py", "Exception", "<class")


def short(method: Any) -> str:
    """ "Service.Rpc"."""
    return f"{method.containing_service.name}.{method.name}"


@pytest.mark.parametrize("process", NOT_SERVED)
def test_every_rpc_answers_ok_or_typed(deployed: dict[str, Any], methods_of: Any, process: str) -> None:
    one = deployed[process]
    unserved = set()
    for method in methods_of(process):
        outcome = one.call(method)
        if outcome.reason == "NOT_IMPLEMENTED":
            unserved.add(short(method))
            assert outcome.code == grpc.StatusCode.UNIMPLEMENTED
        elif outcome.code != grpc.StatusCode.OK:
            assert len(outcome.infos) == 1, (short(method), outcome)
            assert outcome.infos[0].domain == "quartet", (short(method), outcome)
            assert outcome.reason in REASONS, (short(method), outcome)
            assert outcome.reason != "INTERNAL", (short(method), outcome)
    assert unserved == NOT_SERVED[process]
    assert one.alive()


@pytest.mark.parametrize("process", NOT_SERVED)
def test_a_malformed_message_is_a_typed_error(
    deployed: dict[str, Any], methods_of: Any, process: str
) -> None:
    one = deployed[process]
    for method in methods_of(process):
        outcome = one.call(method, MALFORMED)
        assert outcome.code != grpc.StatusCode.OK, short(method)
        assert outcome.reason in REASONS - {"INTERNAL"}, (short(method), outcome)
        assert not any(word in outcome.details for word in TELLTALE), (short(method), outcome)
    assert one.alive()


@pytest.mark.parametrize("process", NOT_SERVED)
def test_an_oversized_message_is_refused(deployed: dict[str, Any], methods_of: Any, process: str) -> None:
    """Refused by gRPC itself, before any code of ours sees it: hence the bare code."""
    one = deployed[process]
    oversized = b"\xf2\x7f" + bytes([0x80, 0x80, 0x80, 0x02]) + b"x" * MESSAGE_LIMIT_BYTES
    for method in methods_of(process):
        outcome = one.call(method, oversized)
        expected = {grpc.StatusCode.RESOURCE_EXHAUSTED}
        if short(method) in NOT_SERVED[process]:
            expected.add(grpc.StatusCode.UNIMPLEMENTED)
        assert outcome.code in expected, (short(method), outcome)
    assert one.alive()


@pytest.mark.parametrize("process", NOT_SERVED)
def test_an_unknown_rpc_is_unimplemented(deployed: dict[str, Any], process: str) -> None:
    one = deployed[process]
    call = one.channel.unary_unary("/quartet.v1.NoService/NoRpc", bytes, bytes)
    with pytest.raises(grpc.RpcError) as caught:
        call(b"", timeout=10)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert one.alive()
