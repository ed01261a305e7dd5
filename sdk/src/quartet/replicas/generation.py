"""What is known of one generation while it is sampled, by one replica or by several. No I/O.

1. A token that arrived is kept and never asked for again: the request that goes on names it as sampled
   (`resumed_tokens`), so penalties, stop strings, the seed's position and max_tokens treat it so.
2. Positions, log-probabilities and version spans of a completion go on without a gap wherever it was sampled;
   a replica that answers otherwise is refused with INTERNAL. So do the experts that took the tokens, where
   they are asked for: what a replica had told of them when it was lost is told again by the next one.
3. What the client sees is one stream: one start, deltas, one finish for each completion, its usage counted
   over all replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quartet.errors import QuartetError
from quartet.inference import MAX_COMPLETIONS
from quartet.seeds import requested_seeds
from quartet.trainable import no_logprob
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb


@dataclass(eq=False)
class Lane:
    """One completion: what arrived of it, from whomever."""

    index: int
    # Tokens that it had before the client's own request, which may itself go on from elsewhere.
    before: int
    token_ids: list[int] = field(default_factory=list)
    # How many tokens it had when the replica that samples it now took it over.
    taken_over_at: int = 0
    # Addresses of those that sampled any of it.
    replicas: set[str] = field(default_factory=set)
    finished: bool = False

    @property
    def sampled(self) -> int:
        """All tokens sampled so far."""
        return self.before + len(self.token_ids)


class Generation:
    """A request and how far its completions are."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        """The request as the client made it; refused here only where lanes could not be made of it."""
        if request.n > MAX_COMPLETIONS:
            raise QuartetError(
                "INVALID_REQUEST",
                f"n = {request.n} is refused; ask for at most {MAX_COMPLETIONS} completions",
                field="n",
                value=request.n,
            )
        self.request = request
        self.lanes = [Lane(index, request.resumed_tokens) for index in range(max(1, request.n))]
        # The whole prompt, once a replica said so or the request itself did.
        self.prompt_ids: list[int] | None = None
        if request.WhichOneof("prompt") == "tokens" and not request.tokens.tail_messages:
            self.prompt_ids = list(request.tokens.token_ids)
        self._started = False
        self._kept = True
        self._seeds = requested_seeds(request)

    def may_be_together(self, lanes: Sequence[Lane]) -> bool:
        """Whether one request can ask for these: for one always, for several only before any has a token."""
        return len(lanes) == 1 or not any(lane.token_ids for lane in lanes)

    def ask(self, lanes: Sequence[Lane]) -> pb.GenerateRequest:
        """The request for what is still to be sampled of these lanes, which may be together."""
        assert self.may_be_together(lanes)
        request = pb.GenerateRequest()
        request.CopyFrom(self.request)
        request.n = len(lanes)
        if self._seeds and len(lanes) < len(self.lanes):
            request.sampling.ClearField("seed")
            request.completion_seeds[:] = [self._seeds[lane.index] for lane in lanes]
        if self.prompt_ids is not None:
            # Never rendered a second time: the tokens are those of the prompt that the client was told.
            request.tokens.Clear()
            request.tokens.token_ids.extend(self.prompt_ids)
        if request.HasField("experts_from") and not self._kept:
            request.experts_from = 0  # the client knows other tokens than the prompt has
        for lane in lanes:
            lane.taken_over_at = len(lane.token_ids)
        if lanes[0].token_ids:
            assert self.prompt_ids is not None, "tokens came before their prompt"
            request.tokens.token_ids.extend(lanes[0].token_ids)
            request.resumed_tokens = lanes[0].sampled
        return request

    def take(self, frame: pb.GenerateResponse, lanes: Sequence[Lane], replica: str) -> bool:
        """Note a frame, made as the client shall see it; whether it shall. `lanes` were asked for, of the
        replica at that address."""
        if frame.HasField("start") and not self._start(frame.start, lanes):
            frame.ClearField("start")
        if frame.HasField("delta"):
            lane = self._lane(lanes, frame.delta.index)
            self._check(lane, frame.delta)
            lane.token_ids.extend(frame.delta.token_ids)
            lane.replicas.add(replica)
            frame.delta.index = lane.index
        if frame.HasField("experts"):
            frame.experts.index = self._lane(lanes, frame.experts.index).index
        if frame.HasField("finish"):
            lane = self._lane(lanes, frame.finish.index)
            lane.finished = True
            frame.finish.index = lane.index
            if lane.taken_over_at:
                self._account(lane, frame.finish.usage)
        frame.ClearField("heartbeat")
        frame.ClearField("held_up")
        frame.ClearField("waits_for")
        return any(map(frame.HasField, ("start", "delta", "experts", "finish")))

    def _start(self, start: pb.GenerateStart, lanes: Sequence[Lane]) -> bool:
        """Whether it is the one that the client sees."""
        if lanes[0].taken_over_at:
            return False  # the client knows its prompt; this call's holds what was sampled, too
        told = start.prompt_token_ids[:]  # a list, made faster than list() does
        if told and self.prompt_ids is not None and told != self.prompt_ids:
            raise _broken("two replicas render the prompt differently; give all of them one chat template")
        if told:
            self.prompt_ids = told
        self._kept = self._kept and start.prefix_kept
        first, self._started = not self._started, True
        return first

    def _account(self, lane: Lane, usage: common_pb2.Usage) -> None:
        """The usage of a completion that several replicas sampled, as if it had been one."""
        assert self.prompt_ids is not None
        usage.prompt_tokens = len(self.prompt_ids) - lane.before
        usage.completion_tokens = lane.sampled
        usage.cached_tokens = min(usage.cached_tokens, usage.prompt_tokens)

    def _lane(self, lanes: Sequence[Lane], index: int) -> Lane:
        if self.prompt_ids is None:
            raise _broken("tokens came before the prompt that they complete")
        if index >= len(lanes) or lanes[index].finished:
            raise _broken(f"a frame of completion {index}, which was not asked for or has ended")
        return lanes[index]

    @staticmethod
    def _check(lane: Lane, delta: pb.GenerateDelta) -> None:
        if len(delta.logprobs) != len(delta.token_ids):
            raise _broken(f"{len(delta.logprobs)} log-probabilities for {len(delta.token_ids)} tokens")
        if (value := no_logprob(delta.logprobs)) is not None:
            raise _broken(f"a log-probability of {value:g}; log(p) is finite, and never above 0")
        at = lane.sampled
        end = at + len(delta.token_ids)
        for span in delta.spans:
            if span.start != at or not span.length:
                raise _broken(f"a span at {span.start} where {at} comes next")
            at += span.length
        if at != end:
            raise _broken(f"versions up to token {at}, where {end} were sampled")


def _broken(what: str) -> QuartetError:
    return QuartetError("INTERNAL", f"a replica answered outside the contract: {what}")
