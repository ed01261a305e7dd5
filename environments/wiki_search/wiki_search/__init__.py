"""wiki-search: answer a question by searching an encyclopedia and reading its sections.

1. Tools: `search_pages(query)`, `view_sections(page_id)`, `read_section(section_id)`. What is not there is
   told to the model, with what to do instead.
2. The reward is 1 where the last answer has the expected one in it, word for word (case, articles and
   punctuation aside), names nothing else of its kind that the question does not, and has at most
   `max_answer_words` words; else 0. So a list of candidates earns nothing (wiki_search.reading).
3. Pages and questions are of an invented world, made from `seed`, or from files. Training and evaluation
   share no question; they share the encyclopedia.
4. `max_turns` model calls end a rollout; what stands then is judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Literal, Self

import verifiers.v1 as vf
from pydantic import Field, model_validator

from wiki_search.questions import Source, kin_by_kind
from wiki_search.reading import says, word_count
from wiki_search.server import WikiConfig, WikiToolset

SYSTEM_PROMPT = "Use the provided Wikipedia search tools to help answer questions."


class WikiSearchData(vf.TaskData):
    """One question."""

    answer: str
    kind: str
    source: Source
    """Has the other things of that kind, which are too many to be in each example."""
    max_turns: int
    max_answer_words: int


class WikiSearchTask(vf.Task[WikiSearchData]):
    """Looks for the expected answer in the given one."""

    @vf.stop
    async def max_turns_reached(self, trace: vf.Trace) -> bool:
        """Whether the model had its turns."""
        return trace.num_turns >= self.data.max_turns

    @vf.reward(weight=1.0)
    async def correct_answer(self, trace: vf.Trace) -> float:
        """Whether the last answer says what is expected, in few words."""
        reply = trace.last_reply
        if trace.is_truncated or ("<think>" in reply and "</think>" not in reply):
            return 0.0
        last = trace.assistant_messages[-1:]
        if last and last[0].tool_calls:
            return 0.0
        given = reply.rpartition("</think>")[2]
        data = self.data
        if word_count(given) > data.max_answer_words:
            return 0.0
        return float(says(given, data.answer, data.prompt_text, kin_by_kind(data.source)[data.kind]))

    @vf.metric
    async def tool_calls(self, trace: vf.Trace) -> float:
        """Calls of any tool."""
        return float(sum(len(message.tool_calls or ()) for message in trace.assistant_messages))

    @vf.metric
    async def sections_read(self, trace: vf.Trace) -> float:
        """Calls of read_section."""
        calls = [call.name for message in trace.assistant_messages for call in message.tool_calls or ()]
        return float(calls.count("read_section"))


class WikiSearchConfig(vf.TasksetConfig):
    """The arguments of the environment."""

    split: Literal["train", "eval"] = "train"
    num_train: int = Field(default=1000, ge=1, le=1_000_000)
    num_eval: int = Field(default=100, ge=0, le=100_000)
    max_turns: int = Field(default=10, ge=1)
    max_answer_words: int = Field(default=50, ge=1)
    max_results: int = Field(default=10, ge=1, le=100)
    seed: int = 0
    towns: int = Field(default=60, ge=1, le=2000)
    people: int = Field(default=120, ge=0, le=5000)
    corpus: Path | None = None
    """JSON Lines of pages, {"id", "title", "content"}; content is Markdown."""
    questions: Path | None = None
    """JSON Lines of {"question", "answer"} about those pages; answers of one "kind" exclude each other."""

    @model_validator(mode="after")
    def _both_files(self) -> Self:
        if (self.corpus is None) != (self.questions is None):
            raise ValueError("corpus and questions belong together; give both files, or none")
        return self

    @property
    def source(self) -> Source:
        """Where the questions come from."""
        return Source(questions=self.questions, seed=self.seed, towns=self.towns, people=self.people)

    @property
    def tool(self) -> WikiConfig:
        """The tool server's settings."""
        return WikiConfig(
            corpus=self.corpus.absolute() if self.corpus else None,
            seed=self.seed,
            towns=self.towns,
            people=self.people,
            max_results=self.max_results,
        )


class WikiSearchTaskset(vf.Taskset[WikiSearchTask, WikiSearchConfig]):
    """Questions, and the encyclopedia that they share."""

    @classmethod
    def toolsets(cls, config: WikiSearchConfig) -> list[vf.Toolset]:
        """One server for all rollouts of a worker."""
        return [WikiToolset(config.tool)]

    def load(self) -> Iterator[WikiSearchTask]:
        """The questions of the configured split."""
        config = self.config
        asked = list(islice(config.source.read(), config.num_eval + config.num_train))
        held_out = asked[: config.num_eval]
        texts = {question.text for question in held_out}
        train = [question for question in asked if question.text not in texts]
        if not train:
            raise ValueError(
                f"there are {len(asked)} questions; with num_eval = {config.num_eval} none are left to train "
                "on"
            )
        for question in train if config.split == "train" else held_out:
            data = WikiSearchData(
                prompt=question.text,
                system_prompt=SYSTEM_PROMPT,
                answer=question.answer,
                kind=question.kind,
                source=config.source,
                max_turns=config.max_turns,
                max_answer_words=config.max_answer_words,
            )
            yield WikiSearchTask(data, config.task)


__all__ = ["WikiSearchTaskset"]
