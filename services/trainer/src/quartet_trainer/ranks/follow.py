"""The ranks that do not serve: they do what the first one tells, in its order, until it says stop.

1. A run here is the same as the first rank's, with the other part of every tensor.
2. An error of the contract is the first rank's to answer; it is raised there, too. Any other ends this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog
from quartet.errors import QuartetError

from quartet_trainer.ranks import command as told
from quartet_trainer.ranks.group import Group
from quartet_trainer.ranks.lead import beginning_of, end_group, part_of
from quartet_trainer.ranks.shards import digests, write
from quartet_trainer.run import Run
from quartet_trainer.sample import Sample
from quartet_trainer.spec import RunSpec
from quartet_trainer.worker import release_memory

log = structlog.get_logger()


class Follower:
    """The runs of this rank."""

    def __init__(self, group: Group, make_run: Callable[[str, RunSpec], Run]) -> None:
        self._group, self._make_run = group, make_run
        self._runs: dict[str, Run] = {}

    def obey(self, command: told.Command, samples: Sequence[Sample]) -> None:
        """Do as the first rank does. Errors: those of the run's method."""
        match command:
            case told.Open(run_id=run_id, spec=spec):
                self._runs[run_id] = self._make_run(run_id, spec)
            case told.Train(run_id=run_id):
                run = self._runs[run_id]
                run.forward_backward(samples, command.loss, command.normalizer, command.verify_logprobs)
            case told.Step(run_id=run_id):
                self._runs[run_id].optim_step(command.learning_rate)
            case told.Score(run_id=run_id):
                self._runs[run_id].forward(samples, command.version, command.temperature)
            case told.Publish(run_id=run_id):
                self._runs[run_id].publish()
            case told.Write(run_id=run_id):
                content = self._runs[run_id].content(command.seq_id)
                write(command.folder, content.tensors, self._group, self._group.host_group)
            case told.Digest():
                digests(command.folder, command.names, self._group)
            case told.Read(run_id=run_id):
                run = self._runs[run_id]
                if command.begins:
                    run.begin(beginning_of(command.folder, run, self._group, {}))
                else:
                    run.restore(part_of(command.folder, run, self._group))
            case told.Export(run_id=run_id):
                self._runs[run_id].export(command.folder)
            case told.Close(run_id=run_id):
                self._runs.pop(run_id).close()
                release_memory()
            case told.Wait():
                pass
            case _:
                raise AssertionError(f"{command.kind} is not for a follower")


def follow(group: Group, make_run: Callable[[str, RunSpec], Run]) -> None:
    """Obey until told to stop."""
    follower = Follower(group, make_run)
    try:
        while True:
            command, samples = group.hear()
            if command.kind == "stop":
                return
            try:
                follower.obey(command, samples)
            except QuartetError as error:
                log.info("refused_with_the_first_rank", rank=group.rank, why=str(error))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the ranks are out of step
        end_group(group.rank, error)
