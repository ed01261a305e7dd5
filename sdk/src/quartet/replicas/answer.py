"""Answers of the inference tier: whole ones, made of frames.

1. What frames say in pieces is joined in the order of their arrival; spans stay as they came.
2. One completion is whole when its `finish` has arrived, before the others are.
3. Nothing holds a frame, which has the whole prompt where one says all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quartet import experts
from quartet.v1 import common_pb2, rollout_pb2
from quartet.v1 import inference_service_pb2 as pb


@dataclass
class Completion:
    """One completion, whole."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # (start, length, policy version), counted from the first sampled token; neighbours of one version are
    # not merged.
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    # As PolicyWeights has it, (policy version, weights_id) of what sampled it, where the replicas told it.
    weights: set[tuple[int, int]] = field(default_factory=set)
    # Addresses of the replicas that sampled it, one unless it was carried on.
    replicas: set[str] = field(default_factory=set)
    finish_reason: pb.FinishReason = pb.FINISH_REASON_UNSPECIFIED
    stop_match: str = ""
    message: common_pb2.Message = field(default_factory=common_pb2.Message)
    usage: common_pb2.Usage = field(default_factory=common_pb2.Usage)
    # Which experts took the tokens, where the request asked for it and the replicas told it.
    experts: rollout_pb2.RoutedExperts | None = None


@dataclass
class Generated:
    """The answer to one request."""

    # The whole prompt, exactly as it was completed; known once a completion has ended.
    prompt_ids: list[int]
    # Whether the prompt extends the tokens of the request.
    prefix_kept: bool
    completions: list[Completion]


class Answer:
    """An answer as its frames arrive."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        """Nothing has arrived."""
        self.so_far = Generated([], True, [Completion() for _ in range(max(1, request.n))])
        self._experts_from = request.experts_from
        self._parts: dict[int, list[rollout_pb2.RoutedExperts]] = {}

    def take(self, frame: pb.GenerateResponse) -> None:
        """The next frame; the prompt is the generation's, who has made a list of it already."""
        answer = self.so_far
        if frame.HasField("start"):
            answer.prefix_kept = frame.start.prefix_kept
        if frame.HasField("delta"):
            into = answer.completions[frame.delta.index]
            into.token_ids.extend(frame.delta.token_ids)
            into.logprobs.extend(frame.delta.logprobs)
            into.spans.extend((s.start, s.length, s.policy_version) for s in frame.delta.spans)
            into.weights.update((one.policy_version, one.weights_id) for one in frame.delta.weights)
        if frame.HasField("experts"):
            self._parts.setdefault(frame.experts.index, []).append(frame.experts.experts)
        if frame.HasField("finish"):
            ended, finish = answer.completions[frame.finish.index], frame.finish
            ended.finish_reason, ended.stop_match = finish.finish_reason, finish.stop_match
            ended.message.CopyFrom(finish.message)
            ended.usage.CopyFrom(finish.usage)
            start = self._experts_from if answer.prefix_kept else 0
            ended.experts = experts.joined(self._parts.pop(finish.index, ()), start)

    def alone(self, index: int) -> Generated:
        """One of its completions, with lists of its own."""
        answer = self.so_far
        return Generated(list(answer.prompt_ids), answer.prefix_kept, [answer.completions[index]])
