"""What an evaluation asks of replicas that it did not start (quartet.cli.eval.services)."""

from __future__ import annotations

import socket

import pytest
from quartet.cli.eval.services import reach
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
