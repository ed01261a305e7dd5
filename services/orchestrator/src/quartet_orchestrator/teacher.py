"""The teacher of a run that distils: asked what it thinks of every token of a rollout, before the rollout is
written down.

1. A rollout that was judged has one finite number for each covered position of its samples; they are in the
   journal with it, so a batch that is sent again carries the same ones.
2. A teacher that is away is waited for, within the run's patience, and so is one that cannot be called as it
   is configured, whose certificates may be half rotated; one that refuses, or gives no scores, is
   RunInterrupted: it can be mended, or started again with another model.
3. Requests stay below the limit of messages: REQUEST_BYTES and one sample; and have no more samples than a
   replica scores at once.
4. One that scores by two versions of its model, as the run's own replica does under whatever address, is no
   fixed reference: a person is told so, once.
5. Runs with the same teacher share its connection, and the last one that rests closes it.
6. The token is shown at addresses of the configuration alone, and not at any that a run names. A teacher at
   another one that asks for a token is RunInterrupted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import grpc
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.kit.call import unary
from quartet.kit.channel import ClientSecurity, connect
from quartet.kit.security import check_client, client_credentials
from quartet.v1 import inference_service_pb2 as ipb
from quartet.v1 import rollout_pb2 as rpb
from quartet.v1.inference_service_pb2_grpc import InferenceServiceStub

from quartet_orchestrator.outage import LOCKED_OUT, Outage, RunInterrupted
from quartet_orchestrator.trouble import Note

# Scoring is a forward pass over one rollout, behind those that others asked for.
SCORE_S = 600.0
REQUEST_BYTES = 1 << 20
# Of the contract (ScoreRequest.samples).
REQUEST_SAMPLES = 1024
# Rollouts end in bursts; more requests than this at once would only wait inside the teacher.
AT_ONCE = 16


class Teachers:
    """Connections to the teachers of the runs that work, one for each address."""

    def __init__(self, security: ClientSecurity, known: Collection[str] = ()) -> None:
        """`known`: the addresses at which its token may be shown."""
        self._security = security
        self._without_token = security.model_copy(update={"token_file": None})
        self._known = known
        self._called: dict[str, tuple[grpc.aio.Channel, InferenceServiceStub]] = {}
        # The address that each run asks.
        self._asked_by: dict[str, str] = {}

    def check(self, address: str) -> None:
        """Whether it can be called. Raises ConfigError."""
        check_client(address, self._security)
        if self._security.encrypted:
            client_credentials(self._security)  # its files may be half rotated

    def at(self, address: str, run_id: str, outage: Outage, note: Note) -> Teacher:
        """The teacher of a run, whom `note` tells something, until the run has left."""
        self._asked_by[run_id] = address
        lacks_token = self._security.token_file is not None and address not in self._known
        return Teacher(address, partial(self._stub, address), outage, note, lacks_token=lacks_token)

    def _stub(self, address: str) -> InferenceServiceStub:
        """Raises NOT_READY."""
        if address not in self._called:
            try:
                security = self._security if address in self._known else self._without_token
                channel = connect(address, security=security)
            except ConfigError as error:
                raise QuartetError("NOT_READY", f"{address} cannot be called: {error}") from None
            self._called[address] = channel, InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        return self._called[address][1]

    async def left(self, run_id: str) -> None:
        """A run works no longer, whether it has a teacher or not."""
        address = self._asked_by.pop(run_id, "")
        if address in self._called and address not in self._asked_by.values():
            await self._called.pop(address)[0].close()

    async def close(self) -> None:
        """Closes every connection; requests under way are cancelled."""
        for channel, _ in self._called.values():
            await channel.close()


class Teacher:
    """A teacher as one run asks it."""

    def __init__(
        self,
        address: str,
        stub: Callable[[], InferenceServiceStub],
        outage: Outage,
        note: Note,
        *,
        lacks_token: bool,
    ) -> None:
        self._address = address
        self._lacks_token = lacks_token
        self._stub = stub
        self._note = note
        # By which it scored; no more are remembered than are told.
        self._versions: list[int] = []
        self._outage = outage
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def judge(self, rollout: rpb.Rollout) -> None:
        """Fills in the reference_logprobs of a rollout that succeeded."""
        for samples in _parts(rollout.samples):
            try:
                async with self._turns:
                    answer = await self._outage.through(partial(self._score, samples))
            except QuartetError as error:
                raise self._refused(error.message) from error
            if len(answer.samples) != len(samples):
                raise self._refused(f"scored {len(answer.samples)} samples of {len(samples)}")
            for sample, scored in zip(samples, answer.samples, strict=True):
                self._check(sample, scored)
                self._notice(scored.policy_version)
                sample.reference_logprobs[:] = scored.logprobs

    async def _score(self, samples: Sequence[rpb.Sample]) -> ipb.ScoreResponse:
        request = ipb.ScoreRequest(samples=[_question(sample) for sample in samples])
        try:
            with self._outage.calling():
                response: ipb.ScoreResponse = await unary(self._stub().Score, request, timeout_s=SCORE_S)
        except QuartetError as error:
            if error.reason == LOCKED_OUT and self._lacks_token:
                raise RunInterrupted(
                    f"the teacher at {self._address} asks for a token, and none is shown at an address that "
                    "a run alone names: add it to teacher_addresses of the orchestrator's configuration, "
                    "then resume the run"
                ) from error
            raise
        return response

    def _check(self, sample: rpb.Sample, scored: ipb.ScoredSample) -> None:
        if len(scored.logprobs) != len(sample.logprobs) or not all(map(math.isfinite, scored.logprobs)):
            raise self._refused(
                f"{len(scored.logprobs)} log-probabilities for {len(sample.logprobs)} tokens, or some that "
                "are no numbers; it needs the run's tokenizer"
            )

    def _refused(self, why: str) -> RunInterrupted:
        return RunInterrupted(f"the teacher at {self._address}: {why}; mend that there, then resume the run")

    def _notice(self, version: int) -> None:
        if len(self._versions) == 2 or version in self._versions:
            return
        self._versions.append(version)
        if len(self._versions) == 2:
            first, second = self._versions
            self._note(
                f"the teacher at {self._address} scored by version {first} of its model, and now by "
                f"{second}: it serves what somebody trains. If that is this run, its reference is the policy "
                "itself: stop it, and submit one whose algorithm.reference.address serves another model",
                warning=True,
            )


def _question(sample: rpb.Sample) -> rpb.Sample:
    return rpb.Sample(token_ids=sample.token_ids, spans=sample.spans)


def _parts(samples: Sequence[rpb.Sample]) -> Iterator[list[rpb.Sample]]:
    part: list[rpb.Sample] = []
    size = 0
    for sample in samples:
        part.append(sample)
        size += sample.ByteSize()
        if size >= REQUEST_BYTES or len(part) == REQUEST_SAMPLES:
            yield part
            part, size = [], 0
    if part:
        yield part
