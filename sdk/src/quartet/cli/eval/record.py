"""The folder of one evaluation.

    results.jsonl    one line for each rollout that has a reward
    failures.jsonl   one line for each that failed
    metadata.json    settings and figures, in Verifiers' form

1. A line is written whole as soon as its rollout ends. A folder opened again cuts off a torn last line, and
   asks only for the rollouts that have no result: those that failed are tried again.
2. A folder holds results of one setting. Opened with another one it is refused, with the key. `num_examples`
   may grow: then the further examples are run.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from quartet.cli.eval.config import ALL, Trial
from quartet.cli.eval.kept import check_same
from quartet.cli.eval.rows import failure_kind, failure_row, result_row
from quartet.cli.eval.source import Source
from quartet.cli.held import held
from quartet.cli.outputs import PRIVATE, Row, append_line, recover_lines, recovered, write_json, write_lines
from quartet.config import ConfigError
from quartet.run.statistics import Summary, means_by_name, summarise
from quartet.v1.envhost_service_pb2 import EnvironmentInfo
from quartet.v1.rollout_pb2 import Rollout, Task

RESULTS, FAILURES, METADATA = "results.jsonl", "failures.jsonl", "metadata.json"
FIGURES = ("example_id", "rollout", "reward", "metrics", "token_usage", "is_truncated", "policy_versions")
#: Characters of a failure's message at a terminal; the file has all of it.
SHOWN_OF_A_REASON = 500
#: Of metadata.json: what may not change while a folder is filled, as the keys of the command are called.
SETTINGS = {
    "env_id": "id",
    "env_args": "args",
    "split": "split",
    "model": "model",
    "base_url": "base_url",
    "rollouts_per_example": "rollouts_per_example",
    "sampling_args": "sampling",
}


class Record:
    """What is known of one evaluation, in memory and in its folder."""

    def __init__(self, folder: Path, trial: Trial, source: Source) -> None:
        """Read the folder, if there is one. Raises ConfigError where it holds another evaluation."""
        self.folder, self.trial, self.source = folder, trial, source
        self.settings = settings_of(trial, source)
        #: What the figures need of each line; conversations stay in the file.
        self.results: list[Row] = []
        self.failures: dict[tuple[int, int], str] = {}
        self._reasons: Counter[str] = Counter()
        self._info = EnvironmentInfo()
        self._tasks: Sequence[Task] = ()
        self._began = time.monotonic()
        self._before = 0.0
        if (folder / METADATA).exists():
            self._check()

    def _check(self) -> None:
        """Whether the folder was begun with equal settings. Raises ConfigError."""
        try:
            known = json.loads((self.folder / METADATA).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{self.folder} cannot be read ({error}); use another folder") from None
        check_same(SETTINGS, known, self.settings, self.folder)
        before, now = int(known["num_examples"]), self.trial.num_examples
        if now != ALL and now < before:
            raise ConfigError(
                f"num_examples = {now} is refused: {self.folder} was begun with {before}; "
                "it may grow, not shrink"
            )
        self._before = float(known.get("time", 0.0))

    @contextmanager
    def held(self, info: EnvironmentInfo, tasks: Sequence[Task]) -> Iterator[None]:
        """The folder, made, locked and read; metadata.json says at the end how it went, whatever ended it."""
        with held(self.folder, f"{self.folder} is being filled by another evaluation; wait for it"):
            if (self.folder / METADATA).exists():
                self._check()  # again: another evaluation may have begun it since
            self._info, self._tasks = info, tasks
            # Not before: services load first, and other evaluations of the same file are played.
            self._began = time.monotonic()
            self.results = self._read()
            recover_lines(self.folder / FAILURES)
            try:
                self.save()
                yield
            finally:
                self.save()

    def _read(self) -> list[Row]:
        """The results of the folder, which is locked.

        Where rewards compare the members of a group, an example of which one is missing is played again
        whole, and what it has is dropped.
        """
        file = self.folder / RESULTS
        rows = [_figures(row) for row in recovered(file)]
        if self._info.group_scoring:
            members = Counter(row["example_id"] for row in rows)
            torn = {one for one, count in members.items() if count != self.trial.rollouts_per_example}
            if torn:
                write_lines(file, [row for row in recovered(file) if row["example_id"] not in torn])
                rows = [row for row in rows if row["example_id"] not in torn]
        return rows

    def wanted(self) -> dict[int, list[int]]:
        """Of each task, the members that have no result yet."""
        done = {_key(row) for row in self.results}
        members = range(self.trial.rollouts_per_example)
        return {
            task.index: [member for member in members if (task.index, member) not in done]
            for task in self._tasks
        }

    def note(self, task: Task, rollout: Rollout) -> None:
        """Take a rollout."""
        if rollout.HasField("failure"):
            kind = self.failures[task.index, rollout.member] = failure_kind(rollout)
            reason = " ".join(rollout.failure.message.split())[:SHOWN_OF_A_REASON]
            self._reasons[f"{kind}: {reason}"] += 1
            append_line(self.folder / FAILURES, failure_row(task, rollout))
            return
        row = result_row(task, rollout)
        append_line(self.folder / RESULTS, row)
        self.results.append(_figures(row))

    @property
    def failed(self) -> Counter[str]:
        """Rollouts of this attempt without a result, by the kind of failure."""
        return Counter(self.failures.values())

    @property
    def why_nothing(self) -> str:
        """Where every rollout failed: the reason that most of them had; else empty."""
        if self.results or not self._reasons:
            return ""
        ((reason, count),) = self._reasons.most_common(1)
        return f"{count} of {self._reasons.total()} rollouts, which all failed, ended as {reason}"

    def summary(self) -> Summary | None:
        """None where there is no result."""
        groups: dict[int, list[float]] = {}
        compared: dict[int, dict[str, list[float]]] = {}
        for row in self.results:
            groups.setdefault(row["example_id"], []).append(row["reward"])
            roles = compared.setdefault(row["example_id"], {})
            for part in row.get("parts", [{"agent": "", "reward": row["reward"]}]):
                roles.setdefault(part["agent"], []).append(part["reward"])
        if not groups:
            return None
        trial, lists = self.trial, {example: list(roles.values()) for example, roles in compared.items()}
        return summarise(groups, trial.pass_threshold, trial.rollouts_per_example, lists)

    def save(self) -> None:
        """Write metadata.json."""
        write_json(self.folder / METADATA, self.metadata(), PRIVATE)

    def metadata(self) -> Row:
        """Settings and figures."""
        figures, tried = self.summary(), len(self.results) + len(self.failures)
        usage = [row["token_usage"] for row in self.results]
        means = means_by_name(row["metrics"] for row in self.results)
        return {
            **self.settings,
            "name": self.trial.name,
            "num_examples": len(self._tasks),
            "shuffle": False,
            "shuffle_seed": None,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "time": self._before + time.monotonic() - self._began,
            "avg_reward": figures.mean if figures else None,
            "avg_metrics": {name: one if math.isfinite(one) else None for name, one in means.items()},
            "avg_error": len(self.failures) / tried if tried else 0.0,
            "pass_at_k": figures.pass_at_k if figures else {},
            "pass_all_k": figures.pass_all_k if figures else {},
            "pass_threshold": self.trial.pass_threshold,
            "usage": means_by_name(usage) or None,
            "version_info": {
                "vf_version": self._info.verifiers_version,
                "vf_commit": None,
                "env_version": self._info.version or None,
                "env_commit": None,
            },
            "state_columns": [],
            "path_to_save": str(self.folder),
            "tools": None,
            # Beyond Verifiers' form.
            "reward_std": figures.deviation if figures else None,
            "reward_stderr": figures.error if figures else None,
            "reward_std_within_example": figures.within if figures else None,
            "truncated": fmean(row["is_truncated"] for row in self.results) if self.results else None,
            "results": len(self.results),
            "rollouts": len(self._tasks) * self.trial.rollouts_per_example,
            "failures": dict(self.failed),
            "policy_versions": sorted({one for row in self.results for one in row["policy_versions"]}),
        }


def settings_of(trial: Trial, source: Source) -> dict[str, Any]:
    """What the results depend on, as it stands in metadata.json."""
    return {
        "env_id": trial.hosted.id,
        "env_args": trial.hosted.args,
        "split": trial.split,
        "model": source.name,
        "base_url": source.base_url,
        "rollouts_per_example": trial.rollouts_per_example,
        "sampling_args": trial.sampling.model_dump(mode="json", exclude_none=True, exclude_defaults=True),
    }


def _key(row: Mapping[str, Any]) -> tuple[int, int]:
    return row["example_id"], row["rollout"]


def _figures(row: Row) -> Row:
    parts = {"parts": row["parts"]} if "parts" in row else {}
    return {name: row[name] for name in FIGURES} | parts
