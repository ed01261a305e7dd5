"""The output folder of a run.

    metrics.jsonl            one line for each step and evaluation
    rollouts/step_NNNN.jsonl one line for each rollout of a step; rollouts/eval_NNNN.jsonl for evaluations
    after NNNN steps checkpoint/              the trained model, a Hugging Face folder
    reward.png summary.json  written at the end, the first of what has been measured by then
    run.json                 which run this folder belongs to
    run.toml                 the run and its services, as a file for `quartet rl`
    config/ logs/ data/      configs, logs and state of the services

1. Every line carries the number of its event, and is written whole before the next event is taken. Opened
   again, the folder cuts off a torn last line and says after which event to go on: no line is lost and none
   is written twice.
2. What is written to be moved to its place has one name in every process, so what a killed one left of it is
   replaced by the next. Whoever writes has the folder locked.
3. What holds the arguments of environments is readable by its owner alone (PRIVATE).
4. Where somebody says how many steps keep their rollouts, the files of earlier ones are removed once a later
   one is written down, and so are those of all but as many evaluations; one that was killed in between
   removes them when the folder is opened again. Nothing else reads these files but W&B's table of the step
   or evaluation (wandb/rows.py), and people (rollouts.py).
5. The lines of a step's rollouts are written once more when it is applied: they say then what was trained on
   (trained_on.py). Whoever reads the file meanwhile has either.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quartet.cli import trained_on
from quartet.cli.figure import write_reward_png
from quartet.cli.messages import message_row
from quartet.cli.progress import Progress, ledger_dict
from quartet.config import ConfigError
from quartet.kit.unknown import enum_name
from quartet.task_data import FIRST, read
from quartet.v1.orchestrator_service_pb2 import RolloutEvent, StepEvent, WatchRunResponse
from quartet.v1.rollout_pb2 import FailureKind, Rollout

Row = dict[str, Any]

#: The trained model.
CHECKPOINT = "checkpoint"

#: Files of weights end so.
WEIGHTS = ".safetensors"

#: Of files with the arguments of environments, among which a judge's key may be: for their owner alone.
PRIVATE = 0o600


class Outputs:
    """Writes the folder. `progress` holds what the folder already tells."""

    def __init__(self, folder: Path, keep_rollouts: int | None = None) -> None:
        """Open the folder, new or begun, in which so many of the newest steps keep their rollouts, and as
        many evaluations: all of them where nothing is said."""
        self.folder = folder
        self._keep_rollouts = keep_rollouts
        self.metrics_file = folder / "metrics.jsonl"
        self.rollouts = folder / "rollouts"
        self.rollouts.mkdir(parents=True, exist_ok=True)
        self.progress = Progress()
        self._recover()

    def _recover(self) -> None:
        last = 0
        for row in recovered(self.metrics_file):
            last = max(last, int(row["event"]))
            metrics = {k: v for k, v in row.items() if isinstance(v, float) and "/" in k}
            if "policy_version" in row:  # also of an evaluation without a result
                self.progress.add_eval(int(row["step"]), metrics)
            else:
                self.progress.add_step(int(row["step"]), metrics)
        for _, file in (*self._files_of("step"), *self._files_of("eval")):
            if (newest := last_row(file)) is not None:
                last = max(last, int(newest["event"]))
        self.progress.last_event = last
        self._remove_old()

    def record(self, event: WatchRunResponse) -> bool:
        """Take one event into the progress and the files. Whether it was new."""
        if not self.progress.apply(event):
            return False
        head = {"event": event.event, "time": event.at_ms / 1000}
        match event.WhichOneof("kind"):
            case "step":
                self._tell_fates(event.step)
                ledger = {f"ledger/{k}": v for k, v in ledger_dict(event.step.ledger).items()}
                append_line(
                    self.metrics_file, {**head, "step": event.step.step, **dict(event.step.metrics), **ledger}
                )
                self._remove_old()
            case "eval":
                row = {**head, "step": event.eval.step, "policy_version": event.eval.policy_version}
                append_line(self.metrics_file, row | dict(event.eval.metrics))
                self._remove_old()
            case "rollout":
                self._rollout(head, event.rollout)
        return True

    def _rollout(self, head: Row, event: RolloutEvent) -> None:
        if event.HasField("step"):
            if event.step < self._oldest_kept:
                return  # it ended after its step had been trained without it
            name = _of_step(event.step)
        else:
            name = f"eval_{self.progress.step:04d}.jsonl"
        append_line(self.rollouts / name, head | rollout_row(event))

    def _tell_fates(self, event: StepEvent) -> None:
        """Before its line: whoever is killed in between does it again."""
        file = self.rollouts / _of_step(event.step)
        if event.groups and file.exists():
            fates = trained_on.by_group(event.groups)
            write_lines(file, [trained_on.told(row, fates) for row in recovered(file)])

    @property
    def _oldest_kept(self) -> int:
        """The first step whose rollouts are kept."""
        return 0 if self._keep_rollouts is None else self.progress.step - self._keep_rollouts + 1

    def _remove_old(self) -> None:
        if self._keep_rollouts is None:
            return
        steps, evaluations = self._files_of("step"), self._files_of("eval")
        old = [file for number, file in steps if number < self._oldest_kept]
        old += [file for _, file in evaluations[: -self._keep_rollouts]]
        for file in old:
            file.unlink(missing_ok=True)

    def _files_of(self, kind: str) -> list[tuple[int, Path]]:
        """The files of rollouts of steps or of evaluations, with the numbers of their steps, oldest first."""
        files = [(file.stem.removeprefix(f"{kind}_"), file) for file in self.rollouts.glob(f"{kind}_*.jsonl")]
        return sorted((int(number), file) for number, file in files if number.isdecimal())

    def draw(self, title: str) -> None:
        """Write the figure of what was recorded, where there is something to draw."""
        if not (self.progress.rewards or self.progress.evals):
            return
        write_reward_png(self.progress, title, self.folder / "reward.png")

    def take_checkpoint(self, model_path: Path) -> Path:
        """Put the exported model into the folder."""
        return take_model(model_path, self.folder / CHECKPOINT)


def take_model(model_path: Path, target: Path) -> Path:
    """Put an exported model at the target, whole. What is large of it is linked where possible."""
    staged = _staged(target)
    if staged.exists():
        shutil.rmtree(staged)
    shutil.copytree(model_path, staged, copy_function=_link_or_copy)
    if target.exists():
        shutil.rmtree(target)
    staged.rename(target)
    return target


def _staged(target: Path) -> Path:
    """Where a file or folder is made before it is moved to its place."""
    return target.with_name(f"{target.name}.partial")


def _link_or_copy(source: str, target: str) -> None:
    """A hard link of weights: what writes such a file puts another in its place. A copy across file systems,
    and of all else: who writes into a tokenizer must not change the saved state that it came from."""
    if source.endswith(WEIGHTS):
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    shutil.copy2(source, target)


def _of_step(step: int) -> str:
    return f"step_{step:04d}.jsonl"


def rollout_row(event: RolloutEvent) -> Row:
    """A rollout as JSON."""
    rollout = event.rollout
    spans = [span.policy_version for sample in rollout.samples for span in sample.spans]
    row: Row = {
        "step": event.step if event.HasField("step") else None,
        "env": event.env_id,
        "task": event.task_index,
        "group": event.group,
        "member": rollout.member,
        "reward": rollout.reward,
        "rewards": dict(rollout.rewards),
        "metrics": dict(rollout.metrics),
        "stop_condition": rollout.stop_condition,
        "truncated": rollout.truncated,
        "turns": rollout.num_turns,
        "prompt_tokens": rollout.usage.prompt_tokens,
        "completion_tokens": rollout.usage.completion_tokens,
        "policy_versions": sorted(set(spans)),
        "replicas": list(rollout.replicas),
        "total_ms": rollout.timing.total_ms,
    }
    row |= task_fields(rollout.task_json) | parts_field(rollout)
    if rollout.messages:
        row["messages"] = [message_row(message) for message in rollout.messages]
    kind: str | None = None
    if rollout.HasField("failure"):
        kind = enum_name(FailureKind, rollout.failure.kind)
        row["failure"] = {"kind": kind, "message": rollout.failure.message}
        row["reward"] = None  # a failure is not a reward
    return row | trained_on.unknown(kind) if event.HasField("step") else row


def parts_field(rollout: Rollout) -> Row:
    """The agents of a rollout that several played, whose conversations stand after each other in it."""
    if rollout.HasField("failure") or not rollout.parts:
        return {}
    return {"parts": [{"agent": part.agent, "reward": part.reward} for part in rollout.parts]}


def task_fields(task_json: str) -> Row:
    """What a rollout tells of its task (quartet.task_data): by Verifiers' names, and apart whatever else an
    environment has."""
    data = read(task_json) or {}
    row = {name: data.pop(name) for name in FIRST if name in data}
    return row | ({"task_data": data} if data else {})


def append_line(file: Path, row: Row) -> None:
    """Append one line, handed to the system whole. Raises OSError, and nothing of it is left."""
    line = json.dumps(row).encode() + b"\n"
    with file.open("ab", buffering=0) as out:
        before = out.tell()
        try:
            whole = out.write(line) == len(line)
        except OSError as error:
            error.filename = str(file)
            raise
        if not whole:
            out.truncate(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))


def recover_lines(file: Path) -> list[Row]:
    """The whole lines of a file; a torn last one is cut off. Raises ConfigError where another is damaged."""
    return list(recovered(file))


def recovered(file: Path) -> Iterator[Row]:
    """As `recover_lines`, one after the other: of a long run they are more than is to be held at once."""
    if not file.exists():
        return
    whole = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                os.truncate(file, whole)
                return
            whole += len(line)
            yield _row(file, number, line)


def last_row(file: Path) -> Row | None:
    """The last whole line; a torn one behind it is cut off. No other is read: those of a long run's rollouts
    are gigabytes. Raises ConfigError where it is damaged."""
    size = file.stat().st_size
    if not size:
        return None
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as lines:
        whole = lines.rfind(b"\n") + 1
        line = lines[lines.rfind(b"\n", 0, whole - 1) + 1 : whole] if whole else b""
    if whole < size:
        os.truncate(file, whole)
    if line and (row := _parsed(line)) is not None:
        return row
    recover_lines(file)  # of a damaged one it says which line it is
    return None


def _row(file: Path, number: int, line: bytes) -> Row:
    if (row := _parsed(line)) is None:
        raise ConfigError(
            f"{file}:{number} is no JSON object, and not the last line, which a crash may tear; restore it, "
            "or remove the line"
        )
    return row


def _parsed(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def write_json(file: Path, content: Row, mode: int = 0o666) -> None:
    """Write a file atomically, of one JSON object; with the rights of `mode`, less the umask."""
    write_text(file, json.dumps(content, indent=2) + "\n", mode)


def write_lines(file: Path, rows: Sequence[Row]) -> None:
    """Write a file of lines atomically, in place of the one that is there."""
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))


def write_text(file: Path, text: str, mode: int = 0o666) -> None:
    """Write a file atomically; with the rights of `mode`, less the umask."""
    staged = _staged(file)
    try:
        staged.unlink(missing_ok=True)  # with its rights
        staged.touch(mode)
        staged.write_text(text, encoding="utf-8")
        staged.replace(file)
    except OSError as error:
        error.filename = str(file)
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            staged.unlink()
