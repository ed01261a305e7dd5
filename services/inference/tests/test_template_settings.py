"""Variables of the chat template that a request chooses, over the real service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quartet.config import ConfigError
from quartet.config.load import validate
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb
from quartet_inference.config import InferenceConfig
from quartet_inference.openai.front import Front

from . import chat_templates as templates
from .inference_replica import Replica, serving
from .openai_door import opened

BRIEF, LONG = '{"style": "brief"}', '{"style": "long"}'
SAMPLING = common_pb2.SamplingParams(max_tokens=4, seed=1, ignore_eos=True)


def first(settings: str) -> pb.GenerateRequest:
    messages = pb.MessagesPrompt(messages=[common_pb2.Message(role="user", content="hi")])
    return pb.GenerateRequest(messages=messages, sampling=SAMPLING, template_settings=settings)


def later(known: list[int], role: str, settings: str) -> pb.GenerateRequest:
    tail = [common_pb2.Message(role=role, content="and?")]
    tokens = pb.TokensPrompt(token_ids=known, tail_messages=tail)
    return pb.GenerateRequest(tokens=tokens, sampling=SAMPLING, template_settings=settings)


async def whole(replica: Replica, request: pb.GenerateRequest) -> list[int]:
    """The prompt and what was sampled."""
    deltas, _ = await replica.generate(request)
    return [*replica.start.prompt_token_ids, *(token for delta in deltas for token in delta.token_ids)]


@pytest.fixture
def varies(tmp_path: Path) -> dict[str, Any]:
    """Settings of a service whose template branches on two variables."""
    file = tmp_path / "template.jinja"
    file.write_text(templates.VARIES)
    return {"chat": {"template_file": file, "template_settings": {"enable_thinking": False}}}


async def test_two_requests_of_one_service_differ_in_every_turn(
    model_folder: Path, varies: dict[str, Any]
) -> None:
    """Invariant 6: what was given stays, to the token; what is new is as the request says."""
    async with serving(model_folder, **varies) as replica:
        ends: list[int] = []
        for settings in (BRIEF, LONG):
            known = await whole(replica, first(settings))
            said = await whole(replica, later(known, "user", settings))
            assert replica.start.prefix_kept and said[: len(known)] == known
            ends.append(len(replica.start.prompt_token_ids) - len(known))
        assert ends[0] - ends[1] == len("brief") - len("long"), "a token for each letter"


async def test_a_conversation_is_known_under_its_own_settings_alone(
    model_folder: Path, tmp_path: Path
) -> None:
    """Answers of tools cannot be appended under one of them: it is rendered whole, where it is remembered."""
    file = tmp_path / "template.jinja"
    file.write_text(templates.MAY_CONTINUE)
    continues = '{"continues": true}'
    async with serving(model_folder, chat={"template_file": file}) as replica:
        for settings, kept in (("", True), (continues, False)):
            known = await whole(replica, first(settings))
            await replica.generate(later(known, "tool", settings))
            assert replica.start.prefix_kept is kept
        known = await whole(replica, first('{"continues": 1}'))
        error = await replica.refusal(later(known, "tool", '{"continues": 2}'))
        assert error.metadata["field"] == "tokens.tail_messages"


async def test_what_cannot_be_chosen_is_refused(model_folder: Path) -> None:
    """template_settings.py 1-2"""
    async with serving(model_folder) as replica:
        for settings, why in (
            ("{", "send a JSON object"),
            ("[]", "send a JSON object"),
            ("NaN", "send a JSON object"),
            ('{"a": NaN}', "send a JSON object"),
            (r'{"a": "\ud83d"}', "send a JSON object"),
            ('{"a": "' + "x" * 8192 + '"}', "at most 8192 travel"),
            ('{"tools": []}', "tools is no variable that can be chosen"),
            ('{"chat_template": "{{ 1 }}"}', "chat_template is no variable"),
        ):
            for request in (first(settings), later([1, 2, 3], "user", settings)):
                error = await replica.refusal(request)
                assert (error.reason, error.metadata["field"]) == ("INVALID_REQUEST", "template_settings")
                assert why in error.message, error.message


async def test_the_front_takes_them_as_vllm_calls_them(
    model_folder: Path, varies: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(model_folder, **varies) as door:

        async def prompt(**more: Any) -> str:
            body = {"return_token_ids": True, **({"chat_template_kwargs": more} if more else {})}
            answer = await door.chat(max_tokens=2, extra_body=body)
            asked = await door.plain.responses.create(
                model=door.model, input="hi", max_output_tokens=2, extra_body=body
            )
            told: list[int] = answer.prompt_token_ids  # type: ignore[attr-defined]
            assert told == asked.prompt_token_ids  # type: ignore[attr-defined]
            front: Front = door.front
            return front._chat.text(told, special=True)

        closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        assert await prompt() == f"<|im_start|>user\nhi<|im_end|>\n{closed}"
        assert await prompt(style="brief") == f"<|im_start|>user\nhi /brief<|im_end|>\n{closed}"
        assert (await prompt(enable_thinking=True)).endswith("assistant\n")
        assert (await prompt(enable_thinking=None)).endswith("assistant\n"), "null is a value, as with vLLM"


def test_a_service_is_not_configured_with_what_cannot_be_chosen(model_folder: Path) -> None:
    given = {"model": model_folder, "chat": {"template_settings": {"add_generation_prompt": False}}}
    with pytest.raises(ConfigError, match="add_generation_prompt is no variable"):
        validate(InferenceConfig, given)
