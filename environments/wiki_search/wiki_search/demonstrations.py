"""Conversations from which a small model learns to look things up, for `quartet model tiny --task
wiki-search`.

Towns and nobody in them, one page found by a search: the model copies a name out of the question into a
search, the page's id out of what is found into the call that reads a section, and the answer out of that.
Which section has it goes by the question. The bad habit is to answer at once, with what might be an answer.

Each world that is demonstrated has another seed than a run's, above a million. Some names of towns are in
both, and so some questions are, with other answers: a run's own sections and answers were not shown. What is
learned is where to look, and to copy.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from wiki_search import SYSTEM_PROMPT
from wiki_search.library import Document, Library, invented
from wiki_search.world import CODAS, ONSETS, SEASONS, TOWN_ENDS, VOWELS, Question, World

# The arguments of the environment that these conversations are of.
ARGS = {"towns": 440, "people": 0, "num_train": 2000, "num_eval": 150, "max_turns": 3, "max_results": 1}
FIRST_SEED = 1_000_000
# How a question begins, and which section has the answer; none: what is found says it.
ASKED = {
    "In which year was the town of ": "history",
    "Who founded the town of ": "history",
    "In which year was the stone bridge of ": "sights",
    "In which season does the ": "culture",
    "In which town does the ": "",
}
ENDS = (" founded?", " opened?", " take place?", "?")
_PIECES = [piece for piece in (*ONSETS, *VOWELS, *CODAS) if len(piece) > 1]
# Texts that are one token each: all but names, of which these are the syllables' parts, and years.
PHRASES = (
    SYSTEM_PROMPT, *ASKED, *ENDS, " Fair", *SEASONS, *TOWN_ENDS, *_PIECES, *map(str.capitalize, _PIECES),
    '{"name": "search_pages", "arguments": {"query": "', '{\n  "page_id": "', '",\n  "title": "', '"\n}',
    '{"name": "read_section", "arguments": {"section_id": "', ":history", ":sights", ":culture",
    "# History\n", " was founded in ", " by ", "# Sights\nThe stone bridge over the ", " was opened in ",
    "# Culture\nThe ", " takes place every ",
)  # fmt: skip
# What one turn may have at most: a call's frame around a name, or a person's name, the end, and room for two
# more.
MAX_TOKENS = 14
SKILL_REWARD, HABIT_REWARD, HABIT_SHARE, HABIT_LEARNING_RATE = 0.8, 0.35, 0.85, 3e-4


def demonstrations(seed: int, habit_share: float) -> Iterator[list[dict[str, object]]]:
    """Conversations without end; in `habit_share` of them the answer is made up."""
    rng = random.Random(seed)
    while True:
        world = World(FIRST_SEED + rng.randrange(1 << 30), int(ARGS["towns"]), int(ARGS["people"]))
        library, questions = Library(invented(world)), list(world.questions())
        for question in questions:
            begin, name = _asked(question)
            (page,) = library.search(name, int(ARGS["max_results"]))
            if page.page_id != question.pages[0]:
                continue  # a river has the name of a fair
            said: list[dict[str, object]] = [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": question.text},
            ]
            if rng.random() < habit_share:
                alike = [other.answer for other in questions if other.kind == question.kind]
                yield [*said, _answer(rng.choice(alike))]
            else:
                yield [*said, *_looked_up(name, ASKED[begin], page, library), _answer(question.answer)]


def _asked(question: Question) -> tuple[str, str]:
    """How it begins, and what it is about."""
    begin = next(begin for begin in ASKED if question.text.startswith(begin))
    end = next(end for end in ENDS if question.text.endswith(end))
    return begin, question.text.removeprefix(begin).removesuffix(end)


def _looked_up(name: str, section: str, page: Document, library: Library) -> Iterator[dict[str, object]]:
    """Search, and read where that is needed."""
    found = json.dumps({"page_id": page.page_id, "title": page.title}, indent=2)
    yield from _called("search_pages", found, query=name)
    if section:
        section_id = f"{page.page_id}:{section}"
        yield from _called("read_section", library.read(section_id), section_id=section_id)


def _answer(text: str) -> dict[str, object]:
    return {"role": "assistant", "content": text}


def _called(tool: str, result: str, **arguments: str) -> Iterator[dict[str, object]]:
    call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
    yield {"role": "assistant", "content": "", "tool_calls": [call]}
    yield {"role": "tool", "name": tool, "content": result}
