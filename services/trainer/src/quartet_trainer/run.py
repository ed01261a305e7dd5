"""One run: a model, its optimizer, its gradients, its versions. Everything that computes happens here, on the
worker's thread.

1. A batch is applied whole or not at all: gradients join the accumulated ones after its last micro-batch.
2. Equal calls in equal order give equal bits, in this process or another: nothing random happens after
   initialisation, micro-batches follow from the samples alone, and sums are taken in a fixed order.
3. `content` holds all that the future of the run depends on, accumulated gradients included; `restore` of it
   continues bit-equally.
4. policy_version = optimizer steps taken. Published weights of a version are immutable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quartet.errors import QuartetError
from quartet.v1 import weights_pb2
from quartet.weights.store import WeightStore
from torch import Tensor
from torch.func import functional_call

from quartet_trainer import model as base
from quartet_trainer.logprobs import PolicyForward
from quartet_trainer.loss import diagnostics, token_losses
from quartet_trainer.optimizer import Optimizer, scheduled_rate
from quartet_trainer.packing import MicroBatch, pack
from quartet_trainer.publish import TORCH_DTYPES, Snapshot, snapshot, wire_tensors
from quartet_trainer.sample import Floats, Sample, check_against_model
from quartet_trainer.spec import LossSpec, Ratio, RunSpec
from quartet_trainer.states import Content
from quartet_trainer.verification import Verification, verify

WEIGHTS, MOMENTS, GRADIENTS = "weights", "moments", "gradients"


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run as it stands, apart from its place in the sequence."""

    policy_version: int
    trainable_parameters: int
    parameters: int
    published_version: int | None


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What a batch did."""

    loss: float
    loss_tokens: int
    tokens: int
    diagnostics: dict[str, float]
    verification: Verification | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did."""

    grad_norm: float
    learning_rate: float
    policy_version: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What the service's configuration says about computing."""

    device: torch.device
    microbatch_tokens: int
    row_tokens: int
    hub: bool


@dataclass(slots=True)
class _Pass:
    """Collected over the micro-batches of a call: the outputs of each sample, and the loss."""

    logprobs: list[Floats]
    entropies: list[Floats]
    loss: float = 0.0


class Run:
    """A run that can compute. Not thread-safe: one worker thread owns it."""

    def __init__(
        self, run_id: str, spec: RunSpec, machine: Machine, store: WeightStore, progress: Callable[[], None]
    ) -> None:
        """Load or initialise the base model. Errors: INVALID_CONFIG."""
        self.run_id, self.spec = run_id, spec
        self._machine, self._store, self._progress = machine, store, progress
        on_cuda = machine.device.type == "cuda"
        compute = spec.compute_dtype or ("bfloat16" if on_cuda else "float32")
        self._served_dtype = spec.served_dtype or compute
        self._budget_tokens = spec.microbatch_tokens or machine.microbatch_tokens
        self._folder = base.resolve_folder(spec.base_model, machine.hub)
        self._model = base.load_model(
            self._folder,
            spec.base_model,
            from_scratch=spec.from_scratch,
            seed=spec.seed,
            device=machine.device,
        )
        autocast = None if compute == "float32" else TORCH_DTYPES[compute]
        self._policy = PolicyForward(self._model, machine.device, autocast)
        self._vocab_size = int(self._model.get_input_embeddings().num_embeddings)
        base.probe(self._policy, self._vocab_size, spec.base_model)
        # Whether the live weights compute exactly what their published copy computes in float32.
        self._publishes_exactly = compute == "float32" and self._served_dtype == "float32"
        self._optimizer = Optimizer(self._model.named_parameters(), spec.optimizer)
        self._policy_version = 0
        self._published_version: int | None = None
        self._retained: dict[int, Snapshot] = {}

    @property
    def status(self) -> RunStatus:
        """The run as it stands."""
        trainable, total = base.parameter_counts(self._model)
        return RunStatus(self._policy_version, trainable, total, self._published_version)

    # -- training

    def forward_backward(
        self, samples: Sequence[Sample], loss: LossSpec, normalizer: float, verify_logprobs: bool
    ) -> BatchResult:
        """Add the gradients of a batch. Errors: INVALID_REQUEST."""
        self._check_batch(samples, loss)
        weights = [_weights(sample) for sample in samples]
        before = self._set_gradients(None for _ in self._parameters())
        try:
            done = self._train_pass(samples, weights, loss, normalizer)
            if not math.isfinite(done.loss):
                raise QuartetError(
                    "INVALID_REQUEST",
                    f"the loss is {done.loss}; the model has diverged; nothing was applied",
                    field="loss",
                    value=done.loss,
                    remedy="LoadState, then a lower learning rate",
                )
        except BaseException:
            self._set_gradients(before)
            raise
        self._set_gradients([_sum(*pair) for pair in zip(before, self._parameters(), strict=True)])
        return BatchResult(
            done.loss,
            sum(len(sample.covered_K) for sample in samples),
            sum(len(sample.tokens_T) for sample in samples),
            _diagnose(samples, weights, loss, done),
            self._verify(samples, loss.temperature, done.logprobs) if verify_logprobs else None,
        )

    def optim_step(self, learning_rate: float | None) -> StepResult:
        """Clip, step, clear. Errors: INVALID_REQUEST."""
        if not self._optimizer.has_gradients:
            raise QuartetError(
                "INVALID_REQUEST",
                "there are no gradients to apply; send a ForwardBackward first",
                field="seq_id",
                remedy="send ForwardBackward first",
            )
        norm = self._optimizer.gradient_norm()
        if not math.isfinite(norm):
            raise QuartetError(
                "INVALID_REQUEST",
                f"the gradient norm is {norm}; the model has diverged; nothing was applied",
                field="gradients",
                value=norm,
                remedy="LoadState, then a lower learning rate",
            )
        scheduled = scheduled_rate(self.spec.optimizer, self._policy_version)
        rate = scheduled if learning_rate is None else learning_rate
        self._optimizer.step(rate, norm)
        self._policy_version += 1
        return StepResult(norm, rate, self._policy_version)

    # -- scoring

    def forward(self, samples: Sequence[Sample], version: int | None, temperature: float) -> list[Floats]:
        """Log-probabilities of the covered positions of each sample.

        Errors: VERSION_UNKNOWN, INVALID_REQUEST.
        """
        check_against_model(samples, self._vocab_size, base.max_positions(self._model))
        if version is not None and version not in self._retained:
            held = ", ".join(map(str, self._retained)) or "none"
            raise QuartetError(
                "VERSION_UNKNOWN",
                f"version {version} is not retained (held: {held}); raise retain_versions of the run",
                version=version,
                latest=max(self._retained, default=""),
            )
        return self._score(samples, None if version is None else self._retained[version], temperature)

    def _score(self, samples: Sequence[Sample], weights: Snapshot | None, temperature: float) -> list[Floats]:
        done = _Pass([np.empty(0, np.float32)] * len(samples), [np.empty(0, np.float32)] * len(samples))
        replaced = {}
        if weights is not None:
            replaced = {
                f"model.{name}": tensor.to(self._machine.device, torch.float32)
                for name, tensor in weights.items()
            }
        with torch.no_grad():
            for batch in self._pack(samples, range(len(samples))):
                if weights is None:
                    output = self._policy(batch, temperature)
                else:
                    output = functional_call(self._policy, replaced, (batch, temperature, True))
                _keep(done, samples, batch, *output)
                self._progress()
        return done.logprobs

    def _verify(
        self, samples: Sequence[Sample], temperature: float, live_logprobs: Sequence[Floats]
    ) -> Verification:
        return verify(
            samples,
            self._retained,
            lambda chosen, weights: self._score(chosen, weights, temperature),
            self._policy_version if self._publishes_exactly else None,
            live_logprobs,
        )

    # -- versions and states

    def publish(self) -> weights_pb2.WeightManifest:
        """Make the live weights a version.

        Errors: SEQUENCE_CONFLICT if that version is held with other weights.
        """
        weights = snapshot(self._model, self._served_dtype)
        manifest = self._store.publish(self.run_id, self._policy_version, wire_tensors(weights))
        self._published_version = self._policy_version
        if self.spec.retain_versions:
            self._retained[self._policy_version] = weights
            for version in sorted(self._retained)[: -self.spec.retain_versions]:
                del self._retained[version]
        return manifest

    def content(self, applied_seq_id: int) -> Content:
        """Everything that the run's future depends on."""
        gradients = {
            name: parameter.grad
            for name, parameter in self._model.named_parameters()
            if parameter.grad is not None
        }
        meta = {
            "run_id": self.run_id,
            "spec": self.spec.model_dump(mode="json"),
            "applied_seq_id": applied_seq_id,
            "policy_version": self._policy_version,
            "published_version": self._published_version,
        }
        weights = {name: parameter.detach() for name, parameter in self._model.named_parameters()}
        tensors = {WEIGHTS: weights, MOMENTS: self._optimizer.moments(), GRADIENTS: gradients}
        return Content(meta, {stem: named for stem, named in tensors.items() if named})

    def restore(self, content: Content) -> None:
        """Stand where the content was taken, and publish its weights if they had been.

        Every other version is forgotten.
        """
        weights = content.tensors[WEIGHTS]
        gradients = content.tensors.get(GRADIENTS, {})
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(weights[name])
                gradient = gradients.get(name)
                parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
        self._policy_version = int(content.meta["policy_version"])
        self._optimizer.restore(content.tensors.get(MOMENTS, {}), self._policy_version)
        self._retained.clear()
        self._published_version = None
        self._store.close_run(self.run_id)
        self._store.open_run(self.run_id)
        if content.meta["published_version"] is not None:
            self.publish()

    def export(self, target: Path) -> None:
        """Write the live model as a Hugging Face folder."""
        base.export_folder(self._model, self._folder, target, self._served_dtype)

    # -- inside

    def _train_pass(
        self, samples: Sequence[Sample], weights: Sequence[Floats], loss: LossSpec, normalizer: float
    ) -> _Pass:
        done = _Pass([np.empty(0, np.float32)] * len(samples), [np.empty(0, np.float32)] * len(samples))
        moving = [index for index, weight in enumerate(weights) if weight.any()]
        still = sorted(set(range(len(samples))) - set(moving))
        for members, learns in ((moving, True), (still, False)):
            # Where every weight is zero so is the gradient: the forward pass alone gives the diagnostics.
            for batch in self._pack(samples, members):
                with torch.set_grad_enabled(learns):
                    logp_K, entropy_K = self._policy(batch, loss.temperature)
                    sampled_K = self._joined([samples[m].logprobs_K for m in batch.members])
                    weights_K = self._joined([weights[m] for m in batch.members])
                    assert weights_K is not None
                    total = token_losses(loss, logp_K, sampled_K, weights_K).sum() / normalizer
                if learns:
                    torch.autograd.backward(total)
                done.loss += float(total.detach())
                _keep(done, samples, batch, logp_K.detach(), entropy_K)
                self._progress()
        return done

    def _check_batch(self, samples: Sequence[Sample], loss: LossSpec) -> None:
        check_against_model(samples, self._vocab_size, base.max_positions(self._model))
        if not any(sample.is_covered for sample in samples):
            raise _refused("samples", "no position of the batch is covered", "give the samples spans")
        for index, sample in enumerate(samples):
            if not sample.is_covered or loss.ratio is Ratio.CROSS_ENTROPY:
                continue
            if sample.advantages_K is None:
                field = f"samples[{index}].advantages"
                raise _refused(
                    field, "a policy gradient needs advantages", "send one, or one for each position"
                )
            if sample.logprobs_K is None and loss.ratio is not Ratio.NONE:
                field = f"samples[{index}].sample.logprobs"
                raise _refused(
                    field, f"{loss.ratio.value} needs the sampler's log-probabilities", "send them"
                )

    def _pack(self, samples: Sequence[Sample], members: Sequence[int]) -> list[MicroBatch]:
        return pack(samples, members, self._budget_tokens, self._machine.row_tokens)

    def _joined(self, arrays: Sequence[Floats | None]) -> Tensor | None:
        present = [array for array in arrays if array is not None]
        if len(present) < len(arrays):
            return None
        return torch.from_numpy(np.concatenate(present)).to(self._machine.device)

    def _parameters(self) -> list[Any]:
        return list(self._model.parameters())

    def _set_gradients(self, gradients: Iterable[Tensor | None]) -> list[Tensor | None]:
        """Replace every parameter's gradient and return those that stood there."""
        held = []
        for parameter, gradient in zip(self._parameters(), gradients, strict=True):
            held.append(parameter.grad)
            parameter.grad = gradient
        return held


def _keep(
    done: _Pass, samples: Sequence[Sample], batch: MicroBatch, logp_K: Tensor, entropy_K: Tensor
) -> None:
    ends = np.cumsum([len(samples[member].covered_K) for member in batch.members])[:-1]
    for target, values in ((done.logprobs, logp_K), (done.entropies, entropy_K)):
        for member, part in zip(batch.members, np.split(values.cpu().numpy(), ends), strict=True):
            target[member] = part


def _weights(sample: Sample) -> Floats:
    if sample.advantages_K is None:
        return np.ones(len(sample.covered_K), dtype=np.float32)
    return sample.advantages_K


def _sum(before: Tensor | None, parameter: Any) -> Tensor:
    # A parameter that no loss reached still counts as having a gradient: the batch was applied.
    added = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return added if before is None else before.add_(added)


def _diagnose(
    samples: Sequence[Sample], weights: Sequence[Floats], loss: LossSpec, done: _Pass
) -> dict[str, float]:
    covered = [index for index, sample in enumerate(samples) if sample.is_covered]

    def joined(arrays: Sequence[Any]) -> Tensor:
        return torch.from_numpy(np.concatenate([arrays[index] for index in covered]))

    sampled = [sample.logprobs_K for sample in samples]
    complete = all(sampled[index] is not None for index in covered)
    return diagnostics(
        loss,
        joined(done.logprobs),
        joined(sampled) if complete else None,
        joined(weights),
        joined(done.entropies),
    )


def _refused(field: str, what: str, remedy: str) -> QuartetError:
    return QuartetError("INVALID_REQUEST", f"{field}: {what}; {remedy}", field=field, remedy=remedy)
