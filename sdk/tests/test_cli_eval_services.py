"""What an evaluation asks of replicas that it did not start (quartet.cli.eval.services)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import Any

import pytest
from quartet.cli.eval import services
from quartet.cli.eval.services import reach, with_host
from quartet.cli.eval.source import Source
from quartet.config import ConfigError
from quartet.kit.channel import ClientSecurity
from replica_fleet import fleet


async def test_replicas_of_which_none_answers_are_refused_before_anything_starts() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens, and nobody else can
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"no replica of inference answers; {nobody}: "):
            await reach([nobody], ClientSecurity())
        async with fleet(1) as ([scripted], _replicas):
            await reach([nobody, scripted.address], ClientSecurity())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_scheduler_and_a_closed_terminal_end_it_as_ctrl_c_does(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    ended = []

    async def beside(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("in order")

    monkeypatch.setattr(services, "beside", beside)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        with_host([], Source("m"), lambda *_: asyncio.sleep(0))
    assert ended == ["in order"] and signal.getsignal(number) is before
