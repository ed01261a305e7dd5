"""Turns to samples: what is trained on is exactly what was sampled.

1. A turn whose prompt starts with the whole of an earlier sample extends it; what lies between (tool and
   user messages, template tokens) is carried uncovered. Otherwise it starts a new sample, which is counted
   as a prefix break.
2. A sampled token is covered by exactly one span of exactly one sample, also where conversations fork.
3. Log-probabilities are those of the sampler, in the order of the covered positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from quartet.v1 import rollout_pb2


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


@dataclass
class _Draft:
    tokens: list[int]
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def merge_turns(turns: Iterable[SampledTurn]) -> tuple[list[rollout_pb2.Sample], int]:
    """The samples of one trace, and how often a later prompt did not extend the earlier tokens."""
    drafts: list[_Draft] = []
    breaks = 0
    for turn in turns:
        extended = [d for d in drafts if turn.prompt_ids[: len(d.tokens)] == d.tokens]
        if extended:
            draft = max(extended, key=lambda one: len(one.tokens))
        else:
            breaks += bool(drafts)
            draft = _Draft([])
            drafts.append(draft)
        draft.tokens = turn.prompt_ids + turn.token_ids
        at = len(turn.prompt_ids)
        draft.spans += [(at + start, length, version) for start, length, version in turn.spans]
        draft.logprobs += turn.logprobs
    return [_sample(draft) for draft in drafts if draft.spans], breaks


def _sample(draft: _Draft) -> rollout_pb2.Sample:
    sample = rollout_pb2.Sample(token_ids=draft.tokens, logprobs=draft.logprobs)
    for start, length, version in draft.spans:
        last = sample.spans[-1] if sample.spans else None
        if last is not None and last.start + last.length == start and last.policy_version == version:
            last.length += length
        else:
            sample.spans.add(start=start, length=length, policy_version=version)
    return sample
