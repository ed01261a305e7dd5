"""A choice while it grows and as a whole: nothing of it is lost on the way, nor told twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from quartet_inference.chat.formats import FORMATS
from quartet_inference.chat.reader import THINKING_MARKS, DeclaredReader, FormatReader, Said, Turn, TurnReader
from quartet_inference.chat.schemas import schemas_of
from quartet_inference.engine import Delta, Span
from quartet_inference.openai.choices import Choice, Speaker
from quartet_inference.stop_strings import Stops

from .declared import DECLARED
from .openai_door import TOOL

END = "\x03"


def streamed(reader: Callable[[], TurnReader], text: str, sizes: Sequence[int] = ()) -> tuple[str, str]:
    """Thinking and content as a stream tells them."""
    speaker = Speaker(lambda ids: "".join(map(chr, ids)), reader(), Stops([]))
    reasoning, content, at = "", "", 0
    for size in (*sizes, len(text)):
        piece = [ord(letter) for letter in text[at : at + size]]
        said = speaker.feed(Delta(0, piece, [0.0] * len(piece), []))
        reasoning, content, at = reasoning + said.reasoning, content + said.content, at + size
    turn = reader().finish(text.removesuffix(END))
    rest = speaker.rest(turn.reasoning, turn.content)
    return reasoning + rest.reasoning, content + rest.content


def declared() -> TurnReader:
    return DeclaredReader(DECLARED, "hi<|im_start|>assistant\n", [TOOL])


def test_a_stream_tells_all_of_any_answer() -> None:
    """choices.py 1: whatever marks it is made of, and however it is cut into pieces."""
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(2000):
        form = chance.choice([None, *FORMATS.values()])
        thinking = chance.choice([None, *THINKING_MARKS])
        opened, closed = chance.choice([(True, False), (False, True), (False, False)])
        words = [
            "Well",
            " ",
            "\n",
            "\n\n",
            "é",
            "x < y",
            "{",
            "[",
            "add(a=1)",
            '{"name": "add", "arguments": {}}',
        ]
        if form is not None:
            words += [*form.markers, *(mark[:3] for mark in form.markers)]
        if thinking is not None:
            words += [*thinking, *(mark[:3] for mark in thinking), *thinking]
        text = "".join(chance.choices(words, k=chance.randint(1, 7))) + chance.choice(["", END])

        def reader() -> TurnReader:
            state = (thinking, thinking is not None and opened, form, schemas_of([TOOL]))  # noqa: B023
            return FormatReader(*state, closed=thinking is not None and closed)  # noqa: B023

        told = streamed(reader, text, chance.choices([1, 2, 3, 7, 40], k=len(text)))
        turn = reader().finish(text.removesuffix(END))
        assert told[0] == turn.reasoning, text
        # Before a closing mark that none opens all was told as content, and what follows it is not lost.
        assert told[1].endswith(turn.content), text
        before = told[1].removesuffix(turn.content)
        assert turn.reasoning or before.strip() == "", text


@pytest.mark.parametrize("sizes", [(), (1, 1, 1, 1), (6, 1)])
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        # Cut off at its last token, which is text, behind white space that the whole leaves out.
        ("\nx is 41", "", "\nx is 41"),
        ("<think>\nhm</think>\nx is 41", "\nhm", "\nx is 41"),
        # What a mark may begin with.
        ("\nx <c" + END, "", "\nx <c"),
        # It does not follow the template: the whole is all of it.
        ("Well.<call>{broken</call>", "", "Well.<call>{broken</call>"),
    ],
)
def test_a_declared_reader_loses_no_end(
    sizes: tuple[int, ...], text: str, reasoning: str, content: str
) -> None:
    """choices.py 1"""
    assert streamed(declared, text, sizes) == (reasoning, content)


def test_a_call_that_cannot_be_read_is_told_behind_what_was_told_of_its_answer() -> None:
    """choices.py 1: as a whole the answer is all text, its marks of thinking too."""
    for text, thought in (
        ("<think>hm</think>Well.<call>{broken</call>", "hm"),
        ("<think>\n\nhm\n</think>\n\nWell.<call>{broken</call>", "\n\nhm\n"),
        # What is said stands in what was thought, and that in a mark.
        ("<think>Well. Let me add.</think>Well.<call>{broken</call>", "Well. Let me add."),
        ("<think>banana</think> a<call>{broken</call>", "banana"),
        ("<think>th</think>t<call>{broken</call>", "th"),
    ):
        for sizes in ([1] * len(text), [len(text) - 9]):
            said = text.rpartition("</think>")[2]
            assert streamed(declared, text + END, sizes) == (thought, said), text


@pytest.mark.parametrize(
    ("told", "whole", "rest"),
    [
        (" a", "<tool>banana", ""),
        (" a", "<tool>\na banana", " banana"),
        ("Well", "<|channel|>analysis<|message|>Well.", "."),
        ("Well", "[A][B]Well.", "."),
        ("Well", "<|channel>Well\nWell.", "\nWell."),
        ("x", "<" * 100_000 + "x", ""),
    ],
)
def test_what_was_told_is_looked_for_at_the_beginning_and_behind_marks_alone(
    told: str, whole: str, rest: str
) -> None:
    """choices.py 1: of a whole that the reader finds nothing in any more."""

    class Given:
        def feed(self, text: str) -> Said:
            return Said("", text)

        def finish(self, text: str) -> Turn:
            return Turn(whole, "", ())

    assert streamed(Given, told + END, [len(told) + 1]) == ("", told + rest)


def test_an_answer_behind_a_mark_with_nothing_before_it_but_space_is_told() -> None:
    """choices.py 1: a model that thinks nothing may close what it has not opened."""

    def reader() -> TurnReader:
        return FormatReader(THINKING_MARKS[0], False, None, {})

    for sizes in ((), (1, 1, 1), (4, 4)):
        reasoning, content = streamed(reader, "\n\n</think>\n\nIt is four." + END, sizes)
        assert (reasoning, content.strip()) == ("", "It is four.")


@pytest.mark.parametrize("sizes", [(), (1,) * 40, (9, 3)])
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        # Thinking that no mark had begun was told as content.
        ("\n\nLet me see.</think>It is four.", "Let me see.", "It is four."),
        # What is said begins as what was thought.
        ("<think>It is four, I think.</think>It is four.", "It is four, I think.", "It is four."),
        ("<think>It</think>It", "It", "It"),
        ("<think>It is cut", "It is cut", ""),
    ],
)
def test_thinking_and_content_are_told_once(
    sizes: tuple[int, ...], text: str, reasoning: str, content: str
) -> None:
    """choices.py 1"""
    told = streamed(lambda: FormatReader(THINKING_MARKS[0], False, None, {}), text + END, sizes)
    if text.startswith("<think>"):
        assert told == (reasoning, content)
    else:
        assert told[0] == reasoning and told[1].endswith(content)


def test_neighbouring_spans_of_one_version_are_one() -> None:
    choice = Choice()
    assert choice.versions == []
    spans = [[Span(0, 3, 4), Span(3, 1, 5)], [Span(4, 2, 5)], [Span(6, 1, 4)], [Span(7, 2, 4)]]
    choice.deltas = [Delta(0, [], [], some) for some in spans]
    assert choice.versions == [
        {"start": 0, "length": 3, "policy_version": 4},
        {"start": 3, "length": 3, "policy_version": 5},
        {"start": 6, "length": 3, "policy_version": 4},
    ]
