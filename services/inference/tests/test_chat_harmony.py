"""Harmony, the format of gpt-oss: its turns read, whole and while they are written, and served."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import trl
from hypothesis import given
from hypothesis import strategies as st
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet_inference.chat import Chat, ParsedCall, Turn
from quartet_inference.chat.enforced import Calls, TurnForm
from quartet_inference.chat.harmony import MARKS, MAX_HEADER, HarmonyReader, opened_by
from quartet_inference.engine import Delta, Finish, Reason, Request, Span
from quartet_inference.messages import from_turn
from quartet_inference.structure.grammar import of_schema
from tokenizers import AddedToken

from .openai_door import Door, opened
from .random_models import byte_tokenizer, qwen3

TEMPLATE = Path(trl.__file__).parent / "chat_templates" / "gptoss.jinja"
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "Does.", "parameters": {"type": "object"}}}
    for name in ("add", "python")
]
ADD = ParsedCall("add", '{"a":  1}')
THINKS = "<|channel|>analysis<|message|>"
SAYS = "<|channel|>final<|message|>"
PLANS = "<|channel|>commentary<|message|>"
CALLS = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
NEXT = "<|end|><|start|>assistant"
FINAL = f"{THINKS}Let me see.{NEXT}{SAYS}It is four."
CALL = f'{THINKS}Let me see.{NEXT}{CALLS}{{"a":  1}}'

#: Text, thinking, content, calls.
READ: list[tuple[str, str, str, list[ParsedCall]]] = [
    (FINAL, "Let me see.", "It is four.", []),
    (f"{FINAL}<|return|>", "Let me see.", "It is four.", []),
    (f"{FINAL}<|end|><|return|>", "Let me see.", "It is four.", []),
    (CALL, "Let me see.", "", [ADD]),
    (f"{CALL}<|call|>", "Let me see.", "", [ADD]),
    # As the template writes it, and as the model may.
    (' to=functions.add<|channel|>commentary json<|message|>{"a":  1}<|call|>', "", "", [ADD]),
    ('<|channel|>analysis to=functions.add code<|message|>\n{"a":  1} ', "", "", [ADD]),
    ('<|channel|>commentary to=functions.add<|constrain|>json<|message|>{"a":  1}', "", "", [ADD]),
    ("<|channel|>commentary to=functions.other<|message|>{}", "", "", [ParsedCall("other", "{}")]),
    (f'{CALLS}{{"a":  1}}{NEXT}{CALLS}{{"a": 2}}', "", "", [ADD, ParsedCall("add", '{"a": 2}')]),
    (f'{CALLS}{{"a": "<|start|>"}}', "", "", [ParsedCall("add", '{"a": "<|start|>"}')]),
    (CALLS + r'{"a": "\ud83d"}', "", "", [ParsedCall("add", r'{"a": "\ud83d"}')]),
    # A preamble is for the user.
    (f'{THINKS}Hm.{NEXT}{PLANS}I add.{NEXT}{CALLS}{{"a":  1}}', "Hm.", "I add.", [ADD]),
    (f"{PLANS}I plan.{NEXT}{THINKS}Hm.{NEXT}{SAYS}Done.", "Hm.", "I plan.\nDone.", []),
    (f"{THINKS}One.{NEXT}{THINKS}{NEXT}{THINKS}Two.", "One.\nTwo.", "", []),
    (f"{CALLS}{{}}{NEXT}{THINKS}Hm.{NEXT}{SAYS}Yes.", "Hm.", "Yes.", [ParsedCall("add", "{}")]),
    ("<|message|>No channel.<|return|>", "", "No channel.", []),
    ('<|channel|>final <|constrain|>json<|message|>{"a": 1}', "", '{"a": 1}', []),
    # White space is of the text.
    (f"{THINKS}\n hm \n{NEXT}{SAYS}\n four\n", "\n hm \n", "\n four\n", []),
    # A tool that is built into the model, where one of that name was given.
    ('<|channel|>analysis to=python<|message|>{"b": 1}', "", "", [ParsedCall("python", '{"b": 1}')]),
    # Cut off.
    (f"{THINKS}Let me", "Let me", "", []),
    (f"{THINKS}Hm.<|end|>", "Hm.", "", []),
    (f"{THINKS}Hm.<|end|><|start|>assi", "Hm.", "", []),
    (f"{THINKS}Hm.{NEXT}", "Hm.", "", []),
    (f"{THINKS}Hm.{NEXT}<|channel|>", "Hm.", "", []),
    (f"{THINKS}Hm.{NEXT}<|channel|>comm", "Hm.", "", []),
    (f"{THINKS}Hm.{NEXT}<|channel|>commentary to=functions.add <|constrain|>", "Hm.", "", []),
    ("", "", "", []),
]

#: What is content as it was written.
WRITTEN = [
    "It is four.",
    "to",
    "to=functions.add",
    "<",
    "<|channel",
    "It is <|channel|>final<|message|>four.<|end|>",
    "<|channel|>analysis Let me see.",
    "<|channel|>analysis<|end|>",
    "<|channel|>thoughts<|message|>Hm.<|end|>",
    "<|channel|>analysis<|channel|>final<|message|>Hm.",
    "<|channel|>analysis json text<|message|>Hm.",
    "<|start|>assistant says<|channel|>final<|message|>Hm.<|end|>",
    "<|start|>user<|message|>And five?<|end|>",
    "<|start|>functions.add to=assistant<|channel|>commentary<|message|>2<|end|>",
    "<|channel|>analysis to=browser.search code<|message|>{}<|call|>",
    "<|channel|>commentary to=functions.<|message|>{}",
    "<|channel|>commentary to=functions.add<|channel|>commentary<|message|>{}",
    "<|channel|>commentary to=functions.add to=functions.add<|message|>{}",
    "<|channel|>analysis to=python<|message|>print(1)<|call|>",
    f"{CALLS}<|call|>",
    f"{CALLS}[1]<|call|>",
    f"{CALLS}null",
    f'{CALLS}{{"a": ',
    f'{CALLS}{{"a": 1}} and more<|call|>',
    f'{CALLS}{{"a": NaN}}<|call|>',
    f'{CALLS}"{{}}"<|call|>',
    CALLS + '{"a":' * 5_000,
    f"<|channel|>{'a' * MAX_HEADER}<|message|>Hm.",
]


def said(reader: HarmonyReader, pieces: list[str]) -> tuple[str, str]:
    """All that is told of the text, piece by piece."""
    told = [reader.feed(piece) for piece in pieces]
    return "".join(one.reasoning for one in told), "".join(one.content for one in told)


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), READ)
def test_a_turn_is_read(text: str, reasoning: str, content: str, calls: list[ParsedCall]) -> None:
    """harmony.py 1, 2, 4."""
    reader = HarmonyReader(TOOLS)
    assert reader.finish(text) == Turn(content, reasoning, tuple(calls))
    assert said(reader, list(text)) == (reasoning, content), "all of it is told while it grows"


@pytest.mark.parametrize("text", WRITTEN, ids=[text[:60] for text in WRITTEN])
def test_what_cannot_be_read_is_content_as_it_was_written(text: str) -> None:
    """harmony.py 3."""
    reader = HarmonyReader(TOOLS)
    assert reader.finish(text) == Turn(text, "", ())
    _, told = said(reader, list(text))
    assert text.startswith(told)
    around = HarmonyReader(TOOLS).finish(f"{THINKS}Hm.{NEXT}{PLANS}First.<|end|>{text}")
    assert around == Turn(f"First.\n{text}", "Hm.", ())
    if text.endswith(("<|end|>", "<|call|>")):
        followed = f"{text}<|start|>assistant{SAYS}Four."
        assert reader.finish(followed) == Turn(f"{text}\nFour.", "", ())
        assert said(HarmonyReader(TOOLS), list(followed)) == ("", f"{text}\nFour.")


def test_text_without_a_header_is_told_as_it_is_written() -> None:
    reader = HarmonyReader(TOOLS)
    for letter in "It is <b>four</b>.":
        assert reader.feed(letter).content.endswith(letter) or letter == "<"


def test_without_tools_nothing_is_a_call() -> None:
    """harmony.py 2: nor is anything held back."""
    reader = HarmonyReader([])
    text = f'{CALLS}{{"a": 1}}'
    assert reader.finish(text) == Turn(text, "", ())
    assert said(reader, list(text)) == ("", text)


@pytest.mark.parametrize(
    ("prompt", "opening", "text", "turn"),
    [
        ("<|end|><|start|>assistant", "", FINAL, Turn("It is four.", "Let me see.", ())),
        ("<|start|>assistant" + THINKS, THINKS, f"Hm.{NEXT}{SAYS}Yes.", Turn("Yes.", "Hm.", ())),
        ("<|start|>assistant" + SAYS, SAYS, "Yes.", Turn("Yes.", "", ())),
        ("<|start|>assistant" + SAYS + "It is", SAYS, " four.", Turn(" four.", "", ())),
        ("<|start|>assistant" + CALLS, CALLS, '{"a":  1}', Turn("", "", (ADD,))),
        ("<|start|>assistant" + CALLS, CALLS, "{", Turn("{", "", ())),
        ("<|start|>assistant<|channel|>", "<|channel|>", "final<|message|>Yes.", Turn("Yes.", "", ())),
        (f"<|start|>assistant{SAYS}Yes.<|end|>", "", FINAL, Turn("It is four.", "Let me see.", ())),
        ("hi", "", "ho", Turn("ho", "", ())),
    ],
)
def test_a_message_that_the_prompt_has_opened_goes_on(
    prompt: str, opening: str, text: str, turn: Turn
) -> None:
    assert opened_by(prompt) == opening
    reader = HarmonyReader(TOOLS, opening)
    assert reader.finish(text) == turn
    held = turn.content == "{"  # it may become a call
    assert said(reader, list(text)) == (turn.reasoning, "" if held else turn.content)


FRAGMENTS = [
    *MARKS, *MARKS, "assistant", "user", "analysis", "final", "commentary", " to=functions.add", " to=python",
    "json", '{"a": 1}', "{", "}", "text", " ", "\n", "<", "<|", "|>", "<|en", "d|>", "t", "to", "=", "é",
    THINKS, SAYS, PLANS, CALLS, NEXT, r'{"a": "\ud83d"}',
]  # fmt: skip


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=16), st.booleans(), st.sampled_from(["", THINKS, CALLS]))
def test_no_text_is_a_fault_and_nothing_told_is_taken_back(
    parts: list[str], with_tools: bool, opening: str
) -> None:
    """harmony.py 5."""
    text = "".join(parts)
    whole, pieces, letters = (HarmonyReader(TOOLS if with_tools else [], opening) for _ in range(3))
    turn = whole.finish(text)
    assert from_turn(turn).ByteSize()
    reasoning, content = said(pieces, parts)
    assert (reasoning, content) == said(letters, list(text)) == said(whole, [text])
    assert turn.reasoning.startswith(reasoning) and turn.content.startswith(content)
    assert pieces.finish(text) == turn, "whatever was fed before"


#: Of a long answer.
CHARS = 200_000
SECONDS = 1.0


@pytest.mark.parametrize(
    ("head", "part"),
    [
        *(("", part) for part in (*MARKS, CALLS, f"{CALLS}{{<|end|>", f"{THINKS}x{NEXT}", " ", "to=", "<")),
        *((CALLS, part) for part in ('{"a":', "[", " ", "<|message|>", "<|e", '{"a": 1}<|call|>' + CALLS)),
        (THINKS, "x"),
        (SAYS, "<|start|>assistant"),
        ("<|channel|>", "final "),
    ],
)
def test_a_long_text_is_read_at_once(head: str, part: str) -> None:
    """harmony.py 5: each character once, however many pieces it comes in."""
    text = head + part * (CHARS // len(part))
    began = time.process_time()
    HarmonyReader(TOOLS).finish(text)
    assert time.process_time() - began < SECONDS
    reader = HarmonyReader(TOOLS)
    began = time.process_time()
    for at in range(0, len(text), 8):
        reader.feed(text[at : at + 8])
    assert time.process_time() - began < SECONDS


def harmony_folder(folder: Path) -> Path:
    """A tokenizer of gpt-oss's marks and template."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS], True)
    tokenizer.eos_token = "<|return|>"
    tokenizer.chat_template = TEMPLATE.read_text()
    tokenizer.save_pretrained(folder)
    ends = [tokenizer.convert_tokens_to_ids(mark) for mark in ("<|return|>", "<|call|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat(harmony_folder(tmp_path_factory.mktemp("harmony")))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["without tools", "with tools"])
def test_what_the_real_template_writes_is_read_back(chat: Chat, tools: list[dict[str, Any]]) -> None:
    assert chat.tool_parser == "openai" and chat.rewrites_earlier_turns
    prompt = chat.render([user("hi")], tools)
    reader, shown = chat.reader(prompt, tools)
    assert shown == chat.kept_tokens and {chat.token_text(token) for token in shown} == set(MARKS)
    turn = {"role": "assistant", "thinking": "Let me see.", "content": "It is four."}
    whole = chat.encode(chat.template.render([user("hi"), turn], tools, opened=False))
    assert whole[: len(prompt)] == prompt and whole[-1] in chat.end_tokens
    sampled = chat.text(whole[len(prompt) :], keep=shown)
    assert reader.finish(sampled) == Turn("It is four.", "Let me see.", ())
    assert said(reader, [chat.text([token], keep=shown) for token in whole[len(prompt) :]]) == (
        "Let me see.",
        "It is four.",
    )


def test_calls_that_the_real_template_writes_are_read_back(chat: Chat) -> None:
    prompt = chat.render([user("hi")], TOOLS)
    arguments = {"a": 1, "text": 'é "<|x|>"\n', "deep": [{"b": None}]}
    function = {"name": "add", "arguments": arguments}
    turn = {
        "role": "assistant",
        "thinking": "Let me see.",
        "content": "",
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}],
    }
    whole = chat.encode(chat.template.render([user("hi"), turn], TOOLS, opened=False))
    reader, shown = chat.reader(prompt, TOOLS)
    read = reader.finish(chat.text(whole[len(prompt) : -1], keep=shown))
    (call,) = read.calls
    assert (read.reasoning, read.content, call.name) == ("Let me see.", "", "add")
    assert json.loads(call.arguments_json) == arguments
    with_calls, _ = chat.reader(prompt, [])
    assert with_calls.finish(CALL).calls == ()


RESULT = {"role": "tool", "content": "2", "name": "add", "tool_call_id": "abcdefghi"}
ASKS = "<|start|>user<|message|>and?<|end|><|start|>assistant"
TELLS = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"2"<|end|><|start|>assistant'


@pytest.mark.parametrize(
    ("sampled", "tail", "follows"),
    [
        (f"{FINAL}<|return|>", user("and?"), ASKS),
        (FINAL, user("and?"), f"<|end|>{ASKS}"),
        (f"{FINAL}<|end|>", user("and?"), ASKS),
        (f"{CALL}<|call|>", user("and?"), ASKS),
        (f"{CALL}<|call|>", RESULT, TELLS),
        (CALL, RESULT, f"<|call|>{TELLS}"),
        (f"{FINAL}<|return|>", RESULT, TELLS),
    ],
)
def test_one_end_stands_behind_a_turn_that_was_sampled(
    chat: Chat, sampled: str, tail: dict[str, str], follows: str
) -> None:
    """Where the template writes an earlier turn's end as <|end|>, the model has sampled its own."""
    tokens = [*chat.render([user("hi")], TOOLS), *chat.encode(sampled)]
    extended = chat.extend(tokens, [tail], TOOLS)
    assert extended[: len(tokens)] == tokens
    assert chat.text(extended[len(tokens) :], special=True) == follows


def test_a_call_ends_a_turn_whatever_the_folder_says(tmp_path: Path) -> None:
    folder = harmony_folder(tmp_path)
    (folder / "generation_config.json").write_text("{}")
    ends = Chat(folder).end_tokens
    assert ends == Chat(harmony_folder(tmp_path)).end_tokens and len(ends) == 2


def test_which_parser_a_template_has(tmp_path: Path, model_folder: Path) -> None:
    folder = harmony_folder(tmp_path)
    without = Chat(folder, tool_parser="none")
    assert without.tool_parser == "none"
    reader, _ = without.reader(without.render([user("hi")], []), TOOLS)
    read = reader.finish(CALL)
    assert (read.reasoning, read.calls) == ("Let me see.", ()) and read.content.endswith('{"a":  1}')
    assert Chat(folder, tool_parser="hermes").tool_parser == "hermes"
    assert Chat(model_folder).tool_parser == "hermes"
    chosen = Chat(model_folder, tool_parser="openai")
    reader, _ = chosen.reader(chosen.render([user("hi")], TOOLS), TOOLS)
    assert reader.finish(CALL).calls == (ADD,)
    with pytest.raises(ConfigError, match=r"choose auto, none, .*openai"):
        Chat(folder, tool_parser="harmony")


def test_nothing_is_enforced_but_an_answer_from_the_first_token(chat: Chat) -> None:
    assert chat.enforces_forms and not chat.enforces_calls and not chat.enforces_answers
    prompt = chat.render([user("hi")], TOOLS)
    answer = of_schema({"type": "object"})
    for tools, form in (
        (TOOLS, TurnForm(calls=Calls(required=True))),
        (TOOLS, TurnForm(answer=answer)),
        ([], TurnForm(answer=answer)),
    ):
        with pytest.raises(QuartetError, match=r"cannot be enforced.*\(openai\)") as refused:
            chat.grammar(prompt, tools, form)
        assert refused.value.reason == "NOT_IMPLEMENTED"
    assert chat.grammar(prompt, [], TurnForm(answer=answer, from_first_token=True))
    reader, _ = chat.reader(prompt, [])
    assert reader.finish('{"a": 1}') == Turn('{"a": 1}', "", ())


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    """A front of a random model with this tokenizer."""
    qwen3(0, vocab_size=268, max_position_embeddings=2048).save_pretrained(tmp_path)
    async with opened(harmony_folder(tmp_path), max_model_len=2048) as one:
        yield one


Say = Callable[[str], None]


@pytest.fixture
def say(door: Door, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Let the engine write a text token by token, and end with its last one."""

    def put(text: str) -> None:
        tokens = door.encode(text)

        async def generate(request: Request) -> AsyncIterator[Delta | Finish]:
            for start in range(0, len(tokens), 7):
                piece = tokens[start : start + 7]
                yield Delta(0, piece, [-1.0] * len(piece), [Span(start, len(piece), 0)])
            yield Finish(0, Reason.STOP, "", None, 0)

        monkeypatch.setattr(door.engine, "generate", generate)

    return put


async def streamed(door: Door, **asked: Any) -> tuple[str, str, list[Any], str | None]:
    """Reasoning, content, calls and the reason of a streamed answer."""
    reasoning, content, calls, reason = "", "", [], None
    async for chunk in await door.chat(stream=True, **asked):
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
            reason = choice.finish_reason or reason
    return reasoning, content, calls, reason


async def test_the_front_tells_thinking_content_and_calls_apart(door: Door, say: Say) -> None:
    say(f"{FINAL}<|return|>")
    for tools in ({}, {"tools": TOOLS}):
        (choice,) = (await door.chat(**tools)).choices
        message = choice.message
        assert (message.reasoning_content, message.content) == ("Let me see.", "It is four.")
        assert (message.tool_calls, choice.finish_reason) == (None, "stop")
        assert await streamed(door, **tools) == ("Let me see.", "It is four.", [], "stop")

    say(f'{THINKS}Hm.{NEXT}{PLANS}I add.{NEXT}{CALLS}{{"a":  1}}<|call|>')
    (choice,) = (await door.chat(tools=TOOLS)).choices
    assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", "I add.")
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a":  1}')
    reasoning, content, calls, reason = await streamed(door, tools=TOOLS)
    assert (reasoning, content, reason) == ("Hm.", "I add.", "tool_calls")
    assert [(one.function.name, one.function.arguments) for one in calls] == [("add", '{"a":  1}')]

    broken = f"<|start|>assistant{CALLS}{{"
    say(f"{THINKS}Hm.<|end|>{broken}<|call|>")
    (choice,) = (await door.chat(tools=TOOLS)).choices
    assert (choice.message.content, choice.message.tool_calls) == (broken, None)
    assert await streamed(door, tools=TOOLS) == ("Hm.", broken, [], "stop")


async def test_a_completion_is_the_text_with_its_marks(door: Door, say: Say) -> None:
    say(f"{FINAL}<|return|>")
    (whole,) = (await door.complete()).choices
    assert whole.text == FINAL
    told = [choice.text async for chunk in await door.complete(stream=True) for choice in chunk.choices]
    assert "".join(told) == FINAL


async def test_the_front_refuses_what_is_not_enforced(door: Door) -> None:
    form: Any = {"type": "json_object"}
    for asked in ({"response_format": form}, {"tools": TOOLS, "tool_choice": "required"}):
        with pytest.raises(openai.BadRequestError, match=r"openai\.best_effort"):
            await door.chat(**asked)
