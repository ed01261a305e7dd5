"""How completions are sampled, and by which engine, from the arguments of TRL's GRPOConfig."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quartet.config.model import ConfigError
from quartet.scripts.draft import Draft

#: Of generation_kwargs, which are transformers' or vLLM's: the keys of [sampling].
GENERATION: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "max_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "min_tokens": "min_tokens",
    "stop": "stop",
    "stop_strings": "stop",
    **{
        name: name
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
            *("presence_penalty", "frequency_penalty"),
        )
    },
}
#: And those of which this alone is what is done here anyway.
AS_HERE: Mapping[str, Any] = {"do_sample": True, "num_beams": 1, "n": 1, "use_cache": True}
#: Arguments that use_vllm = True alone reads.
OF_VLLM = (
    *("vllm_mode", "vllm_model_impl", "vllm_gpu_memory_utilization", "vllm_max_model_length"),
    *("vllm_tensor_parallel_size", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
    *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
    "vllm_importance_sampling_cap",
)
#: A conversation has 1024 answers at most, of which the last calls in vain.
MAX_CALLING = 1023


def sampling(draft: Draft) -> None:
    """Puts how a completion is drawn. Raises ConfigError."""
    args = draft.args
    if args.max_completion_length is not None:
        draft.put("sampling.max_tokens", draft.count("max_completion_length"), "max_completion_length")
    draft.take("temperature", "sampling.temperature")
    for name, off in (("top_p", (1.0,)), ("top_k", (0, -1, None)), ("min_p", (None,))):
        if getattr(args, name) not in off:
            draft.take(name, f"sampling.{name}")
    if args.repetition_penalty != 1.0:
        draft.take("repetition_penalty", "sampling.repetition_penalty")
    for name, value in (args.generation_kwargs or {}).items():
        _generated(draft, name, value)
    if args.chat_template_kwargs:
        draft.put("sampling.template_settings", dict(args.chat_template_kwargs), "chat_template_kwargs")


def check_calling(draft: Draft, *, has_tools: bool) -> None:
    """How often an answer's calls are answered, which the script itself sees to. Raises ConfigError."""
    value = draft.args.max_tool_calling_iterations
    if value is None:
        return
    if not has_tools:
        draft.notes.append(
            f"args.max_tool_calling_iterations = {value!r} is without effect, as in TRL: tools alone read it"
        )
    elif draft.count("max_tool_calling_iterations", 0) > MAX_CALLING:
        raise ConfigError(
            f"args.max_tool_calling_iterations = {value} is refused: should be {MAX_CALLING} at most; None "
            "is as many"
        )


def _generated(draft: Draft, name: str, value: Any) -> None:
    """One of generation_kwargs, which win over what has an argument of its own. Raises ConfigError."""
    if name in AS_HERE and value == AS_HERE[name]:
        return
    if name not in GENERATION:
        known = ", ".join(GENERATION)
        raise ConfigError(
            f"args.generation_kwargs: {name} = {value!r} is refused: [sampling] has no such key; known are "
            f"{known}"
        )
    key = GENERATION[name]
    if key == "stop":
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        value = list(value) if is_list else [value]
    if key == "top_k" and value == -1:  # vLLM's word for off
        value = 0
    draft.put(f"sampling.{key}", value, "generation_kwargs")


def engine(draft: Draft, context: int | None) -> None:
    """Puts which one samples; `context`: the longest sequence of the model. Raises ConfigError."""
    args = draft.args
    if not args.use_vllm:
        for name in OF_VLLM:
            if (value := getattr(args, name)) != getattr(type(args), name):
                draft.notes.append(
                    f"args.{name} = {value!r} is without effect, as in TRL: use_vllm = True alone reads it"
                )
        return
    draft.put("inference.engine", "vllm", "use_vllm")
    if args.vllm_max_model_length is not None:
        length = draft.count("vllm_max_model_length")
        draft.put("inference.max_model_len", min(length, context or length), "vllm_max_model_length")
    given = "inference.vllm.args"
    if draft.chosen("vllm_model_impl", ("vllm", "transformers")) != "vllm":
        draft.take("vllm_model_impl", f"{given}.model_impl")
    if draft.chosen("vllm_mode", ("colocate", "server")) == "server":
        draft.notes.append("args.vllm_mode = 'server' is without effect: train() starts the engine")
        return
    # A CPU build has no share of a device.
    if not args.use_cpu:
        draft.take("vllm_gpu_memory_utilization", f"{given}.gpu_memory_utilization")
    if args.vllm_tensor_parallel_size != 1:
        draft.put(
            f"{given}.tensor_parallel_size",
            draft.count("vllm_tensor_parallel_size"),
            "vllm_tensor_parallel_size",
        )
