"""Which of this machine's GPUs each process of a local run sees.

1. `gpus` in [trainer] and [inference] is a number of them, or a list of the ones that are meant. Numbers are
   handed out in order, inference first, past those that a list names; no device is given twice.
2. One that says nothing beside one that does is refused: it would take a device that is not its own. `gpus =
   0` computes on the CPU. Where neither says anything every process sees what the launcher sees.
3. The trainer gets a rank for each of its devices, inference a replica for each, or by vLLM for each set that
   its engine spans; they compute there or not at all.

Devices are counted among those that CUDA_VISIBLE_DEVICES leaves the launcher. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice, takewhile
from math import prod
from typing import Any

from quartet.config import ConfigError

Table = dict[str, Any]

#: In the order in which they choose.
ON_DEVICES = ("inference", "trainer")
#: The services that choose none.
ON_NONE = ("orchestrator", "envhost")
#: Arguments of vLLM by whose product one replica's devices are counted.
SPANS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def shared_out(tables: Mapping[str, Table], visible: str | None) -> dict[str, Table]:
    """The tables with `gpus` as a list of devices, and with the ranks or replicas that follow from it.

    `visible` is CUDA_VISIBLE_DEVICES, where it is set. Errors: ConfigError.
    """
    for name in ON_NONE:
        if "gpus" in tables.get(name, {}):
            raise ConfigError(f"{name}.gpus is refused: it computes on no device; leave it out")
    here = [name for name in ON_DEVICES if name in tables]
    asked = {name: tables[name]["gpus"] for name in here if "gpus" in tables[name]}
    if not asked:
        return dict(tables)
    for name, gpus in asked.items():
        if not _is_number(gpus) and not (isinstance(gpus, list) and all(map(_is_number, gpus))):
            raise ConfigError(
                f"{name}.gpus = {gpus!r} is refused: give how many, such as 2, or which, such as [0, 1]"
            )
    for name in here:
        if name not in asked:
            other = next(iter(asked))
            raise ConfigError(
                f"{other}.gpus = {asked[other]!r} leaves open which devices {name} computes on; "
                f"set {name}.gpus, too (0: none, on the CPU)"
            )
    given = _given(asked, visible)
    placed = {name: {**tables[name], "gpus": given[name]} for name in here}
    if given.get("trainer"):
        placed["trainer"] = _ranks(placed["trainer"])
    if given.get("inference"):
        placed["inference"] = _replicas(placed["inference"])
    return {**tables, **placed}


def as_seen(numbers: Sequence[str], visible: str | None) -> list[str]:
    """A machine's devices of these numbers, as its CUDA_VISIBLE_DEVICES names them. Raises ConfigError."""
    if visible is None:
        return list(numbers)
    known = devices_of(visible)
    if max(map(int, numbers), default=-1) >= len(known):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={visible} leaves {len(known)} devices of this machine, and the run wants "
            f"device {max(map(int, numbers))}, counted from 0; give it more, or set gpus to less"
        )
    return [known[int(number)] for number in numbers]


def devices_of(visible: str) -> list[str]:
    """Of a CUDA_VISIBLE_DEVICES, as CUDA reads it: up to the first that is none, such as -1."""
    return list(takewhile(lambda one: one and not one.startswith("-"), map(str.strip, visible.split(","))))


def _given(asked: Mapping[str, Any], visible: str | None) -> dict[str, list[str]]:
    """The devices of each service, as CUDA_VISIBLE_DEVICES names them."""
    known = None if visible is None else devices_of(visible)
    named = {
        number for gpus in asked.values() if isinstance(gpus, list) for number in gpus if _is_number(number)
    }
    rest = (number for number in (count() if known is None else range(len(known))) if number not in named)
    found = {name: list(_chosen(name, gpus, rest, known)) for name, gpus in asked.items()}
    given: set[str] = set()
    for device in (device for devices in found.values() for device in devices):
        if device in given:
            raise ConfigError(f"device {device} stands twice in {' and '.join(found)}.gpus; name it once")
        given.add(device)
    return found


def _chosen(name: str, gpus: Any, rest: Iterator[int], known: Sequence[str] | None) -> Iterator[str]:
    if _is_number(gpus):
        numbers = list(islice(rest, gpus))
        lacks = len(numbers) < gpus
    else:
        numbers = gpus
        lacks = known is not None and max(gpus, default=-1) >= len(known)
    if lacks:
        raise ConfigError(
            f"{name}.gpus = {gpus!r} is more than there is: CUDA_VISIBLE_DEVICES leaves {len(known or ())} "
            f"devices for {' and '.join(ON_DEVICES)} together"
        )
    return (str(number) if known is None else known[number] for number in numbers)


def _ranks(trainer: Table) -> Table:
    # "auto" would take the CPU where there is no CUDA, and say so in its log alone.
    trainer.setdefault("device", "cuda")
    ranks = trainer.setdefault("ranks", len(trainer["gpus"]))
    if ranks != len(trainer["gpus"]):
        raise ConfigError(
            f"trainer.ranks = {ranks!r} is refused: each of its {len(trainer['gpus'])} gpus takes one rank; "
            "leave ranks out"
        )
    return trainer


def _replicas(inference: Table) -> Table:
    if inference.get("engine") != "vllm":
        embedded = inference.get("embedded", {})
        # As for the trainer. What is no table the service refuses.
        if isinstance(embedded, dict):
            inference["embedded"] = {"device": "cuda", **embedded}
        spans = [1]
    else:
        spans = _spans(inference.get("vllm"))
    span = prod(spans)
    devices = len(inference["gpus"])
    replicas = inference.setdefault("replicas", devices // span)
    if replicas * span != devices:
        raise ConfigError(
            f"inference.gpus are {devices}, but {replicas} replicas of {span} devices each "
            f"({' x '.join(SPANS)}) are {replicas * span}; set gpus or replicas to match"
        )
    return inference


def _spans(vllm: Any) -> list[int]:
    """Devices of one replica along each way of spanning them."""
    arguments = vllm.get("args", {}) if isinstance(vllm, dict) else {}
    given = {name: arguments.get(name, 1) for name in SPANS} if isinstance(arguments, dict) else {}
    for name, value in given.items():
        if not _is_number(value) or value == 0:
            raise ConfigError(
                f"inference.vllm.args.{name} = {value!r} is refused: give a whole number from 1 on"
            )
    return list(given.values())


def _is_number(value: Any) -> bool:
    return type(value) is int and value >= 0
