"""A tool server that all rollouts of a worker share is lost, and costs no more than the rollouts under way:
real hosts, workers and servers. v1/shared.py 1-2, v1/starts.py 1.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hosting import serving
from quartet.v1 import envhost_service_pb2
from quartet_envhost import processes
from quartet_envhost.own_folder import folder_of
from rollout_outcomes import kind, refusal, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

STALL_S = 2.0


class Desk:
    """A host of environments whose tool servers are shared, and its policy."""

    def __init__(self, host: Any, stub: Any, policy: Any) -> None:
        self.host, self.stub, self.policy = host, stub, policy

    async def run(self, env_id: str = "shared-env", args: str = "", **fields: Any) -> Any:
        """One rollout."""
        fields = {"members": [0], "timeout_ms": 60_000, "request_id": os.urandom(6).hex(), **fields}
        request = envhost_service_pb2.RunRolloutsRequest(
            environment={"id": env_id, "args_json": args}, **fields
        )
        stream = self.stub.RunRollouts(request, timeout=120)
        (rollout,) = [one.rollout async for one in stream if one.HasField("rollout")]
        return rollout

    @property
    def worker(self) -> int:
        """The process of the only worker."""
        (worker,) = [one for pool in self.host._pools.values() for one in pool.workers]
        pid: int = worker.pid
        return pid

    @property
    def servers(self) -> list[int]:
        """What that has started."""
        return [one.pid for one in processes.tree(self.worker) if one.pid != self.worker]

    def calls(self, call: str) -> None:
        """From now on, every rollout calls a tool once and is done."""
        self.policy.answer = lambda request, last: "done" if _asked(request) else call


def _asked(request: Any) -> bool:
    return any(message.role == "tool" for message in request.tokens.tail_messages)


def called_by_a_stranger(server: int, query: str) -> int:
    """The status that a call of a tool by another user of the machine has."""
    environment = Path(f"/proc/{server}/environ").read_text().split("\0")
    (file,) = [one.partition("=")[2] for one in environment if one.startswith("MCP_PORT_FILE=")]
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    request = urllib.request.Request(
        f"http://127.0.0.1:{Path(file).read_text()}/mcp{query}",
        json.dumps(call).encode(),
        {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"},
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    return refused.value.code


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


@pytest.fixture
def desk(envs_python: str, templates_of_all: Any, path: dict[str, Any]) -> Callable[..., Any]:
    """What serves a host of its own, with these settings besides."""

    @asynccontextmanager
    async def serve(**settings: Any) -> AsyncIterator[Desk]:
        import scripted_inference

        policy = scripted_inference.ScriptedInference()
        inference = await scripted_inference.serve_scripted(policy)
        table = {
            "inference_addresses": [inference.address],
            "python": envs_python,
            "environments": {"shared-env": path, "wiki-search": path},
            **settings,
        }
        async with serving(table, templates_of_all) as (host, stub):
            yield Desk(host, stub, policy)
        await inference.stop(0)

    return serve


async def test_a_shared_server_that_is_killed_costs_the_rollouts_under_way_alone(desk: Any) -> None:
    """v1/shared.py 1, with an environment of ours. v1/tool_server.py 2: and nobody else calls its tools."""
    async with desk() as one:
        one.calls('call search_pages {"query": "river"}')
        before = await one.run("wiki-search", max_retries=0)
        assert not before.HasField("failure") and before.num_turns == 2, before.failure
        one.policy.delay_s = 50.0
        under_way = [asyncio.create_task(one.run("wiki-search", max_retries=more)) for more in (0, 2)]
        await asyncio.wait_for(until(lambda: one.policy.running == 2), 60)
        worker, one.policy.delay_s = one.worker, 0.0
        (server,) = one.servers
        assert "quartet_envhost.v1.tool_server" in command_of(server), "and not as Verifiers would"
        for query in ("", "?quartet_key=", "?quartet_key=guessed"):
            assert await asyncio.to_thread(called_by_a_stranger, server, query) == 403
        os.kill(server, signal.SIGKILL)
        alone, again = await asyncio.wait_for(asyncio.gather(*under_way), 60)
        assert kind(alone) == "HOST" and alone.failure.retryable
        assert "its tool server was ended by signal 9" in alone.failure.message, alone.failure
        assert not again.HasField("failure") and again.failed_attempts == 1, again.failure
        after = await one.run("wiki-search", max_retries=0)
        assert not after.HasField("failure") and one.worker != worker


@pytest.mark.parametrize("way", ["killed", "stopped"])
async def test_a_worker_leaves_no_folder_however_it_ends(desk: Any, way: str) -> None:
    """own_folder.py 2: the shared server's lies in that of the worker."""
    async with desk() as one:
        one.calls('call desk_block {"seconds": 0}')
        assert not (await one.run(max_retries=0)).HasField("failure")
        folder = folder_of(one.worker, os.environ)
        assert [log.name for log in folder.glob("*/*")], "the server's log"
        if way == "killed":
            os.kill(one.worker, signal.SIGKILL)
            await asyncio.wait_for(until(lambda: not folder.exists()), 60)
    assert not folder.exists()


async def test_a_shared_server_that_ends_by_itself_is_lost_at_once(desk: Any) -> None:
    """v1/shared.py 1: long before it would be taken for one that hangs, with whatever code it ends."""
    async with desk() as one:
        one.calls('call desk_block {"seconds": 0}')
        # The times below are the loss's; starting a worker takes as long as the machine is busy.
        assert not (await one.run()).HasField("failure")
        for code in (0, 1):
            worker = one.worker
            one.calls(f'call desk_leave {{"code": {code}}}')
            ended = await asyncio.wait_for(one.run(max_retries=0), 30)
            assert (
                f"its tool server 'desk' exited with code {code}" in ended.failure.message
                or kind(ended) == "TOOL"
            )
            gone = Path(f"/proc/{worker}")
            await asyncio.wait_for(until(lambda gone=gone: not gone.exists()), 30)
            one.calls('call desk_block {"seconds": 0}')
            rollout = await one.run(max_retries=2)
            assert not rollout.HasField("failure"), rollout.failure


async def test_a_shared_server_that_ends_as_it_starts_keeps_its_environment_from_loading(desk: Any) -> None:
    """v1/starts.py 1: long before the time to load is over."""
    async with desk(load_timeout_seconds=170.0) as one:
        refused = await refusal(one.run(args=json.dumps({"breaks": True})))
        assert refused.reason == "ENVIRONMENT_UNAVAILABLE"
        how = "exited with code 1 as it started: LookupError: no drawer: "
        assert f"does not load: ToolsetError: its tool server 'desk' {how}" in refused.message


async def _stops(one: Desk) -> None:
    for pid in one.servers:
        os.kill(pid, signal.SIGSTOP)


async def _blocks(one: Desk) -> None:
    one.calls('call desk_block {"seconds": 600}')
    rollout = await one.run(timeout_ms=500)
    assert kind(rollout) == "TIMEOUT"


async def test_a_shared_server_that_hangs_is_lost(desk: Any) -> None:
    """v1/shared.py 2: whether its process stands still or its loop does."""
    async with desk(stall_seconds=STALL_S) as one:
        one.calls('call desk_block {"seconds": 0}')
        assert not (await one.run()).HasField("failure")
        for hang in (_stops, _blocks):
            worker = one.worker
            await hang(one)
            one.calls('call desk_block {"seconds": 0}')
            rollout = await one.run(max_retries=1)
            assert not rollout.HasField("failure") and one.worker != worker, rollout.failure
            assert rollout.failed_attempts == 1
            told = f"its tool server 'desk' answered nothing for {STALL_S:g} s"
            assert told in rollout.earlier_failure.message


async def test_a_shared_server_that_works_is_not_lost(desk: Any) -> None:
    """v1/shared.py 2: each call shorter than `stall_seconds`, and all in a row longer."""
    async with desk(stall_seconds=STALL_S) as one:
        one.calls('call desk_block {"seconds": 1}')
        await one.run()
        worker, started = one.worker, time.monotonic()
        rollouts = await asyncio.gather(*(one.run() for _ in range(5)))
        assert time.monotonic() - started > 2 * STALL_S, "or it tells nothing"
        assert not any(rollout.HasField("failure") for rollout in rollouts)
        assert one.worker == worker


@pytest.mark.slow
async def test_a_server_that_cannot_be_reached_is_a_failure_of_the_tool(desk: Any) -> None:
    """v1/shared.py 4: it is not ours to start anew, and may be back for the next."""
    async with desk() as one:
        one.calls('call desk_block {"seconds": 0}')
        with socket.socket() as taken:  # bound, and nobody listens
            taken.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{taken.getsockname()[1]}/mcp"
            rollout = await one.run(args=json.dumps({"url": url}))
        assert kind(rollout) == "TOOL" and rollout.failure.retryable, rollout.failure
        assert "tool servers desk do not answer: " in rollout.failure.message
        assert "TaskGroup" not in rollout.failure.message


async def test_half_a_surrogate_pair_is_an_error_of_the_tool(desk: Any) -> None:
    """v1/harness.py: its model is told, at once, and the tool is not called again."""
    async with desk() as one:
        one.calls("call desk_half {}")
        rollout = await one.run(messages_of_members=1)
        assert not rollout.HasField("failure") and rollout.reward == 1.0, rollout.failure
        (said,) = [message.content for message in rollout.messages if message.role == "tool"]
        assert said == "error: the answer of half is no text that can be read"
        assert rollout.timing.total_ms < 10_000
