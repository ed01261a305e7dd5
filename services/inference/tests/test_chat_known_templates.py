"""Chat templates as models are published with them (TRL ships these): what each shows, and what it hides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trl
from quartet.errors import QuartetError
from quartet_inference.chat import Chat
from quartet_inference.chat.enforced import TurnForm
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


@pytest.mark.parametrize("name", WITHOUT_RESULTS)
def test_results_that_a_template_hides_are_refused(chat_with: Make, name: str) -> None:
    """shown.py 1: in a whole conversation, and behind a turn that was sampled."""
    chat = chat_with(name)
    result: dict[str, Any] = {"role": "tool", "content": "2", "tool_call_id": "abcdefghi", "name": "add"}
    with pytest.raises(QuartetError, match=r"messages.role = tool is refused; the model's chat template"):
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
    with pytest.raises(QuartetError, match=r"messages.role = user is refused"):
        chat_with(name).render([QUESTION], [])


def test_calls_that_nothing_reads_are_refused(chat_with: Make) -> None:
    chat = chat_with("muse_glimmer")
    assert chat.tool_parser == "none"
    with pytest.raises(
        QuartetError, match=r"writes calls in a format that is not known here: set chat.tool_parser"
    ):
        chat.render([QUESTION], [TOOL])
    assert chat.render([QUESTION], [])
