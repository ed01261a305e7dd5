"""Serves a script's RewardService in a thread of its own, so that the script may have threads, signal
handlers and a running event loop (a notebook) of its own.

1. `served` returns once calls are accepted, or raises what was in the way; it may be used twice in a process,
   at two addresses.
2. At its end calls under way have GRACE_SECONDS, and the thread is waited for no longer than CLOSE_SECONDS. A
   function that goes on beyond that is left to itself, and ends with the process.
3. The script's own log stays its own: of what the kit logs there, only warnings are said, and nothing of a
   liveness that nobody restarts a script by.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import structlog
from grpc import aio

from quartet.config.model import ConfigError
from quartet.kit import own_log
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.rewards.conversation import Conversation
from quartet.rewards.environments import Environments
from quartet.rewards.functions import RewardFunctions
from quartet.rewards.instances import USUAL, Bounds
from quartet.rewards.listening import held
from quartet.rewards.prompts import Prompts
from quartet.rewards.service import NAME, RewardServicer
from quartet.v1 import reward_service_pb2_grpc

THREAD: Final = "reward service"
#: Binding takes milliseconds; so long a machine may be busy with other things.
START_SECONDS: Final = 60.0
#: The run has ended, and whoever calls is about to be told so.
GRACE_SECONDS: Final = 1.0
CLOSE_SECONDS: Final = 10.0
QUIET: Final = ("debug", "info")


@contextmanager
def served(
    functions: RewardFunctions,
    train: Prompts,
    evaluation: Prompts | None,
    address: str,
    failed: Callable[[BaseException], None],
    conversation: Conversation | None = None,
    environments: Environments | None = None,
    bounds: Bounds = USUAL,
) -> Iterator[None]:
    """RewardService at the address ("unix:...") while inside. `failed` is called once, in a thread of the
    service, with what a reward function raised, or the ValueError of a wrong answer. `conversation` is how
    those with tools go on, `environments` what each has, within `bounds`. Raises ConfigError."""
    servicer = RewardServicer(functions, train, evaluation, failed, conversation, environments, bounds)
    _quieten()
    accepting: Future[None] = Future()
    stop: Future[None] = Future()
    with held(address):
        thread = threading.Thread(
            target=lambda: asyncio.run(_serve(servicer, address, accepting, stop)), name=THREAD, daemon=True
        )
        thread.start()
        try:
            try:
                accepting.result(START_SECONDS)
            except TimeoutError:
                raise ConfigError(
                    f"{address} was not served within {START_SECONDS:g} s: the machine is busy; try again"
                ) from None
            yield
        finally:
            stop.set_result(None)
            thread.join(CLOSE_SECONDS)


async def _serve(servicer: RewardServicer, address: str, accepting: Future[None], stop: Future[None]) -> None:
    health, add = Health(is_told=False), reward_service_pb2_grpc.add_RewardServiceServicer_to_server
    try:
        _keep_grpc()
        running = await start([Service(NAME, add, servicer)], ServerConfig(address=address), health)
    except BaseException as error:  # noqa: BLE001 - raised where it is waited for
        accepting.set_exception(error)
        return
    health.set_ready(NAME)
    accepting.set_result(None)
    await asyncio.wrap_future(stop)
    health.drain()
    await running.stop(GRACE_SECONDS)


@cache
def _keep_grpc() -> None:
    """Once in a process, under a running loop: it looks for one, and a script's thread may have none."""
    # grpc.aio ends its thread with the last channel or server of the process, and may wait for that for ever
    # where it happens under another event loop (github.com/grpc/grpc/pull/40989): a script has several.
    aio.init_grpc_aio()


@cache
def _quieten() -> None:
    """Once in a process."""
    if not structlog.is_configured():
        logging.getLogger(own_log.NAME).setLevel(logging.WARNING)
        return
    structlog.configure(processors=[_of_service, *structlog.get_config()["processors"]])


def _of_service(_logger: Any, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    if threading.current_thread().name != THREAD:
        return event
    if method in QUIET:
        raise structlog.DropEvent
    # As plain text: structlog's own way shows all that frames hold, which took a minute of a large answer.
    return structlog.processors.format_exc_info(_logger, method, event)
