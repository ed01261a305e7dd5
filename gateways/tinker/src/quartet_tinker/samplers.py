"""Sampling clients: of published weights, of saved ones, of the base model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quartet_tinker import paths
from quartet_tinker.base_model import BaseModel
from quartet_tinker.config import GatewayConfig
from quartet_tinker.promises import Promise, Promises
from quartet_tinker.refusal import Refused
from quartet_tinker.sampling import Sampler, Sampling
from quartet_tinker.sampling_bodies import CreateSamplingSession, SampleBody
from quartet_tinker.served import ServedModel
from quartet_tinker.sessions import Sessions


class Samplers:
    """What sampling clients ask for. For one event loop."""

    def __init__(
        self,
        config: GatewayConfig,
        sampling: Sampling,
        sessions: Sessions,
        promises: Promises,
        model: ServedModel,
        base: BaseModel,
    ) -> None:
        self._config, self._sampling = config, sampling
        self._sessions, self._promises, self._model, self._base = sessions, promises, model, base
        # Of each run, how often it returned to a saved state.
        self._returns: dict[str, int] = {}
        self._samples = 0

    def now(self, run_id: str, version: int, *, inflight: bool = False, untrained: bool = False) -> Sampler:
        """A version of a run, as versions are counted now."""
        moves_on = inflight or (self._config.replaced_samplers == "newest" and not untrained)
        return Sampler(run_id, version, moves_on, self._returns.get(run_id, 0), untrained)

    def count_again(self, run_id: str) -> None:
        """The run returns to a state: what a number of a version meant before, it may no longer mean."""
        self._returns[run_id] = self._returns.get(run_id, 0) + 1

    def count_on(self, run_id: str) -> None:
        """It does not return after all: they mean what they meant."""
        self._returns[run_id] -= 1

    async def create(self, body: CreateSamplingSession) -> dict[str, Any]:
        """A sampler of saved weights, or of the base model."""
        session = self._sessions.find(body.session_id)
        sampler = Sampler()
        if body.model_path is not None:
            path = paths.read(body.model_path)
            if path.version is None:
                remedy = "give what save_weights_for_sampler returned"
                raise Refused(f"model_path = {body.model_path!r} is a state; {remedy}")
            if body.base_model is not None:
                (await self._model.names()).check(body.base_model)
            await self._sampling.check(path)
            sampler = self.now(path.run_id, path.version)
        else:
            await self._base.ready(body.base_model)
        name = session.add(f"sample-{body.sampling_session_seq_id}", sampler, body.model_path)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def join(self, sampling_session_id: str) -> dict[str, Any]:
        """Another process uses a sampler."""
        session, _, _ = self._sessions.sampler(sampling_session_id)
        session.clones += 1
        return {"type": "join_sampling_session", "client_counter": session.clones}

    async def about(self, sampling_session_id: str) -> dict[str, Any]:
        """What a sampler is."""
        _, _, path = self._sessions.sampler(sampling_session_id)
        name = (await self._model.names()).name
        return {"sampler_id": sampling_session_id, "base_model": name, "model_path": path}

    def sample(self, body: SampleBody, raw: bytes) -> tuple[Promise, list[str]]:
        """Completions; the promise, and the names of the sequences to come."""
        body.check()
        session, sampler, _ = self._sessions.sampler(body.sampling_session_id)
        if sampler.returns != self._returns.get(sampler.run_id, 0):
            sampler = _after_return(sampler)
        request_id = f"{body.sampling_session_id}:{body.seq_id}"
        is_new = self._promises.find(request_id) is None
        if is_new and self._samples >= self._config.max_samples:
            raise Refused(f"{self._samples} sampling requests are under way (max_samples)", status=429)
        work = self._sampling.sample(sampler, body, self._config.sample_seconds)
        promise = self._promises.begin(request_id, raw, session.session_id, work)
        if is_new:
            self._samples += 1
            promise.at_end = self._sampled
        return promise, [f"{request_id}:{index}" for index in range(body.num_samples)]

    def _sampled(self) -> None:
        self._samples -= 1


def _after_return(sampler: Sampler) -> Sampler:
    """One made before its run returned to a saved state. Raises Refused where its weights are gone."""
    if sampler.untrained:  # however often its run returns, version 0 is the base model
        return sampler
    if sampler.inflight:  # the newest answers, and its number may be a smaller one now
        return replace(sampler, version=0)
    raise Refused(
        f"this sampler is of version {sampler.version} of a run that has returned to a saved state "
        "since; use a sampling client that was made afterwards"
    )
