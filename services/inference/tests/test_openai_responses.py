"""POST /v1/responses, by the real client of that API: it is chat, in other words."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from quartet_inference.engine import Delta, Finish, Reason, Request, Span

from .openai_door import TOOL, Door, opened, requests_seen, say
from .random_models import CHATML

SEEDED: dict[str, Any] = {"temperature": 1.0, "extra_body": {"seed": 7, "return_token_ids": True}}
FLAT: Any = {"type": "function", "strict": False, **TOOL["function"]}
EVENTS: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a":  %d}}\n</tool_call>'
# A template that knows thinking, and tells that of earlier turns.
THOUGHT = "('<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '')"
THINKING = CHATML.replace("+ m.content }}", f"+ {THOUGHT} + m.content }}}}")


@pytest.fixture
async def thinking(model_folder: Path, tmp_path: Path) -> AsyncIterator[Door]:
    """A front whose model's template knows thinking."""
    template = tmp_path / "chat.jinja"
    template.write_text(THINKING)
    async with opened(model_folder, chat={"template_file": template}) as one:
        yield one


async def ask(door: Door, **more: Any) -> Response:
    """A response; it is one to the letter."""
    answer = await door.plain.responses.create(**{"model": door.model, "input": "hi", **more})
    return Response.model_validate(answer.model_dump())


async def told(door: Door, **more: Any) -> list[Any]:
    """The events of a response, each one to the letter, and about an item of the last event's output."""
    stream = await door.plain.responses.create(**{"model": door.model, "input": "hi", "stream": True, **more})
    events = [EVENTS.validate_python(event.model_dump()) async for event in stream]
    output = events[-1].response.output
    for event in events:
        if hasattr(event, "output_index"):
            named = event.item.id if hasattr(event, "item") else event.item_id
            assert named == output[event.output_index].id, event
    return events


def plain(response: Any) -> dict[str, Any]:
    """A response without what is new in each."""
    fields = response.model_dump()
    items = [{**item, "id": ""} for item in fields["output"]]
    cached = {"input_tokens_details": None}  # the second of two finds the first's prefix
    new = {"id": "", "created_at": 0, "completed_at": 0, "usage": {**fields["usage"], **cached}}
    return {**fields, "output": items, **new}


def texts(events: list[Any], name: str) -> str:
    """What the deltas of a kind add up to."""
    return "".join(event.delta for event in events if event.type == f"response.{name}.delta")


async def prompt_of(door: Door, **more: Any) -> list[int]:
    """The exact prompt of a request."""
    answer = await ask(door, max_output_tokens=1, extra_body={"return_token_ids": True}, **more)
    return answer.prompt_token_ids  # type: ignore[attr-defined,no-any-return]


async def test_it_is_chat_whole_and_streamed(door: Door) -> None:
    """responses 1, 3; events.py 1, 2."""
    whole = await ask(door, **SEEDED, instructions="Be brief.", max_output_tokens=40)
    history: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    chat = await door.chat(**SEEDED, messages=history, max_tokens=40)
    (choice,) = chat.choices
    assert whole.output_text == choice.message.content
    assert whole.prompt_token_ids == chat.prompt_token_ids  # type: ignore[attr-defined]
    assert whole.token_ids == choice.token_ids  # type: ignore[attr-defined]
    assert whole.policy_versions == choice.policy_versions  # type: ignore[attr-defined]
    usage = whole.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    assert (whole.instructions, whole.store) == ("Be brief.", False)  # type: ignore[attr-defined]

    events = await told(door, **SEEDED, instructions="Be brief.", max_output_tokens=40)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    begin = ["created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"]
    end = ["output_text.done", "content_part.done", "output_item.done", whole.status]
    assert names[:5] == begin and names[-4:] == end
    assert texts(events, "output_text") == events[-4].text == whole.output_text
    assert plain(events[-1].response) == plain(whole)
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1
    ids = {event.response.id for event in events if hasattr(event, "response")}
    assert len(ids) == 1 and ids != {whole.id}


async def test_thinking_text_and_calls_are_items(thinking: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """output.py 1, 2; events.py 1, 2."""
    say(monkeypatch, thinking, f"<think>\nOne and one.\n</think>\n\nWell.\n{CALL % 1}\n{CALL % 2}")
    whole = await ask(thinking, tools=[FLAT], max_output_tokens=200)
    thought, _, *calls = whole.output
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert thought.type == "reasoning" and thought.content is not None
    assert (thought.content[0].text, whole.output_text) == ("One and one.", "Well.")
    assert [call.arguments for call in calls] == ['{"a":  1}', '{"a":  2}']  # type: ignore[union-attr]
    assert all(item.status == "completed" for item in whole.output)  # type: ignore[union-attr]
    assert whole.usage is not None and whole.usage.output_tokens_details.reasoning_tokens == 12
    assert len({item.id for item in whole.output}) == 4

    events = await told(thinking, tools=[FLAT], max_output_tokens=200)
    assert texts(events, "reasoning_text") == "One and one."
    assert texts(events, "output_text") == "Well."
    assert texts(events, "function_call_arguments") == '{"a":  1}{"a":  2}'
    done = [event for event in events if event.type == "response.output_item.done"]
    steps = [event.output_index for event in events if "output_item." in event.type]
    assert steps == [0, 0, 1, 1, 2, 2, 3, 3], "one item after another"
    assert [event.item for event in done] == events[-1].response.output
    without = {**plain(whole), "output": [{**item, "call_id": ""} for item in plain(whole)["output"]]}
    streamed = plain(events[-1].response)
    assert {**streamed, "output": [{**item, "call_id": ""} for item in streamed["output"]]} == without

    async with thinking.plain.responses.stream(
        model=thinking.model, input="hi", tools=[FLAT], max_output_tokens=200
    ) as stream:
        pieces = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert pieces[-1] == "Well." and final.output_text == "Well."


@pytest.mark.parametrize("text", [
    f"<think>Hm.</think>Well.{CALL % 1}{CALL % 2}", f"Well.{CALL % 1}", CALL % 1, "<think>Hm.</think>Well.",
    "Well.", "<think>Hm.</think>", f"<think>Hm.</think>{CALL % 1}",
])  # fmt: skip
async def test_every_item_begins_with_nothing_and_ends_once(
    thinking: Door, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """events.py 1, 2: it is added in progress and empty, before anything is told of it, and done at last."""
    say(monkeypatch, thinking, text)
    events = await told(thinking, tools=[FLAT], max_output_tokens=200)
    response = events[-1].response
    assert response.output
    for place, item in enumerate(response.output):
        own = [event for event in events if getattr(event, "output_index", None) == place]
        names = [event.type.removeprefix("response.") for event in own]
        added, done = own[0], own[-1]
        assert (names[0], names[-1]) == ("output_item.added", "output_item.done")
        assert (added.item.status, added.item.id, added.item.type) == ("in_progress", item.id, item.type)
        assert done.item == item and item.status == "completed"
        inner = names[1:-1]
        if item.type == "function_call":
            assert (added.item.arguments, added.item.call_id, added.item.name) == ("", item.call_id, "add")
            assert inner == ["function_call_arguments.delta", "function_call_arguments.done"]
            assert (own[1].delta, own[2].arguments, own[2].name) == (item.arguments, item.arguments, "add")
        else:
            kind = {"message": "output_text", "reasoning": "reasoning_text"}[item.type]
            assert added.item.content == []
            assert inner[0] == "content_part.added" and own[1].part.text == ""
            assert inner[-2:] == [f"{kind}.done", "content_part.done"]
            assert set(inner[1:-2]) <= {f"{kind}.delta"}
            assert own[-3].text == own[-2].part.text == item.content[0].text
            assert "".join(event.delta for event in own[2:-3]) == item.content[0].text
    begun = [event for event in events if hasattr(event, "response")]
    assert [event.response.output for event in begun[:-1]] == [[], []], "what is told of it before is empty"


async def test_items_that_come_back_are_the_turn_that_chat_has(
    thinking: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """items.py 1, 2: the prompt is that of the same conversation in chat, to the token."""
    say(monkeypatch, thinking, f"<think>\nHm.\n</think>\n\nWell.\n{CALL % 1}\n{CALL % 2}")
    more: Any = {"tools": [FLAT], "include": ["reasoning.encrypted_content"]}
    first = await ask(thinking, **more)
    chat = (await thinking.chat(tools=[TOOL])).choices[0].message.model_dump()
    items: Any = [item.model_dump() for item in first.output]
    calls = [item for item in items if item["type"] == "function_call"]
    for call, item in zip(chat["tool_calls"], calls, strict=True):
        call["id"] = item["call_id"]
    system: Any = [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "S"}]}]
    outputs: Any = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "2"} for call in calls
    ]
    outputs[1]["output"] = [{"type": "input_text", "text": "2"}]
    messages: Any = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "hi"},
        chat,
        *({"role": "tool", "tool_call_id": call["call_id"], "content": "2"} for call in calls),
    ]
    monkeypatch.undo()
    asked: Any = {"messages": messages, "tools": [TOOL], "max_tokens": 1}
    want = (await thinking.chat(**asked, extra_body={"return_token_ids": True})).prompt_token_ids
    said: Any = {"role": "user", "content": "hi"}
    turn = [*system, said, *items, *outputs]
    assert await prompt_of(thinking, tools=[FLAT], input=turn) == want
    assert items[0]["encrypted_content"] and items[0]["content"][0]["text"] == "Hm."
    for thought in (
        {"type": "reasoning", "summary": [], "encrypted_content": items[0]["encrypted_content"]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
    ):
        turn[2] = thought
        assert await prompt_of(thinking, tools=[FLAT], input=turn) == want
    assert await prompt_of(thinking, tools=[FLAT], input=turn[:2] + turn[3:]) != want, "thinking counts"


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        ([["t", "a"], ["m", "b"], ["c", "1"], ["c", "2"]], [["a", "b", "12"]]),
        ([["m", "a"], ["m", "b"]], [["", "a", ""], ["", "b", ""]]),
        ([["c", "1"], ["m", "b"]], [["", "", "1"], ["", "b", ""]]),
        ([["m", "a"], ["t", "b"], ["c", "1"]], [["", "a", ""], ["b", "", "1"]]),
        ([["t", "a"], ["t", "b"]], [["a", "", ""], ["b", "", ""]]),
        ([["c", "1"], ["o", "1"], ["c", "2"], ["o", "2"]], [["", "", "1"], ["", "", "2"]]),
    ],
)
async def test_an_item_that_goes_back_begins_another_turn(
    door: Door, monkeypatch: pytest.MonkeyPatch, items: list[list[str]], turns: list[list[str]]
) -> None:
    """items.py 1."""
    seen = requests_seen(monkeypatch)
    forms: dict[str, Any] = {
        "t": lambda text: {"type": "reasoning", "summary": [], "content": [part("reasoning_text", text)]},
        "m": lambda text: {"role": "assistant", "content": [part("output_text", text)]},
        "c": lambda text: {"type": "function_call", "call_id": text, "name": "f", "arguments": "{}"},
        "o": lambda text: {"type": "function_call_output", "call_id": text, "output": "x"},
    }
    await ask(door, input=[forms[kind](text) for kind, text in items], max_output_tokens=1)
    said = [message for message in seen[0].messages.messages if message.role == "assistant"]
    assert [[m.reasoning_content, m.content, "".join(c.id for c in m.tool_calls)] for m in said] == turns


def part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text}


async def test_what_is_cut_off_is_incomplete(thinking: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """output.py 1, 2."""

    def write(text: str) -> None:
        tokens = [*thinking.encode(text)]

        async def generate(request: Request) -> AsyncIterator[Delta | Finish]:
            yield Delta(0, tokens, [-1.0] * len(tokens), [Span(0, len(tokens), 0)])
            yield Finish(0, Reason.LENGTH, "", None, 0)

        monkeypatch.setattr(thinking.engine, "generate", generate)

    for text, kinds in (
        ("<think>Hm, ", [("reasoning", "incomplete")]),
        ("<think>Hm.</think>We", [("reasoning", "completed"), ("message", "incomplete")]),
        ("", [("message", "incomplete")]),
        (f"Well.{CALL % 1}", [("message", "completed"), ("function_call", "incomplete")]),
    ):
        write(text)
        whole = await ask(thinking, tools=[FLAT])
        assert whole.status == "incomplete" and whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens" and whole.completed_at is None
        assert [(item.type, item.status) for item in whole.output] == kinds  # type: ignore[union-attr]
        events = await told(thinking, tools=[FLAT])
        assert events[-1].type == "response.incomplete"
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [(item.type, item.status) for item in done] == kinds
        assert done == events[-1].response.output


async def test_a_turn_that_says_nothing_is_an_empty_message(
    thinking: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """output.py 1: else loops of agents ask for ever; but beside calls there is none."""
    for text, kinds in (
        ("<think>Hm.</think>", ["reasoning", "message"]),
        (CALL % 1, ["function_call"]),
        ("", ["message"]),
    ):
        say(monkeypatch, thinking, text or "\n", times=1 if text else 0)
        whole = await ask(thinking, tools=[FLAT])
        assert [item.type for item in whole.output] == kinds and whole.output_text == ""
        last = (await told(thinking, tools=[FLAT]))[-1].response
        assert [item.type for item in last.output] == kinds and last.output_text == ""


async def test_log_probabilities_are_chats(door: Door) -> None:
    """events.py 3."""
    sampling: Any = {"temperature": 1.0, "top_logprobs": 3, "extra_body": {"seed": 3, "ignore_eos": True}}
    include: Any = ["message.output_text.logprobs"]
    whole = await ask(door, **sampling, include=include, max_output_tokens=30)
    (message,) = whole.output
    assert message.type == "message" and message.content[0].type == "output_text"
    have = message.content[0].logprobs
    chat = await door.chat(**sampling, logprobs=True, max_tokens=30)
    assert have is not None and len(have) == 30
    want = [entry.model_dump() for entry in chat.choices[0].logprobs.content]
    assert [entry.token for entry in have] == [entry["token"] for entry in want]
    assert [entry.logprob for entry in have] == pytest.approx([e["logprob"] for e in want], abs=1e-6)
    assert [len(entry.top_logprobs) for entry in have] == [3] * 30
    events = await told(door, **sampling, include=include, max_output_tokens=30)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [one.token for event in deltas for one in event.logprobs] == [one.token for one in have]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert [one.token for one in done.logprobs] == [one.token for one in have]
    assert (await ask(door, max_output_tokens=2)).output[0].content[0].logprobs == []  # type: ignore[union-attr,index]


async def test_log_probabilities_of_thinking_are_told_with_the_first_text(
    thinking: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """events.py 3."""
    text = "<think>Hm, hm, hm.</think>Well, well."
    say(monkeypatch, thinking, text)
    include: Any = ["message.output_text.logprobs"]
    events = await told(thinking, include=include)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [one.token for event in deltas for one in event.logprobs] == [*text, "<|im_end|>"]
    assert len(deltas[0].logprobs) > len(text) / 2 and len(deltas) > 1


async def test_log_probabilities_of_calls_are_told_behind_the_message_before_them(
    thinking: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """events.py 1, 3: a delta without a text tells them, before the message is done."""
    include: Any = ["message.output_text.logprobs"]
    text = f"Well.{CALL % 1}"
    say(monkeypatch, thinking, text)
    events = await told(thinking, tools=[FLAT], include=include)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [one.token for event in deltas for one in event.logprobs] == [*text, "<|im_end|>"]
    assert (deltas[-1].delta, texts(events, "output_text")) == ("", "Well.")
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert events.index(deltas[-1]) < events.index(done)
    message, call = events[-1].response.output
    assert [one.token for one in message.content[0].logprobs] == [one.token for one in done.logprobs]
    assert len(done.logprobs) == len(text) + 1 and "logprobs" not in call.model_dump()
    say(monkeypatch, thinking, CALL % 1)
    events = await told(thinking, tools=[FLAT], include=include)
    assert [item.type for item in events[-1].response.output] == ["function_call"]
    assert not [event for event in events if "output_text" in event.type]


async def test_responses_are_not_kept(door: Door) -> None:
    """responses 2."""
    kept = await ask(door, max_output_tokens=2, store=True)
    for asked in (
        door.plain.responses.retrieve(kept.id),
        door.plain.responses.delete(kept.id),
        door.plain.responses.cancel(kept.id),
    ):
        with pytest.raises(openai.NotFoundError, match=f"{kept.id}.*not kept here") as away:
            await asked
        assert away.value.code == "not_found"
