"""A run of the first rank: what it does, it tells the others first, and all do it together.

1. An error of the contract is raised in every rank alike, and the run stands as before it.
2. Any other error in one rank leaves the others waiting in a collective, so it ends this process; torchrun
   ends the rest, and starts all anew where it was told to (--max-restarts). States are on disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import structlog
from quartet.errors import QuartetError
from quartet.v1 import weights_pb2
from safetensors import SafetensorError

from quartet_trainer.content import WEIGHTS, Content, Stems
from quartet_trainer.passes import Scores
from quartet_trainer.ranks.command import (
    Close,
    Command,
    Digest,
    Export,
    Open,
    Publish,
    Read,
    Score,
    Step,
    Train,
    Write,
)
from quartet_trainer.ranks.group import Group
from quartet_trainer.ranks.shards import digests, read, unwritten, write
from quartet_trainer.results import BatchResult, StepResult
from quartet_trainer.run import Run
from quartet_trainer.sample import Sample
from quartet_trainer.spec import LossSpec, RunSpec
from quartet_trainer.states import META

T = TypeVar("T")

log = structlog.get_logger()


def end_group(rank: int, why: BaseException) -> NoReturn:
    """End this process at once, whatever its other threads do: the ranks are no longer in step."""
    log.error("rank_ended", rank=rank, why=f"{type(why).__name__}: {why}", exc_info=why)
    os._exit(1)


def together(group: Group, command: Command, work: Callable[[], T], samples: Sequence[Sample] = ()) -> T:
    """Do in this rank what the others are told to do. Errors: those of the contract."""
    try:
        group.tell(command, samples)
        return work()
    except QuartetError:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, the ranks are out of step
        end_group(group.rank, error)


def part_of(folder: Path, run: Run, group: Group) -> Content:
    """This rank's part of a saved content of a run."""
    meta = json.loads((folder / META).read_text(encoding="utf-8"))
    return Content(meta, read(folder, run.is_spread, group.host_group), folder)


def beginning_of(folder: Path, run: Run, group: Group, found: Stems) -> Content:
    """What a run begins with: the adapter that the first rank found there, or this rank's part of a state."""
    if run.spec.lora is None or not run.spec.lora.initial_adapter:
        return part_of(folder, run, group)
    assert not run.is_spread, "low-rank matrices are whole in each rank"
    return Content({}, {WEIGHTS: group.hand(found.get(WEIGHTS, {}))}, folder)


class LeadFiles:
    """The tensors of a state, of which each rank writes its part. Implements content.TensorFiles."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def write(self, folder: Path, content: Content) -> None:
        """In all ranks. Errors: NOT_READY."""
        run_id, seq_id = content.meta["run_id"], content.meta["applied_seq_id"]
        together(
            self._group,
            Write(run_id=run_id, seq_id=seq_id, folder=folder),
            lambda: write(folder, content.tensors, self._group, self._group.host_group),
        )

    def read(self, folder: Path) -> Stems:
        """Nothing: LeadRun.restore lets each rank read its part."""
        return {}

    def digests(self, folder: Path, names: Sequence[str], progress: Callable[[], None]) -> Mapping[str, str]:
        """Each rank those of its part, at the same time. Errors: NOT_READY."""
        return together(
            self._group,
            Digest(folder=folder, names=tuple(names)),
            lambda: digests(folder, names, self._group, progress),
        )


class LeadRun(Run):
    """A run that all ranks have."""

    def __init__(self, group: Group, run_id: str, spec: RunSpec, *arguments: Any) -> None:
        self._group = group
        self._together(
            Open(run_id=run_id, spec=spec), lambda: super(LeadRun, self).__init__(run_id, spec, *arguments)
        )

    def _together(self, command: Command, work: Callable[[], T], samples: Sequence[Sample] = ()) -> T:
        return together(self._group, command, work, samples)

    def forward_backward(
        self, samples: Sequence[Sample], loss: LossSpec, normalizer: float, verify_logprobs: bool
    ) -> BatchResult:
        """Each rank its share."""
        return self._together(
            Train(run_id=self.run_id, loss=loss, normalizer=normalizer, verify_logprobs=verify_logprobs),
            lambda: super(LeadRun, self).forward_backward(samples, loss, normalizer, verify_logprobs),
            samples,
        )

    def optim_step(self, learning_rate: float | None) -> StepResult:
        """Each rank its part of the parameters."""
        return self._together(
            Step(run_id=self.run_id, learning_rate=learning_rate),
            lambda: super(LeadRun, self).optim_step(learning_rate),
        )

    def forward(self, samples: Sequence[Sample], version: int | None, temperature: float) -> list[Scores]:
        """Each rank its share."""
        return self._together(
            Score(run_id=self.run_id, version=version, temperature=temperature),
            lambda: super(LeadRun, self).forward(samples, version, temperature),
            samples,
        )

    def publish(self) -> weights_pb2.WeightManifest | None:
        """Tensor after tensor, from all ranks to this one."""
        return self._together(Publish(run_id=self.run_id), super().publish)

    def export(self, target: Path) -> None:
        """Tensor after tensor; this rank writes. Errors: NOT_READY, the others are through by then."""

        def work() -> None:
            try:
                super(LeadRun, self).export(target)
            except (OSError, SafetensorError) as error:
                raise unwritten(target, str(error)) from error

        self._together(Export(run_id=self.run_id, folder=target), work)

    def restore(self, content: Content) -> None:
        """Each rank reads its part."""
        folder = content.folder
        assert folder is not None
        self._together(
            Read(run_id=self.run_id, folder=folder),
            lambda: super(LeadRun, self).restore(part_of(folder, self, self._group)),
        )

    def begin(self, content: Content) -> None:
        """Each rank reads its part of a state; an adapter it gets from this one."""
        folder = content.folder
        assert folder is not None
        self._together(
            Read(run_id=self.run_id, folder=folder, begins=True),
            lambda: super(LeadRun, self).begin(beginning_of(folder, self, self._group, content.tensors)),
        )

    def close(self) -> None:
        """In all ranks."""
        self._together(Close(run_id=self.run_id), super().close)
