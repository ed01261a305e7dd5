"""Sampling and scoring by the inference service, for one sampler or for the base model.

A sampler is a version of a run. Replicas hold the newest version of a run's adapter: a snapshot is answered
while it is that one, and refused in one sentence afterwards, but for an untrained one: those weights are the
base model's, which answers then. An inflight sampler is answered by its version
or a later one, as the SDK says of it. A run that returns to a saved state counts its versions again from
there: which weights a version is, its digest says.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from quartet.errors import QuartetError
from quartet.kit.call import unary
from quartet.replicas import Replicas
from quartet.v1 import inference_service_pb2 as pb

from quartet_tinker import tinker_wire_pb2 as wire
from quartet_tinker.arrival import AGAIN_SECONDS, ASK_SECONDS, PASSING, Arrival, served
from quartet_tinker.paths import WeightsPath
from quartet_tinker.promises import PROTO, Answer
from quartet_tinker.refusal import Refused
from quartet_tinker.sampling_bodies import SampleBody

#: The run is closed, or stands where it had published nothing yet.
GONE: Final = frozenset({"RUN_UNKNOWN", "VERSION_UNKNOWN"})
_FINISH = {pb.FINISH_REASON_LENGTH: wire.STOP_REASON_LENGTH}


@dataclass(frozen=True)
class Sampler:
    """Which weights answer."""

    # Empty for the base model.
    run_id: str = ""
    version: int = 0
    # Whether a later version may answer.
    inflight: bool = False
    # How often its run had returned to a saved state.
    returns: int = 0
    # Version 0 of a run that began with new adapters: the weights of the base model.
    untrained: bool = False


class Sampling:
    """A client of the replicas. For one event loop."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._turn = itertools.count()

    async def model(self) -> pb.GetModelResponse:
        """What is served. Raises QuartetError."""
        return await self._ask("GetModel", pb.GetModelRequest(), time.monotonic() + ASK_SECONDS)  # type: ignore[no-any-return]

    async def arrival(self, run_id: str, digest: bytes, timeout_s: float) -> None:
        """Wait until the replicas serve these weights of a run (arrival.py). Raises Refused, QuartetError."""
        with self._replicas.stubs() as stubs:
            if not stubs:
                raise Refused(self._replicas.out_of_reach, category="server")
            await Arrival(run_id, digest, timeout_s).wait(stubs)

    async def check(self, path: WeightsPath) -> None:
        """Whether a replica serves these saved weights. Raises Refused, QuartetError."""
        is_open, kept = True, dict[str, str]()
        with self._replicas.stubs() as stubs:
            for address, stub in stubs.items():
                try:
                    if (await served(stub, path.run_id, ASK_SECONDS)).hex().startswith(path.digest):
                        return
                except QuartetError as error:
                    if error.reason in PASSING:
                        kept[address] = f"replica {address}: {error.message} ({error.reason})"
                    elif error.reason not in GONE:
                        raise
                    is_open = is_open and error.reason != "RUN_UNKNOWN"
        if len(kept) == len(stubs):
            told = "; ".join(kept.values()) or self._replicas.out_of_reach
            raise Refused(f"no replica says whether it serves {path.name!r}: {told}", status=503)
        if not is_open:
            raise Refused(
                f"the run of {path.origin} is not open: its client was closed, or the gateway or the trainer "
                "was started again; make a client of one of its states "
                "(create_training_client_from_state_with_optimizer) and save the weights again"
            )
        raise Refused(
            f"{path.name!r} is not the newest version of its run any more, which is what the replicas hold; "
            "save the weights again, or a state with save_state"
        )

    async def sample(self, sampler: Sampler, body: SampleBody, timeout_s: float) -> Answer:
        """Completions of a prompt, and its own log-probabilities where they are asked for."""
        try:
            return await self._sample(sampler, body, timeout_s)
        except QuartetError as error:
            if sampler.untrained and _stale(sampler, error):
                return await self._sample(Sampler(), body, timeout_s)
            raise _moved_on(sampler, error) from error

    async def _sample(self, sampler: Sampler, body: SampleBody, timeout_s: float) -> Answer:
        deadline = time.monotonic() + timeout_s
        prompt = body.prompt.tokens()
        response = wire.SampleResponse()
        if body.prompt_logprobs:
            response.prompt_logprobs = await self._scores(sampler, prompt, body, deadline)
        request = _generate(sampler, prompt, body)
        generated = await self._replicas.complete(request, max(0.001, deadline - time.monotonic()))
        for one in generated.completions:
            response.sequences.add(
                stop_reason=_FINISH.get(one.finish_reason, wire.STOP_REASON_STOP),
                tokens=np.array(one.token_ids, dtype="<i4").tobytes(),
                logprobs=np.array(one.logprobs, dtype="<f4").tobytes(),
            )
        response.prompt_cache_hit_tokens = int(generated.completions[0].usage.cached_tokens)
        return Answer(response.SerializeToString(), PROTO)

    async def _scores(self, sampler: Sampler, prompt: list[int], body: SampleBody, deadline: float) -> bytes:
        """float32 of each token of the prompt; NaN of the first, and of those that were not asked for."""
        logprobs = np.full(len(prompt), np.nan, dtype="<f4")
        first = 1 if body.prompt_logprobs_last_n is None else len(prompt) - body.prompt_logprobs_last_n
        if first < len(prompt):
            request = pb.ScoreRequest(run_id=sampler.run_id)
            if sampler.run_id and not sampler.inflight:
                request.exact_policy_version = sampler.version
            sample = request.samples.add(token_ids=prompt)
            sample.spans.add(start=first, length=len(prompt) - first)
            scored = await self._ask("Score", request, deadline, sampler)
            logprobs[first:] = scored.samples[0].logprobs
        return logprobs.tobytes()

    async def _ask(self, rpc: str, request: Any, deadline: float, sampler: Sampler | None = None) -> Any:
        """The answer of any replica, asked in turn until one has it."""
        for tried in itertools.count(1):
            left_s = deadline - time.monotonic()
            try:
                with self._replicas.stubs() as stubs:
                    if not stubs:
                        raise QuartetError("NOT_READY", self._replicas.out_of_reach)
                    stub = list(stubs.values())[next(self._turn) % len(stubs)]
                    return await unary(getattr(stub, rpc), request, timeout_s=max(0.001, left_s))
            except QuartetError as error:
                stale = sampler is not None and _stale(sampler, error)
                if error.reason not in PASSING or stale or left_s < AGAIN_SECONDS:
                    raise
            if tried % max(1, len(stubs)) == 0:
                await asyncio.sleep(AGAIN_SECONDS)
        raise AssertionError("it counts for ever")


def _generate(sampler: Sampler, prompt: list[int], body: SampleBody) -> pb.GenerateRequest:
    request = pb.GenerateRequest(run_id=sampler.run_id, n=body.num_samples)
    if sampler.run_id:
        request.min_policy_version = sampler.version
        if not sampler.inflight:
            request.exact_policy_version = sampler.version
    request.tokens.token_ids.extend(prompt)
    given, sampling = body.sampling_params, request.sampling
    sampling.temperature, sampling.top_p, sampling.top_k = given.temperature, given.top_p, max(0, given.top_k)
    if given.max_tokens is not None:
        sampling.max_tokens = given.max_tokens
    if given.seed is not None:
        sampling.seed = given.seed % 2**64
    stop = [given.stop] if isinstance(given.stop, str) else given.stop
    # An empty list is the SDK's way to say: not even at the model's own end.
    sampling.ignore_eos = stop == []
    for one in stop or ():
        if isinstance(one, str):
            sampling.stop.append(one)
        else:
            sampling.stop_token_ids.append(one)
    return request


def _stale(sampler: Sampler, error: QuartetError) -> bool:
    """Whether a later version has taken the place of a sampler's."""
    have = error.metadata.get("have", "")
    return error.reason == "VERSION_UNAVAILABLE" and have.isdigit() and int(have) > sampler.version


def _moved_on(sampler: Sampler, error: QuartetError) -> Exception:
    if error.reason != "VERSION_UNAVAILABLE":
        return error
    have = error.metadata.get("have", "another")
    return Refused(
        f"this sampler is of version {sampler.version} and the replicas serve version {have} of its run: use "
        "the sampling client that was made last, or make it with kind='inflight'; where a script cannot, as "
        "in asynchronous training of the cookbook, start the gateway with --replaced-samplers newest"
    )
