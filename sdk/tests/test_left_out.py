"""What of a conversation a chat template leaves out (left_out.py)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from quartet.cli.sft.template import Template
from quartet.left_out import MAX_ASKED, MAX_FORMS, LeftOut, Part, What

USER = {"role": "user", "content": "hi"}
RESULT = {"role": "tool", "content": "2", "tool_call_id": "abcdefgh1", "name": "add"}
SHOWS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.reasoning_content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}"
)


def call(number: int, call_id: str = "abcdefgh1") -> dict[str, Any]:
    function = {"name": f"f{number}", "arguments": {"a": number}}
    return {"id": call_id, "type": "function", "function": function}


def said(content: str, *calls: dict[str, Any], **more: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **more}


class Rendered:
    """A template that counts how often it is rendered."""

    def __init__(self, source: str) -> None:
        self.times = 0
        self._template = Template(source, {})

    def __call__(self, messages: Sequence[Any], tools: Sequence[Any], opened: bool) -> str | None:
        self.times += 1
        try:
            return self._template.render(messages, tools, opened)
        except ValueError:
            return None


def left_out(source: str, *messages: dict[str, Any]) -> list[Part]:
    return list(LeftOut(Rendered(source)).parts(messages, (), True))


@pytest.mark.parametrize(
    ("source", "messages", "parts"),
    [
        (SHOWS, [USER, said("so", call(1), call(2), reasoning_content="hm"), RESULT], []),
        (
            SHOWS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
            [USER, said("", call(1), call(2)), RESULT],
            [Part(1, What.NAME, 1), Part(1, What.ARGUMENTS, 1)],
        ),
        (
            SHOWS.replace("{{ c.function.arguments | tojson }}", ""),
            [USER, said("", call(1), call(2))],
            [Part(1, What.ARGUMENTS, 0), Part(1, What.ARGUMENTS, 1)],
        ),
        (
            SHOWS.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}"),
            [USER, said("so", call(1)), RESULT],
            [Part(1, What.CONTENT)],
        ),
        (
            SHOWS.replace("{{ m.content }}", "{{ m.content if loop.first or m.role != 'system' }}"),
            [{"role": "system", "content": text} for text in ("a", "b", "c")] + [USER],
            [Part(1, What.CONTENT)],
        ),
        (
            SHOWS.replace("m.content", "m.content if m.role != 'tool' or loop.previtem.tool_calls"),
            [USER, said("four"), RESULT, said("", call(1)), RESULT],
            [Part(2, What.CONTENT)],
        ),
        (SHOWS.replace("{{ m.reasoning_content }}", ""), [USER, said("four", reasoning_content="hm")],
         [Part(1, What.THINKING)]),
    ],
)  # fmt: skip
def test_what_is_not_in_the_text_is_told(
    source: str, messages: list[dict[str, Any]], parts: list[Part]
) -> None:
    """1, 6: the first of each kind."""
    assert left_out(source, *messages) == parts


@pytest.mark.parametrize(
    "form", ["| tojson", "| upper", "| trim", "| e", "| tojson | tojson", "| title", "| indent(4)", "| list"]
)
def test_the_form_in_which_a_template_writes_it_does_not_matter(form: str) -> None:
    """2. In `list` its letters are apart, so that its word is never found."""
    source = SHOWS.replace("m.content", f"m.content {form}").replace(
        "c.function.name", f"c.function.name {form}"
    )
    assert not left_out(source, USER, said(' "so"\n<b>', call(1), call(2)), RESULT)


def test_what_is_shown_in_the_conversation_itself_is_not_told() -> None:
    """2: a template may choose by what is said."""
    source = SHOWS.replace("{{ m.content }}", "{{ m.content if m.content[0] == '!' }}")
    assert not left_out(source, {"role": "user", "content": "!hi"})
    assert left_out(source, USER) == [Part(0, What.CONTENT)]


def test_what_is_dropped_later_counts_as_shown() -> None:
    """3."""
    source = SHOWS.replace("m.reasoning_content", "m.reasoning_content if loop.last")
    assert not left_out(source, USER, said("four", reasoning_content="hm"), USER, said("five"))
    assert left_out(
        source.replace("if loop.last", "if false"), USER, said("four", reasoning_content="hm"), USER
    )
    source = SHOWS.replace("m.content", "m.content if loop.last")
    assert left_out(source, USER, said("four"), USER) == [Part(0, What.CONTENT)], "what others say does not"


def test_a_call_may_be_told_by_its_id() -> None:
    """4."""
    source = SHOWS.replace("c.function.name", "c.id")
    assert not left_out(source, USER, said("", call(1, "functions.f1:0"), call(2, "functions.f2:1")))
    assert left_out(source, USER, said("", call(1, ""))) == [Part(1, What.NAME, 0)]


def test_what_a_template_refuses_is_not_told() -> None:
    """5: neither a form of it nor the conversation."""
    for when in ("'QUARTET' in m.content", "'QUARTET' not in m.content"):
        source = "{% for m in messages %}{% if WHEN %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
        assert not left_out(source.replace("WHEN", when), USER)
    source = "{% if messages[0].content == 'hi' %}{{ raise_exception('no') }}{% endif %}"
    assert not left_out(source, USER, said("four"), {"role": "user", "content": "so"})


def test_what_one_kind_has_in_plenty_hides_no_other() -> None:
    """6: text beside calls is dropped later, and other text at once."""
    source = SHOWS.replace("m.content", "m.content if m.role == 'user' or (m.tool_calls and loop.last)")
    thinking = [said("so", call(1)) for _ in range(2 * MAX_ASKED)]
    assert not left_out(source, USER, *thinking, USER)
    assert left_out(source, USER, *thinking, said("four"), USER) == [Part(2 * MAX_ASKED + 1, What.CONTENT)]


def test_messages_that_say_nothing_are_not_looked_for() -> None:
    assert not left_out("", {"role": "user", "content": " \n"}, said("", reasoning_content=""))


def test_a_form_is_rendered_once_and_little_is_made_sure_of() -> None:
    """6."""
    rendered = Rendered(SHOWS)
    known = LeftOut(rendered)
    chance = random.Random(9)
    for _ in range(MAX_FORMS):
        call_id = f"{chance.randrange(10**9):09d}"
        chat = [USER | {"content": call_id}, said("", call(chance.randrange(99), call_id))]
        assert not list(known.parts(chat, (), True))
    assert rendered.times == 1
    hides = Rendered("{% for m in messages %}{{ m.content | length }},{% endfor %}")
    many = [{"role": "user", "content": "x" * number} for number in range(100, 300)]
    assert not list(LeftOut(hides).parts(many, (), True))
    assert hides.times == 1 + 2 * MAX_ASKED
