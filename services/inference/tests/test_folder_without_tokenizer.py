"""A model's folder without a tokenizer, or without a chat template: what is served, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.v1 import inference_service_pb2 as pb
from quartet_inference.chat import Chat
from structlog.testing import capture_logs

from .inference_replica import serving
from .openai_door import opened


@pytest.fixture
def bare(model_folder: Path, tmp_path: Path) -> Path:
    """As whoever trains with token ids may leave it."""
    folder = tmp_path / "bare"
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    return folder


def test_it_is_said_at_the_start(model_folder: Path, bare: Path) -> None:
    with capture_logs() as said:
        Chat(model_folder)
        assert not [one for one in said if one["log_level"] == "warning"]
        Chat(bare)
    [warning] = [one for one in said if one["log_level"] == "warning"]
    assert warning["event"] == "messages, texts, stop strings and structures are refused"
    assert f"folder {str(bare)!r} has no tokenizer" in warning["why"]


async def test_tokens_are_served_and_texts_are_refused_with_what_to_copy(bare: Path) -> None:
    message: Any = {"role": "user", "content": "hi"}
    structure = pb.GenerateRequest()
    structure.tokens.token_ids.append(5)
    structure.sampling.structure.json_schema = "{}"
    asked = {
        "messages": pb.GenerateRequest(messages={"messages": [message]}),
        "tokens.tail_messages": pb.GenerateRequest(tokens={"token_ids": [5], "tail_messages": [message]}),
        "sampling.stop": pb.GenerateRequest(tokens={"token_ids": [5]}, sampling={"stop": ["x"]}),
        "structure.json_schema": structure,
    }
    async with serving(bare) as replica:
        tokens = pb.GenerateRequest(tokens={"token_ids": [5]}, sampling={"max_tokens": 3})
        _, [finish] = await replica.generate(tokens)
        assert finish.usage.completion_tokens == 3
        for field, request in asked.items():
            with pytest.raises(QuartetError) as refused:
                await replica.generate(request)
            assert (refused.value.reason, refused.value.metadata["field"]) == ("INVALID_REQUEST", field)
            assert f"{str(bare)!r} has no tokenizer" in refused.value.message
            assert "copy tokenizer.json" in refused.value.message


async def test_the_openai_front_refuses_texts_and_takes_tokens(bare: Path) -> None:
    async with opened(bare) as door:
        assert (await door.complete(prompt=[5, 6], max_tokens=3)).usage.completion_tokens == 3
        told = {"messages": [{"role": "user", "content": "hi"}], "model": door.model}
        for path, body in {
            "chat/completions": told,
            "completions": {"model": door.model, "prompt": "hi"},
            "responses": {"model": door.model, "input": "hi"},
        }.items():
            status, error = await door.refusal(path, **body)
            assert status == 400 and f"{str(bare)!r} has no tokenizer" in error["message"], (path, error)


async def test_without_a_chat_template_messages_are_refused_in_our_words(
    model_folder: Path, tmp_path: Path
) -> None:
    """A base model's folder: texts and tokens are served, and who sends messages is told what to do."""
    folder = tmp_path / "base"
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("chat_template*"))
    message: Any = {"role": "user", "content": "hi"}
    asked = {
        "messages": pb.GenerateRequest(messages={"messages": [message]}),
        "tokens.tail_messages": pb.GenerateRequest(tokens={"token_ids": [5], "tail_messages": [message]}),
    }
    with capture_logs() as said:
        async with serving(folder) as replica:
            for field, request in asked.items():
                with pytest.raises(QuartetError) as refused:
                    await replica.generate(request)
                assert (refused.value.reason, refused.value.metadata["field"]) == ("INVALID_REQUEST", field)
                assert "the model has no chat template: send token ids" in refused.value.message
                assert "tokenizer.chat_template" not in refused.value.message
    assert "messages are refused" in [one["event"] for one in said if one["log_level"] == "warning"]
    async with opened(folder) as door:
        status, error = await door.refusal(model=door.model, messages=[message])
        assert (status, error["param"]) == (400, "messages")
        assert "send token ids, or texts to /v1/completions" in error["message"]
        assert (await door.complete(max_tokens=2)).usage.completion_tokens == 2
