"""How tests read what a host answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from quartet.errors import QuartetError, from_rpc
from quartet.v1 import rollout_pb2


def kind(rollout: Any) -> str:
    """The kind of its failure; UNSPECIFIED where it has none."""
    return rollout_pb2.FailureKind.Name(rollout.failure.kind).removeprefix("FAILURE_KIND_")


async def refusal(call: Any) -> QuartetError:
    """What a call of the service is refused with."""
    with pytest.raises(grpc.RpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    return from_rpc(caught.value)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it; the caller bounds the wait."""
    while not condition():  # noqa: ASYNC110 - what is waited for happens in other processes too
        await asyncio.sleep(0.02)
