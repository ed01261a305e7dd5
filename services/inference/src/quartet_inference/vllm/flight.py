"""One completion on its way through vLLM.

1. vLLM's report of which weights sampled a token is what a token is stamped with; it labels weights by their
   stamp (`label_of`).
2. A submission whose weights were replaced before its first token arrived is submitted again where keys are
   kept: what it has computed, or found in the prefix cache, comes from older weights.
3. However it ends, its request has left vLLM.
4. An open row (`drawing` 5) is reported with as many of its best as there are alternatives, and one more: its
   own token, whose sign is turned, is among them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import repeat
from typing import Any

from quartet.errors import QuartetError
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from quartet_inference.completion import Completion
from quartet_inference.engine import (
    EngineInfo,
    Event,
    Experts,
    NonFiniteLogits,
    Request,
    ScoreRequest,
    ServedWeights,
    Stamp,
    Top,
)
from quartet_inference.structure.following import stuck
from quartet_inference.vllm import asked
from quartet_inference.vllm.drawing import KEY, Draw, sign_turned
from quartet_inference.vllm.staging import StagedAdapter

#: vLLM's label of the weights that it was started with.
FIRST_LABEL = "default"

#: Of each covered token its log-probability, and the likeliest tokens there where they were asked for.
Rows = tuple[list[float], list[Top]]


@dataclass(eq=False)
class Flight:
    """A completion, and where its events go."""

    request: Request
    completion: Completion
    events: asyncio.Queue[Event | QuartetError]
    first: Stamp  # what vLLM's first label stands for
    adapter: ServedAdapter | None = None  # what answers it now; None: the base model
    submission: Submission | None = field(default=None, repr=False)
    started: bool = False  # a token has arrived
    again: bool = False
    received: int = 0
    noted_as: str = ""  # where experts are asked for: the submission's name for the workers
    experts: list[Experts] = field(default_factory=list, repr=False)  # those known, in parts
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def params(self, info: EngineInfo) -> SamplingParams:
        """What vLLM must know: it stops where a token says so, and draws as DrawTokens does."""
        sampling, completion, top = self.request.sampling, self.completion, self.request.top
        extra: dict[str, Any] = {KEY: asdict(Draw.of(completion))}
        if self.request.experts_from is not None:
            extra[asked.KEY] = (self.noted_as, self.experts_end)
        return SamplingParams(
            temperature=0.0,
            max_tokens=sampling.max_tokens - completion.sampled,
            stop_token_ids=sorted(completion.ends),
            ignore_eos=True,
            logprobs=_reported(top, info.vocab_size),
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            # A stop string is looked for in every token, so that few are sampled in vain.
            stream_interval=1 if completion.watch is not None else completion.piece,
            extra_args=extra,
        )

    def prompt(self) -> list[int]:
        """What is submitted: what was sampled so far belongs to it."""
        given = len(self.request.prompt) - self.request.resumed
        return [*self.request.prompt[:given], *self.completion.out]

    @property
    def tokens(self) -> int:
        """Of the prompt and of what was sampled so far."""
        return len(self.request.prompt) - self.request.resumed + len(self.completion.out)

    @property
    def experts_end(self) -> int:
        """The first position whose experts are not known, where they are asked for."""
        return (self.request.experts_from or 0) + sum(map(len, self.experts))

    def take(self, output: Any, starts: Sequence[tuple[str, int]]) -> int:
        """Accept what vLLM has sampled, and tell it, but not the end; the number of tokens accepted.

        `starts` are the first positions of each label. Errors: INTERNAL, INVALID_REQUEST (a structure that is
        stuck).
        """
        part = output.outputs[0]
        if self.completion.cached_tokens is None:
            self.completion.cached_tokens = output.num_cached_tokens or 0
        first = self.received
        for token, logprob, top in _sampled(part, self.request.top):
            if logprob == math.inf:
                raise stuck()
            if not math.isfinite(logprob):
                raise NonFiniteLogits()
            stamp = self._stamp_at(self.received, starts)
            finish = self.completion.accept(token, logprob, stamp, top)
            self.received += 1
            if finish is not None or self.completion.has_piece:
                self.events.put_nowait(self.completion.tell())
            if finish is not None:
                break
        return self.received - first

    def _stamp_at(self, position: int, starts: Sequence[tuple[str, int]]) -> Stamp:
        if self.adapter is not None:
            return self.adapter.weights.stamp
        label = next(label for label, start in reversed(starts) if start <= position)
        return self.first if label == FIRST_LABEL else _stamp_of(label)


def label_of(stamp: Stamp) -> str:
    """What vLLM calls these weights."""
    return f"{stamp.version}@{stamp.weights_id:016x}"


def _stamp_of(label: str) -> Stamp:
    version, _, weights_id = label.partition("@")
    return Stamp(int(version), int(weights_id, 16))


def _sampled(part: Any, top: int) -> Iterable[tuple[int, float, Top | None]]:
    """What vLLM has sampled, with log-probabilities, and alternatives where they are asked for."""
    if not part.token_ids:
        return ()
    told = part.logprobs
    if not top:
        return zip(map(int, part.token_ids), told.logprobs, repeat(None, len(told.logprobs)), strict=True)
    rows = (
        dict(zip(told.token_ids[start:end], told.logprobs[start:end], strict=True))
        for start, end in zip(told.start_indices, told.end_indices, strict=True)
    )
    return (
        (token, *_opened(row, token, top)) for token, row in zip(map(int, part.token_ids), rows, strict=True)
    )


@dataclass(eq=False)
class ServedAdapter:
    """One version of an adapter inside vLLM: the id and the name are its own, and so are its prefixes."""

    weights: ServedWeights
    lora: LoRARequest
    staged: StagedAdapter
    users: int = 0
    retired: bool = False  # nothing is submitted for it any more


class Moved(Exception):
    """What was submitted is answered by other weights from now on."""


class Submission:
    """A request inside vLLM; leaving the context takes it out."""

    def __init__(self, llm: AsyncLLM, request_id: str, on_output: Callable[[], None]) -> None:
        self._llm = llm
        self._request_id = request_id
        self._on_output = on_output
        self._queue: Any = None
        self._state: Any = None
        self._ended = False

    async def submit(
        self,
        tokens: Sequence[int],
        salt: str,
        params: SamplingParams,
        lora: LoRARequest | None = None,
        ahead: bool = False,
    ) -> None:
        """Hand it over, before all that waits or behind it. The salt keeps prefixes of other weights away."""
        prompt = tokens_input(list(tokens), cache_salt=salt)
        try:
            self._queue = await self._llm.add_request(
                self._request_id, prompt, params, lora_request=lora, priority=-1 if ahead else 0
            )
        except asyncio.CancelledError:
            # It may be there already, and vLLM itself takes it out only once it has told us its own id.
            await self._llm.abort(self._request_id)
            raise
        self._state = self._llm.output_processor.request_states.get(self._queue.request_id)

    def move(self) -> None:
        """Let `next` raise Moved: what has not been taken is sampled again."""
        if self._queue is not None:
            self._queue.put(Moved())

    async def next(self) -> Any:
        """What was sampled since; several outputs that have piled up are one."""
        output = self._queue.get_nowait() or await self._queue.get()
        self._ended = output.finished
        self._on_output()
        return output

    def starts(self, output: Any) -> list[tuple[str, int]]:
        """The first positions of each label of weights, as vLLM reports them."""
        spans = output.outputs[0].weight_versions
        if spans is not None:
            return [(span.version, span.start) for span in spans]
        return list(self._state.weight_version_starts)

    async def __aenter__(self) -> Submission:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._queue is not None:
            if not self._ended:
                await self._llm.abort(self._queue.request_id, internal=True)
            self._queue.close()


async def scored(
    submission: Submission, request: ScoreRequest, salt: str, lora: LoRARequest | None, vocabulary: int
) -> Rows:
    """Score what is covered. Errors: INTERNAL where a log-probability is no number."""
    tokens = request.tokens
    await submission.submit(tokens[:-1], salt, _score_params(request, vocabulary), lora, request.ahead)
    output = await submission.next()
    positions = [at for start, length in request.covered for at in range(start, start + length)]
    # The last position alone was sampled, the others are a prompt's.
    rows = (
        _row(output.prompt_logprobs[at]) if at < len(tokens) - 1 else _last_row(output, request)
        for at in positions
    )
    logprobs, tops = [], []
    for at, row in zip(positions, rows, strict=True):
        logprobs.append(row[tokens[at]])
        if request.top:
            tops.append(_best(row, request.top))
    if not all(map(math.isfinite, logprobs)):
        raise NonFiniteLogits()
    return logprobs, tops


def _row(told: Mapping[int, Any]) -> Top:
    return {token: one.logprob for token, one in told.items()}


def _last_row(output: Any, request: ScoreRequest) -> Top:
    row, token = _row(output.outputs[0].logprobs[0]), request.tokens[-1]
    # Of what is no number vLLM takes any token as the largest, not the forced one.
    logprob = row.get(token, math.nan)
    row[token] = sign_turned(logprob) if request.top else logprob
    return row


def _opened(row: Top, token: int, top: int) -> tuple[float, Top]:
    """Log-probability of an open row's token, and the best of the row."""
    if row[token] != math.inf:  # of a stuck row it stands as it is
        row[token] = sign_turned(row[token])
    return row[token], _best(row, top)


def _best(row: Top, top: int) -> Top:
    return dict(sorted(row.items(), key=lambda pair: -pair[1])[:top])


def _reported(top: int, vocabulary: int) -> int:
    """So many tokens of a row vLLM reports beside its own; more than there are would end its core."""
    return min(top + 1, vocabulary) if top else 0


def _score_params(request: ScoreRequest, vocabulary: int) -> SamplingParams:
    """Everything but the last token is a prompt; the last one is forced."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        logprobs=_reported(request.top, vocabulary),
        prompt_logprobs=min(request.top, vocabulary),
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={KEY: asdict(Draw(forced=request.tokens[-1], top=request.top))},
    )
