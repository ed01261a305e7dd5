"""What an engine is to the service: tokens for each request, and weights that change between two steps.

1. `generate` yields Delta and Finish events, Routed ones where asked for; when its iterator is closed, the
   slots of the request are free within one step.
2. Every token carries the stamp of the weights that sampled it, their version and what tells them from others
   of that number; an engine stamps nothing that `swap` has not given it.
3. `stage` may take long and disturbs nobody; `swap` is short, happens between two steps, and drops no
   request.
4. A request that is pinned to a run or version fails when the weights leave it; no token of it is sampled by
   others. One that names an adapter's run is answered by base model and adapter, others by the base model.
5. No gRPC, chat template or weight plane in here. Faults are QuartetError.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from quartet.errors import QuartetError
from quartet.inference import UpdateRefusal
from quartet.weights.tensor import Tensor

from quartet_inference.layout import Layout
from quartet_inference.structure.following import Compiled

#: Alternatives of a position that a request or a score may ask for.
MAX_TOP = 20
#: The likeliest tokens of a position with their log-probabilities, the best first.
Top = dict[int, float]
#: Numbers of the experts that took tokens, [tokens, routers, slots]: uint8, or uint16 of more than 256.
Experts = npt.NDArray[np.unsignedinteger[Any]]


class Stamp(NamedTuple):
    """What a token says of the weights that sampled it."""

    version: int
    weights_id: int = 0  # as PolicyWeights has it; 0: not known


@dataclass(frozen=True)
class ServedWeights:
    """Which weights are in the engine."""

    run_id: str
    version: int
    digest: bytes

    @cached_property
    def stamp(self) -> Stamp:
        """That of their tokens; made once, as every token is given it."""
        return Stamp(self.version, int.from_bytes(self.digest[:8], "big"))


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the defaults change nothing. Checked by whoever makes it."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    untold: frozenset[int] = frozenset()  # special tokens that are no part of the text with those
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0  # that are sampled before anything ends the completion; not with a grammar
    grammar: str = ""  # that the completion must follow, as `structure` compiled it; empty: none

    @property
    def truncates(self) -> bool:
        """Whether improbable tokens are excluded."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def penalises(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def ends(self, end_tokens: frozenset[int]) -> frozenset[int]:
        """The tokens that end a completion, of a model with these end tokens."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | end_tokens


@dataclass(frozen=True)
class Request:
    """A prompt to be completed n times."""

    prompt: tuple[int, ...]
    sampling: Sampling
    n: int = 1
    seeds: tuple[int, ...] = ()  # of each completion; empty: unseeded
    run_id: str = ""  # empty: any run
    min_version: int = 0
    exact_version: int | None = None
    keep_prefix: bool = False  # a later prompt will probably extend what is sampled
    # The last so many tokens of the prompt were sampled by this completion, elsewhere; only with n = 1.
    resumed: int = 0
    watched: bool = False  # its tokens are told one by one
    top: int = 0  # so many of the likeliest tokens in the place of each sampled one too, at most MAX_TOP
    # Tell which experts took the tokens from this position on; None: do not. Only where EngineInfo.routers.
    experts_from: int | None = None
    # What sampling.grammar says, for an engine that samples in this process.
    compiled: Compiled | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens of one completion that the same weights sampled."""

    start: int
    length: int
    version: int
    weights_id: int = 0  # as Stamp has it


@dataclass(frozen=True)
class Delta:
    """The next tokens of one completion."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    spans: list[Span]
    # Of each token, where they were asked for, and of the distribution that its log-probability is of.
    tops: Sequence[Top] = ()


class Reason(Enum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Routed:
    """Which experts took the tokens of one completion and its prompt; once, after its last Delta.

    The last token sampled was not computed on, so that it is not among them.
    """

    index: int
    start: int  # position of the first
    experts: Experts


@dataclass(frozen=True)
class Finish:
    """The end of one completion."""

    index: int
    reason: Reason
    stop_string: str  # the stop string that ended it, or empty
    stop_token: int | None  # the stop token that ended it; the model's end tokens count as none
    cached_tokens: int


Event = Delta | Routed | Finish


@dataclass(frozen=True)
class ScoreRequest:
    """A sequence whose covered tokens are to be scored; nothing is sampled."""

    tokens: tuple[int, ...]
    # (start, length) of the covered positions: ascending, disjoint, the first from position 1 on.
    covered: tuple[tuple[int, int], ...]
    run_id: str = ""  # empty: any run
    exact_version: int | None = None
    ahead: bool = False  # it goes before all that waits, and is not refused for what waits
    top: int = 0  # so many of the likeliest tokens of each covered position too, at most MAX_TOP


@dataclass(frozen=True)
class Scored:
    """The log-probability of each covered token given all before it, at temperature 1, by one version."""

    logprobs: list[float]
    version: int
    # Of each covered position, where they were asked for.
    tops: list[Top] = field(default_factory=list)


@dataclass(frozen=True)
class EngineInfo:
    """What an engine says of itself."""

    name: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    served: ServedWeights | None
    running: int
    waiting: int
    tokens_sampled: int
    updates_applied: int
    last_update_pause_ms: float
    paused: bool
    closed: bool = False  # it will never answer again
    ended: str = ""  # why, where nobody has asked it to close
    out_of_service: str = ""  # why it answers nothing until other weights are served
    update_refusals: tuple[UpdateRefusal, ...] = ()  # why versions that were offered last are not served
    adapters: tuple[ServedWeights, ...] = ()
    routers: int = 0  # whose choices it notes for requests that ask; 0: it notes none
    asked: bool = False  # it is at work on something else than tokens, which may hang

    def serving(self, run_id: str) -> ServedWeights | None:
        """What answers requests that name this run, or none."""
        return next((one for one in self.adapters if one.run_id == run_id), self.served)


def refusal(request: Request | ScoreRequest, served: ServedWeights | None) -> QuartetError | None:
    """Why these weights cannot answer a request; None where they can."""
    if served is None:
        return QuartetError("NOT_READY", "no verified weights are served yet")
    if request.run_id not in ("", served.run_id):
        return QuartetError(
            "RUN_NOT_SERVED",
            f"run {served.run_id or '(base model)'} is served",
            have=served.run_id,
            want=request.run_id,
        )
    exact = request.exact_version
    minimum = request.min_version if isinstance(request, Request) else 0
    if served.version < minimum or exact not in (None, served.version):
        return _other_version(served.version, minimum, exact)
    return None


def _other_version(have: int, minimum: int, exact: int | None) -> QuartetError:
    """The error of a request that names another version than these weights have."""
    if exact is None:
        asked = f"min_policy_version = {minimum} has not come"
    elif exact < have:
        asked = f"exact_policy_version = {exact} is over; ask for {have}, or leave exact_policy_version out"
    else:
        asked = (
            f"exact_policy_version = {exact} has not come; give min_policy_version = {exact} to wait for it"
        )
    want = minimum if exact is None else exact
    return QuartetError("VERSION_UNAVAILABLE", f"version {have} is served, and {asked}", have=have, want=want)


class NonFiniteLogits(QuartetError):
    """The weights have no distribution for a token of one request. INTERNAL, unless the canary says of them
    that they are wrong (canary.py 1)."""

    def __init__(self) -> None:
        """Of whichever version the request was answered by."""
        super().__init__("INTERNAL", "the weights give non-finite logits")


def adapter_gone(run_id: str) -> QuartetError:
    """The error of requests whose adapter is served no more."""
    return QuartetError("RUN_NOT_SERVED", f"the adapter of run {run_id} was unloaded", have="", want=run_id)


def no_base(served: ServedWeights | None) -> QuartetError:
    """The error of an adapter where its base model is not served."""
    have = "no weights" if served is None else f"version {served.version} of run {served.run_id}"
    return QuartetError(
        "INVALID_REQUEST",
        f"adapters are served upon the model of this replica's folder; {have} is in the engine",
        field="run_id",
        value=have,
        remedy="use a replica that follows no run that trains the whole model",
    )


def not_ready() -> QuartetError:
    """The error of an engine that is being closed."""
    return QuartetError("NOT_READY", "the engine is stopping")


class Engine(Protocol):
    """One model, many requests."""

    def generate(self, request: Request) -> AsyncIterator[Event]:
        """Complete a prompt. Errors: OVERLOADED, RUN_NOT_SERVED, VERSION_UNAVAILABLE, NOT_READY, INTERNAL."""
        ...

    async def score(self, request: ScoreRequest) -> Scored:
        """Score a sequence that fits into max_model_len. All of it by one version: a swap starts it anew.

        Decoding goes on meanwhile. Errors: those of `generate`.
        """
        ...

    async def pause(self) -> int:
        """Decode no further after the current step; the number of requests that wait. Idempotent."""
        ...

    async def resume(self) -> int:
        """Go on; the number of requests that go on. Idempotent."""
        ...

    def layout(self) -> Layout:
        """The names, dtypes and shapes that a version of the model consists of."""
        ...

    async def stage(self, tensors: Mapping[str, Tensor]) -> Any:
        """Check names, shapes and dtypes, all of them, and prepare the tensors for `swap`.

        Errors: INVALID_REQUEST, OVERLOADED (no room to prepare them).
        """
        ...

    async def swap(self, staged: Any, weights: ServedWeights) -> None:
        """Serve staged weights, or, where staged is None, the ones already held, under a name."""
        ...

    async def stage_adapter(self, config_json: str, tensors: Mapping[str, Tensor]) -> Any:
        """Check an adapter against the model and prepare it for `swap_adapter`. Errors: INVALID_REQUEST."""
        ...

    async def swap_adapter(self, staged: Any, weights: ServedWeights) -> None:
        """Serve a staged adapter as that of its run, or, where staged is None, the one held under a name.

        Errors: OVERLOADED (too many, too large), INVALID_REQUEST (the base model is not the one it was made
        for: other weights were swapped in).
        """
        ...

    async def drop_adapter(self, run_id: str, why: QuartetError) -> None:
        """Serve a run's adapter no more; its requests fail so. Idempotent."""
        ...

    def base_digest(self) -> bytes:
        """WeightManifest.digest of the weights that the engine was started with."""
        ...

    def info(self) -> EngineInfo:
        """A snapshot."""
        ...

    async def close(self) -> None:
        """Stop; what still runs fails with NOT_READY."""
        ...
