"""One run: a model, its optimizer, its gradients, its versions. Everything that computes happens here, on the
worker's thread.

1. A batch is applied whole or not at all (gradients.py).
2. Equal calls in equal order give equal bits, in this process or another, whichever other runs share the
   model: all that is random follows from the seed and the run's place, and sums are taken in a fixed order.
3. `content` holds all that the future of the run depends on, accumulated gradients and retained versions
   included; `restore` of it continues bit-equally.
4. policy_version = optimizer steps, skipped ones included. Published weights of a version are immutable.
5. Weights and moments stay finite: a step whose loss or gradient norm is not a finite number is skipped. It
   clears the gradients and counts, and nothing else changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from quartet.v1 import weights_pb2
from quartet.weights.store import WeightStore

from quartet_trainer import model as base
from quartet_trainer.bases import Bases
from quartet_trainer.batch import Columns, check_batch, diagnose, weights_of
from quartet_trainer.beginning import STEPS_BEFORE, beginning, optimizer_steps
from quartet_trainer.canary import canary
from quartet_trainer.coefficients import Coefficients
from quartet_trainer.content import GRADIENTS, MOMENTS, WEIGHTS, Content
from quartet_trainer.gradients import Gradients
from quartet_trainer.machine import Machine
from quartet_trainer.optimizer import Optimizer
from quartet_trainer.passes import Passes, Scores, Standing
from quartet_trainer.placement import frozen, placed
from quartet_trainer.publish import TORCH_DTYPES, Snapshot
from quartet_trainer.ranks.layout import is_whole, part
from quartet_trainer.recompute import NOTHING, Recomputed, recomputable
from quartet_trainer.reference import REFERENCE, Reference
from quartet_trainer.replay import replayed_share
from quartet_trainer.results import BatchResult, RunStatus, StepResult
from quartet_trainer.routing import freeze_routers, routing_values
from quartet_trainer.sample import Floats, Sample
from quartet_trainer.schedule import scheduled_rate
from quartet_trainer.spec import LossSpec, RunSpec
from quartet_trainer.trained import Trained, WholeModel, check_weights, replaced
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
        self._folder = machine.folder_of(spec.base_model, progress)
        default_dtype = "bfloat16" if machine.device.type == "cuda" else "float32"
        self._compute_dtype = spec.compute_dtype or default_dtype
        self._served_dtype = spec.served_dtype or self._compute_dtype
        self._autocast = None if self._compute_dtype == "float32" else TORCH_DTYPES[self._compute_dtype]
        self._budget_tokens = spec.microbatch_tokens or machine.microbatch_tokens
        self._progress = progress
        self._trained: Trained
        bare = None
        if spec.lora is None:
            model = self._load()
            if spec.freeze_routers:
                freeze_routers(model, spec.base_model)
            self._trained = WholeModel(model)
        else:
            shared = bases.open(self._folder, spec, self._load, self._autocast)
            self._trained = adapter = shared.join(spec.lora, spec.base_model, spec.seed)
            bare = adapter.bare
        try:
            self._model = self._trained.model
            self._vocab_size = base.vocab_size(self._model)
            recompute = spec.gradient_checkpointing or machine.gradient_checkpointing
            layers = recomputable(self._model, spec.base_model) if recompute else ()
            anew = Recomputed(layers, machine.keep_attention)
            self._passes = self._passes_of(self._model, self._trained.standing, anew)
            self._reference = self._make_reference(bare)
        except BaseException:
            self._trained.close()
            raise
        self._counts = self._trained.counts()
        moved = self._trained.moved.items()
        self._gradients = Gradients(moved, machine.ranks)
        self._optimizer = Optimizer(
            moved, spec.optimizer, self._trained.embeddings, machine.optimizer_offload
        )
        config = self._trained.adapter_config
        self._versions = Versions(
            run_id, store, spec.retain_versions, self._canary, config, ranks=machine.ranks
        )
        self._coefficients = Coefficients()
        self._policy_version = 0
        self._skipped_steps = 0
        # Of the optimizer, where the run began with the state of another one.
        self._steps_before = 0
        # Whether a loss among the accumulated batches was not finite; their gradients may look sound.
        self._loss_broken = False
        self._torn = False

    def _load(self) -> Any:
        """The base model, which computes rightly here."""
        seed = self.spec.seed if self.spec.from_scratch else None
        return placed(self._machine, self._folder, self.spec.base_model, self._autocast, seed)

    def _passes_of(
        self, model: Any, standing: Standing = replaced, recomputed: Recomputed = NOTHING
    ) -> Passes:
        policy = self._machine.ranks.policy(model, self._machine.device, self._autocast, recomputed)
        return Passes(policy, self._machine, self._budget_tokens, self._progress, standing)

    @property
    def status(self) -> RunStatus:
        """The run as it stands."""
        trainable, total = self._counts
        return RunStatus(self._policy_version, self._skipped_steps, trainable, total, self._versions.newest)

    @property
    def is_spread(self) -> bool:
        """Whether each rank has a part of what is trained, and not the whole."""
        return not all(is_whole(parameter) for parameter in self._trained.parameters.values())

    @property
    def is_torn(self) -> bool:
        """Whether a call failed half way: what is in memory is no state of the run any more."""
        return self._torn

    @contextmanager
    def changing(self) -> Iterator[None]:
        """What fails in here tears the run: its parameters, moments and reference change in place."""
        self._torn = True
        yield
        self._torn = False

    # -- training

    def forward_backward(
        self, samples: Sequence[Sample], loss: LossSpec, normalizer: float, verify_logprobs: bool
    ) -> BatchResult:
        """Add the gradients of a batch. Errors: INVALID_REQUEST."""
        check_batch(
            samples,
            loss,
            vocab_size=self._vocab_size,
            max_tokens=base.max_positions(self._model),
            holds_reference=self._reference is not None,
            custom=self._machine.losses,
        )
        self._passes.replay.check(samples)
        columns = self._columns(samples, loss)
        used = self._coefficients.adapted(loss)
        loss_tokens = sum(len(sample.covered_K) for sample in samples)
        # All that can fail comes before the gradients join: a call that fails was not applied.
        with self._gradients.joined():
            with self._trained.learning():
                done = self._passes.train(samples, columns, used, normalizer)
            values = diagnose(columns, loss, done.logprobs, done.measured)
            if done.routing is not None:
                values |= routing_values(done.routing)
                values["replayed_fraction"] = replayed_share(samples)
            if done.own is not None:
                values |= done.own.values()
            found = self._verify(samples, loss.temperature, done.logprobs) if verify_logprobs else None
        self._trained.learned()
        self._loss_broken = self._loss_broken or not math.isfinite(done.loss)
        values |= self._coefficients.observe(loss, values, loss_tokens)
        tokens = sum(len(sample.tokens_T) for sample in samples)
        return BatchResult(done.loss, loss_tokens, tokens, values, found)

    def _columns(self, samples: Sequence[Sample], loss: LossSpec) -> Columns:
        """What the loss reads beside the pass itself. Errors: VERSION_UNKNOWN, INVALID_REQUEST."""
        reference: Sequence[Floats | None] = [sample.reference_K for sample in samples]
        sent = any(one is not None for one in reference)
        if loss.needs_reference and not sent:
            assert self._reference is not None, "checked with the batch"
            reference = self._reference.score(samples, loss.temperature)
        version = loss.proximal_version
        proximal: Sequence[Floats] | None = None
        if version is not None and version != self._policy_version:
            weights = self._versions.find(version)
            proximal = self._passes.score(samples, weights, loss.temperature, full_precision=False)
        return Columns(
            [weights_of(sample, loss) for sample in samples],
            [sample.logprobs_K for sample in samples],
            reference,
            self._machine.device,
            proximal,
            proximal_is_live=version == self._policy_version,
            top_entropy=self._passes.most_uncertain(samples, loss),
        )

    def optim_step(self, learning_rate: float | None) -> StepResult:
        """Clip, step, clear; or only clear, where the gradients are no numbers. Errors: INVALID_REQUEST."""
        norm = self._optimizer.gradient_norm()
        scheduled = scheduled_rate(self.spec.optimizer, self._policy_version)
        rate = scheduled if learning_rate is None else learning_rate
        skipped = self._loss_broken or not math.isfinite(norm)
        with self.changing():
            if skipped:
                self._optimizer.clear()
                self._skipped_steps += 1
            else:
                self._optimizer.step(rate, norm)
            self._loss_broken = False
            self._policy_version += 1
            self._coefficients.step(not skipped)
            if self._reference is not None:
                self._reference.stepped(self._policy_version, self._trained.parameters)
        return StepResult(norm, rate, self._policy_version, skipped)

    # -- scoring

    def forward(self, samples: Sequence[Sample], version: int | None, temperature: float) -> list[Scores]:
        """Log-probabilities of the covered positions of each sample.

        Errors: VERSION_UNKNOWN, INVALID_REQUEST.
        """
        self._passes.check(samples)
        self._passes.replay.check(samples)
        weights = None if version is None else self._versions.find(version)
        return self._passes.judge(samples, weights, temperature)

    def _verify(
        self, samples: Sequence[Sample], temperature: float, live_logprobs: Sequence[Floats]
    ) -> Verification:
        # Whether the live weights compute exactly what their published copy computes in float32.
        publishes_exactly = self._trained.exact and self._compute_dtype == self._served_dtype == "float32"
        return verify(
            samples,
            self._versions.kept,
            lambda chosen, weights: self._passes.score(chosen, weights, temperature),
            self._policy_version if publishes_exactly else None,
            live_logprobs,
        )

    # -- versions and states

    def publish(self) -> weights_pb2.WeightManifest | None:
        """Make the live weights a version; None in a rank that does not serve it.

        Errors: SEQUENCE_CONFLICT if that version is held with other weights.
        """
        weights = self._trained.published(self._trained.parameters, self._served_dtype)
        return self._versions.publish(self._policy_version, weights)

    def content(self, applied_seq_id: int) -> Content:
        """Everything that the run's future depends on."""
        meta = {
            "run_id": self.run_id,
            "spec": self.spec.model_dump(mode="json"),
            "applied_seq_id": applied_seq_id,
            "policy_version": self._policy_version,
            "skipped_steps": self._skipped_steps,
            STEPS_BEFORE: self._steps_before,
            "loss_broken": self._loss_broken,
            **self._coefficients.meta(),
            "served_dtype": self._served_dtype,
            "trained": self._trained.meta(),
            **self._versions.meta(),
        }
        tensors = {
            WEIGHTS: {name: parameter.detach() for name, parameter in self._trained.parameters.items()},
            MOMENTS: self._optimizer.moments(),
            GRADIENTS: self._gradients.taken(),
            REFERENCE: {} if self._reference is None else self._reference.tensors(),
            **self._versions.tensors(self._policy_version),
        }
        return Content(meta, {stem: named for stem, named in tensors.items() if named})

    def restore(self, content: Content) -> None:
        """Stand where the content was taken, with the version published last and those retained before it.

        Every other version is forgotten. Errors: CHECKSUM_MISMATCH, INVALID_CONFIG, which change nothing.
        """
        self._stand(content)

    def begin(self, content: Content) -> None:
        """Begin with another run's state, or with an adapter. Errors: INVALID_CONFIG, CHECKSUM_MISMATCH."""
        self._stand(beginning(self.spec, content, self._trained, self._served_dtype))

    def _stand(self, content: Content) -> None:
        weights, meta = content.tensors[WEIGHTS], content.meta
        policy_version, skipped = int(meta["policy_version"]), int(meta["skipped_steps"])
        # What was served when the state was taken, on whatever device that was.
        served_dtype = str(meta["served_dtype"])
        self._trained.check(meta["trained"])
        check_weights(self._trained.parameters, weights)
        self._optimizer.check(content.tensors.get(MOMENTS, {}))
        live = self._trained.published(weights, served_dtype)
        kept = self._versions.read(meta, content.tensors, policy_version, live)
        with self.changing():
            # Before anything is published: its canary is computed as this type is.
            self._served_dtype = served_dtype
            self._versions.restore(meta, kept)
            with torch.no_grad():
                for name, parameter in self._trained.parameters.items():
                    part(parameter).copy_(part(weights[name]))
            self._trained.restore(meta["trained"])
            self._gradients.restore(content.tensors.get(GRADIENTS, {}))
            self._optimizer.restore(content.tensors.get(MOMENTS, {}), optimizer_steps(meta))
            if self._reference is not None:
                self._reference.restore(content.tensors.get(REFERENCE, {}))
            self._coefficients.restore(meta)
            self._policy_version, self._skipped_steps = policy_version, skipped
            self._steps_before = int(meta.get(STEPS_BEFORE, 0))
            self._loss_broken = bool(meta["loss_broken"])

    def export(self, target: Path) -> None:
        """Write the live model as a Hugging Face folder; the first rank does, all give their parts."""
        self._trained.export(self._folder, target, self._served_dtype, self._machine.ranks.first)

    def _make_reference(self, bare: Standing | None) -> Reference | None:
        """`bare` makes the model of an adapter stand as its base."""
        spec = self.spec.reference
        if spec is None:
            return None
        if not spec.model and bare is not None and not spec.sync_steps:
            return Reference.of_model(spec, self._passes_of(self._model, bare))
        if not spec.model:
            return Reference.of_policy(spec, self._passes, self._trained.parameters)
        model = frozen(self._machine, spec.model, self._autocast, self._progress)
        return Reference.of_model(spec, self._passes_of(model))

    def close(self) -> None:
        """Withdraw what was published, and let go of what takes memory. The run must not be used any more."""
        self._versions.close()
        self._trained.close()
        # Of a run that tore the call that did it still holds this object while its memory is given back.
        del self._model, self._trained, self._passes, self._reference, self._gradients, self._optimizer

    def _canary(self, weights: Snapshot) -> weights_pb2.Canary | None:
        precise = self._machine.device.type == "cpu" or self._served_dtype == "float32"
        score = partial(self._passes.score, full_precision=precise)
        return canary(score, weights, self._vocab_size, base.max_positions(self._model))
