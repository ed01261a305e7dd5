"""Keys of prime-rl that become no key of a run: why nothing is missed, or what to write instead.

A key names all that is in its table. Read off the configuration of prime-rl 0.8.0, and of its releases before
for what is no longer there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_FIND = "services find each other"
_WEIGHTS = "weights travel over gRPC"
_ROLLOUTS = "rollouts travel over gRPC"
_LOG = "every service has its log"
_MEASURED = "metrics are in metrics.jsonl, and at server.metrics_address"
_FOLDER = "everything is in the output folder"
_COMPUTES = "how it computes is the trainer's own choice"
_RANKS = "ranks share the model by FSDP2"
_ENGINE = "the engine sees to it"
_ENVIRONMENT = "services inherit the environment: set it where the command is given"
_TEMPLATE = "chats are rendered by the model's own template, and keep the exact tokens"
_HOST = "the environment host sees to its workers"
_WHOLE_STATE = "a state is saved and restored whole"
_HAS_THEM = "this machine has as many as it has"
_QUEUED = "a job runs in the folder that it is queued from"
_MODEL = "the model is exported after the last step, and by quartet export"

SERVICES: Final = ("trainer", "orchestrator", "inference")

#: Of each key, the values that say nothing, and the remedy for every other one.
Refusals = Mapping[str, tuple[tuple[Any, ...], str]]


def _of_all(key: str, reason: str) -> dict[str, str]:
    return {key: reason} | {f"{service}.{key}": reason for service in SERVICES}


#: What Quartet does by itself, or does not need.
LEFT_OUT: Final[Mapping[str, str]] = {
    **_of_all("weight_broadcast", _WEIGHTS),
    **_of_all("rollout_transport", _ROLLOUTS),
    **_of_all("log", _LOG),
    **_of_all("env_vars", _ENVIRONMENT),
    **_of_all("file_monitor", _MEASURED),
    **_of_all("monitors.file", _MEASURED),
    **_of_all("heartbeat", _MEASURED),
    **_of_all("dry_run", "there is --dry-run"),
    "monitors.prime": "there is quartet watch",
    "orchestrator.monitors.prime": "there is quartet watch",
    "orchestrator.prime_monitor": "there is quartet watch",
    "trainer.output_dir": _FOLDER,
    "orchestrator.output_dir": _FOLDER,
    "inference.output_dir": _FOLDER,
    "clean": "there is --overwrite",
    "clean_output_dir": "there is --overwrite",
    "dump_config": "there is --dry-run",
    "broadcast_backend": _WEIGHTS,
    "env_server_base_port": _FIND,
    "run.dir": _FOLDER,
    "gpus_per_node": _HAS_THEM,
    "deployment.gpus_per_node": _HAS_THEM,
    "deployment.nodes_per_fsdp_group": _RANKS,
    "deployment.orchestrator_on_inference": "the orchestrator is on the first machine",
    # Of the trainer.
    **{
        f"trainer.model.{key}": _COMPUTES
        for key in (
            *("attn", "compile", "conversion_dir", "fused_lm_head_chunk_size", "ac_offloading", "impl"),
            *("fused_lm_head_token_chunk_size", "index_cache", "moe", "moe_router_dtype"),
            *("moe_use_grouped_mm", "load_using_meta", "liger", "optimization_dtype", "reduce_dtype"),
        )
    },
    **{
        f"trainer.model.{key}": _RANKS
        for key in (
            *("cp_style", "deepep_num_sms", "deepep_token_chunk_size", "dp_replicate", "ep"),
            *("ep_comm_backend", "reshard_after_forward", "tp"),
        )
    },
    "trainer.model.debug.force_balanced_routing": _COMPUTES,
    "trainer.matmul_precision": _COMPUTES,
    "trainer.gc": _COMPUTES,
    "trainer.dist_timeout_seconds": _RANKS,
    "trainer.max_concurrent_runs": "the trainer's max_runs decides",
    "trainer.metrics_server": _MEASURED,
    "trainer.enable_token_export": "rollouts/ of the output folder has every token",
    "trainer.recompute_logprobs": "there is checks.verify_logprobs",
    "trainer.weights": _MODEL,
    "trainer.data.small_batch_granularity": _COMPUTES,
    **{
        f"{prefix}ckpt.{key}": reason
        for prefix in ("", "trainer.", "orchestrator.")
        for key, reason in {
            "output_dir": _FOLDER,
            "weights": _MODEL,
            "weights_only": "saved states have the optimizer, too",
            "skip_gather_master_weights": _MODEL,
            "save_async": _COMPUTES,
            "async_save": _COMPUTES,
            "skip_progress": _WHOLE_STATE,
            "skip_scheduler": _WHOLE_STATE,
            "skip_dataloader": _WHOLE_STATE,
            "skip_optimizer": _WHOLE_STATE,
            "skip_buffer": _WHOLE_STATE,
            "buffer_path": _FOLDER,
            "wait_for_weights_timeout": _WEIGHTS,
        }.items()
    },
    # Of the orchestrator.
    "orchestrator.client": _FIND,
    "orchestrator.model.client": _FIND,
    "orchestrator.renderer": _TEMPLATE,
    "orchestrator.use_renderer": _TEMPLATE,
    "orchestrator.use_token_client": _TEMPLATE,
    "orchestrator.trajectory_strategy": _TEMPLATE,
    "orchestrator.pool_size": _TEMPLATE,
    "orchestrator.num_train_workers": _RANKS,
    "orchestrator.pad_to_multiple_of": _RANKS,
    "orchestrator.micro_batch_size": "microbatch_tokens decides",
    "orchestrator.workers_per_env": _HOST,
    "orchestrator.max_env_worker_restarts": _HOST,
    "orchestrator.env_server_base_port": _FIND,
    "orchestrator.env_install_prerelease": "environments are installed by quartet env install",
    "orchestrator.collect_inference_metrics": _MEASURED,
    "orchestrator.inference_metrics_roles": _MEASURED,
    "orchestrator.reload_weights_on_start": _WEIGHTS,
    "orchestrator.lora_name": "an adapter is named after its run",
    "orchestrator.model.lora.name": "an adapter is named after its run",
    "orchestrator.optim": "it is of several runs on one trainer; trainer.optim decides",
    "orchestrator.concurrency.initial_inflight": "as many as max_concurrent from the beginning",
    "orchestrator.concurrency.min_inflight": "as many as max_concurrent from the beginning",
    "orchestrator.strict_async_level": "the newest weights sample",
    "orchestrator.buffer.seed": "seed decides",
    "orchestrator.buffer.hash_keys": "the journal has what was sampled",
    "orchestrator.buffer.easy_fraction": "tasks are in no pools",
    "orchestrator.buffer.hard_fraction": "tasks are in no pools",
    "orchestrator.train.num_workers": _HOST,
    "orchestrator.eval.num_workers": _HOST,
    "orchestrator.eval.skip_eval_on_resume": "an evaluation is done once",
    "orchestrator.eval.skip_eval_on_restart": "an evaluation is done once",
    "orchestrator.eval.retrigger_on_resume": "an evaluation is done once",
    "orchestrator.eval.cancel_inflight_rollouts_on_eval": "training samples on beside evaluations",
    "orchestrator.eval.watcher": "evaluations are asked for by the run",
    # Of inference.
    "inference.server": _FIND,
    "inference.api_server_count": _FIND,
    "inference.router": _FIND,
    "inference.renderer": _TEMPLATE,
    "inference.data_parallel_rpc_port": _FIND,
    "inference.data_parallel_size_local": _FIND,
    "inference.model.reasoning_parser": "thinking is read as the chat template marks it",
    "inference.model.enable_auto_tool_choice": "tool calls are read wherever there are tools",
    "inference.backend_port": _FIND,
    "inference.deployment.gpus_per_node": _HAS_THEM,
    **{
        f"inference.deployment.{key}": _FIND
        for key in ("backend_port", "router", "router_policy", "router_port")
    },
    "inference.slurm": "inference is in the job of the run, which [slurm] is of",
    "inference.kv_cache_offload": _ENGINE,
    **{
        f"inference.{key}": "the engine has room for the run's adapter"
        for key in ("enable_lora", "lora_target_modules", "max_cpu_loras", "max_lora_rank", "max_loras")
    },
    "inference.enable_return_routed_experts": "it follows algorithm.router_replay",
    "inference.enable_fp32_lm_head": "logits are float32 (docs/numerics.md)",
    "inference.enable_fp32_router_logits": _ENGINE,
    "inference.use_deep_gemm": _ENGINE,
}

#: Of [slurm], where the run is started; and what was at the top of a file before there was that table.
OF_A_JOB: Final[Mapping[str, str]] = {
    **{
        f"{prefix}{key}": reason
        for prefix in ("slurm.", "")
        for key, reason in {
            "base_dir": _QUEUED,
            "hf_hub_offline": _ENVIRONMENT,
            "nodes_per_fsdp_group": _RANKS,
            "project_dir": _QUEUED,
        }.items()
    },
    "slurm.cleanup_grace_period": "a job ends with its run",
    "slurm.dry_run": "there is --dry-run",
    "slurm.launch_modelexpress": _WEIGHTS,
    "slurm.log_dir": "the log of a job is beside the run's folder",
    "slurm.max_requeues": "a job is queued again at its time limit, not where its run failed",
    "slurm.shared_fs": "a job installs nothing",
    "slurm.step_timeout": "the orchestrator's stalled_after_seconds tells of a run that stands still",
}

_TEMPLATE_OF_A_JOB = (
    "the script is Quartet's own; write what yours has of sbatch's options and of shell lines into [slurm] "
    "options and setup in a second file, and remove it"
)
_RESUME = "write --resume with --output-dir; remove it"
_REMOTE_CODE = "no code of a model folder is run; remove it"
_TEACHER = (
    'a teacher is a table of Quartet\'s own: in a second file [algorithm] preset = "opd" and '
    '[algorithm.reference] model = "..."; remove it here'
)
_OLD_LOSS = (
    "it is of a loss that prime-rl 0.8 has no more; remove it for the default one (dppo_mask_low, "
    'dppo_mask_high, kl_tau), or write [algorithm] loss = "ppo", proximal = true and correction = { mode = '
    '"mask", floor = ..., cap = ... } in a second file'
)
_OF_WHICH = 'say of which loss: type = "icepop", "cispo" or "ppo"'
_POOLS = (
    "tasks are in no pools; set [difficulty_filter] enabled, min_reward and max_reward in a second file: "
    "groups outside are replaced"
)
_CURRICULUM = "tasks come in a new order in each epoch; remove it"

#: What no run here can do.
REFUSED: Final[Refusals] = {
    "slurm.template_path": ((), _TEMPLATE_OF_A_JOB),
    "slurm.slurm_template": ((), _TEMPLATE_OF_A_JOB),
    "slurm_template": ((), _TEMPLATE_OF_A_JOB),
    "deployment.num_teacher_gpus": ((0,), _TEACHER),
    "deployment.num_teacher_nodes": ((0,), _TEACHER),
    "teacher_inference": ((), _TEACHER),
    "teacher_gpu_ids": (([],), _TEACHER),
    "bench": ((False,), "there are benchmarks/; remove it"),
    "trainer.bench": ((False,), "there are benchmarks/; remove it"),
    "orchestrator.bench": ((False,), "there are benchmarks/; remove it"),
    "resume": ((), _RESUME),
    "trainer.resume": ((), _RESUME),
    "orchestrator.resume": ((), _RESUME),
    **{
        f"{prefix}{key}": rule
        for prefix in ("", "trainer.", "orchestrator.", "inference.")
        for key, rule in {
            "model.trust_remote_code": ((False,), _REMOTE_CODE),
            "model.vlm": ((), "models read text alone here; remove it"),
            "tokenizer.trust_remote_code": ((False,), _REMOTE_CODE),
            "tokenizer.name": (
                (),
                "the tokenizer is that of the model's folder; put it there, and remove it",
            ),
        }.items()
    },
    "trainer.optim.learning_rate": ((), "did you mean 'trainer.optim.lr'?"),
    **{
        f"inference.{table}tensor_parallel_size": ((), "did you mean 'inference.parallel.tp'?")
        for table in ("", "model.", "parallel.")
    },
    "trainer.model.fp8": ((False,), "the trainer computes in bfloat16 or float32; remove it"),
    "trainer.model.quantization": ((), "the trainer computes in bfloat16 or float32; remove it"),
    "trainer.model.debug": ((False, {}), "the model is trained as its folder has it; remove it"),
    "trainer.data.fake": ((), "there are no made-up data; remove it"),
    "trainer.trace_path": ((), "there are traces by OpenTelemetry (docs/tracing.md); remove it"),
    "trainer.memory_profiler_path": ((), "nothing is profiled here; remove it"),
    **{
        f"trainer.loss.{key}": ((), _OLD_LOSS)
        for key in (
            *("clip_ratio", "epsilon_high", "epsilon_low", "geo_mask_high", "geo_mask_low", "kl_mask_type"),
            *("mask_ratio_high", "mask_ratio_low", "ratio_length_norm", "ratio_type", "sequence_clip_high"),
            *("sequence_mask_high", "sequence_mask_low", "sequence_mask_ratio_high", "token_mask_high"),
            *("sequence_mask_ratio_low", "token_mask_low"),
        )
    },
    "trainer.loss.ratio_low": ((), _OF_WHICH),
    "trainer.loss.ratio_high": ((), _OF_WHICH),
    "trainer.loss.teacher_tau": ((0, 0.0), _TEACHER),
    "trainer.loss.max_importance_ratio": ((1e4,), "a ratio is cut at e^20; remove it"),
    "orchestrator.teacher": ((), _TEACHER),
    "orchestrator.teacher_model": ((), _TEACHER),
    "orchestrator.teacher_rollout_model": ((), _TEACHER),
    "orchestrator.training_mode": (("rl",), _TEACHER),
    "orchestrator.token_batch_size": ((), "set orchestrator.batch_size, in rollouts; remove it"),
    "orchestrator.tasks_per_minute": ((), "set orchestrator.max_inflight_rollouts, how many are under way"),
    "orchestrator.val": ((), "write [orchestrator.eval], on the environment of training"),
    "orchestrator.mask_env_responses": ((True,), "tokens of environments are never learned; remove it"),
    "orchestrator.zero_truncated_completions": (
        (False,),
        "let the environment reward it so, or set mask_truncated_completions",
    ),
    "orchestrator.curriculum": (({},), _CURRICULUM),
    "orchestrator.buffer.type": (("simple",), _POOLS),
    "orchestrator.buffer.min_reward": ((), _POOLS),
    "orchestrator.buffer.max_reward": ((), _POOLS),
    "orchestrator.buffer.easy_threshold": ((), _POOLS),
    "orchestrator.buffer.hard_threshold": ((), _POOLS),
    "orchestrator.buffer.skip_verification": ((False,), "rewards are always asked for; remove it"),
    "orchestrator.train.select": (({}, False), "give the environment arguments that choose; remove it"),
    "orchestrator.eval.select": (({}, False), "give num_examples, or the environment arguments; remove it"),
    "orchestrator.advantage": (
        ("default", False),
        "write a function of your own ([orchestrator.advantages], docs/algorithms.md), and choose it in a "
        'second file: [algorithm] advantage = "custom" and custom_advantage = "NAME"',
    ),
    "experimental": (({},), "it is of prime-rl's own experiments; remove it"),
    "trainer.experimental": (({},), "it is of prime-rl's own experiments; remove it"),
    "orchestrator.experimental": (({},), "it is of prime-rl's own experiments; remove it"),
    "inference.experimental": (({},), "it is of prime-rl's own experiments; remove it"),
}

#: Of one entry of [[orchestrator.train.source]] and its like.
LEFT_OUT_OF_ENV: Final[Mapping[str, str]] = {
    "num_workers": _HOST,
    "pool": _HOST,
    "serve": _HOST,
    "log": _LOG,
    "extra_env_kwargs": _HOST,
    "legacy": _HOST,
    "max_concurrent": "max_concurrent is of all environments together",
}
REFUSED_OF_ENV: Final[Refusals] = {
    "address": ((), "give its host's address: [orchestrator] envhost_addresses in a second file; remove it"),
    "max_total_completion_tokens": ((-1,), "bound an answer by max_completion_tokens; remove it"),
    "curriculum.sampler.type": (("standard",), _CURRICULUM),
    "curriculum.sampler": (({},), _CURRICULUM),
    "sampler.type": (("standard",), _CURRICULUM),
    "sampler": (({},), _CURRICULUM),
    "min_abs_advantage": ((0, 0.0), "only groups without any signal are left out; remove it"),
    "select": (({}, False), "give the environment arguments that choose; remove it"),
    "skip_first": ((0,), "give the environment arguments that choose its examples; remove it"),
}

#: Keys that came after 0.8.0, whose presence says that the file counts on other defaults.
AFTER_VERSION: Final = (
    *("orchestrator.train.group_size", "orchestrator.train.algo", "orchestrator.train.select"),
    *("orchestrator.constant_trainer_batch_size", "trainer.loss.eps"),
)
