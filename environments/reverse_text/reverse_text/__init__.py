"""reverse-text: write a text backwards, in one turn.

1. The prompt is the text; the answer stands in the one pair of <reversed_text> tags. What stands in <think>
   is no part of it; thinking that never ends has no answer.
2. The reward is the similarity ratio (difflib) of that answer to the reversed prompt. An answer without
   exactly one pair earns 0.
3. With `require_clean_end` an answer that goes on after the closing tag, or that a token limit cut, earns 0
   as well. Without it, a policy learns to append junk at no cost.
4. Texts are generated from `seed`, or read from a file; training and evaluation never share a text. Nothing
   is downloaded.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import string
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import Literal, Self

import verifiers.v1 as vf
from pydantic import Field, model_validator

SYSTEM_PROMPT = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
_ANSWER = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)
_TAG = re.compile(r"</?reversed_text>")
# Comparing longer texts takes up to seconds, in which the worker's other rollouts must go on.
INLINE_CHARS = 1000


class ReverseTextData(vf.TaskData):
    """One example: `prompt` is the text."""

    answer: str


class ReverseTextTaskConfig(vf.TaskConfig):
    """How an answer is judged."""

    require_clean_end: bool = True


class ReverseTextTask(vf.Task[ReverseTextData, vf.State, ReverseTextTaskConfig]):
    """Ask once, compare the answer."""

    @vf.reward(weight=1.0)
    async def lcs_reward(self, trace: vf.Trace) -> float:
        """Similarity of the answer to the reversed text, in [0, 1]."""
        answer = self._answer(trace)
        if answer is None:
            return 0.0
        if len(answer) + len(self.data.answer) <= INLINE_CHARS:
            return similarity(answer, self.data.answer)
        return await asyncio.to_thread(similarity, answer, self.data.answer)

    @vf.metric
    async def exact_match(self, trace: vf.Trace) -> float:
        """Whether the answer is the reversed text."""
        return float(self._answer(trace) == self.data.answer)

    def _answer(self, trace: vf.Trace) -> str | None:
        if self.config.require_clean_end and trace.is_truncated:
            return None
        return parse_answer(trace.last_reply, require_clean_end=self.config.require_clean_end)


def similarity(answer: str, right: str) -> float:
    """How alike the texts are, in [0, 1]."""
    # autojunk would pass over the frequent characters of a text, from 200 on: nearly all of them.
    return SequenceMatcher(None, answer, right, autojunk=False).ratio()


def parse_answer(reply: str, *, require_clean_end: bool = True) -> str | None:
    """The text in the single pair of tags, or None where the reply is not of that form."""
    reply = reply.rpartition("</think>")[2]
    if reply.lstrip().startswith("<think>"):
        return None
    found = _ANSWER.search(reply)
    if found is None or len(_TAG.findall(reply)) != 2:
        return None
    if require_clean_end and reply[found.end() :].strip():
        return None
    return found.group(1).strip()


class ReverseTextConfig(vf.TasksetConfig):
    """The arguments of the environment."""

    task: ReverseTextTaskConfig = ReverseTextTaskConfig()
    split: Literal["train", "eval"] = "train"
    num_train: int = Field(default=2000, ge=1, le=1_000_000)
    num_eval: int = Field(default=200, ge=0, le=100_000)
    min_chars: int = Field(default=4, ge=1)
    max_chars: int = Field(default=8, ge=1, le=10_000)
    seed: int = 0
    alphabet: str = Field(default=string.ascii_lowercase, min_length=1)
    texts: Path | None = None
    """JSON Lines, each with a "text" (or "prompt"), used instead of generated texts.

    The last `num_eval` are held out."""
    require_clean_end: bool = True
    """Same as `task.require_clean_end`, where arguments are flat."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_chars > self.max_chars:
            raise ValueError(f"min_chars = {self.min_chars} is more than max_chars = {self.max_chars}")
        letters = len(set(self.alphabet))
        possible = sum(
            letters**n for n in range(self.min_chars, min(self.max_chars, self.min_chars + 30) + 1)
        )
        # Drawing distinct texts slows down without bound as they run out; half of them keeps it short.
        if self.texts is None and 2 * (self.num_train + self.num_eval) > possible:
            raise ValueError(
                f"{self.num_train + self.num_eval} distinct texts are asked for, of {possible} possible ones "
                "(at most half may be used); raise max_chars or lower num_train"
            )
        return self


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    """Texts to reverse."""

    def load(self) -> Iterator[ReverseTextTask]:
        """The examples of the configured split."""
        task = self.config.task
        if not self.config.require_clean_end:
            task = task.model_copy(update={"require_clean_end": False})
        train, held_out = split_texts(self.config)
        for text in train if self.config.split == "train" else held_out:
            data = ReverseTextData(prompt=text, system_prompt=SYSTEM_PROMPT, answer=text[::-1].strip())
            yield ReverseTextTask(data, task)


def split_texts(config: ReverseTextConfig) -> tuple[list[str], list[str]]:
    """Training and evaluation texts: distinct, disjoint, the same for equal configurations."""
    if config.texts is not None:
        texts = read_texts(config.texts)
        if len(texts) <= config.num_eval:
            raise ValueError(
                f"{config.texts} has {len(texts)} distinct texts; "
                f"with num_eval = {config.num_eval} none are left to train on"
            )
        first_eval = len(texts) - config.num_eval
        return texts[:first_eval][: config.num_train], texts[first_eval:]
    # Evaluation is drawn first, from a stream of its own: it stays the same whatever num_train is.
    held_out = _draw(config, "eval", config.num_eval, frozenset())
    return _draw(config, "train", config.num_train, frozenset(held_out)), held_out


def _draw(config: ReverseTextConfig, stream: str, count: int, without: frozenset[str]) -> list[str]:
    rng = random.Random(f"{config.seed}:{stream}")
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        length = rng.randint(config.min_chars, config.max_chars)
        text = "".join(rng.choices(config.alphabet, k=length))
        if text.strip() and text not in without:
            drawn[text] = None
    return list(drawn)


def read_texts(path: Path) -> list[str]:
    """The distinct texts of a JSON Lines file, in order."""
    texts: dict[str, None] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: it is no JSON ({error})") from None
        text = row.get("text", row.get("prompt")) if isinstance(row, dict) else row
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f'{path}, line {number}: no "text"; write {{"text": "..."}}')
        texts[text] = None
    return list(texts)


__all__ = ["ReverseTextTaskset"]
