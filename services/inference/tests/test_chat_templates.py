"""Later turns are exact tokens plus new messages, whatever a template would have made of the earlier ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.template_settings import RESERVED
from quartet_inference.chat import Chat, Unextendable
from transformers import PreTrainedTokenizerBase

from . import chat_templates as templates

END = 258
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
Make = Callable[..., Chat]


@pytest.fixture
def chat_with(model_folder: Path, tmp_path: Path) -> Make:
    """`chat_with(template)`: the model's tokenizer with another template."""

    def make(template: str, **settings: Any) -> Chat:
        file = tmp_path / "template.jinja"
        file.write_text(template)
        return Chat(model_folder, template_file=file, **settings)

    return make


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def result(text: str) -> dict[str, str]:
    return {"role": "tool", "content": text, "tool_call_id": "abcdefghi", "name": "add"}


#: Template, what was said, what follows; with these the whole rendering extends the tokens exactly.
FAITHFUL = [
    (templates.HERMES, said("four"), [user("and?")]),
    (templates.HERMES, said("", tool_calls=[CALL]), [result("2")]),
    (templates.HERMES, said("", tool_calls=[CALL, CALL]), [result("2"), result("3"), user("so?")]),
    (templates.QWEN3, said("", tool_calls=[CALL], reasoning_content="hm"), [result("2"), result("3")]),
    (templates.LLAMA3, said("four"), [user("and?")]),
    (templates.LLAMA3, said("", tool_calls=[CALL]), [result("2")]),
    (templates.MISTRAL, said("", tool_calls=[CALL]), [result("2")]),
    (templates.MISTRAL, said("", tool_calls=[CALL, CALL]), [result("2"), result("3")]),
]


@pytest.mark.parametrize(("template", "turn", "tail"), FAITHFUL)
@pytest.mark.parametrize("closed", [True, False])
def test_an_extension_is_what_the_template_would_have_rendered(
    chat_with: Make, template: str, turn: dict[str, Any], tail: list[dict[str, Any]], closed: bool
) -> None:
    """Invariant 6, where the template itself keeps what was said."""
    chat = chat_with(template)
    tools = [TOOL] if turn.get("tool_calls") else []
    whole = chat.render([user("hi"), turn, *tail], tools)
    alone = chat.encode(chat.template.render([user("hi"), turn], tools, opened=False))
    end = len(alone) - alone[::-1].index(END)
    sampled = alone[: end if closed else end - 1]
    assert chat.extend(sampled, tail, tools) == whole
    assert not chat.template.may_break


def test_qwen3_drops_earlier_thinking_and_the_tokens_keep_it(chat_with: Make) -> None:
    """Invariant 6: what was sampled stays, to the token, though the template would have dropped it."""
    chat = chat_with(templates.QWEN3)
    assert chat.rewrites_earlier_turns and not chat.template.may_break
    prompt = chat.render([user("hi")], [])
    sampled = chat.encode("<think>\nlet me see\n</think>\n\nfour<|im_end|>")
    extended = chat.extend([*prompt, *sampled], [user("and?")], [])
    assert extended[: len(prompt) + len(sampled)] == [*prompt, *sampled]
    follows = "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    assert chat.text(extended[len(prompt) + len(sampled) :], special=True) == follows
    turn = said("four", reasoning_content="let me see")
    assert "let me see" not in chat.text(chat.render([user("hi"), turn, user("and?")], []))


def test_an_opened_thinking_is_read_and_kept(chat_with: Make) -> None:
    chat = chat_with(templates.THINKER)
    assert chat.rewrites_earlier_turns
    prompt = chat.render([user("hi")], [])
    reader, _ = chat.reader(prompt, [])
    turn = reader.finish("let me see\n</think>\n\nfour")
    assert (turn.reasoning, turn.content) == ("let me see", "four")
    cut = reader.finish("let me")
    assert (cut.reasoning, cut.content) == ("let me", "")
    sampled = chat.encode("let me see\n</think>\n\nfour<|im_end|>")
    again = chat.extend([*prompt, *sampled], [user("and?")], [])
    assert again[: len(prompt) + len(sampled)] == [*prompt, *sampled]
    assert chat.text(again, special=True).endswith("<|im_start|>assistant\n<think>\n")


def test_mistral_moves_its_tools_and_the_tokens_stay(chat_with: Make) -> None:
    """The tools stand before the last question: the template changes earlier turns, the tokens stay."""
    chat = chat_with(templates.MISTRAL)
    assert chat.rewrites_earlier_turns and not chat_with(templates.HERMES).rewrites_earlier_turns
    prompt = chat.render([user("hi")], [TOOL])
    sampled = chat.encode("four<|im_end|>")
    whole = chat.render([user("hi"), said("four"), user("and?")], [TOOL])
    assert whole[: len(prompt)] != prompt
    extended = chat.extend([*prompt, *sampled], [user("and?")], [TOOL])
    assert extended[: len(prompt) + len(sampled)] == [*prompt, *sampled]
    tools_at = chat.text(extended, special=True).rindex("[AVAILABLE_TOOLS]")
    assert chat.text(extended, special=True)[tools_at:].endswith("[/AVAILABLE_TOOLS][INST]and?[/INST]")


def test_two_answers_where_the_template_knows_single_calls(chat_with: Make) -> None:
    chat = chat_with(templates.LLAMA3)
    prompt = chat.render([user("hi")], [TOOL])
    extended = chat.extend([*prompt, 97, END], [result("2"), result("3")], [TOOL])
    follows = (
        '<|im_start|>ipython\n\n"2"<|im_end|><|im_start|>ipython\n\n"3"<|im_end|><|im_start|>assistant\n\n'
    )
    assert chat.text(extended[len(prompt) + 2 :], special=True) == follows


def test_a_system_message_that_would_stand_before_sampled_turns_extends_nothing(chat_with: Make) -> None:
    """Else it would be in no prompt at all."""
    told = {"role": "system", "content": "Be brief."}
    hoisting = chat_with(templates.HOISTS)
    given = [*hoisting.render([user("hi")], []), 97, END]
    assert hoisting.extend(given, [user("and?")], [])[: len(given)] == given
    for tail in ([told, user("and?")], [result("2"), told]):
        with pytest.raises(Unextendable, match="before the turns"):
            hoisting.extend(given, tail, [])
    for template in (templates.QWEN3, templates.HERMES):
        chat = chat_with(template)
        given = [*chat.render([user("hi")], [TOOL]), 97, END]
        assert "Be brief." in chat.text(chat.extend(given, [told, user("and?")], [TOOL])[len(given) :])


def test_a_turn_that_answers_continue_cannot_be_extended(chat_with: Make) -> None:
    chat = chat_with(templates.CONTINUES_THE_TURN, tool_parser="hermes")
    assert chat.template.may_break
    prompt = chat.render([user("hi")], [TOOL])
    assert chat.extend([*prompt, 97, END], [user("and?")], [TOOL])[: len(prompt) + 2] == [*prompt, 97, END]
    with pytest.raises(Unextendable):
        chat.extend([*prompt, 97, END], [result("2")], [TOOL])


def test_a_message_that_holds_the_mark_changes_nothing(chat_with: Make) -> None:
    chat = chat_with(templates.HERMES)
    mark = "QUARTETSAMPLEDTURN"
    for tail in ([user(f"say {mark}")], [result(mark), user(mark)]):
        extended = chat.text(chat.extend([1, END], tail, []), special=True)
        assert extended.count(mark) == len(tail) and "<|im_start|>system" not in extended


def test_settings_reach_the_template(chat_with: Make) -> None:
    chat = chat_with(templates.QWEN3, template_settings={"enable_thinking": False})
    assert chat.text(chat.render([user("hi")], []), special=True).endswith("<think>\n\n</think>\n\n")
    reader, _ = chat.reader(chat.render([user("hi")], []), [])
    assert reader.finish("four").content == "four"


def test_a_requests_settings_win_key_by_key_in_every_turn(chat_with: Make) -> None:
    """template.py 4: the same text of a later turn as a whole rendering would have had."""
    chat = chat_with(templates.VARIES, template_settings={"enable_thinking": False, "style": "brief"})
    for settings, style, opened in (
        ("", " /brief", "<think>\n\n</think>\n\n"),
        ('{"style": "long", "no_such": [1, null]}', " /long", "<think>\n\n</think>\n\n"),
        ('{"enable_thinking": true, "style": ""}', "", ""),
    ):
        prompt = chat.render([user("hi")], [], settings=settings)
        opening = f"<|im_start|>assistant\n{opened}"
        assert chat.text(prompt, special=True) == f"<|im_start|>user\nhi{style}<|im_end|>\n{opening}"
        later = chat.extend([*prompt, 97, END], [user("and?")], [], settings=settings)
        follows = f"\n<|im_start|>user\nand?{style}<|im_end|>\n{opening}"
        assert later[: len(prompt) + 2] == [*prompt, 97, END]
        assert chat.text(later[len(prompt) + 2 :], special=True) == follows


def test_whether_a_turn_can_be_extended_is_asked_of_the_settings_given(chat_with: Make) -> None:
    chat = chat_with(templates.MAY_CONTINUE, tool_parser="hermes")
    prompt = chat.render([user("hi")], [TOOL])
    continues = '{"continues": true}'
    assert not chat.template.may_break and chat.template.given(continues).may_break
    assert chat.extend([*prompt, 97, END], [result("2")], [TOOL])
    with pytest.raises(Unextendable):
        chat.extend([*prompt, 97, END], [result("2")], [TOOL], settings=continues)


@pytest.mark.parametrize("settings", ['{"n": 0}', '{"n": "x"}', '{"n": []}', '{"raise_exception": 1}'])
def test_what_a_template_cannot_do_with_a_setting_is_the_requests_fault(
    chat_with: Make, settings: str
) -> None:
    chat = chat_with("{{- 6 // n }}{{- raise_exception('why') }}")
    with pytest.raises(QuartetError) as caught:
        chat.render([user("hi")], [], settings=settings)
    assert caught.value.reason == "INVALID_REQUEST"


def test_what_transformers_takes_for_itself_can_not_be_chosen() -> None:
    """template_settings.py 2"""
    taken = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.values()
    assert {one.name for one in taken if one.kind is not one.VAR_KEYWORD} <= RESERVED


BY_ID = """\
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\\n' + m.content }}
        {%- for c in m.tool_calls or [] %}{{- '<tool_call>' + (c.function | tojson) + '</tool_call>' }}
        {%- endfor %}{{- '<|im_end|>' }}
        {%- for c in m.tool_calls or [] %}
            {%- for r in messages if r.role == 'tool' and r.tool_call_id == c.id %}
            {%- if loop.first %}{{- '<|im_start|>tool\\n' + r.content + '<|im_end|>' }}{% endif %}
        {%- endfor %}{%- endfor %}
    {%- elif m.role == 'user' %}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>' }}
    {%- elif m.role == 'system' and loop.first %}{{- '<|im_start|>system\\n' + m.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def test_results_may_be_found_by_the_ids_of_their_calls(chat_with: Make) -> None:
    """template.py 2."""
    chat = chat_with(BY_ID)
    results = [{**result(str(n)), "tool_call_id": f"call{n:05d}"} for n in (2, 3)]
    extended = chat.text(chat.extend([97, END], results, [TOOL]), special=True)
    assert "tool\n2<|im_end|>" in extended and "tool\n3<|im_end|>" in extended


def test_a_later_system_message_that_a_template_hides_is_refused(chat_with: Make) -> None:
    """shown.py 1."""
    chat = chat_with(BY_ID)
    system = {"role": "system", "content": "be brief"}
    assert "be brief" in chat.text(chat.render([system, user("hi")], []), special=True)
    with pytest.raises(
        QuartetError, match=r"messages\[2\].content = be brief is refused; .* one system message"
    ):
        chat.render([user("hi"), said("four"), system, user("and?")], [])


def test_a_call_whose_arguments_a_template_hides_is_refused(chat_with: Make) -> None:
    """shown.py 1."""
    talk = [user("hi"), said("", tool_calls=[CALL]), result("2")]
    assert '"a": 1' in chat_with(BY_ID).text(chat_with(BY_ID).render(talk, []))
    with pytest.raises(
        QuartetError, match=r"messages\[1\].tool_calls\[0\].arguments_json = {\"a\": 1} is refused"
    ):
        chat_with(BY_ID.replace("c.function |", "c.function.name |")).render(talk, [])
