"""The environment host, for Prometheus: its workers and what runs in them.

1. An environment is a label while it is loaded, by its canonical name, and so at most max_loaded at once.
   What is not loaded is a number alone: callers may make up names. Two of one name, with other arguments or
   versions, are added up.
2. `collect` runs in the thread of the endpoint and only reads numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


@dataclass(frozen=True)
class Glance:
    """An environment as it is right now."""

    environment: str
    #: That live and take rollouts.
    workers: int
    #: Rollouts that can be under way at once.
    places: int
    #: Whether it could not be loaded.
    failed: bool


@dataclass(frozen=True)
class UnderWay:
    """A request."""

    environment: str
    #: Rollouts of it that have not ended.
    unfinished: int
    #: Whether its environment is loaded.
    started: bool


class Glanced(Protocol):
    """A host, as far as it is looked at; from any thread."""

    max_in_flight: int

    def glances(self) -> list[Glance]:
        """Of the environments that are loaded, or could not be."""
        ...

    def under_way(self) -> list[UnderWay]:
        """Of the requests."""
        ...


class HostGauges(Collector):
    """Reads the host when somebody scrapes."""

    def __init__(self, host: Glanced) -> None:
        self._host = host

    def collect(self) -> Iterable[Metric]:
        """The families."""
        glances, under_way = self._host.glances(), self._host.under_way()
        workers, places, in_flight = Counter[str](), Counter[str](), Counter[str]()
        for one in glances:
            if not one.failed:
                workers[one.environment] += one.workers
                places[one.environment] += one.places
                in_flight[one.environment] += 0
        for request in under_way:
            if request.started:
                in_flight[request.environment] += request.unfinished
        yield _family("quartet_envhost_workers", "Live workers.", workers)
        yield _family("quartet_envhost_places", "Rollouts that can be under way at once.", places)
        yield _family("quartet_envhost_rollouts_in_flight", "Rollouts accepted and not yet ended.", in_flight)
        yield GaugeMetricFamily(
            "quartet_envhost_rollouts_waiting",
            "Rollouts accepted whose environment is being loaded.",
            sum(request.unfinished for request in under_way if not request.started),
        )
        yield GaugeMetricFamily(
            "quartet_envhost_max_rollouts_in_flight",
            "Rollouts that are accepted at once, over all environments.",
            self._host.max_in_flight,
        )
        yield GaugeMetricFamily(
            "quartet_envhost_failed_environments",
            "Environments that could not be loaded when they were asked for last.",
            sum(one.failed for one in glances),
        )


def _family(name: str, what: str, by_environment: Counter[str]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, what, labels=["environment"])
    for environment, value in sorted(by_environment.items()):
        family.add_metric([environment], value)
    return family
