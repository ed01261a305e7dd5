"""The deployment tables of a run's file: carried to the services, which alone know their keys.

1. prime-rl has a run's keys in the tables of its programs. Its own files are read as they are (prime_rl);
   where such a key stands in a file of ours, a refusal of each says where it goes: the service does not know
   what a run is made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import pydantic

from quartet.config.model import ELSEWHERE, wrong
from quartet.run.other_names import AS_TABLES, REMEDIES, SAME
from quartet.run.sampling import SamplingConfig
from quartet.run.values import FileTable, is_refused

_MODEL = "set 'model' at the top of the file to the model's folder"
_ENV = "write [[env]] alone, for each environment"
#: prime-rl's example has keys of the run among its args.
_ENV_TABLE = (
    "write [[env]] with its id and args in the file of the run; rollouts_per_example and max_concurrent are "
    "no args, and stand at its top"
)
_ADVANTAGE = (
    "set 'algorithm.preset' or 'algorithm.advantage'; a function of your own is "
    'orchestrator.advantages.NAME = "package.module:function", with algorithm.advantage = "custom" and '
    'algorithm.custom_advantage = "NAME"'
)
_LOG = "set 'log_level' in this table"
_GPUS = "set 'gpus' in this table"
_NODES = "set 'nodes' in this table to how many machines it has"
_REPLICAS = "set 'replicas' in this table to how many engines each of its machines has"
#: What the launcher reads, as it is called elsewhere or by a slip; a service would name its own keys alone.
_OF_MACHINES = {"gpu": _GPUS, "n_gpus_per_node": _GPUS, "num_gpus": _GPUS} | dict.fromkeys(
    ("machines", "nnodes", "node", "num_nodes"), _NODES
)

#: Keys of others' tables that the service of that name has not; each is at the top of the file, or called
#: otherwise there.
MISPLACED: Mapping[str, Sequence[str]] = {
    "trainer": (
        *("algorithm", "batch_size", "ckpt", "ckpt_interval", "ckpt_path", "critic", "critic_warmup"),
        *("default_local_dir", "epochs", "eval_before_train", "eval_interval", "experiment_name"),
        *("hf_save_interval", "learning_rate", "logger", "lora", "lr", "lr_scheduler", "max_grad_norm"),
        *("max_ckpts_to_keep", "max_prompt_length", "max_steps", "optim", "optimizer"),
        *("policy_mini_batch_size", "project_name", "resume_mode", "run_name", "save_freq"),
        *("scheduler", "seed", "seq_len", "test_freq", "total_epochs", "total_training_steps"),
        *("train_batch_size", "update_epochs_per_batch", "val_before_train", "wandb", "warmup_steps"),
        *("weight_broadcast", "weight_decay"),
    ),
    "orchestrator": (
        *("async_level", "batch_size", "buffer", "ckpt", "eval", "group_size", "lr"),
        *("max_async_level", "max_off_policy_steps", "max_steps", "optim", "rollouts_per_example"),
        *("rollouts_per_prompt", "sampling", "seed", "seq_len", "wandb", "weight_broadcast"),
    ),
    "inference": (
        *("gpu_memory_utilization", "parallel", "sampling", "seq_len", "tensor_parallel_size"),
        "weight_broadcast",
    ),
    "envhost": (),
}

#: What is in some of them, by its name here: of one that holds nothing else, that is told alone.
INSIDE: Mapping[str, Mapping[str, str]] = {
    "trainer": {
        "optim.type": "optimizer",
        "optim.lr": "learning_rate",
        "optim.weight_decay": "weight_decay",
        "optim.max_norm": "max_grad_norm",
        "optim.betas1": "adam_beta1",
        "optim.betas2": "adam_beta2",
        "scheduler.type": "lr_scheduler",
        "scheduler.warmup_steps": "warmup_steps",
        "scheduler.decay_steps": "decay_steps",
        "scheduler.min_lr": "min_lr",
    },
    "orchestrator": {f"sampling.{key}": f"sampling.{key}" for key in SamplingConfig.model_fields},
    "inference": {},
    "envhost": {},
}

#: Others, and what to write.
IN_TABLES: Mapping[str, Mapping[str, str]] = {
    "trainer": {
        "model": _MODEL,
        **_OF_MACHINES,
        "loss": REMEDIES["loss_type"],
        "policy": f"{_MODEL}; {REMEDIES['optim']}",
        "placement": REMEDIES["colocate_all"],
        "log": "its log tells everything at level info; remove it",
    },
    "orchestrator": {
        "model": _MODEL,
        "env": _ENV,
        "environment": _ENV_TABLE,
        "train": "[sampling], [[env]] and [algorithm] stand at the top of the file",
        "advantage": _ADVANTAGE,
        "filters": "write a table [difficulty_filter]",
        "log": _LOG,
    },
    "inference": {
        **_OF_MACHINES,
        **dict.fromkeys(("num_engines", "num_inference_engines", "num_replicas", "replica"), _REPLICAS),
        "model.name": _MODEL,
        "enforce_eager": REMEDIES["gpu_memory_utilization"],
        "log": _LOG,
    },
    "envhost": {"env": _ENV},
}


def _without_keys_of_a_run(table: dict[str, Any], info: pydantic.ValidationInfo) -> dict[str, Any]:
    service = str(info.field_name)
    remedies = _remedies(service)
    held = [name for name in remedies if _holds(table, name.split("."))]
    apart = {name for name in held if _is_told_inside(table, name, INSIDE[service])}
    told = [
        name
        for name in held
        if name not in apart and (name not in INSIDE[service] or name.partition(".")[0] in apart)
    ]
    problems = [(ELSEWHERE, tuple(name.split(".")), table, remedies[name]) for name in told]
    if problems:
        raise wrong(service, *problems)
    return table


def own_keys(service: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """What stands in a service's table and is not refused by the run: no key of a run's, and no value that a
    file of the service's cannot have."""
    names = {name.partition(".")[0] for name in _remedies(service)}
    own = {key: value for key, value in table.items() if key.replace("-", "_") not in names}
    return {key: value for key, value in own.items() if not is_refused(value)}


def is_misplaced(name: str) -> bool:
    """Whether a dotted name is one of these."""
    service, _, key = name.partition(".")
    return service in MISPLACED and any(f"{key}.".startswith(f"{one}.") for one in _remedies(service))


def _remedies(service: str) -> dict[str, str]:
    inside = {name: _called(key) for name, key in INSIDE[service].items()}
    return {name: _at_the_top(name) for name in MISPLACED[service]} | inside | dict(IN_TABLES[service])


def _at_the_top(name: str) -> str:
    if name in SAME:
        return _called(SAME[name])
    here = "it stands at the top of the file; of an option leave out the name of the table"
    return REMEDIES.get(name) or AS_TABLES.get(name, here)


def _called(key: str) -> str:
    return f"set {key!r} at the top of the file, or write '--{key.replace('_', '-')} VALUE'"


def _is_told_inside(table: Mapping[str, Any], name: str, inside: Mapping[str, str]) -> bool:
    """Whether all that is in a table of that name is told by its own name."""
    own = next((one for key, one in table.items() if key.replace("-", "_") == name), None)
    return (
        isinstance(own, Mapping)
        and bool(own)
        and all(f"{name}.{key.replace('-', '_')}" in inside for key in own)
    )


def _holds(table: Any, path: Sequence[str]) -> bool:
    if not path:
        return True
    if not isinstance(table, Mapping):
        return False
    return any(_holds(inner, path[1:]) for key, inner in table.items() if key.replace("-", "_") == path[0])


#: A service's table.
ServiceTable = Annotated[FileTable, pydantic.AfterValidator(_without_keys_of_a_run)]
