"""What the first rank tells the others to do with it: small typed values, and the samples of a batch.

1. A command and its samples become bytes and come back equal. Nothing is pickled: JSON, and safetensors for
   arrays.
2. Both are bounded; the samples by what a call may carry (intake.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from quartet import experts
from safetensors.numpy import load, save

from quartet_trainer.intake import MAX_CALL_BYTES
from quartet_trainer.sample import Sample
from quartet_trainer.spec import LossSpec, RunSpec
from quartet_trainer.spec.value import Value

#: A spec is a few kilobytes; whoever sends longer lists of modules meets the 4 MiB of a message before this.
MAX_COMMAND_BYTES = 16 << 20
#: About four times their size on the wire. A token of one byte there may be 8 of tokens, covered and versions
#: each here, and 4 of its advantage. Experts are as large as there.
MAX_SAMPLE_BYTES = 32 * MAX_CALL_BYTES + experts.MAX_CALL_BYTES


class Open(Value):
    """Make a run."""

    kind: Literal["open"] = "open"
    run_id: str
    spec: RunSpec


class Train(Value):
    """Run.forward_backward of the samples that follow."""

    kind: Literal["train"] = "train"
    run_id: str
    loss: LossSpec
    normalizer: float
    verify_logprobs: bool


class Step(Value):
    """Run.optim_step."""

    kind: Literal["step"] = "step"
    run_id: str
    learning_rate: float | None


class Score(Value):
    """Run.forward of the samples that follow."""

    kind: Literal["score"] = "score"
    run_id: str
    version: int | None
    temperature: float


class Publish(Value):
    """Run.publish."""

    kind: Literal["publish"] = "publish"
    run_id: str


class Write(Value):
    """Write this rank's part of the run's content into a folder."""

    kind: Literal["write"] = "write"
    run_id: str
    seq_id: int
    folder: Path


class Digest(Value):
    """Hash this rank's part of the files of a state; names below the folder."""

    kind: Literal["digest"] = "digest"
    folder: Path
    names: tuple[str, ...]


class Read(Value):
    """Restore the run from a folder, or let it begin with what that holds."""

    kind: Literal["read"] = "read"
    run_id: str
    folder: Path
    begins: bool = False


class Export(Value):
    """Run.export; the first rank writes."""

    kind: Literal["export"] = "export"
    run_id: str
    folder: Path


class Close(Value):
    """Run.close."""

    kind: Literal["close"] = "close"
    run_id: str


class Wait(Value):
    """Nothing to do; the first rank is well."""

    kind: Literal["wait"] = "wait"


class Stop(Value):
    """The trainer ends."""

    kind: Literal["stop"] = "stop"


Command = Annotated[
    Open | Train | Step | Score | Publish | Write | Digest | Read | Export | Close | Wait | Stop,
    pydantic.Field(discriminator="kind"),
]
_COMMAND: pydantic.TypeAdapter[Command] = pydantic.TypeAdapter(Command)

#: The optional arrays of a sample.
_OPTIONAL = ("logprobs_K", "advantages_K", "reference_K")


def command_bytes(command: Command) -> bytes:
    """The command as JSON."""
    # A spec distinguishes what was given from what was left out.
    return json.dumps({"kind": command.kind} | command.model_dump(mode="json", exclude_unset=True)).encode()


def parse_command(body: bytes) -> Command:
    """The command again."""
    return _COMMAND.validate_json(body)


def sample_bytes(samples: Sequence[Sample]) -> bytes:
    """All samples, array behind array, as safetensors; empty without samples."""
    if not samples:
        return b""
    arrays = {
        "tokens": np.concatenate([sample.tokens_T for sample in samples]),
        "token_counts": np.array([len(sample.tokens_T) for sample in samples]),
        "covered": np.concatenate([sample.covered_K for sample in samples]),
        "covered_counts": np.array([len(sample.covered_K) for sample in samples]),
        "versions": np.concatenate([sample.versions_K for sample in samples]),
    }
    for name in _OPTIONAL:
        given = [getattr(sample, name) for sample in samples]
        arrays[f"has_{name}"] = np.array([one is not None for one in given])
        present = [one for one in given if one is not None]
        arrays[name] = np.concatenate(present) if present else np.empty(0, np.float32)
    # Of any shapes: they are compared with the model by all ranks alike, as everything else is.
    told = [np.empty((0, 0, 0), np.uint8) if one.experts_TNk is None else one.experts_TNk for one in samples]
    arrays["has_experts"] = np.array([one.experts_TNk is not None for one in samples])
    arrays["expert_shapes"] = np.array([one.shape for one in told])
    # Of any width each: which samples share a row depends on their bytes.
    arrays["expert_widths"] = np.array([one.itemsize for one in told])
    arrays["experts"] = np.concatenate([one.reshape(-1).view(np.uint8) for one in told])
    return save(arrays)


def parse_samples(body: bytes) -> list[Sample]:
    """The samples again."""
    if not body:
        return []
    arrays = load(body)
    counts = arrays["covered_counts"]
    columns = [
        _cut(arrays["tokens"], arrays["token_counts"]),
        _cut(arrays["covered"], counts),
        _cut(arrays["versions"], counts),
    ]
    for name in _OPTIONAL:
        has = arrays[f"has_{name}"]
        present = iter(_cut(arrays[name], counts[has]))
        columns.append([next(present) if one else None for one in has])
    shapes, widths = arrays["expert_shapes"], arrays["expert_widths"]
    parts = _cut(arrays["experts"], shapes.prod(1) * widths)
    told = zip(parts, shapes, widths, arrays["has_experts"], strict=True)
    columns.append([part.view(f"u{width}").reshape(of) if has else None for part, of, width, has in told])
    return [Sample(*values) for values in zip(*columns, strict=True)]


def _cut(array: Any, counts: Any) -> list[Any]:
    return np.split(array, np.cumsum(counts))[:-1]
