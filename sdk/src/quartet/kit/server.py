"""Runs a service: bind, health, reflection, interceptor, metrics; then drain in order.

1. `serve` returns after SIGTERM or SIGINT, so that the process exits with 0. Order: health says NOT_SERVING
   and `health.draining` is set -> `drain_delay_seconds` for load balancers to notice -> `on_drain` (at most
   `flush_seconds`) -> RPCs in flight get `drain_seconds`, new ones are refused with UNAVAILABLE -> closed.
   Whoever only watches health is not waited for. A second signal skips the waiting.
2. A port in use, an unreadable certificate, an open door off loopback: one ConfigError sentence, before
   anything is served.
3. The address is published in `port_file` only once the port accepts connections, and atomically.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import platform
import re
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pydantic
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from quartet.config import Config, ConfigError
from quartet.kit import build, tracing
from quartet.kit.folder import check_folder
from quartet.kit.health import Health, HealthServicer
from quartet.kit.intercept import ServerInterceptor
from quartet.kit.memory import tune_allocator
from quartet.kit.metrics import MetricsServer, check_metrics, start_metrics
from quartet.kit.options import server_options
from quartet.kit.own_log import get_logger
from quartet.kit.security import MAX_PORT, ServerTls, TokenFile, check_server, host_port, server_credentials

#: What the kernel takes, less the byte that ends it.
MAX_SOCKET_PATH_BYTES = 107
HEALTH_SERVICE = "grpc.health.v1.Health"

log = get_logger()


class ServerConfig(Config):
    """Where and how a service listens. The `server` table of every service's configuration."""

    #: "host:port", or "unix:path".
    address: str = "127.0.0.1:0"
    metrics_address: str = ""
    tls: ServerTls | None = None
    token_file: Path | None = None
    insecure_ok_off_loopback: bool = False
    drain_seconds: float = pydantic.Field(default=5.0, ge=0, le=3600)
    drain_delay_seconds: float = pydantic.Field(default=0.0, ge=0, le=60)
    flush_seconds: float = pydantic.Field(default=60.0, ge=0, le=3600)
    port_file: Path | None = None
    reflection: bool = True
    max_concurrent_rpcs: int = pydantic.Field(default=4096, ge=1)

    @pydantic.field_validator("address")
    @classmethod
    def _is_address(cls, address: str) -> str:
        return address if re.match("unix:.", address) else host_port(address)


class BindError(ConfigError):
    """The address cannot be listened on."""


@dataclass(frozen=True)
class Service:
    """One gRPC service of a process: its full name, its generated add function, its servicer."""

    name: str
    add: Callable[[Any, Any], None]
    servicer: object


class _MethodTable:
    """What the generated add functions see of a server: handlers by name, and no methods known to the core.

    For those grpc.aio keeps a task each, and looks at all of them whenever a call arrives.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Nothing: the generic handler has them too."""


class RunningServer:
    """A server that accepts calls."""

    def __init__(
        self,
        server: grpc.aio.Server,
        address: str,
        watches: HealthServicer,
        watchdog: asyncio.Task[None],
        metrics: MetricsServer | None,
    ) -> None:
        """Take over a started server."""
        self._server = server
        self._watches = watches
        self._watchdog = watchdog
        self._metrics = metrics
        self.address = address

    async def stop(self, grace: float | None = None) -> None:
        """Refuse new RPCs, give those in flight `grace` seconds, close.

        Can be called again with less grace.
        """
        self._watches.close()
        await self._server.stop(grace)
        self._watchdog.cancel()
        await asyncio.gather(self._watchdog, return_exceptions=True)
        if self._metrics is not None:
            metrics, self._metrics = self._metrics, None
            await asyncio.to_thread(metrics.close)


def check_here(config: ServerConfig) -> None:
    """Whether `start` would begin now, serving nothing; ports are let go at once. Raises ConfigError."""
    tracing.check()
    _locked_door(config)
    if config.tls is not None:
        server_credentials(config.tls)
    _check_address(config.address)
    if config.metrics_address:
        check_metrics(config.metrics_address)
    if config.port_file:
        check_port_file(config.port_file)


async def start(services: Sequence[Service], config: ServerConfig, health: Health) -> RunningServer:
    """Bind and serve until `stop`. Raises ConfigError."""
    token = _locked_door(config)
    server = grpc.aio.server(
        interceptors=[ServerInterceptor(token, config.max_concurrent_rpcs)], options=server_options()
    )
    names = [service.name for service in services]
    health.register(names)
    table = _MethodTable(server)
    for service in services:
        service.add(service.servicer, table)
    runs = build.of_servicer(services[0].servicer) if services else build.build_of()
    watches = HealthServicer(health, runs)
    health_pb2_grpc.add_HealthServicer_to_server(watches, table)
    if config.reflection:
        reflection.enable_server_reflection((*names, HEALTH_SERVICE, reflection.SERVICE_NAME), server)
    address = _bind(server, config)
    metrics = start_metrics(config.metrics_address) if config.metrics_address else None
    if names:
        build.scraped(names[0], runs)
    await server.start()
    watchdog = asyncio.create_task(health.watchdog(), name="health-watchdog")
    running = RunningServer(server, address, watches, watchdog, metrics)
    if config.port_file:
        try:
            publish_address(config.port_file, address)
        except ConfigError:
            await running.stop(0)
            raise
    log.info("serving", address=address, services=names, build=str(runs), python=platform.python_version())
    return running


async def serve(
    services: Sequence[Service],
    config: ServerConfig,
    health: Health,
    *,
    on_drain: Callable[[], Awaitable[None]] | None = None,
    started: asyncio.Future[str] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain; `started` receives the address that was bound.

    Raises ConfigError where it cannot begin.
    """
    tune_allocator()
    with _signals() as (asked, hurry):
        running = await start(services, config, health)
        if started is not None:
            started.set_result(running.address)
        try:
            await asked.wait()
            log.info("draining", address=running.address)
            health.drain()
            await _unless(hurry, asyncio.sleep(config.drain_delay_seconds))
            if on_drain is not None:
                await _unless(hurry, _flush(on_drain, config.flush_seconds))
            await _unless(hurry, running.stop(config.drain_seconds))
        finally:  # also when serve() itself is cancelled
            await running.stop(0)
        log.info("stopped", address=running.address)


@contextlib.contextmanager
def _signals() -> Any:
    """Events for the first and the second SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    asked, hurry = asyncio.Event(), asyncio.Event()

    def notice() -> None:
        (hurry if asked.is_set() else asked).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, notice)
    try:
        yield asked, hurry
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _unless(hurry: asyncio.Event, work: Any) -> None:
    """Wait for `work`, but no longer once `hurry` is set."""
    tasks = {asyncio.ensure_future(work), asyncio.ensure_future(hurry.wait())}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:  # also where whoever waits is cancelled
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def _flush(on_drain: Callable[[], Awaitable[None]], limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await on_drain()
    except TimeoutError:
        log.error("flush took too long and was cut off", limit_s=limit_s)
    except Exception:
        log.exception("flush failed")


def _locked_door(config: ServerConfig) -> TokenFile | None:
    """The token of callers, where there is one. Raises ConfigError where strangers would be let in."""
    token = TokenFile(config.token_file, "server.token_file") if config.token_file else None
    check_server(config.address, config.tls, token, insecure_ok=config.insecure_ok_off_loopback)
    return token


def _bind(server: grpc.aio.Server, config: ServerConfig) -> str:
    address = config.address
    _check_address(address)
    try:
        if config.tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, server_credentials(config.tls))
    except RuntimeError as error:
        raise BindError(f"server.address = {address!r} cannot be bound: {error}") from None
    if address.startswith("unix:"):
        return address
    return f"{address.rpartition(':')[0]}:{port}"


def _check_address(address: str) -> None:
    """Whether it can be bound, as far as can be told before. Raises BindError, or ConfigError for a socket's
    folder, which say why, as gRPC does not."""
    if not address.startswith("unix:"):
        return check_free(address)
    path = Path(re.sub("^unix:(//)?", "", address))
    told = f"server.address = {address!r} cannot be bound"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise BindError(f"{told}: a socket's path ends at {MAX_SOCKET_PATH_BYTES} bytes; name a shorter one")
    if not path.parent.is_dir():
        raise BindError(f"{told}: there is no folder {path.parent}; make it")
    check_folder("server.address", path.parent)
    if why := _in_the_way(path):
        raise BindError(f"{told}: {why}")


def _in_the_way(path: Path) -> str:
    """Why a socket cannot take this path: gRPC would take it from whoever listens there, and tell neither."""
    if not os.path.lexists(path):
        return ""
    if not path.is_socket():
        return "what stands there is no socket; remove it, or name another path"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
            return ""  # left behind by a process that was killed
    return "a process listens there; stop it, or name another path"


def check_free(address: str, key: str = "server.address") -> None:
    """Bind and let go. Raises BindError, which says why, as gRPC does not."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if int(port) > MAX_PORT:  # the C library would silently take it modulo 65536
        raise BindError(f"{key} = {address!r} cannot be bound: ports end at {MAX_PORT}")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:  # the latter of a name with an empty label
        raise BindError(f"{key} = {address!r} is no address of this machine: {error}") from None
    with socket.socket(found[0], socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(found[4])
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                remedy = (
                    "the port is in use; stop the process that has it, or choose another (0: any free one)"
                )
            else:
                remedy = str(error.strerror)
            raise BindError(f"{key} = {address!r} cannot be bound: {remedy}") from None


def check_port_file(path: Path, key: str = "server.port_file") -> None:
    """Whether `publish_address` could write it. Raises ConfigError."""
    if not path.parent.is_dir():
        raise ConfigError(f"{key} = {str(path)!r} is in no folder; make it")
    check_folder(key, path.parent)


def publish_address(path: Path, address: str, key: str = "server.port_file") -> None:
    """Write the address, whole or not at all. Raises ConfigError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(f"{address}\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"{key} = {str(path)!r} cannot be written: {error.strerror}") from None
