"""What a body becomes as a request, and where its bounds lie: without a front, as no answer shows them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.v1 import inference_service_pb2 as pb
from quartet_inference.openai.bodies import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    ChatBody,
    CompletionBody,
    parse_chat,
    parse_completion,
)
from quartet_inference.openai.errors import OpenAiError, from_quartet
from quartet_inference.openai.forms import Chosen, tool_choice
from quartet_inference.openai.parameters import MAX_DEPTH, json_object
from quartet_inference.openai.turns import TurnBody
from quartet_inference.openai.wishes import Wishing

USER = [TurnBody(role="user", content="hi")]


def chat(**fields: Any) -> ChatBody:
    return ChatBody(model="m", messages=USER, **fields)


def completion(**fields: Any) -> CompletionBody:
    return CompletionBody(model="m", **{"prompt": [1], **fields})


@pytest.mark.parametrize("ids", [[1, -1], [-1, 1], [2**32], [1, 2**32]])
def test_tokens_that_are_none_are_refused_wherever_they_stand(ids: list[int]) -> None:
    for told in ([ids], [[1], ids]):
        with pytest.raises(OpenAiError, match="from 0 to 4294967295"):
            completion().requests(told)
    assert list(completion().requests([[0, 2**32 - 1]])[0].tokens.token_ids) == [0, 2**32 - 1]


def test_prompts_times_n_are_bounded() -> None:
    assert len(completion(prompt=[[1]] * 8, n=MAX_CHOICES // 8).prompts()) == 8
    for prompt, n in (([[1]] * 8, MAX_CHOICES // 8 + 1), (["a"] * (MAX_CHOICES + 1), 1), ([], 1)):
        with pytest.raises(OpenAiError, match=f"send 1 to {MAX_CHOICES} prompts"):
            completion(prompt=prompt, n=n).prompts()


def test_log_probabilities_of_an_answer_are_bounded_and_so_many_are_told() -> None:
    """Those of prompts that are told back count, those of others do not."""
    most = MAX_LOGPROBS // 5  # of four alternatives beside each token
    assert MAX_LOGPROBS % 5 == 0
    prompts = [[1] * 100, [1] * 100]
    for fields, told in (
        ({"logprobs": 4, "max_tokens": most // 2}, prompts),
        ({"logprobs": 4, "max_tokens": most // 2 - 100, "echo": True}, prompts),
        ({"logprobs": 4, "max_tokens": most // 4, "n": 2}, prompts),
        ({"logprobs": 0, "max_tokens": MAX_LOGPROBS - 100, "echo": True}, prompts[:1]),
    ):
        assert len(completion(**fields).requests(told)) == len(told)
        with pytest.raises(OpenAiError, match=f"at most {MAX_LOGPROBS} log-probabilities"):
            completion(**{**fields, "max_tokens": fields["max_tokens"] + 1}).requests(told)
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 4}
    for fields, room in (
        ({"max_tokens": most}, 2 * most),
        ({}, most),
        ({"n": 2, "max_tokens": most // 2}, most),
    ):
        assert chat(**asked, **fields).requests(room)
        longer = {**fields, "max_tokens": fields["max_tokens"] + 1} if fields else {}
        with pytest.raises(OpenAiError, match="send max_tokens, or fewer of them"):
            chat(**asked, **longer).requests(room if fields else room + 1)


def test_every_setting_arrives_and_what_is_left_out_stays_unset() -> None:
    said = {"temperature": 0.0, "top_p": 0.5, "presence_penalty": 0.25, "frequency_penalty": -0.5}
    said |= {"min_p": 0.125, "repetition_penalty": 1.5}
    sampling = (
        chat(**said, top_k=-1, seed=-1, stop="x", stop_token_ids=[3], ignore_eos=True).request().sampling
    )
    assert {name: getattr(sampling, name) for name in said} == said
    assert (sampling.top_k, sampling.seed) == (0, 2**64 - 1)
    assert (list(sampling.stop), list(sampling.stop_token_ids), sampling.ignore_eos) == (["x"], [3], True)
    assert chat(max_completion_tokens=7, max_tokens=7).request().sampling.max_tokens == 7
    bare = chat().request()
    fields = ("temperature", "top_p", "top_k", "seed", "max_tokens", "structure")
    assert not any(bare.sampling.HasField(name) for name in fields)
    assert not bare.HasField("min_policy_version") and not bare.HasField("exact_policy_version")
    pinned = chat(min_policy_version=0, exact_policy_version=0, prompt_cache_key="key").request()
    assert pinned.HasField("min_policy_version") and pinned.HasField("exact_policy_version")
    assert pinned.session_id == "key"
    assert chat(prompt_cache_key="key", session_id="mine").request().session_id == "mine"


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '{"a": "\\udC00\\ud800"}', "[1]", "null", "{"])
def test_what_is_no_object_of_text_is_refused(text: str) -> None:
    with pytest.raises(OpenAiError) as refused:
        json_object(text.encode())
    assert (refused.value.status, refused.value.body["error"]["code"]) == (400, "invalid_json")
    assert json_object(b'{"a": "\\ud83d\\ude00", "b": null}') == {"a": "\U0001f600"}


def chosen(**fields: Any) -> Chosen:
    return Chosen.model_validate(fields)


def test_a_choice_of_tools_is_that_of_the_contract() -> None:
    add = {"name": "add"}
    of_two = {
        "mode": "auto",
        "tools": [{"type": "function", "function": one} for one in (add, {"name": "sub"})],
    }
    offered = ["add", "sub", "mul"]
    for asked, single, wanted in (
        ("auto", False, None),
        ("none", False, None),
        ("auto", True, pb.ToolChoice(single=True)),
        ("required", False, pb.ToolChoice(required=True)),
        (
            chosen(type="function", function=add),
            False,
            pb.ToolChoice(required=True, single=True, names=["add"]),
        ),
        (chosen(type="allowed_tools", allowed_tools=of_two), False, pb.ToolChoice(names=["add", "sub"])),
        (
            chosen(type="allowed_tools", allowed_tools=of_two | {"mode": "required"}),
            True,
            pb.ToolChoice(required=True, single=True, names=["add", "sub"]),
        ),
    ):
        assert tool_choice(asked, single, offered) == wanted, asked
    assert tool_choice("auto", True, []) is None, "without tools there is nothing to choose"
    for asked, tools, why in (
        (chosen(type="function"), offered, "tool_choice.function: is missing"),
        (chosen(type="allowed_tools", function=add), offered, "tool_choice.allowed_tools: is missing"),
        (chosen(type="function", allowed_tools=of_two), offered, "tool_choice.function: is missing"),
        (chosen(type="function", function={"name": "div"}), offered, "'div' is none of the tools"),
        ("required", [], "only with tools"),
    ):
        with pytest.raises(OpenAiError, match=why):
            tool_choice(asked, False, tools)


@pytest.mark.parametrize(
    ("reason", "waits_ms", "status", "retry_after_s"),
    [
        ("NOT_READY", 0, 503, 5.0),
        ("NOT_READY", 250, 503, 0.25),
        ("OVERLOADED", 1500, 429, 1.5),
        ("OVERLOADED", 0, 429, None),
        ("INVALID_REQUEST", 0, 400, None),
        ("STREAM_TORN", 0, 500, None),
    ],
)
def test_an_error_says_when_to_ask_again_where_that_helps(
    reason: str, waits_ms: int, status: int, retry_after_s: float | None
) -> None:
    told = from_quartet(QuartetError(reason, "secret", retry_after_ms=waits_ms))
    assert (told.status, told.retry_after_s) == (status, retry_after_s)
    assert ("secret" in json.dumps(told.body)) == (status < 500 or reason == "NOT_READY")


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_a_parameter_is_nested_so_deep_and_no_deeper(begin: str, end: str) -> None:
    """parameters.py 3"""
    marks = 2 if begin.startswith("[{") else 1

    def body(levels: int) -> bytes:
        times = levels // marks
        return b'{"b": {"c": 1}, "a": %s}' % (begin * times + "1" + end * times).encode()

    assert json.dumps(json_object(body(MAX_DEPTH))["a"]) == json.dumps(json.loads(body(MAX_DEPTH))["a"])
    with pytest.raises(OpenAiError, match=f"a: is nested deeper than {MAX_DEPTH} levels") as refused:
        json_object(body(MAX_DEPTH + marks))
    assert (refused.value.status, refused.value.body["error"]["param"]) == (400, "a")
    for unread in (body(100_000), begin.encode() * 60_000):
        with pytest.raises(
            OpenAiError, match=f"^the body is nested deeper than {MAX_DEPTH} levels"
        ) as refused:
            json_object(unread)
        assert (refused.value.status, refused.value.body["error"]["code"]) == (400, "invalid_value")


def test_an_option_of_streams_that_is_null_is_left_out() -> None:
    """parameters.py 2"""
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "stream": True}
    for options in ({"include_usage": None}, {"include_usage": None, "include_obfuscation": None}, {}):
        for parse, left_out in ((parse_chat, "prompt"), (parse_completion, "messages")):
            fields = {name: value for name, value in asked.items() if name != left_out}
            body, _ = parse(json.dumps({**fields, "stream_options": options}).encode(), Wishing())
            assert body.stream_options is not None and not body.stream_options.include_usage


def test_what_clients_leave_null_in_what_they_send_back_is_left_out() -> None:
    """Sparse: of a call, of its function, of a tool and of its function too."""
    call = {"id": "1", "type": None, "index": None, "custom": None}
    call["function"] = {"name": "add", "arguments": "{}", "parsed": None}
    tool = {"type": "function", "custom": None}
    tool["function"] = {"name": "add", "description": None, "parameters": None, "strict": None, "more": None}
    turn = {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": [call]}
    schema = {"properties": {"a": {"enum": ["x", None], "default": None, "const": None}}, "title": None}
    full = {"type": "function", "function": {"name": "set", "parameters": schema}}
    asked = {"model": "m", "messages": [turn], "tools": [tool, full], "tool_choice": None}
    body, _ = parse_chat(json.dumps(asked).encode(), Wishing())
    (request,) = body.requests(100)
    assert [one.name for one in request.messages.messages[0].tool_calls] == ["add"]
    assert [one.name for one in request.tools] == ["add", "set"]
    assert json.loads(request.tools[1].parameters_json) == schema, "there null is a value"


@pytest.mark.parametrize(
    ("messages", "why"),
    [([], "messages: Input should not be empty"), (["hi"], r"messages\[0\]: Input should be an object")],
)
def test_a_wrong_shape_is_said_without_names_of_ours(messages: list[Any], why: str) -> None:
    with pytest.raises(OpenAiError, match=f"^{why}$"):
        parse_chat(json.dumps({"model": "m", "messages": messages}).encode(), Wishing())
