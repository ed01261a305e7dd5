"""Turns to samples: what is trained on is exactly what was sampled.

1. A turn whose prompt starts with the whole of an earlier sample extends it; what lies between (tool and
   user messages, template tokens) is carried uncovered. Otherwise it starts a new sample, which is counted
   as a prefix break.
2. A sampled token is covered by exactly one span of exactly one sample, also where conversations fork; one
   that its environment masks is carried uncovered (learned).
3. Log-probabilities are those of the sampler, in the order of the covered positions.
4. A sample tells which experts took its first tokens, as many as it is known of without a gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

from quartet import experts
from quartet.v1 import rollout_pb2

from quartet_envhost.frames import MAX_MESSAGE_BYTES


class SampledTurn(Protocol):
    """A model call; spans are (start, length, version), counted from the first sampled token."""

    @property
    def prompt_ids(self) -> list[int]:
        """The whole prompt."""
        ...

    @property
    def token_ids(self) -> list[int]:
        """What was sampled."""
        ...

    @property
    def logprobs(self) -> list[float]:
        """One for each sampled token."""
        ...

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """Covering all sampled tokens."""
        ...

    @property
    def experts(self) -> rollout_pb2.RoutedExperts | None:
        """Which experts took the tokens, from the end of an earlier turn on; None: not known."""
        ...


@dataclass(frozen=True)
class _Masked:
    """A turn of which some tokens are not learned: neither its spans nor its log-probabilities have them."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int, int]]
    experts: rollout_pb2.RoutedExperts | None


def learned(turn: SampledTurn, mask: Sequence[Any]) -> SampledTurn:
    """The turn, without the sampled tokens that are false in the mask; what it says nothing of is learned."""
    kept = [bool(one) for one in mask[: len(turn.token_ids)]]
    if all(kept):
        return turn
    kept += [True] * (len(turn.token_ids) - len(kept))
    logprobs = [value for value, keep in zip(turn.logprobs, kept, strict=True) if keep]
    return _Masked(turn.prompt_ids, turn.token_ids, logprobs, list(_spans(turn, kept)), turn.experts)


def _spans(turn: SampledTurn, kept: Sequence[bool]) -> Iterator[tuple[int, int, int]]:
    for start, length, version in turn.spans:
        for keep, run in groupby(range(start, start + length), key=kept.__getitem__):
            positions = list(run)
            if keep:
                yield positions[0], len(positions), version


@dataclass
class _Draft:
    tokens: list[int]
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    parts: list[rollout_pb2.RoutedExperts] = field(default_factory=list)  # of its experts


def merge_turns(turns: Iterable[SampledTurn]) -> tuple[list[rollout_pb2.Sample], int]:
    """The samples of one trace, and how often a later prompt did not extend the earlier tokens."""
    drafts: list[_Draft] = []
    breaks = 0
    for turn in turns:
        extended = [draft for draft in drafts if _extends(turn.prompt_ids, draft.tokens)]
        if extended:
            draft = max(extended, key=lambda one: len(one.tokens))
        else:
            breaks += bool(drafts)
            draft = _Draft([], parts=_shared(drafts, turn))
            drafts.append(draft)
        draft.tokens = turn.prompt_ids + turn.token_ids
        at = len(turn.prompt_ids)
        draft.spans += [(at + start, length, version) for start, length, version in turn.spans]
        draft.logprobs += turn.logprobs
        if turn.experts is not None:
            draft.parts.append(turn.experts)
    return [_sample(draft) for draft in drafts if draft.spans], breaks


def _extends(prompt_ids: list[int], tokens: list[int]) -> bool:
    # The last one first, which differs after a break: where each turn is one, as of templates that drop
    # thinking, copies of all earlier samples for each hold up the loop for tens of seconds.
    end = len(tokens)
    return prompt_ids[end - 1 : end] == tokens[-1:] and prompt_ids[:end] == tokens


def _shared(drafts: Iterable[_Draft], turn: SampledTurn) -> list[rollout_pb2.RoutedExperts]:
    """What is told of the tokens before those whose experts a turn tells, by a conversation that it left."""
    if turn.experts is None or not turn.experts.start:
        return []
    before = turn.prompt_ids[: turn.experts.start]
    left = (draft.parts for draft in drafts if draft.parts and draft.tokens[: len(before)] == before)
    return list(next(left, ()))


def _sample(draft: _Draft) -> rollout_pb2.Sample:
    sample = rollout_pb2.Sample(token_ids=draft.tokens, logprobs=draft.logprobs)
    for start, length, version in draft.spans:
        last = sample.spans[-1] if sample.spans else None
        if last is not None and last.start + last.length == start and last.policy_version == version:
            last.length += length
        else:
            sample.spans.add(start=start, length=length, policy_version=version)
    told = experts.joined(draft.parts, most_bytes=MAX_MESSAGE_BYTES)
    if told is not None:
        sample.experts.CopyFrom(told)
    return sample
