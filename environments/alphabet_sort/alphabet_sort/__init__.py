"""alphabet-sort: keep a growing list of names in alphabetical order, over several turns.

1. A scripted user gives names turn by turn; the model answers each turn with the whole list in order, in
   <alphabetical_sorted> tags first, then in <combined_alphabetical_sorted> tags with the names of this turn
   marked `// new name!`.
2. A turn earns the similarity (difflib) of its list to the right one, raised to `similarity_power`; the
   reward is the mean over all turns of the episode, those that were not reached included.
3. Several lists in one answer count only where each is better than the one before: then the last one does.
   What stands in <think> is no part of the answer; thinking that never ends has none.
4. Episodes are generated from `seed`; training leaves out those whose lists evaluation asks for. Nothing is
   downloaded.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any, Literal, Self

import verifiers.v1 as vf
from pydantic import Field, model_validator

from alphabet_sort.episodes import SHORT, Episode, Shape, SortBy, episodes, joined_names, read_names

# Comparing longer lists takes up to seconds, in which the worker's other rollouts must go on.
INLINE_CHARS = 1000
TAGS = ("alphabetical_sorted", "combined_alphabetical_sorted")


class AlphabetSortData(vf.TaskData):
    """One episode. It has no prompt: the scripted user opens the conversation."""

    user_turns: list[str]
    ground_truths: list[list[str]]
    similarity_power: int
    power_per_turn: bool
    require_clean_end: bool


class AlphabetSortTask(vf.Task[AlphabetSortData]):
    """Judges the answers of an episode."""

    @vf.reward(weight=1.0)
    async def alphabet_sort(self, trace: vf.Trace) -> float:
        """Mean over the turns of similarity to the power."""
        power = self.data.similarity_power
        if self.data.power_per_turn:
            return _mean([similarity**power for similarity in await self._similarities(trace)])
        return _mean(await self._similarities(trace)) ** power

    @vf.metric
    async def perfect_turns(self, trace: vf.Trace) -> float:
        """Share of the turns whose list is right."""
        return _mean([float(similarity == 1.0) for similarity in await self._similarities(trace)])

    async def _similarities(self, trace: vf.Trace) -> list[float]:
        if self.data.require_clean_end and trace.is_truncated:
            return [0.0] * len(self.data.ground_truths)
        replies = [message.content for message in trace.assistant_messages]
        texts = [reply if isinstance(reply, str) else "" for reply in replies]
        texts += [""] * len(self.data.ground_truths)

        def compare() -> list[float]:
            return [
                similarity(text, TAGS[min(turn, 1)], right, clean_end=self.data.require_clean_end)
                for turn, (text, right) in enumerate(zip(texts, self.data.ground_truths, strict=False))
            ]

        return compare() if sum(map(len, texts)) <= INLINE_CHARS else await asyncio.to_thread(compare)


def similarity(reply: str, tag: str, right: list[str], *, clean_end: bool = False) -> float:
    """How near the reply's list is to the right one, in [0, 1]; 0 without one, or where a retry is worse."""
    reply = reply.rpartition("</think>")[2]
    if reply.lstrip().startswith("<think>"):
        return 0.0
    found = list(re.finditer(rf"<{tag}>(.*?)</{tag}>", reply, re.DOTALL))
    if not found or (clean_end and reply[found[-1].end() :].strip()):
        return 0.0
    scores = [_ratio(one.group(1), right) for one in found]
    improving = all(later > earlier for earlier, later in pairwise(scores))
    return scores[-1] if improving else 0.0


def _ratio(written: str, right: list[str]) -> float:
    lines = [line.strip().lower() for line in written.splitlines()]
    text = "\n".join(line for line in lines if line)
    # autojunk would pass over the frequent characters of a list, from 200 on: nearly all of them.
    matcher = SequenceMatcher(None, text, "\n".join(right).lower(), autojunk=False)
    return matcher.ratio() if text else 0.0


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


class AlphabetSortConfig(vf.TasksetConfig):
    """The arguments of the environment."""

    split: Literal["train", "eval"] = "train"
    num_train: int = Field(default=2000, ge=1, le=1_000_000)
    num_eval: int = Field(default=200, ge=0, le=100_000)
    min_turns: int = Field(default=1, ge=1)
    max_turns: int = Field(default=3, ge=1, le=50)
    min_names_per_turn: int = Field(default=1, ge=1)
    max_names_per_turn: int = Field(default=5, ge=1, le=20)
    similarity_power: int = Field(default=4, ge=1)
    power_per_turn: bool = True
    seed: int = 1337420
    sort_by: SortBy = "either"
    name_style: Literal["joined", "short"] = "joined"
    """"joined": IdaKeller; "short": 26 given names whose first letters differ, for small models."""
    names: Path | None = None
    """JSON Lines of names, instead of the built-in ones."""
    show_format: bool = True
    """Whether the user shows the format of the answer."""
    require_clean_end: bool = False
    """Nothing may follow the closing tag, and no token limit may cut the answer."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for what in ("turns", "names_per_turn"):
            low, high = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if low > high:
                raise ValueError(f"min_{what} = {low} is more than max_{what} = {high}")
        most = self.max_turns * self.max_names_per_turn
        if self.name_style == "short" and self.names is None:
            if self.sort_by != "first":
                raise ValueError('name_style = "short" has no last names; set sort_by = "first"')
            if most > len(SHORT):
                raise ValueError(f"an episode may need {most} names; there are {len(SHORT)} short ones")
        return self

    @property
    def shape(self) -> Shape:
        """What the episodes are made by."""
        return Shape(
            self.min_turns,
            self.max_turns,
            self.min_names_per_turn,
            self.max_names_per_turn,
            self.sort_by,
            self.show_format,
        )


class AlphabetSortTaskset(vf.Taskset[AlphabetSortTask, AlphabetSortConfig]):
    """Episodes of a scripted user."""

    def load(self) -> Iterator[AlphabetSortTask]:
        """The episodes of the configured split."""
        config = self.config
        for episode in self._held_out() if config.split == "eval" else self._to_train_on():
            data = AlphabetSortData(
                user_turns=episode.user_turns,
                ground_truths=episode.ground_truths,
                similarity_power=config.similarity_power,
                power_per_turn=config.power_per_turn,
                require_clean_end=config.require_clean_end,
            )
            yield AlphabetSortTask(data, config.task)

    def _names(self) -> list[str]:
        if self.config.names is not None:
            return read_names(self.config.names)
        return SHORT if self.config.name_style == "short" else joined_names()

    def _drawn(self, split: str) -> Iterator[Episode]:
        rng = random.Random(f"{self.config.seed}:{split}")
        return episodes(self.config.shape, self._names(), rng)

    def _held_out(self) -> list[Episode]:
        return list(islice(self._drawn("eval"), self.config.num_eval))

    def _to_train_on(self) -> list[Episode]:
        """Some come twice where there are few."""
        config, held_out = self.config, {_asked(one) for one in self._held_out()}
        # Short episodes run out; that so many more are drawn in vain means that they have.
        drawn = islice(self._drawn("train"), 20 * config.num_train + 1000)
        found = list(islice((one for one in drawn if _asked(one) not in held_out), config.num_train))
        if not found:
            raise ValueError(
                f"num_eval = {config.num_eval} holds out every list that such episodes have; lower it, "
                "raise max_names_per_turn or max_turns, or give more names"
            )
        return list(islice(cycle(found), config.num_train))


def _asked(episode: Episode) -> tuple[tuple[str, ...], ...]:
    """The lists that an episode asks for, in whatever words."""
    return tuple(map(tuple, episode.ground_truths))


class AlphabetSortEnv(vf.SingleAgentEnv):
    """Says the user's lines one after the other."""

    async def run(self, task: vf.Task, agents: Any) -> None:
        """Play one episode."""
        async with agents.agent.interaction(task) as talk:
            for line in task.data.user_turns:
                if (await talk.turn(line)).terminated:
                    break


__all__ = ["AlphabetSortEnv", "AlphabetSortTaskset"]
