"""An environment's oracle: a process in the environment's interpreter that answers line by line."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from quartet.cli.env.oracle import WRONG, Oracle, find_oracle, full_reward_of
from quartet.config import ConfigError
from quartet.v1.common_pb2 import Message
from quartet.v1.envhost_service_pb2 import ModelQuestion

SOURCE = """
FULL_REWARD = 1.7
print("imported")

def answer(task, messages):
    print("thinking")
    if len(messages) == 1:
        return {"content": "", "tool_calls": [{"name": "look", "arguments": {"at": task["where"]}}]}
    return f"{messages[-1]['role']} said {messages[-1]['content']}"
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package that this interpreter finds."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = tmp_path / "some_env"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "oracle.py").write_text(SOURCE)
    return folder


async def test_it_answers_with_text_and_tool_calls_and_what_it_prints_is_no_answer(package: Path) -> None:
    assert find_oracle("some_env", sys.executable) == ("some_env.oracle", True)
    async with Oracle("some_env.oracle", sys.executable) as oracle:
        assert oracle.full_reward == 1.7
        oracle.playing({"where": "there"})
        asked = [Message(role="user", content="q")]
        (call,) = (await oracle(ModelQuestion(messages=asked))).message.tool_calls
        assert (call.name, json.loads(call.arguments_json)) == ("look", {"at": "there"})
        asked += [Message(role="assistant"), Message(role="tool", content="42")]
        answer = await oracle(ModelQuestion(messages=asked))
        assert answer.message.content == "tool said 42" and list(answer.token_ids)
        with pytest.raises(ConfigError, match="the oracle failed: KeyError: 'where'"):
            oracle.playing({})
            await oracle(ModelQuestion(messages=asked[:1]))
        assert (await oracle(ModelQuestion(messages=asked))).message.content == "tool said 42", "it goes on"
        oracle.wrong = True
        assert (await oracle(ModelQuestion(messages=asked))).message.content == WRONG


def test_what_a_right_answer_earns_is_1_where_nobody_says(package: Path) -> None:
    assert full_reward_of("some_env", sys.executable) == 1.7
    (package / "oracle.py").write_text("def answer(task, messages): ...")
    assert full_reward_of("some_env", sys.executable) == 1.0
    for written, why in (
        ("FULL_REWARD = 0", r"FULL_REWARD = 0 is refused; set it to what a right answer earns"),
        ("FULL_REWARD = 'much'", "cannot be read: ValueError: could not convert string to float: 'much'"),
        ("import nowhere", "cannot be read: ModuleNotFoundError: No module named 'nowhere'"),
    ):
        (package / "oracle.py").write_text(written)
        with pytest.raises(ConfigError, match=why):
            full_reward_of("some_env", sys.executable)
    (package / "oracle.py").unlink()
    assert full_reward_of("some_env", sys.executable) == 1.0


async def test_promise_3_the_answer_to_a_question_that_was_given_up_is_nobody_elses(package: Path) -> None:
    (package / "oracle.py").write_text(
        "import os, time\n"
        "def answer(task, messages):\n"
        "    while not os.path.exists(task):\n"
        "        time.sleep(0.01)\n"
        "    return task\n"
    )
    question = ModelQuestion(messages=[Message(role="user", content="q")])
    slow = package / "given up"
    async with Oracle("some_env.oracle", sys.executable) as oracle:
        oracle.playing(str(slow))  # type: ignore[arg-type]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(oracle(question), 0.05)
        slow.touch()
        oracle.playing(str(package))  # type: ignore[arg-type]
        assert (await oracle(question)).message.content == str(package)


async def test_one_that_is_not_there_or_cannot_be_imported_is_named(package: Path) -> None:
    (package / "oracle.py").write_text("import no_such_module")
    with pytest.raises(ConfigError, match=r"the process of some_env\.oracle ended"):
        await Oracle("some_env.oracle", sys.executable).__aenter__()
    (package / "oracle.py").unlink()
    assert find_oracle("some_env", sys.executable) == ("some_env.oracle", False)


async def test_that_of_a_single_module_is_a_module_beside_it(package: Path) -> None:
    (package.parent / "one_env.py").write_text("")
    assert find_oracle("one_env", sys.executable) == ("one_env_oracle", False)
    assert full_reward_of("one_env", sys.executable) == 1.0
    (package.parent / "one_env_oracle.py").write_text(SOURCE)
    assert find_oracle("one_env", sys.executable) == ("one_env_oracle", True)
    assert full_reward_of("one_env", sys.executable) == 1.7
    async with Oracle("one_env_oracle", sys.executable) as oracle:
        asked = [Message(role="user", content="q"), Message(role="tool", content="42")]
        assert (await oracle(ModelQuestion(messages=asked))).message.content == "tool said 42"
