"""From what a request says of sampling to what the engine accepts: defaults, bounds, reasons of refusals."""

from __future__ import annotations

import numpy as np
from quartet.errors import refused
from quartet.inference import (
    MAX_REPETITION_PENALTY,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    MIN_TEMPERATURE,
)
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb

from quartet_inference.engine import Sampling

#: SamplingParams.stop_token_ids says so.
MAX_STOP_TOKENS = 256
#: What arrives is the nearest float32 to what was written: 0.01 comes as 0.00999999978.
FLOAT32_ERROR = 2.0**-24


def resolve(
    params: common_pb2.SamplingParams,
    room: int,
    vocab_size: int,
    grammar: str = "",
    untold: frozenset[int] = frozenset(),
) -> Sampling:
    """Check the parameters of a request that has room for `room` tokens. Errors: INVALID_REQUEST."""

    def number(field: str, default: float, low: float, high: float, above: bool = False) -> float:
        if not params.HasField(field):
            return default
        value = float(getattr(params, field))
        # Nor is what is no number in any range.
        if not low - abs(low) * FLOAT32_ERROR <= value <= high or (above and value == low):
            choose = f"choose a number {'above' if above else 'from'} {low:g} to {high:g}"
            raise refused(field, _as_written(value), choose)
        return value

    temperature = number("temperature", 1.0, 0.0, MAX_TEMPERATURE)
    if 0 < temperature < MIN_TEMPERATURE * (1 - FLOAT32_ERROR):
        least = f"choose 0 for greedy sampling or at least {MIN_TEMPERATURE}"
        raise refused("temperature", _as_written(temperature), least)
    if params.HasField("max_tokens") and params.max_tokens == 0:
        raise refused("max_tokens", 0, "ask for at least one token")
    if len(params.stop) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in params.stop):
        raise refused(
            "stop", list(params.stop), f"give at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters"
        )
    if len(params.stop_token_ids) > MAX_STOP_TOKENS or any(
        token >= vocab_size for token in params.stop_token_ids
    ):
        raise refused(
            "stop_token_ids",
            list(params.stop_token_ids),
            f"give at most {MAX_STOP_TOKENS} tokens below the vocabulary's size, {vocab_size}",
        )
    if params.ignore_eos and grammar:
        raise refused("ignore_eos", True, "leave it out: the end token is what a structure ends by")
    if params.min_tokens and grammar:
        raise refused("min_tokens", params.min_tokens, "leave it out: a structure itself says where it ends")
    if params.HasField("max_tokens") and params.min_tokens > params.max_tokens:
        raise refused(
            "min_tokens", params.min_tokens, f"ask for at most max_tokens of them, {params.max_tokens}"
        )
    return Sampling(
        max_tokens=min(params.max_tokens, room) if params.HasField("max_tokens") else room,
        temperature=temperature,
        top_p=number("top_p", 1.0, 0.0, 1.0, above=True),
        top_k=min(params.top_k, vocab_size),
        min_p=number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=number("repetition_penalty", 1.0, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        presence_penalty=number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=number("frequency_penalty", 0.0, -2.0, 2.0),
        stop=tuple(params.stop),
        untold=untold,
        stop_token_ids=frozenset(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_tokens,
        grammar=grammar,
    )


def _as_written(value: float) -> str:
    """The shortest number that arrives as this one: 0.001 and not 0.0010000000474974513."""
    return str(np.float32(value))


def experts_from(request: pb.GenerateRequest, given: int, kept: bool, routers: int) -> int | None:
    """From which position on the experts are asked for; None: they are not. Errors: INVALID_REQUEST.

    `given` tokens are the prompt, `kept` says whether it extends those that the caller knows.
    """
    if not request.HasField("experts_from"):
        return None
    if not routers:
        remedy = "start the replica with routed_experts = true, on a mixture-of-experts model"
        raise refused("experts_from", request.experts_from, remedy)
    if not kept:
        return 0
    if request.experts_from > given:
        remedy = f"send at most the prompt's length, {given}"
        raise refused("experts_from", request.experts_from, remedy)
    return int(request.experts_from)
