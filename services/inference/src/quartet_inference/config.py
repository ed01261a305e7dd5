"""Configuration of the inference service. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import pydantic
from quartet import template_settings
from quartet.config import Config, ConfigError
from quartet.config.text import read_text
from quartet.kit.folder import unreadable_part
from quartet.kit.security import ClientSecurity, check_clients
from quartet.kit.server import ServerConfig

from quartet_inference.openai.config import OpenAiConfig

GIB = 1 << 30
#: The prompt's ids travel in one message of at most 4 MiB, at up to 5 bytes each and beside the text.
MAX_MODEL_LEN = 262_144
#: Arguments of vLLM that `args` may not name, and what to do instead.
OWNED_VLLM_ARGS = {
    "model": "give the folder as model",
    "dtype": "give vllm.dtype",
    "max_model_len": "give max_model_len",
    "max_num_seqs": "give vllm.max_num_seqs",
    "kv_cache_memory_bytes": "give vllm.kv_cache_bytes",
    "logprobs_mode": "log-probabilities are those of the distribution that was sampled",
    "max_logprobs": "how many alternatives are told is said by the front",
    "logits_processors": "tokens are drawn by Quartet's own sampler",
    "worker_extension_cls": "weights are changed by Quartet's own extension",
    "generation_config": "how tokens are drawn is said by each request",
    "skip_tokenizer_init": "text is made by the service, the engine knows tokens only",
    "enable_lora": "give vllm.max_lora_rank",
    "max_lora_rank": "give vllm.max_lora_rank",
    "max_loras": "give vllm.max_loras",
    "max_cpu_loras": "give adapters.max_count",
    "scheduling_policy": "what has no priority keeps its order, and the check of new weights goes first",
    "speculative_config": "drafted tokens are not drawn by Quartet's sampler",
}
#: Further arguments of `vllm serve` (and of Verifiers' vf-vllm), and what a refusal of each says.
_OF_VLLM = (
    *("data_parallel_size", "enable_expert_parallel", "enable_prefix_caching", "enforce_eager"),
    *("gpu_memory_utilization", "max_num_batched_tokens", "pipeline_parallel_size", "quantization"),
    *("tensor_parallel_size", "trust_remote_code"),
)
_FRONT = "give openai.address (host:port) for the OpenAI-compatible front"
SERVED_BY_VLLM = {
    **{name: f'it is vllm.args.{name} here, with engine = "vllm"' for name in _OF_VLLM},
    "host": _FRONT,
    "port": _FRONT,
    "api_key": "give openai.api_key_file",
    "chat_template": "give chat.template_file",
    "tool_call_parser": "give chat.tool_parser",
    "enable_auto_tool_choice": "tool calls are read wherever there are tools; remove it",
    "disable_log_requests": "no request is logged; remove it",
}


class EmbeddedConfig(Config):
    """The embedded engine."""

    #: auto: CUDA where there is a device.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    #: auto: float32 on a CPU, bfloat16 on an accelerator, as the trainer computes there.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    #: Threads of one operation on a CPU. More than one pays only on cores that nobody else uses.
    threads: int = pydantic.Field(default=1, ge=1, le=256)
    max_num_seqs: int = pydantic.Field(default=128, ge=1, le=4096)
    max_waiting: int = pydantic.Field(default=4096, ge=1, le=1_000_000)
    kv_cache_bytes: int = pydantic.Field(default=GIB, ge=1 << 16)
    prefix_cache_bytes: int = pydantic.Field(default=GIB // 8, ge=0)
    #: Copies of float32 matrices on a CPU, in the order in which its kernels read them; 0: none
    #: but those of adapters, which have as much memory again.
    packed_bytes: int = pydantic.Field(default=4 * GIB, ge=0)
    #: What happens to the keys and values of running requests when weights change: "recompute" makes
    #: every later token
    #: comparable with a plain forward pass of its version; "keep" is cheaper and mixes the versions' keys.
    kv_on_update: Literal["keep", "recompute"] = "recompute"
    #: On CUDA decode steps of the engine's own forward pass are recorded, and launched as one operation.
    cuda_graphs: bool = True


class VllmConfig(Config):
    """The vLLM engine."""

    #: auto: float32 on a CPU, bfloat16 on an accelerator, as the trainer computes there.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    #: As for the embedded engine; only a CPU build looks at it.
    threads: int = pydantic.Field(default=1, ge=1, le=256)
    max_num_seqs: int = pydantic.Field(default=128, ge=1, le=4096)
    max_waiting: int = pydantic.Field(default=4096, ge=1, le=1_000_000)
    #: Of each device; default: what vLLM finds free on an accelerator, 1 GiB on a CPU.
    kv_cache_bytes: int | None = pydantic.Field(default=None, ge=1 << 16)
    kv_on_update: Literal["keep", "recompute"] = "recompute"
    #: The largest rank of an adapter; 0 serves none. vLLM keeps room for max_loras of this rank in every
    #: layer, so many can be in one step; on a CPU it serves adapters more slowly than the base model.
    max_lora_rank: int = pydantic.Field(default=0, ge=0, le=512)
    max_loras: int = pydantic.Field(default=4, ge=1, le=256)
    #: Where new weights wait for the swap, and every worker reads them: memory, if there is enough of it.
    staging: Path = Path("/dev/shm")
    #: Any further arguments of vLLM's AsyncEngineArgs, such as tensor_parallel_size, data_parallel_size,
    #: enable_expert_parallel, quantization.
    args: dict[str, Any] = pydantic.Field(default_factory=dict)

    @pydantic.field_validator("args")
    @classmethod
    def _leaves_ours_alone(cls, args: dict[str, Any]) -> dict[str, Any]:
        owned = sorted(OWNED_VLLM_ARGS.keys() & args.keys())
        if owned:
            raise ValueError(f"{owned[0]} is set by Quartet: {OWNED_VLLM_ARGS[owned[0]]}")
        return args


class AdaptersConfig(Config):
    """Adapters: bounded in number and, in the embedded engine, in bytes."""

    max_count: int = pydantic.Field(default=16, ge=0, le=4096)
    max_bytes: int = pydantic.Field(default=GIB, ge=0)
    #: A request that names a run which is not served makes the replica fetch its adapter.
    on_demand: bool = True


class ChatConfig(Config):
    """Messages: the chat template and what is read out of sampled text."""

    #: How the model writes tool calls: "auto" asks the template, "none" reads none, else a name of
    #: quartet_inference.chat.formats.
    tool_parser: str = "auto"
    #: A Jinja file instead of the model folder's own template.
    template_file: Path | None = None
    #: Variables that the template is given, such as enable_thinking = false, where a request does not choose
    #: them otherwise.
    template_settings: dict[str, Any] = pydantic.Field(default_factory=dict)

    @pydantic.field_validator("template_settings")
    @classmethod
    def _can_be_chosen(cls, settings: dict[str, Any]) -> dict[str, Any]:
        template_settings.written(settings)
        return settings

    @pydantic.field_validator("template_file")
    @classmethod
    def _is_a_file(cls, file: Path | None) -> Path | None:
        if file is not None and not file.is_file():
            raise ValueError("no such file; give a Jinja template")
        try:
            if file is not None:
                read_text(file, "it")
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return file


class InferenceConfig(Config):
    """The inference service."""

    OTHER_NAMES: ClassVar = SERVED_BY_VLLM

    model: Path
    engine: Literal["embedded", "vllm"] = "embedded"
    #: The trainer's WeightService; empty serves the folder's own weights as version 0 of no run.
    weights_address: str = ""
    weights_security: ClientSecurity = ClientSecurity()
    #: The run to follow; empty follows the run that the trainer created last.
    run_id: str = ""
    #: Where there is no weights_address: take versions that a foreign trainer pushes.
    accept_push: bool = False
    #: Read versions of a trainer on this host (loopback) from its shared memory.
    shared_memory: bool = True
    #: Replicas hand on to each other what they fetch; the trainer sends a version about once.
    relay: bool = True
    #: Where other replicas reach this one; default: where it listens, or the host's name where it listens on
    #: every interface.
    advertise_address: str = ""
    #: Versions kept for others, each a copy of the model in memory; one more is on its way during an update.
    held_versions: int = pydantic.Field(default=2, ge=1, le=64)
    #: Deltas kept for others beside them; without one a replica that asks gets the full payload.
    held_delta_bytes: int = pydantic.Field(default=GIB, ge=0)
    #: How far the log-probabilities of a version's canary may be from the trainer's, in the mean; default: by
    #: the dtype.
    canary_tolerance: float | None = pydantic.Field(default=None, gt=0)
    #: Longest prompt plus completion; default: what the model was made for.
    max_model_len: int | None = pydantic.Field(default=None, ge=2, le=MAX_MODEL_LEN)
    #: A request that waits for a run or a version waits no longer, whatever its own deadline.
    version_wait_seconds: float = pydantic.Field(default=600.0, gt=0, le=86_400)
    #: Decoding that samples nothing for so long, and an update, a pause or a score that takes so long, fail
    #: the liveness check; for twice so long, and the replica ends, with an error.
    stall_seconds: float = pydantic.Field(default=120.0, gt=0)
    #: Note which experts of a mixture take each token, for requests that ask (a run's router_replay).
    routed_experts: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    embedded: EmbeddedConfig = EmbeddedConfig()
    vllm: VllmConfig = VllmConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    chat: ChatConfig = ChatConfig()
    openai: OpenAiConfig = OpenAiConfig()
    server: ServerConfig = ServerConfig()

    @pydantic.field_validator("model")
    @classmethod
    def _is_model_folder(cls, folder: Path) -> Path:
        if not (folder / "config.json").is_file():
            raise ValueError(
                "no model folder is there (config.json is missing); give a local Hugging Face folder"
            )
        if (part := unreadable_part(folder)) is not None:
            raise ValueError(f"this user cannot read {part.name} there; let it (chmod -R a+rX)")
        return folder

    def excludes(self, run_id: str) -> str:
        """Why nothing can make this replica serve a run; empty where something may."""
        if self.weights_address:
            return ""
        if not self.accept_push:
            return "this replica follows no trainer (weights_address) and takes no pushes (accept_push)"
        if self.run_id not in ("", run_id):
            return f"this replica takes only what run {self.run_id} pushes (run_id)"
        return ""

    @property
    def follows(self) -> str:
        """Which runs come to this replica by themselves, where none is named; empty where that is plain."""
        if not self.weights_address or self.run_id:
            return ""
        return (
            "this replica follows the run that its trainer created last: give it the run_id of another, or "
            "start a replica for each run"
        )

    @pydantic.model_validator(mode="after")
    def _one_publisher(self) -> InferenceConfig:
        if self.weights_address:
            check_clients("weights_address", [self.weights_address], self.weights_security)
        if self.accept_push and self.weights_address:
            raise ValueError(
                f"accept_push = true beside weights_address = {self.weights_address!r}: a replica follows a "
                "trainer or takes what is pushed; leave one of them out"
            )
        return self
