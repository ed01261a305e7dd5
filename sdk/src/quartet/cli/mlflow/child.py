"""The process that speaks to a tracking server of MLflow.

`python -m quartet.cli.mlflow.child PLAN.json`, or `check URI`.

It does what elsewhere/child.py says of each such process, and:

1. The run there is the one of its experiment that has the plan's `run_id` as its tag IDENTITY; it is made
   where there is none, and gone on with where there is.
2. Points are sent in whole, many in one request, with the number of the last as the tag SENT: what the server
   has is not sent again, and nothing after it is left out. What was being sent when the process was killed is
   sent again with the same values, times and steps, which a server with a database has once.
3. Where the plan names no address, it is that of the library's own variables: passwords that these have are
   in no file, and in nothing that is said.
4. No metric has another's name as its folder: a server may make files of them, and then takes neither
   (`Apart`).
5. A metric stands at its run's step and at the time of its event. Settings are parameters; one that was told
   before is never changed there, because MLflow allows none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quartet.cli.elsewhere import child
from quartet.cli.elsewhere.child import LOGGING, STOPPED_CODE, Instructions, Told, serve
from quartet.cli.points import Point
from quartet.kit.imports import uncollected
from quartet.run.mlflow import named

#: Tags by which a run is found again.
IDENTITY, SENT = "quartet.run", "quartet.event"
#: What MLflow takes at once: 1000 things, of which SENT is one; more go out in several requests.
MAX_METRICS, MAX_PARAMETERS = 999, 100
#: Letters of a parameter.
MAX_PARAMETER = 6000


@dataclass(frozen=True, kw_only=True)
class Plan(child.Plan):
    """What is to be told, and as what."""

    tracking_uri: str
    experiment: str
    name: str
    tags: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)


class Logged:
    """One run there."""

    def __init__(self, client: Any, plan: Plan) -> None:
        """Found, or made. Raises what the library raises."""
        self._client = client
        experiment = client.get_experiment_by_name(plan.experiment)
        if experiment is not None and experiment.lifecycle_stage == "deleted":
            raise PermissionError(
                f"the experiment {plan.experiment!r} was deleted there; restore it, or name another by "
                "mlflow.experiment"
            )
        number = client.create_experiment(plan.experiment) if experiment is None else experiment.experiment_id
        found = client.search_runs([number], f"tags.`{IDENTITY}` = '{plan.run_id}'", max_results=1)
        run = (
            found[0] if found else client.create_run(number, tags={IDENTITY: plan.run_id}, run_name=plan.name)
        )
        self.id = run.info.run_id
        self.sent = int(run.data.tags.get(SENT, 0))
        self._apart = Apart(run.data.metrics)
        self.where = address_of(client.tracking_uri, number, self.id)
        client.update_run(self.id, status="RUNNING", name=plan.name)
        self._describe(plan, run.data.params)

    def _describe(self, plan: Plan, known: dict[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        tags = [RunTag(*item) for item in plan.tags.items()]
        new = [Param(*item) for item in plan.parameters.items() if item[0] not in known]
        for part in batches(new, MAX_PARAMETERS):
            self._client.log_batch(self.id, params=part, synchronous=True)
        for part in batches(tags, MAX_PARAMETERS):
            self._client.log_batch(self.id, tags=part, synchronous=True)

    def send(self, points: Sequence[Point]) -> None:
        """What of them it has not yet."""
        from mlflow.entities import Metric, RunTag

        for values, last in parts(point for point in points if point.number > self.sent):
            metrics = [Metric(self._apart.named(value[0]), *value[1:]) for value in values]
            sent = [RunTag(SENT, str(last))]
            self._client.log_batch(self.id, metrics=metrics, tags=sent, synchronous=True)
            self.sent = last

    def end(self, ending: child.Ending) -> None:
        """How the run ended, with what it came to as tags."""
        from mlflow.entities import RunTag

        told = flat(ending.summary, "summary")
        for part in batches([RunTag(*item) for item in told.items()], MAX_PARAMETERS):
            self._client.log_batch(self.id, tags=part, synchronous=True)
        status = {0: "FINISHED", STOPPED_CODE: "KILLED"}.get(ending.exit_code, "FAILED")
        self._client.set_terminated(self.id, status)


class Apart:
    """Names of which none is the folder of another: "judge/clarity" beside "judge" is "judge_clarity"; a
    "judge" that comes later is "judge_"."""

    def __init__(self, known: Iterable[str]) -> None:
        """`known`: those that the run has there."""
        self._names: set[str] = set()
        self._folders: set[str] = set()
        for name in known:
            self._add(name)

    def named(self, name: str) -> str:
        """The name, or one beside those that are in its way; always the same one."""
        whole, *inner = name.split("/")
        for part in inner:
            whole += f"{'_' if whole in self._names else '/'}{part}"
        while whole in self._folders:
            whole += "_"
        self._add(whole)
        return whole

    def _add(self, name: str) -> None:
        self._names.add(name)
        self._folders.update(name[:at] for at, letter in enumerate(name) if letter == "/")


#: Name, value, milliseconds, step.
Value = tuple[str, float, int, int]


def parts(points: Iterable[Point]) -> Iterator[tuple[list[Value], int]]:
    """What is sent at once, in whole points, and the number of the last of these."""
    values: list[Value] = []
    last = 0
    for point in points:
        new = values_of(point)
        if values and len(values) + len(new) > MAX_METRICS:
            yield values, last
            values = []
        values += new
        last = point.number
    if last:
        yield values, last


def values_of(point: Point) -> list[Value]:
    """A point's numbers, by names that MLflow takes; the step is where they stand."""
    told = {
        named(name): value for name, value in point.values.items() if name != "step" and value is not None
    }
    at_ms = int(1000 * point.at_seconds)
    # In order: of two of which one is the other's folder, that one keeps its name.
    return [(name, float(value), at_ms, point.step) for name, value in sorted(told.items())][:MAX_METRICS]


def flat(settings: Any, name: str = "") -> dict[str, str]:
    """Tables and lists spread over names: `env.0.id`."""
    match settings:
        case dict():
            inner: Any = settings.items()
        case list():
            inner = enumerate(settings)
        case _:
            return {named(name): str(settings)[:MAX_PARAMETER]} if settings is not None else {}
    spread: dict[str, str] = {}
    for key, value in inner:
        spread |= flat(value, f"{name}.{key}" if name else str(key))
    return spread


def batches(whole: list[Any], size: int) -> Iterator[list[Any]]:
    """Parts of so many at most."""
    for start in range(0, len(whole), size):
        yield whole[start : start + size]


def address_of(tracking_uri: str, experiment: str, run: str) -> str:
    """Of the run's page, without a password; where there is no page, of the store."""
    parts = urlsplit(tracking_uri)
    shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
    is_page = shown.lower().startswith("http")
    return f"{shown}/#/experiments/{experiment}/runs/{run}" if is_page else shown


def report(file: Path, told: Told) -> None:
    """Tell of the run until it ended."""
    plan = Plan(**json.loads(file.read_text()))
    instructions = Instructions(sys.stdin, plan.finish_seconds, told)
    with uncollected():
        from mlflow import MlflowClient

    run = Logged(MlflowClient(plan.tracking_uri or None), plan)
    told(LOGGING, run.where)
    for points in instructions.followed(Path(plan.folder)):
        run.send(points)
    run.end(instructions.ending)


def check(tracking_uri: str) -> None:
    """Whether the library is here and takes the address; nothing is sent. Raises what it raises."""
    with uncollected():
        from mlflow import MlflowClient

    MlflowClient(tracking_uri or None)


if __name__ == "__main__":
    sys.exit(serve("mlflow", sys.argv[1:], check, report))
