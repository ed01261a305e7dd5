"""docs/deploy.md and what Prometheus reads: no metric is missing there, and none is made up."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.registry import Collector
from quartet.kit import build, metrics
from quartet.kit.unknown import enum_name
from quartet.v1.inference_service_pb2 import GetModelResponse
from quartet.v1.orchestrator_service_pb2 import RunPhase
from quartet_envhost import tally
from quartet_envhost.gauges import HostGauges
from quartet_inference import prompts
from quartet_inference.gauges import ReplicaGauges
from quartet_orchestrator.activity import Activity
from quartet_orchestrator.gauges import PHASES, RunGauges
from quartet_trainer.gauges import TrainerGauges
from quartet_trainer.intake import Intake
from quartet_trainer.worker import Worker

# What else a counter or a histogram is called where Prometheus stores it.
SUFFIXES = re.compile(r"_(total|bucket|count|sum)$")


class Idle:
    """A host and a roster with nothing in them."""

    max_in_flight = max_runs = 1

    def glances(self) -> list[Any]:
        return []

    under_way = glances

    def statuses(self) -> dict[str, Any]:
        return {}


def families() -> Iterable[Metric]:
    """Of all services, with the labels of each."""
    loop = asyncio.new_event_loop()
    idle: Any = Idle()
    collectors: list[Collector] = [
        RunGauges(lambda: []),
        ReplicaGauges(GetModelResponse, lambda: (0, 0), loop),
        TrainerGauges(idle, Intake(), Worker(1, False)),
        HostGauges(idle),
    ]
    loop.close()
    for one in collectors:
        yield from getattr(one, "describe", one.collect)()
    for module in (metrics, build, tally, prompts):
        for one in vars(module).values():
            if hasattr(one, "describe") and not isinstance(one, type):
                yield from one.describe()


@pytest.fixture(scope="module")
def section() -> str:
    text = (Path(__file__).parent.parent.parent / "docs/deploy.md").read_text()
    return text.partition("### What Prometheus reads")[2].partition("\n## ")[0]


def test_the_tables_name_every_metric_and_no_other(section: str) -> None:
    exported = Counter(
        f"{one.name}_total" if one.type == "counter" else one.name
        for one in families()
        if one.name.startswith("quartet_")
    )
    rows = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    told = Counter(re.findall(r"`(quartet_\w+)", rows))
    assert told == exported and set(told.values()) == {1}


def test_the_tables_name_every_activity(section: str) -> None:
    assert [one.name for one in Activity if not re.search(rf"\b{one.name}\b", section)] == []


def test_the_rules_ask_for_what_is_there(section: str) -> None:
    (group,) = yaml.safe_load(section.partition("```yaml\n")[2].partition("```")[0])["groups"]
    known = {SUFFIXES.sub("", one.name) for one in families()}
    *own, volumes = group["rules"]
    assert len(own) == 3 and "kubelet_volume_stats_available_bytes" in volumes["expr"]
    for rule in own:
        asked = re.findall(r"quartet_\w+", rule["expr"])
        assert asked and {SUFFIXES.sub("", name) for name in asked} <= known
        # Two deployments may have a run of one name.
        for labels in re.findall(r"(?:on|by) \((.*?)\)", rule["expr"]):
            assert {"namespace", "instance"} & {*labels.split(", ")}
    names = {enum_name(RunPhase, phase) for phase in PHASES}
    phases = "|".join(re.findall(r'phase=~?"([A-Z|]+)"', section)).split("|")
    assert set(phases) == {"FAILED", "STOPPED", "PENDING", "TRAINING"} <= names
