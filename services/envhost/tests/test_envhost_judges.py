"""Judges of Verifiers 0.4, plugged into a taskset by its arguments, and agents whose model is another one: a
real host, a server that speaks OpenAI's API.

(A judge that our own inference serves, and classic judges: tests/e2e/test_judges.py.)
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from quartet.v1 import envhost_service_pb2
from rollout_outcomes import kind

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Judge(ThreadingHTTPServer):
    """Says what it is told to say of everything; remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.says = "yes"
        self.asked: list[Any] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Answer(BaseHTTPRequestHandler):
    server: Judge

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        message = {"role": "assistant", "content": self.server.says}
        answer = {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        }
        self.send_response(200 if self.server.says else 503)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def judge() -> Iterator[Judge]:
    with Judge() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


async def judged(hosted: Any, judge: Judge) -> Any:
    """A rollout of the trial environment, whose length reward a judge stands beside."""
    plugged = {
        "id": "reference",
        "base_url": judge.url,
        "api_key_var": "PATH",  # one that is set; this judge asks for no key
        "model": "a-judge",
        "answer_field": "mode",
        "weight": 10.0,
    }
    request = envhost_service_pb2.RunRolloutsRequest(
        run_id="run",
        request_id=f"judged {len(judge.asked)} {judge.says}",
        environment={"id": "trial-env", "args_json": json.dumps({"task": {"judges": [plugged]}})},
        members=[0],
        timeout_ms=20_000,
    )
    stream = hosted.stub.RunRollouts(request, timeout=90)
    (rollout,) = [frame.rollout async for frame in stream if frame.HasField("rollout")]
    return rollout


async def test_a_judges_verdict_is_a_reward_beside_the_others(hosted: Any, judge: Judge) -> None:
    hosted.policy.answer = lambda request, last: "four"
    rollout = await judged(hosted, judge)
    assert not rollout.HasField("failure"), rollout.failure
    assert dict(rollout.rewards) == {"length": 4.0, "reference": 1.0} and rollout.reward == 0.5 * 4 + 10.0
    (asked,) = judge.asked
    assert asked["model"] == "a-judge" and "four" in asked["messages"][0]["content"]
    judge.says = "no"
    assert (await judged(hosted, judge)).reward == 2.0


@pytest.mark.parametrize(("says", "why"), [("", "503"), ("maybe", "verdict")])
async def test_a_judge_that_gives_no_verdict_is_no_reward(
    hosted: Any, judge: Judge, says: str, why: str
) -> None:
    """Invariant 5; own_code.py 4."""
    judge.says = says
    hosted.policy.answer = lambda request, last: "four"
    rollout = await judged(hosted, judge)
    assert kind(rollout) == "SCORER" and why in rollout.failure.message, rollout.failure
    assert rollout.failure.message.endswith(f" ({judge.url}/chat/completions)") == (not says)


async def test_an_agent_of_another_endpoint_is_no_part(hosted: Any, judge: Judge) -> None:
    """v1/outcome.py 2: what a frozen opponent earns is neither trained on nor the rollout's reward."""
    client = {"type": "eval", "base_url": judge.url, "api_key_var": "PATH"}
    args = {"attempts": 2, "sides": True, "rival": {"model": "frozen", "client": client}}
    request = envhost_service_pb2.RunRolloutsRequest(
        run_id="run",
        request_id="against a frozen one",
        environment={"id": "compare-env", "args_json": json.dumps(args)},
        members=[0],
        timeout_ms=20_000,
        messages_of_members=1,
    )
    hosted.policy.answer = lambda request, last: "much longer"
    stream = hosted.stub.RunRollouts(request, timeout=90)
    (rollout,) = [frame.rollout async for frame in stream if frame.HasField("rollout")]
    assert not rollout.HasField("failure"), rollout.failure
    assert len(judge.asked) == 1 and judge.asked[0]["model"] == "frozen"
    assert not rollout.parts and len(rollout.samples) == 1 and rollout.num_turns == 1
    assert rollout.reward == 3.0, "of the longer one, not the mean of both"
    assert [message.content for message in rollout.messages] == ["Say a word.", "much longer"]
