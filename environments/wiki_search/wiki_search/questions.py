"""Where the questions come from, and what could be answered to one of a kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from wiki_search.library import row_of
from wiki_search.reading import Words, kin_of
from wiki_search.world import Question, World

SOURCES_KEPT = 4  # of a process; a worker has one


class Source(BaseModel):
    """A file of questions, or an invented world."""

    model_config = ConfigDict(frozen=True)

    questions: Path | None
    seed: int
    towns: int
    people: int

    def read(self) -> Iterator[Question]:
        """All questions of both splits, in stable order. Raises ValueError."""
        if self.questions is None:
            yield from World(self.seed, self.towns, self.people).questions()
            return
        for number, line in enumerate(self.questions.read_text(encoding="utf-8").split("\n"), start=1):
            if line.strip():
                row = row_of(line, f"{self.questions}, line {number}")
                if any(row.get(key) is None for key in ("question", "answer")):
                    raise ValueError(f"{self.questions}, line {number}: needs a question and an answer")
                yield Question(str(row["question"]), str(row["answer"]), (), str(row.get("kind") or ""))


@lru_cache(SOURCES_KEPT)
def kin_by_kind(source: Source) -> Mapping[str, frozenset[Words]]:
    """Of each kind all answers, as they are looked for. A question without a kind has no kin."""
    answers: dict[str, list[str]] = defaultdict(list)
    for question in source.read():
        answers[question.kind].append(question.answer)
    return {kind: kin_of(answers[kind] if kind else ()) for kind in answers}
