"""Starting vLLM for a configuration.

1. `args` of the configuration are AsyncEngineArgs; what Quartet relies on is set here and cannot
   be overridden.
2. The model is also loaded once by transformers, for the names, shapes and digest of its weights, and let go.
3. What cannot be served is a ConfigError that says what to change, and why: vLLM tells that only to its log.
"""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pydantic
from quartet.config import ConfigError
from vllm import AsyncEngineArgs
from vllm.config.lora import MaxLoRARanks
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from quartet_inference.config import GIB, InferenceConfig, VllmConfig
from quartet_inference.embedded import model, products
from quartet_inference.embedded.experts import routers_of
from quartet_inference.engine import MAX_TOP, ServedWeights
from quartet_inference.text_stream import Detokenize
from quartet_inference.vllm import environment, faults, forks, probe
from quartet_inference.vllm.asked import WANTED
from quartet_inference.vllm.checkpoint import Checkpoint, Held
from quartet_inference.vllm.drawing import END_TOKENS
from quartet_inference.vllm.engine import VllmEngine
from quartet_inference.vllm.staging import Staging

#: vLLM's default of 128 on a CPU would leave shorter prompts out of the prefix cache.
CPU_BLOCK_TOKENS = 32
#: Tokens of one step of the engine: what vLLM's own server takes on an H100.
ACCELERATOR_STEP_TOKENS = 8192
#: Logits are summed in float32, as the trainer sums them (embedded/products.py 4).
WIDE_LOGITS = {"head_dtype": "float32"}
#: Kinds of arguments that are checked before vLLM sees them; the others it checks itself.
KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text", type(None): ""}

#: Arguments under which experts are not noted, unless they are vLLM's defaults: steps in parts, of other
#: workers, with tokens that are thrown away; keys that come from elsewhere.
NOT_NOTING = (
    "pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size", "enable_dbo",
    "ubatch_size", "speculative_config", "kv_transfer_config", "kv_offloading_size",
)  # fmt: skip


async def start_checked(
    config: InferenceConfig, end_tokens: frozenset[int], detokenize: Detokenize, on_step: Callable[[], None]
) -> VllmEngine:
    """Start it, and have it show that it computes what the model computes. Errors: ConfigError."""
    engine, known = await asyncio.to_thread(_start, config, end_tokens, detokenize, on_step)
    try:
        await probe.check(engine, config, known)
    except BaseException:
        await engine.close()
        raise
    faults.forget()
    return engine


def start(
    config: InferenceConfig, end_tokens: frozenset[int], detokenize: Detokenize, on_step: Callable[[], None]
) -> VllmEngine:
    """Start it unchecked; takes seconds to minutes. Not for the event loop. Errors: ConfigError."""
    return _start(config, end_tokens, detokenize, on_step)[0]


def _start(
    config: InferenceConfig, end_tokens: frozenset[int], detokenize: Detokenize, on_step: Callable[[], None]
) -> tuple[VllmEngine, probe.Known]:
    settings = config.vllm
    _check_args(settings.args)
    _check_staging(settings)
    if config.routed_experts:
        _check_noting(settings.args)
    _check_stages(settings.args)
    arguments = engine_args(config)
    arguments["additional_config"] = {
        **arguments.get("additional_config", {}),
        END_TOKENS: sorted(end_tokens),
        WANTED: config.routed_experts,
    }
    held, known = _held(config, end_tokens, detokenize)
    if "VLLM_RPC_BASE_PATH" not in os.environ:
        os.environ["VLLM_RPC_BASE_PATH"] = environment.socket_folder()
    faults.keep(Path(environment.socket_folder()) / "fault")
    try:
        with forks.cores(arguments):
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    except Exception as error:
        raise ConfigError(
            f"vLLM cannot serve model = {str(config.model)!r} so: {_why(error)}; {probe.INSTEAD}"
        ) from error
    engine = VllmEngine(
        llm,
        held,
        Staging(settings.staging),
        settings.max_waiting,
        settings.kv_on_update == "recompute",
        on_step,
        config.adapters.max_count,
    )
    return engine, known


def _check_staging(settings: VllmConfig) -> None:
    """Refuse a folder that somebody names and nothing can be written to; one that is full has another beside
    it (staging.py 3)."""
    if "staging" not in settings.model_fields_set:
        return
    try:
        with tempfile.TemporaryFile(dir=settings.staging):
            return
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return
        raise ConfigError(
            f"vllm.staging = {str(settings.staging)!r} takes no file: {error.strerror}; name a folder that "
            "this user can write to, in memory if there is room, or leave it out"
        ) from None


def _check_stages(args: dict[str, Any]) -> None:
    stages = args.get("pipeline_parallel_size", 1)
    if environment.is_cpu_build() and stages != 1:
        raise ConfigError(
            f"vllm.args.pipeline_parallel_size = {stages!r} is refused: vLLM's CPU build ends with it at the "
            "first step; leave it out, and set tensor_parallel_size or data_parallel_size"
        )


def _check_args(args: dict[str, Any]) -> None:
    """Refuse what vLLM does not know, or would take for something else: to it every text is true."""
    fields = {field.name: field for field in dataclasses.fields(AsyncEngineArgs)}
    for name, value in args.items():
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"vllm.args.{name} is no argument of AsyncEngineArgs{hint}")
        kinds = set(get_args(fields[name].type)) or {fields[name].type}
        given = {type(value)} | ({float} if type(value) is int else set())
        if kinds <= KINDS.keys() and not kinds & given:
            wanted = " or ".join(sorted(KINDS[kind] for kind in kinds if KINDS[kind]))
            raise ConfigError(f"vllm.args.{name} = {value!r} is refused: give {wanted}")


def _check_noting(args: dict[str, Any]) -> None:
    """Refuse what leaves a worker without a step's tokens or their routers (`noting`)."""
    defaults = {field.name: field.default for field in dataclasses.fields(AsyncEngineArgs)}
    for name in NOT_NOTING:
        if args.get(name, defaults[name]) != defaults[name]:
            raise ConfigError(
                f"routed_experts = true does not go with vllm.args.{name} = {args[name]!r}; leave one out"
            )


def _why(error: Exception) -> str:
    """In one line what is wrong, where vLLM has logged it from there."""
    fault = faults.first()
    if fault:
        return fault
    if isinstance(error, pydantic.ValidationError):
        told = [".".join(map(str, one["loc"])) + ": " + one["msg"] for one in error.errors()]
        return "; ".join(one.removeprefix(": ").removeprefix("Value error, ") for one in told)
    return f"{type(error).__name__}: {error}"


def engine_args(config: InferenceConfig) -> dict[str, Any]:
    """The AsyncEngineArgs of a configuration."""
    settings = config.vllm
    chosen: dict[str, Any] = {"enable_prefix_caching": True, "disable_log_stats": True, "seed": 0}
    if current_platform.is_cpu():
        chosen |= {
            "enforce_eager": True,
            "block_size": CPU_BLOCK_TOKENS,
            "kv_cache_memory_bytes": settings.kv_cache_bytes or GIB,
        }
        parallel = ("tensor_parallel_size", "pipeline_parallel_size")
        if all(settings.args.get(name, 1) == 1 for name in parallel):
            chosen["distributed_executor_backend"] = "uni"  # one process less
    else:
        # vLLM knows larger steps for its own servers alone; an update has running prompts computed anew.
        chosen["max_num_batched_tokens"] = ACCELERATOR_STEP_TOKENS
        if settings.kv_cache_bytes is not None:
            chosen["kv_cache_memory_bytes"] = settings.kv_cache_bytes
    owned: dict[str, Any] = {
        "model": str(config.model),
        "dtype": _dtype(config),
        "max_model_len": config.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # not the folder's idea of sampling
        "logprobs_mode": "processed_logits",
        "max_logprobs": MAX_TOP + 1,  # beside the token itself
        "scheduling_policy": "priority",  # what has none keeps its order; a canary goes first
        "logits_processors": ["quartet_inference.vllm.drawing:DrawTokens"],
        "worker_extension_cls": "quartet_inference.vllm.worker.WeightWorker",
    }
    if settings.max_lora_rank:
        owned |= {
            "enable_lora": True,
            # It makes room in steps.
            "max_lora_rank": min(rank for rank in get_args(MaxLoRARanks) if rank >= settings.max_lora_rank),
            "max_loras": settings.max_loras,
            # While one version replaces another, both are held.
            "max_cpu_loras": max(settings.max_loras, 2 * config.adapters.max_count),
        }
    overrides = settings.args.get("hf_overrides", {})
    if owned["dtype"] != "float32" and "quantization" not in settings.args and isinstance(overrides, dict):
        # By itself vLLM rounds them to the model's dtype.
        owned["hf_overrides"] = WIDE_LOGITS | overrides
    if config.weights_address and not model.has_weights(config.model):
        owned["load_format"] = "dummy"  # the first weights come from the trainer
    return chosen | settings.args | owned


def _dtype(config: InferenceConfig) -> str:
    if config.vllm.dtype != "auto":
        return config.vllm.dtype
    return "float32" if current_platform.is_cpu() else "bfloat16"


def _held(
    config: InferenceConfig, end_tokens: frozenset[int], detokenize: Detokenize
) -> tuple[Held, probe.Known]:
    network = model.load(config.model, _dtype(config), weights_follow=bool(config.weights_address))
    if config.max_model_len is not None:
        model.made_for(network, config.max_model_len)
    if current_platform.is_cpu():
        _check_heads(network.config)
    products.widen_logits(network)  # as it is compared with
    weights = model.ModelWeights(network)
    digest, layout = weights.digest(), weights.layout()
    served = None if config.weights_address else ServedWeights("", 0, digest)
    same = model.has_weights(config.model) and "quantization" not in config.vllm.args
    known = probe.known_of(network, same, config.routed_experts)
    routers = len(routers_of(network)) if config.routed_experts else 0
    if config.routed_experts and not routers:
        raise ConfigError(f"routed_experts = true: {type(network).__name__} has no routers; leave it out")
    return Held(layout, Checkpoint(network), digest, end_tokens, detokenize, served, routers), known


def _check_heads(config: Any) -> None:
    """Refuse what would end at the first step, before vLLM is started for it."""
    text = config.get_text_config()
    size = getattr(text, "head_dim", None)
    if size is None and hasattr(text, "num_attention_heads"):  # not with state spaces
        size = text.hidden_size // text.num_attention_heads
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    known = CPUAttentionBackend.get_supported_head_sizes()
    if size is not None and size not in known:
        raise ConfigError(
            f"the model has heads of {size}, vLLM's attention on a CPU knows {', '.join(map(str, known))}; "
            'choose engine = "embedded"'
        )
