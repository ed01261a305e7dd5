"""What the services of `quartet rl` get besides their tables, because of the run that they are started for.

1. The host preloads what the run plays; without a trainer of ours inference takes pushes; vLLM has room for
   the adapter; the engine notes what is replayed, and rounds the base as the trainer does that publishes an
   adapter of it. What a table says itself stands.
2. What a table says against the run is refused before anything starts: a loss or an advantage of one's own
   that its service is not given, a rank that vLLM has no room for, a base that is rounded for the trainer
   alone, experts that shall not be noted, another number of states, what is kept of nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quartet.config import ConfigError
from quartet.local.wiring import SERVICES
from quartet.run.algorithm import SHIPPED_LOSSES
from quartet.run.config import RunConfig

Tables = dict[str, dict[str, Any]]


def tables_of(config: RunConfig) -> Tables:
    """A table for each service that the run needs. Raises ConfigError."""
    tables: Tables = {name: dict(getattr(config, name)) for name in SERVICES}
    # Verifiers takes seconds to import, while the other services start.
    asked = (*config.env, *(trial.hosted for trial in config.trials))
    tables["envhost"].setdefault("preload", [{"id": one.id, "args": one.args} for one in asked])
    if config.external_trainer:
        del tables["trainer"]
        tables["inference"].setdefault("accept_push", True)
    else:
        check_keeping(tables["trainer"])
        _keeps_something(tables["trainer"])
        if config.algorithm.custom not in SHIPPED_LOSSES:
            _has("algorithm.custom", config.algorithm.custom, "trainer.losses", tables)
    _has("algorithm.custom_advantage", config.algorithm.custom_advantage, "orchestrator.advantages", tables)
    if config.algorithm.router_replay:
        _notes_experts(tables["inference"])
    if config.lora.enabled and config.lora.publish == "adapter":
        _has_room_for_the_adapter(config.lora.r, tables["inference"])
        _rounds_the_base(config, tables["inference"])
    return tables


def check_keeping(trainer: Mapping[str, Any], begun: int | None = None) -> None:
    """Whether a trainer's table leaves to the run how many states stay; `begun`: as many as one that goes on
    began with. Raises ConfigError."""
    if "keep_last" in trainer:
        remedy = "set ckpt.keep_last" if begun is None else f"write ckpt.keep_last = {begun}, as it was begun"
        raise ConfigError(
            f"trainer.keep_last = {trainer['keep_last']} is for runs that do not say it, and this one does: "
            f"remove it, and {remedy}"
        )


def _keeps_something(trainer: Mapping[str, Any]) -> None:
    """A run of a file never asks for it itself, as a caller of the trainer may."""
    said = {key.replace("-", "_"): value for key, value in trainer.items()}
    if said.get("keep_attention") is True and said.get("gradient_checkpointing", False) is False:
        raise ConfigError(
            "trainer.keep_attention = true keeps a part of what trainer.gradient_checkpointing computes "
            "anew, and that is off; set trainer.gradient_checkpointing = true, or remove it"
        )


def _has(key: str, name: str | None, given: str, tables: Tables) -> None:
    """Whether the service is given the function that the run names by `key`."""
    service, _, functions = given.partition(".")
    known = tables[service].get(functions, {})
    if name is not None and isinstance(known, Mapping) and name not in known:
        raise ConfigError(
            f'{key} = {name!r} is none of {given}; give {given}.{name} = "package.module:function"'
        )


def _notes_experts(inference: dict[str, Any]) -> None:
    if inference.setdefault("routed_experts", True) is False:
        raise ConfigError(
            "algorithm.router_replay = true needs what inference.routed_experts = false forbids; leave one "
            "of them out"
        )


def _has_room_for_the_adapter(rank: int, inference: dict[str, Any]) -> None:
    vllm = inference.get("vllm", {})
    if inference.get("engine") != "vllm" or not isinstance(vllm, Mapping):
        return
    most = vllm.get("max_lora_rank", rank)
    if isinstance(most, int) and most < rank:
        raise ConfigError(
            f"lora.r = {rank} is above inference.vllm.max_lora_rank = {most}; raise that, or leave it out"
        )
    inference["vllm"] = {**vllm, "max_lora_rank": most}


def _rounds_the_base(config: RunConfig, inference: dict[str, Any]) -> None:
    """A version brings no base: the replica holds its own, which has to be that of the canary."""
    key = "served_dtype" if config.served_dtype else "compute_dtype"
    if getattr(config, key) != "bfloat16":
        return  # what is wider than the replica's is within its tolerance, and what follows the device is its
    name = "vllm" if inference.get("engine") == "vllm" else "embedded"
    engine = inference.get(name, {})
    if not isinstance(engine, Mapping):
        return  # inference says so itself
    dtype = engine.get("dtype", "auto")
    if dtype == "float32":
        raise ConfigError(
            f'{key} = "bfloat16" rounds the base that an adapter is published for, and '
            f'inference.{name}.dtype = "float32" does not; set served_dtype = "float32", or '
            f'inference.{name}.dtype to "bfloat16"'
        )
    if dtype == "auto":
        inference[name] = {**engine, "dtype": "bfloat16"}
