"""Chat templates as models are published with them (TRL ships these): what each shows, and what it hides."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trl
from quartet.errors import QuartetError
from quartet_inference.chat import Chat
from quartet_inference.chat.enforced import TurnForm
from quartet_inference.chat.shown import HIDDEN_BESIDE, check_messages
from quartet_inference.chat.template import Template
from quartet_inference.structure.grammar import of_schema
from structlog.testing import capture_logs
from transformers import AutoTokenizer, GenerationConfig

from .following import end_of, follow

FOLDER = Path(trl.__file__).parent / "chat_templates"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "One."},
                "b": {"type": "string", "description": "Other."},
            },
            "required": ["a"],
        },
    },
}
ARGUMENTS = {"a": 1, "b": "x, {y}: [z]"}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
QUESTION = {"role": "user", "content": "hi"}
CALLER = {"role": "assistant", "content": "", "tool_calls": [CALL]}
ENDS = ("<|tool_response>", "<turn|>", "<|user|>", "<|observation|>", "<|eot_id|>")
MARKS = (
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<|tool_call_start|>",
    "<|tool_call_end|>",
)
#: What reads the calls of each that shows tools, calls and their results.
PARSERS = {
    "gemma4": "gemma4", "gemma4_v2": "gemma4", "gemma4_v3": "gemma4", "gemma4_v4": "gemma4",
    "gemma4_v5": "gemma4", "glm4moe": "glm45", "glm4moe_training": "glm45", "lfm2_v2": "lfm2",
    "lfm2_2_5": "lfm2", "lfm2_2_5_v2": "lfm2", "llama3_1": "llama3_json", "llama3_2": "llama3_json",
    "nemotron_3_nano": "qwen3_coder", "nemotron_3_super": "qwen3_coder", "nemotron_3_ultra": "qwen3_coder",
    "qwen2_5": "hermes", "qwen3": "hermes", "qwen3_training": "hermes", "qwen3_instruct_2507": "hermes",
    "qwen3_vl": "hermes", "qwen3_5_think": "qwen3_coder", "qwen3_5_nothink": "qwen3_coder",
    "qwen3_6": "qwen3_coder", "qwen3_8": "qwen3_coder",
}  # fmt: skip
#: Those that show no tools.
WITHOUT_TOOLS = (
    "cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "llama3", "phi3", "phi3_5",
    "qwen2_5_vl",
)  # fmt: skip
#: Those that leave out what a tool answered, and say nothing.
WITHOUT_RESULTS = ("cohere2", "phi3", "phi3_5")
#: What is said is of words that no template has, each its own.
SYSTEM, ASKED, BESIDE, ANSWER, LATER, MORE, RESULT, OTHER_RESULT = (
    f"quartet{word}" for word in ("system", "asked", "beside", "answer", "later", "more", "result", "other")
)


def said(role: str, content: str, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": content, **({"tool_calls": list(calls)} if calls else {})}


def called(name: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function",
            "function": {"name": f"quartet{name}", "arguments": {"a": f"quartetof{name}"}}}  # fmt: skip


def answered(content: str, call_id: str) -> dict[str, Any]:
    return {"role": "tool", "name": "add", "tool_call_id": call_id, "content": content}


ADD, SUB = called("add", "abcdefgh1"), called("sub", "abcdefgh2")
CONVERSATIONS = {
    "system": [said("system", SYSTEM), said("user", ASKED)],
    "systems": [said("system", SYSTEM), said("system", LATER), said("user", ASKED)],
    "later system": [said("user", ASKED), said("assistant", ANSWER), said("system", LATER),
                     said("user", MORE)],
    "turns": [said("system", SYSTEM), said("user", ASKED), said("assistant", ANSWER), said("user", MORE)],
    "users": [said("user", ASKED), said("user", MORE)],
    "call": [said("user", ASKED), said("assistant", "", ADD), answered(RESULT, "abcdefgh1")],
    "calls": [said("user", ASKED), said("assistant", "", ADD, SUB), answered(RESULT, "abcdefgh1"),
              answered(OTHER_RESULT, "abcdefgh2")],
    "beside": [said("user", ASKED), said("assistant", BESIDE, ADD), answered(RESULT, "abcdefgh1")],
    "system for an answer": [said("user", ASKED), said("system", LATER)],
    "beside again": [said("user", ASKED), said("assistant", BESIDE, ADD), answered(RESULT, "abcdefgh1"),
                     said("assistant", MORE, SUB), answered(OTHER_RESULT, "abcdefgh2")],
    "gone on": [said("user", ASKED), said("assistant", "", ADD), answered(RESULT, "abcdefgh1"),
                said("assistant", ANSWER), said("user", MORE)],
    "behind text": [said("user", ASKED), said("assistant", ANSWER), answered(RESULT, "abcdefgh1")],
}  # fmt: skip
NO_CALLS = dict.fromkeys(
    ("call", "calls", "beside", "beside again", "gone on"), "messages[1].tool_calls[0].name"
)
NO_TEXT = dict.fromkeys(
    ("system", "systems", "later system", "system for an answer", "turns", "users", "beside", "beside again",
     "behind text"),
    "messages[0].content",
)  # fmt: skip
NO_TEXT_BESIDE = dict.fromkeys(("beside", "beside again"), "told")
NO_LATER_SYSTEM = {"systems": "messages[1].content", "later system": "messages[2].content",
                   "system for an answer": "messages[1].content"}  # fmt: skip
NO_ANSWER = {"behind text": "messages[2].content"}
#: Of the conversations that a template takes, those that are told of, and those that are refused, with the
#: first part that it leaves out; of a family whose name a template's begins with.
LEFT_OUT = {
    "cohere": {"system for an answer": "messages[1].content"},
    "cohere2": {**NO_CALLS, **NO_ANSWER},
    "deepseek_r1_distill": {**NO_CALLS, "systems": "messages[0].content"},
    "deepseekv3": {"beside again": "told"},
    "diffusion_gemma": NO_ANSWER,
    "gemma4": NO_ANSWER,
    "gemma4_v2": {},
    "gptoss": {**NO_LATER_SYSTEM, "calls": "messages[1].tool_calls[1].name"},
    "idefics3": NO_TEXT,
    "lfm2": NO_CALLS,
    "lfm2_2_5": {},
    "lfm2_v2": {},
    "llama3": NO_CALLS,
    "llama3_1": NO_TEXT_BESIDE,
    "llama3_2": NO_TEXT_BESIDE,
    "llava_next": {"users": "messages[0].content"},
    "muse_glimmer": NO_TEXT_BESIDE,
    "phi3": {**NO_CALLS, **NO_ANSWER},
    "qwen2_5_vl": NO_CALLS,
    "qwen3_vl": NO_LATER_SYSTEM,
    "smolvlm": NO_TEXT,
}  # fmt: skip
Make = Callable[[str], Chat]


@pytest.fixture(scope="module")
def chat_with(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`chat_with(name)`: the model's tokenizer with that template, and the tokens that end turns there."""
    folder = tmp_path_factory.mktemp("known")
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.add_special_tokens({"bos_token": "<bos>", "additional_special_tokens": [*ENDS, *MARKS]})
    tokenizer.save_pretrained(folder)
    ends = [tokenizer.eos_token_id, *map(tokenizer.convert_tokens_to_ids, ENDS)]
    GenerationConfig(eos_token_id=ends).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return lambda name: Chat(folder, template_file=FOLDER / f"{name}.jinja")


@pytest.mark.parametrize("name", PARSERS)
def test_a_call_that_a_template_writes_is_read_back(chat_with: Make, name: str) -> None:
    chat = chat_with(name)
    assert chat.tool_parser == PARSERS[name]
    prompt = chat.render([QUESTION], [TOOL])
    before = chat.text(prompt, special=True)
    whole = chat.template.render([QUESTION, CALLER], [TOOL], opened=False)
    common = next(at for at, (one, other) in enumerate(zip(before + "\0", whole + "\0", strict=False))
                  if one != other)  # fmt: skip
    written = whole[common:]
    for end in (*ENDS, "<|im_end|>"):
        written = written.removesuffix("\n").removesuffix(end)
    reader, wanted = chat.reader(prompt, [TOOL])
    (call,) = reader.finish(chat.text(chat.encode(written), keep=wanted)).calls
    assert (call.name, call.arguments_json) == ("add", '{"a": 1, "b": "x, {y}: [z]"}')


@pytest.mark.parametrize("name", PARSERS)
def test_results_follow_a_call_as_the_template_writes_them(chat_with: Make, name: str) -> None:
    """Invariant 6: behind a turn that is kept to the token, whether its end was sampled or not."""
    chat = chat_with(name)
    results = [
        {"role": "tool", "content": f"{n}!", "tool_call_id": "abcdefghi", "name": "add"} for n in (2, 3)
    ]
    count = 1 if name.startswith("llama3") else 2  # Llama's writes one call a turn
    caller, tail = {**CALLER, "tool_calls": [CALL] * count}, results[:count]
    whole = chat.render([QUESTION, caller, *tail], [TOOL])
    prompt = chat.render([QUESTION], [TOOL])
    turn = chat.encode(chat.template.render([QUESTION, caller], [TOOL], opened=False))
    ends = [at for at, token in enumerate(turn) if token in chat.end_tokens and at > len(prompt)]
    end = ends[-1] if ends else len(turn)
    for sampled in (turn[: end + 1], turn[:end]):
        extended = chat.extend(sampled, tail, [TOOL])
        assert extended[:end] == turn[:end] and len(extended) > end + 1
        assert extended[end:] == whole[len(whole) - len(extended) + end :]
        assert name == "qwen3" or extended == whole, "Qwen3's drops an empty thinking"


@pytest.mark.parametrize("name", [*PARSERS, *WITHOUT_TOOLS])
def test_tools_that_a_template_hides_are_told_of_once(chat_with: Make, name: str) -> None:
    chat = chat_with(name)
    with capture_logs() as told:
        for _ in range(2):
            chat.render([QUESTION], [TOOL])
    assert [one["log_level"] for one in told] == ["warning"] * (name in WITHOUT_TOOLS)


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.jinja")))
def test_what_a_template_leaves_out_is_refused_or_told_and_nothing_else(
    model_folder: Path, name: str
) -> None:
    """shown.py 1, of all that TRL ships: against looking for what was said in the text itself."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text()
    template = Template(tokenizer, {})
    family = max((one for one in LEFT_OUT if name.startswith(one)), key=len, default="")
    found, taken = {}, set()
    for kind, messages in CONVERSATIONS.items():
        for tools in ([], [TOOL]):
            try:
                text = template.render(messages, tools)
            except QuartetError:
                continue
            taken.add(kind)
            words = set(re.findall(r"quartet\w+", json.dumps(messages)))
            try:
                if check_messages(template.shown, messages, tools):
                    found[kind] = "told"
            except QuartetError as error:
                found[kind] = error.metadata["field"]
            assert (kind in found) is any(word not in text for word in words), (kind, tools)
    wanted = LEFT_OUT.get(family, {})
    assert found == {kind: wanted[kind] for kind in wanted if kind in taken}


#: With what is said to help in place of what is refused.
HELPED = {
    "calls": [said("user", ASKED), said("assistant", "", ADD), answered(RESULT, "abcdefgh1"),
              said("assistant", "", SUB), answered(OTHER_RESULT, "abcdefgh2")],
    "later system": CONVERSATIONS["turns"],
    "behind text": CONVERSATIONS["call"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind", "helps"),
    [
        ("gptoss", "calls", "send one call in each message, or "),
        ("gptoss", "later system", "send one system message, at the beginning, or "),
        ("gemma4", "behind text", "send it behind the call that it answers, or "),
        ("phi3_5", "call", ""),
    ],
)
def test_what_helps_is_told_and_does(chat_with: Make, name: str, kind: str, helps: str) -> None:
    chat = chat_with(name)
    with pytest.raises(QuartetError) as caught:
        chat.render(CONVERSATIONS[kind], [])
    assert f"leaves it out: {helps}give the model a template that shows it" in caught.value.message
    assert not helps or chat.render(HELPED[kind], [])


def test_a_developers_message_may_be_sent_as_system(chat_with: Make) -> None:
    chat, asked = chat_with("phi3_5"), said("user", ASKED)
    with pytest.raises(QuartetError) as caught:
        chat.render([said("developer", "be brief"), asked], [])
    assert "leaves it out: send it as system, or give the model a template" in caught.value.message
    assert chat.render([said("system", "be brief"), asked], [])


def test_what_is_left_out_of_earlier_turns_alone_is_not_refused(chat_with: Make) -> None:
    """gpt-oss thinks in what it says beside calls, and its template drops that once there is an answer."""
    chat = chat_with("gptoss")
    under_way = CONVERSATIONS["beside"]
    assert BESIDE in chat.text(chat.render(under_way, [TOOL]))
    gone_on = [*under_way, said("assistant", ANSWER), said("user", MORE)]
    assert BESIDE not in chat.text(chat.render(gone_on, [TOOL]))


def test_text_beside_calls_that_a_template_leaves_out_is_told_of_once(chat_with: Make) -> None:
    """Agents send their turns back as they came, and Llama's template has no place for the text."""
    chat = chat_with("llama3_1")
    with capture_logs() as told:
        for _ in range(2):
            assert BESIDE not in chat.text(chat.render(CONVERSATIONS["beside"], [TOOL]))
    assert [one["event"] for one in told] == [HIDDEN_BESIDE]


@pytest.mark.parametrize("name", WITHOUT_RESULTS)
def test_results_that_a_template_hides_are_refused(chat_with: Make, name: str) -> None:
    """shown.py 1: in a whole conversation, and behind a turn that was sampled."""
    chat = chat_with(name)
    result: dict[str, Any] = {"role": "tool", "content": "2", "tool_call_id": "abcdefghi", "name": "add"}
    with pytest.raises(
        QuartetError, match=r"messages\[1\].tool_calls\[0\].name = add is refused; the model's"
    ):
        chat.render([QUESTION, CALLER, result], [])
    assert chat.template.may_break


def test_arguments_are_text_where_a_template_takes_nothing_else(chat_with: Make) -> None:
    whole = chat_with("deepseekv3").template.render([QUESTION, CALLER], [])
    assert '```json\n{"a": 1, "b": "x, {y}: [z]"}\n```' in whole


def test_gemmas_thinking_is_read(chat_with: Make) -> None:
    """Its mark is a special token and a word."""
    chat = chat_with("gemma4")
    prompt = chat.render([QUESTION], [])
    reader, wanted = chat.reader(prompt, [])
    said = chat.text(chat.encode("<|channel>thought\nlet me\n<channel|>four<turn|>"), keep=wanted)
    turn = reader.finish(said)
    assert (turn.reasoning, turn.content) == ("let me", "four")
    grammar = chat.grammar(prompt, [], TurnForm(answer=of_schema({"const": 4})))
    for text, is_allowed in (
        ("4", True),
        ("<|channel>thought\nlet me<channel|>4", True),
        ("thought 4", False),
    ):
        follows = follow(chat.structures, grammar, chat.encode(text))
        assert end_of(follows, chat.end_tokens) is is_allowed


@pytest.mark.parametrize("name", ["smolvlm", "idefics3"])
def test_what_a_user_says_is_not_left_out(chat_with: Make, name: str) -> None:
    """shown.py 1: of models that see images, whose templates know no plain text."""
    with pytest.raises(QuartetError, match=r"messages\[0\].content = hi is refused"):
        chat_with(name).render([QUESTION], [])


def test_calls_that_nothing_reads_are_refused(chat_with: Make) -> None:
    chat = chat_with("muse_glimmer")
    assert chat.tool_parser == "none"
    with pytest.raises(
        QuartetError, match=r"writes calls in a format that is not known here: set chat.tool_parser"
    ):
        chat.render([QUESTION], [TOOL])
    assert chat.render([QUESTION], [])
