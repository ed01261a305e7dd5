"""The JSON that the SDK sends. What is not served is refused by name, not ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import pydantic

from quartet_tinker.refusal import Refused

B = TypeVar("B", bound="Body")

#: GenerateRequest.n says so.
MAX_SAMPLES = 256


class Body(pydantic.BaseModel):
    """A request; fields that this gateway does not know are refused."""

    model_config = pydantic.ConfigDict(extra="forbid", protected_namespaces=())

    type: str = ""


class CreateSession(Body):
    """A ServiceClient begins."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionName(Body):
    """Which session is still there."""

    session_id: str


class CreateSamplingSession(Body):
    """A sampler of the weights at `model_path`; without it, of the base model."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class JoinSamplingSession(Body):
    """Another process uses a sampler."""

    sampling_session_id: str


class Lora(Body):
    """The adapters of a new model. Without `seed` one is drawn; `train_unembed` has no effect."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(pydantic.BaseModel):
    """Adam; others say so by their type, with fields of their own."""

    type: str = "adamw"


class CreateModel(Body):
    """A model to train; refused without `lora_config`."""

    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: Lora | None = None
    optimizer_config: Optimizer = Optimizer()


class ModelName(Body):
    """Which model is meant."""

    model_id: str


class OptimStep(Body):
    """A step of Adam; refused without `adam_params`."""

    model_id: str
    seq_id: int
    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(Body):
    """A state to save; without `path` it is named after `seq_id`."""

    model_id: str
    seq_id: int
    path: str | None = None
    # States go by their number (the trainer's keep_last), not by their age; metadata is not kept.
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(Body):
    """Weights to publish: with `path` for samplers to be made of it, without it for one at once."""

    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class LoadWeights(Body):
    """A state to return to; without `model_id`, one to make a new model of the session from."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: Optimizer | None = None
    weights_access_token: str | None = None


class TextChunk(Body):
    """Token ids of a prompt."""

    tokens: list[Annotated[int, pydantic.Field(ge=0, lt=2**31)]]


class OtherChunk(pydantic.BaseModel):
    """An image or audio: refused by what it is."""

    type: str


class Prompt(Body):
    """What is to be completed, in chunks."""

    chunks: list[TextChunk | OtherChunk]

    def tokens(self) -> list[int]:
        """All of them. Raises Refused."""
        ids: list[int] = []
        for chunk in self.chunks:
            if not isinstance(chunk, TextChunk):
                raise Refused(f"prompt has a chunk of type {chunk.type!r}; only token ids from 0 are served")
            ids.extend(chunk.tokens)
        if not ids:
            raise Refused("prompt is empty; give at least one token")
        return ids


class SamplingParams(Body):
    """How to sample. None: as the inference service does; `stop` = []: not even at the model's own end."""

    max_tokens: int | None = pydantic.Field(default=None, ge=1, lt=2**31)
    seed: int | None = None
    stop: str | list[str] | list[Annotated[int, pydantic.Field(ge=0, lt=2**31)]] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleBody(Body):
    """Completions to sample, `num_samples` of one prompt."""

    sampling_session_id: str
    seq_id: int
    prompt: Prompt
    sampling_params: SamplingParams
    num_samples: int = pydantic.Field(default=1, ge=1, le=MAX_SAMPLES)
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None

    def check(self) -> None:
        """Refuse what the inference service does not do. Raises Refused."""
        self.prompt.tokens()
        for field in (
            "topk_prompt_logprobs",
            "topk_sample_logprobs",
            "target_prompt_logprobs",
            "prompt_alt_tokens_k",
            "record_stability_info",
        ):
            if getattr(self, field):
                raise Refused(f"{field} is not served here; leave it out")


class RetrieveFuture(Body):
    """Which promise is waited for, or is to be cancelled."""

    request_id: str
    allow_metadata_only: bool = False


class WeightsInfo(Body):
    """Which saved weights are asked about."""

    tinker_path: str


def parse(kind: type[B], raw: bytes) -> B:
    """A body. Raises Refused, naming the field."""
    try:
        return kind.model_validate_json(raw)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        if first["type"] == "extra_forbidden":
            raise Refused(f"{where} is not served here; leave it out") from None
        raise Refused(f"{where} is refused: {first['msg']}") from None
