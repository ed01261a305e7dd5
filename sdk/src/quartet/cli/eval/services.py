"""The services behind an evaluation, on this machine: an environment host, and our inference where a folder
answers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet.cli.chat_template import check_chat_template
from quartet.cli.env.installed import REFUSALS, with_interpreters
from quartet.cli.eval.player import Player
from quartet.cli.eval.source import Source
from quartet.config import ConfigError, validate
from quartet.errors import QuartetError
from quartet.kit.channel import ClientSecurity, connect
from quartet.local.beside import AddressBook, beside
from quartet.local.child import ChildSpec
from quartet.local.deployment import check, write
from quartet.local.wiring import Table, wire
from quartet.v1.envhost_service_pb2_grpc import EnvHostServiceStub

T = TypeVar("T")

DRAIN_SECONDS = 3.0
REPLICA_SECONDS = 10.0  # a health check computes nothing; one that is still loading answers it too


def deploy(
    source: Source, folder: Path, env_ids: Sequence[str], envhost: Table, inference: Table
) -> list[ChildSpec]:
    """Check everything and write the services' configs. Raises ConfigError."""
    tables = {"envhost": with_interpreters(envhost, env_ids)}
    if source.folder:
        check_chat_template(Path(source.folder), inference, env_ids)
        tables["inference"] = inference
    else:
        if inference:
            raise ConfigError("[inference] configures a model that is started here; name a model folder")
        tables["envhost"] |= {
            "inference_addresses": list(source.addresses),
            "interact_only": source.player is not None,
        }
    specs = write(wire(source.folder, folder / "data", tables), folder)
    asyncio.run(check(specs))
    if source.addresses:
        asyncio.run(reach(source.addresses, validate(ClientSecurity, envhost.get("inference_security", {}))))
    return specs


async def reach(addresses: Sequence[str], security: ClientSecurity) -> None:
    """One replica must answer: a rollout would wait for it until its own deadline. Raises ConfigError."""

    async def refusal(address: str) -> str:
        async with connect(address, security=security) as channel:
            try:
                await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=REPLICA_SECONDS
                )
            except grpc.aio.AioRpcError as error:
                return f"{address}: {error.details()}"
        return ""

    refusals = await asyncio.gather(*map(refusal, addresses))
    if all(refusals):
        raise ConfigError(f"no replica of inference answers; {'; '.join(refusals)}")


def with_host(
    specs: Sequence[ChildSpec],
    source: Source,
    work: Callable[[Any, Player | None, AddressBook], Coroutine[Any, Any, T]],
) -> T:
    """Run `work` with a stub of the host and the policy that a client plays, if one does.

    Raises ServiceFailed, QuartetError, and ConfigError for what the host says can never run as written. What
    else than Ctrl-C tells a command to end (a scheduler, a terminal that is closed) raises KeyboardInterrupt,
    too.
    """

    async def hosted() -> T:
        ended, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert ended is not None
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # not under nohup
                loop.add_signal_handler(number, ended.cancel)
        return await beside(specs, connected, drain_s=DRAIN_SECONDS)

    async def connected(book: AddressBook) -> T:
        async with AsyncExitStack() as opened:
            channel = await opened.enter_async_context(connect(book["envhost"][0]))
            host = EnvHostServiceStub(channel)  # type: ignore[no-untyped-call]
            policy = await opened.enter_async_context(source.player()) if source.player else None
            return await work(host, policy, book)

    try:
        return asyncio.run(hosted())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except QuartetError as error:
        if error.reason in REFUSALS:
            raise ConfigError(error.message) from error
        raise
