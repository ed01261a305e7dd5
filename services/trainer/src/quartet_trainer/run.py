"""One run: a model, its optimizer, its gradients, its versions. Everything that computes happens here, on the
worker's thread.

1. A batch is applied whole or not at all (gradients.py).
2. Equal calls in equal order give equal bits, in this process or another, whichever other runs share the
   model: all that is random follows from the seed and the run's place, and sums are taken in a fixed order.
3. `restore` of its `content` continues bit-equally (live_state.py).
4. policy_version = optimizer steps, skipped ones included. Published weights of a version are immutable.
5. Weights and moments stay finite: a step whose loss or gradient norm is not a finite number is skipped. It
   clears the gradients and counts, and nothing else changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from quartet.v1 import weights_pb2
from quartet.weights.store import WeightStore

from quartet_trainer import model as base
from quartet_trainer.bases import Bases
from quartet_trainer.batch import Columns, check_batch, diagnose, weights_of
from quartet_trainer.canary import canary
from quartet_trainer.content import Content
from quartet_trainer.gradients import Gradients
from quartet_trainer.live_state import LiveState
from quartet_trainer.machine import Machine
from quartet_trainer.optimizer import Optimizer
from quartet_trainer.passes import Scores
from quartet_trainer.policy import make_policy
from quartet_trainer.publish import Snapshot
from quartet_trainer.ranks.layout import is_whole
from quartet_trainer.replay import replayed_share
from quartet_trainer.results import BatchResult, RunStatus, StepResult
from quartet_trainer.routing import routing_values
from quartet_trainer.sample import Floats, Sample
from quartet_trainer.schedule import scheduled_rate
from quartet_trainer.spec import LossSpec, RunSpec
from quartet_trainer.verification import Verification, verify
from quartet_trainer.versions import Versions


class Run:
    """A run that can compute. Not thread-safe: one worker thread owns it."""

    def __init__(
        self,
        run_id: str,
        spec: RunSpec,
        machine: Machine,
        store: WeightStore,
        progress: Callable[[], None],
        bases: Bases,
    ) -> None:
        """Load or initialise the base model, unless it is in `bases`. Errors: INVALID_CONFIG."""
        self.run_id, self.spec, self._machine = run_id, spec, machine
        policy = make_policy(spec, machine, progress, bases)
        trained = policy.trained
        self._folder, self._compute_dtype, self._passes = policy.folder, policy.compute_dtype, policy.passes
        self._model = trained.model
        self._vocab_size = base.vocab_size(self._model)
        self._counts = trained.counts()
        moved = trained.moved.items()
        gradients = Gradients(moved, machine.ranks)
        optimizer = Optimizer(moved, spec.optimizer, trained.apart, machine.optimizer_offload)
        config, keep = trained.adapter_config, spec.retain_versions
        versions = Versions(run_id, store, keep, self._canary, config, ranks=machine.ranks)
        served_dtype = spec.served_dtype or policy.compute_dtype
        self._state = LiveState(
            run_id, spec, trained, policy.reference, gradients, optimizer, versions, served_dtype
        )

    @property
    def status(self) -> RunStatus:
        """The run as it stands."""
        trainable, total = self._counts
        state = self._state
        newest = state.versions.newest
        return RunStatus(state.policy_version, state.skipped_steps, trainable, total, newest)

    @property
    def is_spread(self) -> bool:
        """Whether each rank has a part of what is trained, and not the whole."""
        return not all(is_whole(parameter) for parameter in self._state.trained.parameters.values())

    @property
    def is_torn(self) -> bool:
        """Whether a call failed half way: what is in memory is no state of the run any more."""
        return self._state.is_torn

    def changing(self) -> AbstractContextManager[None]:
        """What fails in here tears the run: its parameters, moments and reference change in place."""
        return self._state.changing()

    # -- training

    def forward_backward(
        self, samples: Sequence[Sample], loss: LossSpec, normalizer: float, verify_logprobs: bool
    ) -> BatchResult:
        """Add the gradients of a batch. Errors: INVALID_REQUEST."""
        state = self._state
        check_batch(
            samples,
            loss,
            vocab_size=self._vocab_size,
            max_tokens=base.max_positions(self._model),
            holds_reference=state.reference is not None,
            custom=self._machine.losses,
        )
        self._passes.replay.check(samples)
        columns = self._columns(samples, loss)
        used = state.coefficients.adapted(loss)
        loss_tokens = sum(len(sample.covered_K) for sample in samples)
        # All that can fail comes before the gradients join: a call that fails was not applied.
        with state.gradients.joined():
            with state.trained.learning():
                done = self._passes.train(samples, columns, used, normalizer)
            values = diagnose(columns, loss, done.logprobs, done.measured)
            if done.routing is not None:
                values |= routing_values(done.routing)
                values["replayed_fraction"] = replayed_share(samples)
            if done.own is not None:
                values |= done.own.values()
            found = self._verify(samples, loss.temperature, done.logprobs) if verify_logprobs else None
        state.trained.learned()
        state.loss_broken = state.loss_broken or not math.isfinite(done.loss)
        values |= state.coefficients.observe(loss, values, loss_tokens)
        state.proximal.observe(loss)
        tokens = sum(len(sample.tokens_T) for sample in samples)
        return BatchResult(done.loss, loss_tokens, tokens, values, found)

    def _columns(self, samples: Sequence[Sample], loss: LossSpec) -> Columns:
        """What the loss reads beside the pass itself. Errors: VERSION_UNKNOWN, INVALID_REQUEST."""
        state = self._state
        reference: Sequence[Floats | None] = [sample.reference_K for sample in samples]
        sent = any(one is not None for one in reference)
        if loss.needs_reference and not sent:
            assert state.reference is not None, "checked with the batch"
            reference = state.reference.score(samples, loss.temperature)
        version = loss.proximal_version
        proximal: Sequence[Floats] | None = None
        live = version == state.policy_version
        # What an adapter drops is in the pass that learns, and not in the policy that it is held to.
        in_the_pass = live and not (self.spec.lora and self.spec.lora.dropout)
        if version is not None and not in_the_pass:
            weights = None if live else state.proximal.find(version) or state.versions.find(version)
            proximal = self._passes.score(samples, weights, loss.temperature, full_precision=False)
        return Columns(
            [weights_of(sample, loss) for sample in samples],
            [sample.logprobs_K for sample in samples],
            reference,
            self._machine.device,
            proximal,
            proximal_is_live=in_the_pass,
            top_entropy=self._passes.most_uncertain(samples, loss),
        )

    def optim_step(self, learning_rate: float | None) -> StepResult:
        """Clip, step, clear; or only clear, where the gradients are no numbers. Errors: INVALID_REQUEST."""
        state = self._state
        norm = state.optimizer.gradient_norm()
        scheduled = scheduled_rate(self.spec.optimizer, state.policy_version)
        rate = scheduled if learning_rate is None else learning_rate
        skipped = state.loss_broken or not math.isfinite(norm)
        published = state.versions.kept.get(state.policy_version) if self._publishes_exactly else None
        state.proximal.stepping(state.policy_version, state.trained.parameters, published)
        with self.changing():
            if skipped:
                state.optimizer.clear()
                state.skipped_steps += 1
            else:
                state.optimizer.step(rate, norm)
            state.loss_broken = False
            state.policy_version += 1
            state.coefficients.step(not skipped)
            if state.reference is not None:
                state.reference.stepped(state.policy_version, state.trained.parameters)
        return StepResult(norm, rate, state.policy_version, skipped)

    # -- scoring

    def forward(self, samples: Sequence[Sample], version: int | None, temperature: float) -> list[Scores]:
        """Log-probabilities of the covered positions of each sample.

        Errors: VERSION_UNKNOWN, INVALID_REQUEST.
        """
        self._passes.check(samples)
        self._passes.replay.check(samples)
        weights = None if version is None else self._state.versions.find(version)
        return self._passes.judge(samples, weights, temperature)

    def _verify(
        self, samples: Sequence[Sample], temperature: float, live_logprobs: Sequence[Floats]
    ) -> Verification:
        state = self._state
        return verify(
            samples,
            state.versions.kept,
            lambda chosen, weights: self._passes.score(chosen, weights, temperature),
            state.policy_version if self._publishes_exactly else None,
            live_logprobs,
        )

    # -- versions and states

    @property
    def _publishes_exactly(self) -> bool:
        """Whether the live weights compute exactly what their published copy computes in float32."""
        state = self._state
        return state.trained.exact and self._compute_dtype == state.served_dtype == "float32"

    def publish(self) -> weights_pb2.WeightManifest | None:
        """Make the live weights a version; None in a rank that does not serve it.

        Errors: SEQUENCE_CONFLICT if that version is held with other weights.
        """
        state = self._state
        weights = state.trained.published(state.trained.parameters, state.served_dtype)
        return state.versions.publish(state.policy_version, weights)

    def content(self, applied_seq_id: int) -> Content:
        """Everything that the run's future depends on."""
        return self._state.content(applied_seq_id)

    def restore(self, content: Content) -> None:
        """Stand where the content was taken, with the versions of then.

        Errors: CHECKSUM_MISMATCH, INVALID_CONFIG, which change nothing.
        """
        self._state.restore(content)

    def begin(self, content: Content) -> None:
        """Begin with another run's state, or with an adapter. Errors: INVALID_CONFIG, CHECKSUM_MISMATCH."""
        self._state.begin(content)

    def export(self, target: Path) -> None:
        """Write the live model as a Hugging Face folder; the first rank does, all give their parts."""
        self._state.trained.export(self._folder, target, self._state.served_dtype, self._machine.ranks.first)

    def close(self) -> None:
        """Withdraw what was published, and let go of what takes memory. The run must not be used any more."""
        self._state.close()
        # Of a run that tore the call that did it still holds this object while its memory is given back.
        del self._model, self._passes

    def _canary(self, weights: Snapshot) -> weights_pb2.Canary | None:
        precise = self._machine.device.type == "cpu" or self._state.served_dtype == "float32"
        score = partial(self._passes.score, full_precision=precise)
        return canary(score, weights, self._vocab_size, base.max_positions(self._model))
