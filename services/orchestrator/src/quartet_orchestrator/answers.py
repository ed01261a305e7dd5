"""The trainer's answers: what they say of the run, held against what is known of it, and written down.

1. A version that is published again is compared with the digest in the journal. Another one means that the
   trainer's replay was not bit-equal (invariant 9; kernels that are not deterministic): a warning, counted in
   the next step's metrics. The run goes on: its rollouts keep the log-probabilities they were sampled with.
2. A step that the trainer skipped, because its loss or gradients were no finite numbers, counts like any
   other, with a warning; MAX_SKIPPED_STEPS in a row are RunFailed, whoever heard of them: this process or one
   before it.
3. A trainer counts versions as the run does: one that says another number of optimizer steps than it was
   asked for is RunInterrupted, and its answer is not written down. Else rollouts would wait for a version
   that never comes, or be taken for those of another one.
4. A call that is refused was not applied: RunInterrupted. It is sent again to a trainer that is mended (a
   loss of somebody's own, say).
"""

from __future__ import annotations

from collections.abc import Callable

from quartet.errors import QuartetError
from quartet.v1 import trainer_service_pb2 as tpb

from quartet_orchestrator.book import Book
from quartet_orchestrator.calls import Call, CallKind, CallPlan
from quartet_orchestrator.outage import RunFailed, RunInterrupted

# One batch may be bad; a model that gives no numbers this often in a row has diverged.
MAX_SKIPPED_STEPS = 3

Answer = (
    tpb.ForwardBackwardResponse | tpb.OptimStepResponse | tpb.PublishWeightsResponse | tpb.SaveStateResponse
)

# Of a CallRecord, by what was asked.
_FIELDS = {
    CallKind.FORWARD_BACKWARD: "forward_backward",
    CallKind.OPTIM_STEP: "optim_step",
    CallKind.PUBLISH: "publish",
    CallKind.SAVE: "save",
}


class Answers:
    """Takes the answers to a run's calls, also those to calls that are sent again."""

    def __init__(self, book: Book, plan: CallPlan, on_published: Callable[[int, bytes], None]) -> None:
        """`on_published` hears the number and the digest of every version, also of one that is known."""
        self._book = book
        self._on_published = on_published
        self._plan = plan
        self._versions_changed = 0
        # Of version 0, as the trainer said it to this process: what one before it heard may be published
        # otherwise by now.
        self._first_digest = b""
        # The batches in a row that were skipped; a set, because a replay meets them again. None before the
        # first answer that counts.
        self._skipped: set[int] | None = None

    @property
    def first_digest(self) -> bytes | None:
        """Of version 0, while nothing later can have been published; empty where it was not published to this
        process, None where something later may have been."""
        state = self._book.state
        return None if state.step or state.batches else self._first_digest

    def take_versions_changed(self) -> int:
        """How many versions came out different when they were published again, since it was asked last."""
        count, self._versions_changed = self._versions_changed, 0
        return count

    def take(self, call: Call, answer: Answer) -> None:
        """Checks an answer, and writes it down unless that was done before. Raises RunFailed, RunInterrupted
        and OSError."""
        self._check_version(call, answer)
        self._count_skipped(call, answer)
        if isinstance(answer, tpb.PublishWeightsResponse):
            self._on_published(answer.version, answer.digest)
            if not answer.version:
                self._first_digest = answer.digest
        if self._is_new(call):
            self._book.write(call={"seq_id": call.seq_id, _FIELDS[call.kind]: answer})
        elif isinstance(answer, tpb.PublishWeightsResponse):
            self._compare(call, answer)

    def _is_new(self, call: Call) -> bool:
        """Whether its answer is not written down."""
        return call.seq_id > self._book.state.applied_seq_id

    def _check_version(self, call: Call, answer: Answer) -> None:
        if isinstance(answer, tpb.OptimStepResponse):
            said = answer.policy_version
        elif isinstance(answer, tpb.PublishWeightsResponse):
            said = answer.version
        else:
            return
        taken = self._plan.version_by(call)
        if said != taken:
            raise RunInterrupted(
                f"{call.kind.value} of step {call.batch + 1}: the trainer answers with version {said} after "
                f"{taken} optimizer steps; a version is the number of steps, skipped ones included "
                "(trainer_service.proto): mend that trainer, or let nobody else drive this run on it, then "
                "resume the run"
            )

    def _count_skipped(self, call: Call, answer: Answer) -> None:
        """A step that the trainer skipped is part of the run; too many in a row are its end."""
        if not isinstance(answer, tpb.OptimStepResponse):
            return
        if self._skipped is None:
            self._skipped = self._skipped_before(call)
        if not answer.skipped_nonfinite:
            self._skipped.clear()
            return
        self._skipped.add(call.batch)
        if len(self._skipped) >= MAX_SKIPPED_STEPS:
            raise RunFailed(
                f"step {call.batch + 1}: the loss or the gradients of {MAX_SKIPPED_STEPS} steps in a row "
                "were no finite numbers; lower learning_rate or max_grad_norm, and submit a new run"
            )
        if self._is_new(call):
            self._book.note(
                f"step {call.batch + 1}: the loss or the gradients were no finite numbers; the trainer "
                "skipped the step and the run goes on with the weights it has",
                warning=True,
            )

    def _skipped_before(self, call: Call) -> set[int]:
        """The batches in a row before that call that were skipped, as the journal has it."""
        skipped: set[int] = set()
        for seq_id in range(call.seq_id - 1, 0, -1):
            before = self._plan.call(seq_id)
            if before.kind is not CallKind.OPTIM_STEP:
                continue
            (record,) = self._book.journal.select("call", group=seq_id)
            if not record.call.optim_step.skipped_nonfinite or len(skipped) == MAX_SKIPPED_STEPS:
                break
            skipped.add(before.batch)
        return skipped

    def _compare(self, call: Call, again: tpb.PublishWeightsResponse) -> None:
        (record,) = self._book.journal.select("call", group=call.seq_id)
        first = record.call.publish
        if first.digest == again.digest:
            return
        self._versions_changed += 1
        self._book.note(
            f"the trainer published version {again.version} again with other contents (digest "
            f"{again.digest.hex()[:12]}, before {first.digest.hex()[:12]}): its replay was not bit-equal",
            warning=True,
        )


def refused(call: Call, error: QuartetError) -> RunInterrupted:
    """What a refused call is to the run."""
    said = f"{call.kind.value} of step {call.batch + 1}: {error.message}"
    if error.metadata.get("field") == "batch":  # and would be as large again
        return RunInterrupted(
            f"{said}; the run cannot go on: let another one begin with its newest state (initial_state), "
            "with a lower batch_size or sampling.max_tokens, or a higher algorithm.num_minibatches "
            "(a trainer of an earlier release takes less: upgrade it, then resume the run)"
        )
    return RunInterrupted(f"{said}; then resume the run, which sends it again")
