"""gsm8k: grade-school mathematics in words, reasoned step by step, in one turn.

1. The answer stands in the last \\boxed{...}. The reward is 1 where it is the expected number, else 0;
   1,234 and $1234 and 1234.0 are one number (gsm8k.answers).
2. An answer that a token limit cut, or whose thinking never ended, earns 0.
3. Problems are generated from `seed`, each with a solution that was checked step by step; training and
   evaluation share none. With `dataset` they come from a file or a dataset of the hub, such as
   "openai/gsm8k".
4. With `kinds` only stories of these kinds are told. Some kinds have few stories, so which are held out is
   then settled by their text and not by their number: about one in seven, of every kind.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self
from zlib import crc32

import verifiers.v1 as vf
from pydantic import Field, model_validator

from gsm8k.answers import number
from gsm8k.stories import PLOTS, Story, stories

SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
ALL = -1
GENERATED = {"train": 7473, "eval": 1319}  # as many as the data set of that name has
HUB_SPLITS = {"train": "train", "eval": "test"}
HELD_OUT_OF = 7  # about 1319 of 1319 + 7473
# So many draws in a row that bring nothing new: what the kinds have to tell is told, but for a rest.
MAX_REPEATS = 500


@dataclass(frozen=True)
class Problem:
    """A question, the number it asks for, and the way there."""

    question: str
    answer: str
    solution: str = ""


class Gsm8kData(vf.TaskData):
    """One problem."""

    answer: str


class Gsm8kTask(vf.Task[Gsm8kData]):
    """Compares the boxed number."""

    @vf.reward(weight=1.0)
    async def correct_answer(self, trace: vf.Trace) -> float:
        """Whether the number is right."""
        if trace.is_truncated:
            return 0.0
        found = number(self._boxed(trace))
        return float(found is not None and found == number(self.data.answer))

    @vf.metric
    async def format_followed(self, trace: vf.Trace) -> float:
        """Whether there is a boxed answer at all."""
        return float(bool(self._boxed(trace).strip()))

    def _boxed(self, trace: vf.Trace) -> str:
        reply = trace.last_reply
        if "<think>" in reply and "</think>" not in reply:
            return ""
        return vf.extract_boxed_answer(reply.rpartition("</think>")[2], strict=True)


class Gsm8kConfig(vf.TasksetConfig):
    """The arguments of the environment."""

    split: Literal["train", "eval"] = "train"
    num_train_examples: int = Field(default=ALL, ge=ALL, le=1_000_000)
    num_eval_examples: int = Field(default=ALL, ge=ALL, le=100_000)
    seed: int = 0
    max_turns: int = Field(default=1, ge=1)
    """For files that give it to every environment: there is one turn, however many may be taken."""
    kinds: list[str] = Field(default_factory=list)
    """Which kinds of stories are told, as stories.PLOTS names them; empty: all of them."""
    largest: int | None = Field(default=None, ge=10)
    """With kinds: no number of a problem or of its solution is above it."""
    dataset: str = ""
    """A JSON Lines file of {"question": ..., "answer": ...}, or a dataset of the hub; empty: generated."""
    dataset_subset: str | None = "main"

    @model_validator(mode="after")
    def _known_kinds(self) -> Self:
        for kind in self.kinds:
            if kind not in PLOTS:
                near = get_close_matches(kind, PLOTS, n=1)
                raise ValueError(f"kinds: there is no {kind!r}; use {near[0] if near else ', '.join(PLOTS)}")
        if self.kinds and self.dataset:
            raise ValueError("kinds are of generated problems; leave out kinds, or dataset")
        if self.largest is not None and not self.kinds:
            raise ValueError(
                f"largest = {self.largest} needs kinds that have such stories, as kinds = ['ages']"
            )
        return self


class Gsm8kTaskset(vf.Taskset[Gsm8kTask, Gsm8kConfig]):
    """Problems in words."""

    def load(self) -> Iterator[Gsm8kTask]:
        """The problems of the configured split."""
        for problem in self.problems():
            data = Gsm8kData(prompt=problem.question, system_prompt=SYSTEM_PROMPT, answer=problem.answer)
            yield Gsm8kTask(data, self.config.task)

    def problems(self) -> list[Problem]:
        """The problems with their solutions."""
        config = self.config
        wanted = config.num_train_examples if config.split == "train" else config.num_eval_examples
        if config.dataset:
            rows = self._given()
            return rows if wanted == ALL else rows[:wanted]
        if config.kinds:
            return _of_kinds(config, wanted)
        if config.split == "eval":
            return _generated(config.seed, "eval", wanted, ())
        # At least as many as by default, so that fewer to evaluate with leave the same to train on.
        most = max(GENERATED["eval"], config.num_eval_examples)
        return _generated(config.seed, "train", wanted, _generated(config.seed, "eval", most, ()))

    def _given(self) -> list[Problem]:
        config = self.config
        file = Path(config.dataset)
        if file.is_file():
            rows = [_problem(row, f"{config.dataset}, line {at}") for at, row in _lines(file)]
            # A file has no splits; its last tenth is held out.
            cut = len(rows) - max(1, len(rows) // 10)
            held_out = rows[cut:]
            asked = {problem.question for problem in held_out}
            return held_out if config.split == "eval" else [one for one in rows if one.question not in asked]
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise ValueError(
                f"dataset = {config.dataset!r} is no file; for a dataset of the hub install 'gsm8k[hub]'"
            ) from error
        rows = load_dataset(config.dataset, config.dataset_subset, split=HUB_SPLITS[config.split])
        return [_problem(row, f"{config.dataset}, row {at}") for at, row in enumerate(rows)]


def _generated(seed: int, split: str, count: int, without: Iterable[Problem]) -> list[Problem]:
    """Distinct problems from a stream of their own."""
    rng = random.Random(f"{seed}:{split}")
    taken = {problem.question for problem in without}
    fresh = (
        _told(story)
        for story in stories(rng)
        if story.question not in taken and not taken.add(story.question)
    )
    return list(islice(fresh, GENERATED[split] if count == ALL else count))


def _of_kinds(config: Gsm8kConfig, count: int) -> list[Problem]:
    """Distinct problems of some kinds; all there are where `count` is not set. Raises ValueError."""
    split, kinds = config.split, config.kinds
    told: dict[str, Problem] = {}
    repeats = 0
    for story in stories(random.Random(f"{config.seed}:{split}"), kinds, config.largest):
        if len(told) == (GENERATED[split] if count == ALL else count):
            break
        if story.question in told or _held_out(story.question) != (split == "eval"):
            repeats += 1
            if repeats < MAX_REPEATS:
                continue
            if count == ALL:
                break
            raise ValueError(
                f"num_{split}_examples = {count}, but stories of kinds = {kinds} make {len(told)} different "
                "ones; ask for at most so many, or name more kinds"
            )
        told[story.question] = _told(story)
        repeats = 0
    return list(told.values())


def _held_out(question: str) -> bool:
    return crc32(question.encode()) % HELD_OUT_OF == 0


def _told(story: Story) -> Problem:
    return Problem(story.question, str(story.answer), "\n".join(story.steps))


def _lines(file: Path) -> Iterator[tuple[int, Any]]:
    """Of each line that is not empty its number and what it says. Raises ValueError."""
    for at, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield at, json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}, line {at}: it is no JSON ({error})") from None


def _problem(row: Any, place: str) -> Problem:
    """A row whose answer is a number, or ends with "#### number". Raises ValueError."""
    if not isinstance(row, Mapping):
        raise ValueError(f'{place}: it is no object; write {{"question": ..., "answer": ...}}')
    for key in ("question", "answer"):
        if row.get(key) is None:
            has = ", ".join(map(repr, row)) or "nothing"
            raise ValueError(f'{place}: it has no "{key}" (it has {has}); write "{key}": ... in every line')
    solution, _, answer = str(row["answer"]).rpartition("####")
    if number(answer) is None:
        raise ValueError(f"{place}: the answer {row['answer']!r} is no number and ends with none")
    return Problem(str(row["question"]), answer.strip(), solution.strip())


__all__ = ["Gsm8kTaskset"]
