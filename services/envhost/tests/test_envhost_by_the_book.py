"""Packages that are written as the documentation of Verifiers has it, run unchanged by a real host: stateful
tools, an MCP server over stdio, forks of a conversation, parsers, images, programs in the local runtime.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from hosting import serving
from quartet.interact import interact
from quartet.v1 import envhost_service_pb2
from rollout_outcomes import refusal

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]


class Book:
    """A host of both generations, and its policy."""

    def __init__(self, stub: Any, policy: Any) -> None:
        self.stub, self.policy = stub, policy

    def request(self, env_id: str, args: dict[str, Any], **fields: Any) -> Any:
        """Rollouts with all their conversations."""
        return envhost_service_pb2.RunRolloutsRequest(
            run_id="run",
            request_id=f"{env_id} {args} {fields}",
            environment={"id": env_id, "args_json": json.dumps(args)},
            messages_of_members=8,
            timeout_ms=60_000,
            **{"members": [0], **fields},
        )

    async def run(self, env_id: str, args: dict[str, Any], **fields: Any) -> list[Any]:
        """The rollouts of one request."""
        stream = self.stub.RunRollouts(self.request(env_id, args, **fields), timeout=150)
        return [frame.rollout async for frame in stream if frame.HasField("rollout")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def book(
    envs_python: str, classic_python: str, templates_of_all: Any, path: dict[str, Any]
) -> AsyncIterator[Book]:
    """A running host with an interpreter for each generation."""
    import scripted_inference

    policy = scripted_inference.ScriptedInference()
    inference = await scripted_inference.serve_scripted(policy)
    environments = {"book-v1": path, "book-classic": {**path, "python": classic_python}}
    settings = {
        "inference_addresses": [inference.address],
        "python": envs_python,
        "environments": environments,
    }
    async with serving(settings, templates_of_all) as (_, stub):
        yield Book(stub, policy)
    await inference.stop(0)


async def test_a_parser_and_its_format_reward(book: Book) -> None:
    book.policy.answer = lambda request, last: "<think>\nadd\n</think>\n<answer>\n4\n</answer>"
    right, wrong = [(await book.run("book-classic", {}, task_index=task))[0] for task in (0, 1)]
    assert not right.HasField("failure") and not wrong.HasField("failure"), (right.failure, wrong.failure)
    assert right.rewards["exact"] == 1.0 and wrong.rewards["exact"] == 0.0
    assert right.reward == pytest.approx(wrong.reward + 1.0) and wrong.reward == pytest.approx(0.2)
    assert [m.role for m in right.messages] == ["system", "user", "assistant"]
    assert "by_letter" not in right.metrics, "classic/scoring.py 4: a table is no metric, and no failure"


async def test_each_rollout_has_its_own_state_behind_a_stateful_tool(book: Book) -> None:
    def script(request: Any, last: str) -> str:
        (tool,) = request.tools
        assert "notebook" not in tool.parameters_json, "a hidden argument is not offered"
        lines = int(last.split()[0]) if last[0].isdigit() else 0
        return "done" if lines == 2 else f'call note {{"line": "line {lines}"}}'

    book.policy.answer = script
    rollouts = await book.run("book-classic", {"kind": "stateful"}, members=range(3))
    for rollout in rollouts:
        assert not rollout.HasField("failure"), rollout.failure
        assert rollout.reward == 2.0 and rollout.metrics["note_calls"] == 2.0
        said = [m.content for m in rollout.messages if m.role == "tool"]
        assert said == ["1 lines: line 0", "2 lines: line 0, line 1"]
        assert len(rollout.samples) == 1 and rollout.prefix_breaks == 0


async def test_tools_of_an_mcp_server_over_stdio(book: Book) -> None:
    def script(request: Any, last: str) -> str:
        assert [tool.name for tool in request.tools] == ["inhabitants"]
        return f"There are {last}." if last.isdigit() else 'call inhabitants {"town": "Ulm"}'

    book.policy.answer = script
    rollouts = await book.run("book-classic", {"kind": "mcp"}, members=range(2))
    for rollout in rollouts:
        assert not rollout.HasField("failure"), rollout.failure
        assert rollout.reward == 1.0
        assert [m.role for m in rollout.messages] == ["user", "assistant", "tool", "assistant"]
        assert rollout.messages[2].content == "120000"


async def test_a_conversation_that_forks_gives_a_sample_for_each_branch(book: Book) -> None:
    """Invariant 6: every sampled token is in one sample, once."""
    book.policy.answer = lambda request, last: f"turn {len(book.policy.requests)}"
    (rollout,) = await book.run("book-classic", {"kind": "forks"})
    assert not rollout.HasField("failure"), rollout.failure
    assert rollout.num_turns == 4 and rollout.reward == 4.0
    assert len(rollout.samples) == 2 and rollout.prefix_breaks == 1
    covered = sum(span.length for sample in rollout.samples for span in sample.spans)
    assert covered == rollout.usage.completion_tokens


async def test_the_remote_sandbox_of_classic_verifiers_is_refused(book: Book) -> None:
    """It needs a service elsewhere: the host says that the environment does not load, and why."""
    error = await refusal(book.run("book-classic", {"kind": "sandbox"}))
    assert error.reason == "ENVIRONMENT_UNAVAILABLE", error
    assert "does not load" in error.message and "Sandbox" in error.message


async def test_a_program_runs_in_the_local_runtime(book: Book) -> None:
    book.policy.answer = lambda request, last: "run print(2 * 2)"
    right, wrong = [(await book.run("book-v1", {}, task_index=task))[0] for task in (0, 1)]
    assert not right.HasField("failure") and not wrong.HasField("failure"), (right.failure, wrong.failure)
    assert right.reward == 1.0 and wrong.reward == 0.0
    book.policy.answer = lambda request, last: "run raise SystemExit(7)"
    (rollout,) = await book.run("book-v1", {}, members=[1])
    assert not rollout.HasField("failure") and rollout.reward == 0.0, "its own mistake, and no failure"


@pytest.mark.parametrize(
    ("env_id", "args", "task"), [("book-classic", {"kind": "image"}, 0), ("book-v1", {}, 2)]
)
async def test_images_reach_the_policy_as_they_are(
    book: Book, env_id: str, args: dict[str, Any], task: int
) -> None:
    questions: list[Any] = []

    async def policy(question: Any) -> Any:
        questions.append(question)
        return envhost_service_pb2.ModelAnswer(
            prompt_token_ids=[*question.prefix_token_ids, 5, 6],
            token_ids=[7],
            logprobs=[-1.0],
            message={"content": "run print('a dot')"},
        )

    request = book.request(env_id, args, task_index=task)
    (rollout,) = [one async for one in interact(book.stub, request, policy, timeout_s=150)]
    assert not rollout.HasField("failure"), rollout.failure
    for question in questions:
        asked = question.messages[0]
        assert [part.text for part in asked.parts] == ["What is this?", ""] and not asked.content
        assert asked.parts[1].image_url.startswith("data:image/gif;base64,R0lG")
    assert rollout.reward == len(questions) and len(rollout.samples) == 1
    assert rollout.messages[0].content == "What is this?" and not rollout.messages[0].parts
    await book.run(env_id, args, task_index=task)
    prompt = book.policy.requests[0].messages.messages[0]
    assert len(prompt.parts) == 2, "inference is sent them too, and says what it makes of them"
