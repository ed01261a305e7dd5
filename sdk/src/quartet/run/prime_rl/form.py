"""Which files are prime-rl's: by keys that only one of the two dialects has.

1. A file with keys of prime-rl's form and none of Quartet's own is prime-rl's.
2. One with both is MIXED: nobody knows by whose defaults its author goes.
3. One with neither ([ckpt], [wandb], [slurm], max_steps, max_num_seqs of vLLM say the same in both) is
   Quartet's. So is an option by such a key, but for max_steps: it is laid over what files say, of either
   form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Final

from quartet.run.config import RunConfig
from quartet.run.slurm import SlurmConfig

#: Tables and keys at the top of a file that a run of Quartet does not have.
AT_THE_TOP: Final = frozenset(
    {
        *("async_level", "base_dir", "bench", "broadcast_backend", "clean", "clean_output_dir"),
        *("deployment", "dry_run", "dump_config", "env_server_base_port", "env_vars", "experimental"),
        *("file_monitor", "gpus_per_node", "hf_hub_offline", "inference_gpu_ids", "job_name", "log"),
        *("max_async_level", "max_model_len", "monitors", "nodes_per_fsdp_group", "num_infer_nodes"),
        *("num_train_nodes", "output_dir", "project_dir", "resume", "rollout_transport", "run"),
        *("seq_len", "slurm_template", "teacher_gpu_ids"),
        *("teacher_inference", "tokenizer", "trainer_gpu_ids", "weight_broadcast"),
    }
)
#: Keys of the services' tables that the services of the same name here do not have.
OF_SERVICES: Final[Mapping[str, frozenset[str]]] = {
    "trainer": frozenset(
        {
            *("async_level", "bench", "ckpt", "data", "dist_timeout_seconds", "enable_router_replay"),
            *("enable_token_export", "env_vars", "experimental", "file_monitor", "gc", "heartbeat", "log"),
            *("loss", "matmul_precision", "max_async_level", "max_concurrent_runs", "max_steps"),
            *("memory_profiler_path", "metrics_server", "model", "monitor", "monitors", "optim"),
            *("output_dir", "recompute_logprobs", "resume", "rollout_transport", "scheduler", "tokenizer"),
            *("trace_path", "wandb", "weight_broadcast", "weights"),
        }
    ),
    "orchestrator": frozenset(
        {
            *("advantage", "algo", "async_level", "batch_size", "bench", "buffer", "ckpt", "client"),
            *("collect_inference_metrics", "concurrency", "constant_trainer_batch_size", "env"),
            *("env_install_prerelease", "env_mix", "env_server_base_port", "env_vars", "environment"),
            *("eval", "experimental", "file_monitor", "filters", "group_size", "heartbeat"),
            *("inference_metrics_roles", "log", "lora_name", "mask_env_responses"),
            *("mask_truncated_completions", "max_async_level", "max_concurrent"),
            *("max_inflight_groups", "max_inflight_rollouts"),
            *("max_off_policy_steps", "max_steps", "micro_batch_size", "model", "monitor", "monitors"),
            *("num_train_workers", "optim", "output_dir", "oversampling_factor", "pad_to_multiple_of"),
            *("pool_size", "post_batch_filters", "pre_batch_filters", "prime_monitor"),
            *("reload_weights_on_start", "renderer", "resume", "rollout_transport"),
            *("rollouts_per_example", "sampling", "seed", "seq_len", "strict_async_level"),
            *("tasks_per_minute", "teacher", "teacher_model", "teacher_rollout_model", "token_batch_size"),
            *("tokenizer", "train", "training_mode", "trajectory_strategy", "use_renderer"),
            *("use_token_client", "val", "wandb", "weight_broadcast", "workers_per_env"),
            "zero_truncated_completions",
        }
    ),
    "inference": frozenset(
        {
            *("all2all_backend", "api_server_count", "backend_port", "calculate_kv_scales"),
            *("data_parallel_rpc_port", "data_parallel_size_local", "deployment", "dry_run"),
            *("enable_dbo", "enable_eplb"),
            *("enable_expert_parallel", "enable_fp32_lm_head", "enable_fp32_router_logits"),
            *("enable_lora", "enable_prefix_caching", "enable_return_routed_experts", "env_vars"),
            *("experimental", "gpu_memory_utilization", "kv_cache_offload", "log", "lora_target_modules"),
            *("max_cpu_loras", "max_lora_rank", "max_loras", "output_dir", "parallel", "renderer"),
            *("router", "seed", "slurm", "use_deep_gemm", "vllm_extra", "weight_broadcast"),
        }
    ),
}
#: Keys of [slurm] that say the same in both.
OF_BOTH_SLURMS: Final = frozenset({"account", "gpus_per_node", "job_name", "partition", "time"})
#: What a table has there where Quartet has a table of the same name.
INSIDE: Final[Mapping[str, frozenset[str]]] = {
    "ckpt": frozenset({"keep", "output_dir", "resume_step", "weights", "weights_only"}),
    "wandb": frozenset({"id", "log_extras", "offline", "shared"}),
    "inference.server": frozenset({"host", "port", "liveness_timeout_seconds"}),
    "slurm": frozenset(
        {
            *("base_dir", "cleanup_grace_period", "dry_run", "exclude", "hf_hub_offline"),
            *("launch_modelexpress", "log_dir", "max_requeues", "nodelist", "nodes_per_fsdp_group"),
            *("num_infer_nodes", "num_train_nodes", "pre_run_command", "project_dir", "shared_fs"),
            *("slurm_template", "step_timeout", "template_path"),
        }
    ),
}
#: Of [inference.vllm], what Quartet's alone has, and what says the same in both; all else are arguments of
#: vLLM.
OF_OUR_VLLM: Final = frozenset(
    {"args", "kv_cache_bytes", "kv_on_update", "max_waiting", "staging", "threads"}
)
OF_BOTH_VLLMS: Final = frozenset({"dtype", "max_lora_rank", "max_loras", "max_num_seqs"})
#: Tables that an option without a value writes, with their defaults.
BARE_TABLES: Final = frozenset(
    {
        *("ckpt", "monitors.wandb", "slurm", "wandb", "orchestrator.ckpt", "orchestrator.eval"),
        *("orchestrator.wandb", "trainer.ckpt", "trainer.wandb", "trainer.model.ac"),
        *("trainer.model.ac_offloading", "trainer.model.compile", "trainer.model.experimental.lora"),
        "trainer.model.lora",
    }
)
#: Keys at the top that an option without a value writes true, as it does any other key in a table.
BARE_FLAGS: Final = frozenset({"bench", "clean", "clean_output_dir", "dry_run", "hf_hub_offline"})
#: Keys of a run of Quartet that a file of prime-rl's `rl` has not.
OURS: Final = frozenset(RunConfig.model_fields) - {
    *("ckpt", "inference", "max_steps", "model", "orchestrator", "slurm", "trainer", "wandb")
}
OF_OUR_SLURM: Final = frozenset(SlurmConfig.model_fields) - OF_BOTH_SLURMS
OF_OUR_SERVICES: Final[Mapping[str, frozenset[str]]] = {
    "trainer": frozenset(
        {
            *("context_parallel", "device", "deterministic", "gpus", "gradient_checkpointing", "hub"),
            *(
                "keep_attention",
                "keep_last",
                "liger",
                "losses",
                "max_runs",
                "max_states",
                "microbatch_tokens",
            ),
            *("nodes", "optimizer_offload", "published_versions"),
            *("ranks", "row_tokens", "state_dir", "threads"),
        }
    ),
    "orchestrator": frozenset(
        {
            *("advantages", "data_dir", "envhost_addresses", "goes_on_with", "inference_addresses"),
            *("journal_keep_bytes", "patience_seconds", "security", "stalled_after_seconds"),
            *("teacher_addresses", "trainer_address", "whole_model_runs"),
        }
    ),
    "inference": frozenset(
        {
            *("accept_push", "adapters", "canary_tolerance", "chat", "embedded", "engine", "gpus"),
            *("held_versions", "max_model_len", "nodes", "openai", "python", "replicas"),
            *("routed_experts", "run_id", "shared_memory", "stall_seconds", "weights_address"),
        }
    ),
}


class Form(Enum):
    """Whose a file is."""

    OURS = "Quartet's"
    THEIRS = "prime-rl's"
    MIXED = "both"


def form_of(tables: Mapping[str, Any]) -> tuple[Form, list[str], list[str]]:
    """Whose these tables are, with the keys that say so: prime-rl's, and Quartet's."""
    theirs, ours = sorted(_theirs(tables)), sorted(_ours(tables))
    if not theirs:
        return Form.OURS, theirs, ours
    return (Form.MIXED if ours else Form.THEIRS), theirs, ours


def owns(path: tuple[str, ...]) -> tuple[str, ...] | None:
    """The place of an option's key in a file of prime-rl; None where it is Quartet's."""
    nested: Any = ""
    for part in reversed(path):
        nested = {part: nested}
    return path if path == ("max_steps",) or any(True for _ in _theirs(nested)) else None


def without_value(path: tuple[str, ...]) -> tuple[tuple[str, ...], str] | None:
    """Of an option without a value its place there, and what it says in TOML: a table or true; none or false
    where `no` stands before it. None where it is Quartet's, or a key at the top that has a value."""
    inner, outer = (*path[:-1], path[-1].removeprefix("no_")), (path[0].removeprefix("no_"), *path[1:])
    for place in (inner, outer):
        name = ".".join(place)
        is_table = name in BARE_TABLES
        if is_table or name in BARE_FLAGS or (len(place) > 1 and owns(place)):
            said, unsaid = ("{}", '"None"') if is_table else ("true", "false")
            return place, said if place == path else unsaid
    return None


def _theirs(tables: Mapping[str, Any]) -> Iterator[str]:
    yield from (key for key in tables if key in AT_THE_TOP)
    if isinstance(tables.get("model"), dict):
        yield "model.name"
    for service, keys in OF_SERVICES.items():
        table = tables.get(service)
        if isinstance(table, dict):
            yield from (f"{service}.{key}" for key in table if key in keys)
    for path, keys in INSIDE.items():
        yield from (f"{path}.{key}" for key in _at(tables, path) if key in keys)
    if isinstance(_at(tables, "inference").get("model"), dict):
        yield "inference.model"
    vllm = _at(tables, "inference.vllm")
    theirs = [key for key in vllm if key not in OF_BOTH_VLLMS]
    if theirs and not vllm.keys() & OF_OUR_VLLM and "engine" not in _at(tables, "inference"):
        yield f"inference.vllm.{theirs[0]}"


def _ours(tables: Mapping[str, Any]) -> Iterator[str]:
    yield from (key for key in tables if key.replace("-", "_") in OURS)
    if isinstance(tables.get("model"), str):
        yield "model"
    for service, keys in OF_OUR_SERVICES.items():
        yield from (f"{service}.{key}" for key in _at(tables, service) if key in keys)
    yield from (f"inference.vllm.{key}" for key in _at(tables, "inference.vllm") if key in OF_OUR_VLLM)
    yield from (f"slurm.{key}" for key in _at(tables, "slurm") if key in OF_OUR_SLURM)


def _at(tables: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    node: Any = tables
    for part in path.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}
