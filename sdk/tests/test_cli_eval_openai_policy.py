"""What an endpoint answers, as the policy's answer (quartet.cli.eval.openai_policy)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion
from quartet.cli.eval import openai_policy
from quartet.cli.eval.endpoints import Endpoint, endpoint_at
from quartet.cli.eval.openai_policy import OpenAiPolicy, answer_of
from quartet.cli.eval.source import asked as source_at
from quartet.config import ConfigError
from quartet.v1.envhost_service_pb2 import ModelQuestion


def answered(message: dict[str, Any]) -> ChatCompletion:
    """A completion as the client library reads it from a server."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    return ChatCompletion.model_validate(body)


@pytest.mark.parametrize(
    ("thinking", "read"),
    [
        ({"reasoning_content": "so"}, "so"),
        ({"reasoning": "so"}, "so"),
        ({"reasoning_content": None, "reasoning": "so"}, "so"),
        ({"reasoning": None}, ""),
        ({}, ""),
    ],
)
def test_thinking_is_read_under_both_of_its_names(thinking: dict[str, Any], read: str) -> None:
    """openai_policy.py 3."""
    message = answer_of(answered({"content": "4", **thinking})).message
    assert (message.content, message.reasoning_content) == ("4", read)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_thinking_goes_back_by_the_name_that_it_was_told_by(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """openai_policy.py 1 and 3."""
    asked: list[Any] = []

    async def create(**given: Any) -> ChatCompletion:
        asked.append(given["messages"])
        return answered({"content": "4", name: "so"})

    async with OpenAiPolicy(endpoint_at("http://127.0.0.1:9/v1", "m", "NO_SUCH_VARIABLE")) as policy:
        monkeypatch.setattr(policy._clients[0].chat.completions, "create", create)
        said = (await policy(ModelQuestion())).message
        await policy(ModelQuestion(messages=[said]))
    assert asked == [[], [{"role": "assistant", "content": "4", name: "so"}]]


@pytest.mark.parametrize(
    ("refused", "has_answered", "is_hopeless"),
    [
        (openai.PermissionDeniedError, False, True),
        (openai.PermissionDeniedError, True, False),  # of one text, by its moderation
        (openai.AuthenticationError, True, True),
    ],
)
async def test_a_text_that_is_refused_ends_its_rollout_and_a_wrong_key_everything(
    refused: type[openai.APIStatusError], has_answered: bool, is_hopeless: bool
) -> None:
    """openai_policy.py 5."""
    answers: list[Any] = [answered({"content": "4"})] if has_answered else []
    response = httpx.Response(403, request=httpx.Request("POST", "http://h/v1"))
    answers.append(refused("no", response=response, body={"message": "flagged"}))

    async def create(**_: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with OpenAiPolicy(endpoint_at("http://127.0.0.1:9/v1", "m", "NO_SUCH_VARIABLE")) as policy:
        for client in policy._clients:
            client.chat.completions.create = create
        if has_answered:
            await policy(ModelQuestion())
        with pytest.raises(ConfigError if is_hopeless else refused):
            await policy(ModelQuestion())
        assert (policy.fatal is not None) is is_hopeless


async def test_a_replica_that_is_away_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """openai_policy.py 4."""
    asked: list[str] = []
    failures: dict[str, Exception] = {}

    async def ask(self: Any, client: Any, replica: Any, *_: Any) -> str:
        asked.append(replica.model)
        if failure := failures.get(replica.model):
            raise failure
        self._answered = True
        return str(replica.model)

    monkeypatch.setattr(OpenAiPolicy, "_ask", ask)
    request = httpx.Request("POST", "http://h/v1")
    one = endpoint_at("http://127.0.0.1:9/v1", "a", "NO_SUCH_VARIABLE")
    both = Endpoint([*one.replicas, *one.with_model("b").replicas])
    async with OpenAiPolicy(both) as policy:
        failures["a"] = openai.APIConnectionError(request=request)
        assert [await policy(ModelQuestion()) for _ in range(3)] == ["b", "b", "b"]
        assert asked == ["a", "b", "b", "b"], "the first turn found it away; it rests in those after that"
        failures["b"] = openai.APITimeoutError(request=request)
        with pytest.raises(openai.APITimeoutError):
            await policy(ModelQuestion())
        assert asked[4:] == ["b"], "one that is slow is not asked elsewhere, too"
        policy._rests_until = [0.0, 0.0]
        failures.clear()
        assert [await policy(ModelQuestion()) for _ in range(2)] == ["a", "b"], "rested, it has its turns"
    async with OpenAiPolicy(both) as policy:
        failures |= dict.fromkeys("ab", openai.APIConnectionError(request=request))
        with pytest.raises(ConfigError, match="cannot be reached"):
            await policy(ModelQuestion())


@pytest.mark.parametrize(
    ("rollouts", "answers"), [((), 600.0), ((30.0, 60.0), 600.0), ((30.0, 3600.0), 3600.0)]
)
async def test_an_answer_may_take_as_long_as_a_rollout(rollouts: tuple[float, ...], answers: float) -> None:
    """By the clock of the client it would be asked for anew, from its first token."""
    endpoint = endpoint_at("http://127.0.0.1:9/v1", "m", "NO_SUCH_VARIABLE")
    player = source_at("m", endpoint, rollouts).player
    assert player is not None
    async with player() as policy:
        assert isinstance(policy, OpenAiPolicy)
        assert policy._clients[0].timeout == openai.Timeout(answers, connect=10.0)


@contextlib.contextmanager
def dropped_packets() -> Iterator[str]:
    """An address as behind a firewall that drops: nobody accepts, and what comes beyond the queue is lost."""
    with contextlib.ExitStack() as opened:
        full = opened.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield f"http://127.0.0.1:{full.getsockname()[1]}/v1"


async def test_a_replica_whose_packets_are_dropped_is_passed_over_in_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """openai_policy.py 4: the kernel itself would try for two minutes, and the client library four times."""
    monkeypatch.setattr(openai_policy, "CONNECT_SECONDS", 0.3)
    monkeypatch.setattr(openai_policy, "RETRIES", 1)
    answer = answered({"content": "4"}).model_dump_json().encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(answer)}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    there = "http://{}:{}/v1".format(*server.sockets[0].getsockname()[:2])
    async with server:
        with dropped_packets() as hole:
            lost, found = endpoint_at(hole, "m", "NO_KEY"), endpoint_at(there, "m", "NO_KEY")
            async with OpenAiPolicy(Endpoint([*lost.replicas, *found.replicas])) as policy:
                async with asyncio.timeout(15):
                    assert (await policy(ModelQuestion())).message.content == "4"
                assert policy.fatal is None
            async with OpenAiPolicy(lost) as policy, asyncio.timeout(15):
                with pytest.raises(ConfigError, match=f"{hole} cannot be reached: .*timed out"):
                    await policy(ModelQuestion())
