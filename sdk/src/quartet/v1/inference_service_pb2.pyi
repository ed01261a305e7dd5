from quartet.v1 import common_pb2 as _common_pb2
from quartet.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason

class MessagesPrompt(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[_common_pb2.Message]
    def __init__(self, messages: _Optional[_Iterable[_Union[_common_pb2.Message, _Mapping]]] = ...) -> None: ...

class TokensPrompt(_message.Message):
    __slots__ = ("token_ids", "tail_messages")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TAIL_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tail_messages: _containers.RepeatedCompositeFieldContainer[_common_pb2.Message]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., tail_messages: _Optional[_Iterable[_Union[_common_pb2.Message, _Mapping]]] = ...) -> None: ...

class ToolChoice(_message.Message):
    __slots__ = ("required", "names", "single")
    REQUIRED_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    SINGLE_FIELD_NUMBER: _ClassVar[int]
    required: bool
    names: _containers.RepeatedScalarFieldContainer[str]
    single: bool
    def __init__(self, required: _Optional[bool] = ..., names: _Optional[_Iterable[str]] = ..., single: _Optional[bool] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("run_id", "messages", "tokens", "tools", "sampling", "n", "min_policy_version", "exact_policy_version", "session_id", "resumed_tokens", "completion_seeds", "tool_choice", "experts_from", "template_settings")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    MIN_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXACT_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_SEEDS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FROM_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    messages: MessagesPrompt
    tokens: TokensPrompt
    tools: _containers.RepeatedCompositeFieldContainer[_common_pb2.ToolDefinition]
    sampling: _common_pb2.SamplingParams
    n: int
    min_policy_version: int
    exact_policy_version: int
    session_id: str
    resumed_tokens: int
    completion_seeds: _containers.RepeatedScalarFieldContainer[int]
    tool_choice: ToolChoice
    experts_from: int
    template_settings: str
    def __init__(self, run_id: _Optional[str] = ..., messages: _Optional[_Union[MessagesPrompt, _Mapping]] = ..., tokens: _Optional[_Union[TokensPrompt, _Mapping]] = ..., tools: _Optional[_Iterable[_Union[_common_pb2.ToolDefinition, _Mapping]]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., n: _Optional[int] = ..., min_policy_version: _Optional[int] = ..., exact_policy_version: _Optional[int] = ..., session_id: _Optional[str] = ..., resumed_tokens: _Optional[int] = ..., completion_seeds: _Optional[_Iterable[int]] = ..., tool_choice: _Optional[_Union[ToolChoice, _Mapping]] = ..., experts_from: _Optional[int] = ..., template_settings: _Optional[str] = ...) -> None: ...

class GenerateStart(_message.Message):
    __slots__ = ("prompt_token_ids", "prefix_kept")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_KEPT_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prefix_kept: bool
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., prefix_kept: _Optional[bool] = ...) -> None: ...

class GenerateDelta(_message.Message):
    __slots__ = ("index", "token_ids", "logprobs", "spans", "weights")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    spans: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.PolicySpan]
    weights: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.PolicyWeights]
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., spans: _Optional[_Iterable[_Union[_rollout_pb2.PolicySpan, _Mapping]]] = ..., weights: _Optional[_Iterable[_Union[_rollout_pb2.PolicyWeights, _Mapping]]] = ...) -> None: ...

class GenerateFinish(_message.Message):
    __slots__ = ("index", "finish_reason", "stop_match", "message", "usage")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_MATCH_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    index: int
    finish_reason: FinishReason
    stop_match: str
    message: _common_pb2.Message
    usage: _common_pb2.Usage
    def __init__(self, index: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_match: _Optional[str] = ..., message: _Optional[_Union[_common_pb2.Message, _Mapping]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ...) -> None: ...

class GenerateExperts(_message.Message):
    __slots__ = ("index", "experts")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    experts: _rollout_pb2.RoutedExperts
    def __init__(self, index: _Optional[int] = ..., experts: _Optional[_Union[_rollout_pb2.RoutedExperts, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("start", "delta", "finish", "heartbeat", "held_up", "experts", "waits_for")
    START_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    HELD_UP_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    start: GenerateStart
    delta: GenerateDelta
    finish: GenerateFinish
    heartbeat: _common_pb2.Heartbeat
    held_up: str
    experts: GenerateExperts
    waits_for: str
    def __init__(self, start: _Optional[_Union[GenerateStart, _Mapping]] = ..., delta: _Optional[_Union[GenerateDelta, _Mapping]] = ..., finish: _Optional[_Union[GenerateFinish, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ..., held_up: _Optional[str] = ..., experts: _Optional[_Union[GenerateExperts, _Mapping]] = ..., waits_for: _Optional[str] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("run_id", "samples", "exact_policy_version")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    EXACT_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    samples: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.Sample]
    exact_policy_version: int
    def __init__(self, run_id: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[_rollout_pb2.Sample, _Mapping]]] = ..., exact_policy_version: _Optional[int] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[ScoredSample]
    def __init__(self, samples: _Optional[_Iterable[_Union[ScoredSample, _Mapping]]] = ...) -> None: ...

class ScoredSample(_message.Message):
    __slots__ = ("logprobs", "policy_version")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    policy_version: int
    def __init__(self, logprobs: _Optional[_Iterable[float]] = ..., policy_version: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ("in_flight",)
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    in_flight: int
    def __init__(self, in_flight: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("in_flight",)
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    in_flight: int
    def __init__(self, in_flight: _Optional[int] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("base_model", "run_id", "policy_version", "weights_digest", "engine", "dtype", "max_model_len", "max_num_seqs", "running", "waiting", "tokens_sampled", "updates_applied", "last_update_pause_ms", "paused", "end_token_ids", "adapters", "prefix_breaks", "out_of_service", "update_refused", "refused_adapters", "chat", "update_refusals")
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    UPDATES_APPLIED_FIELD_NUMBER: _ClassVar[int]
    LAST_UPDATE_PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BREAKS_FIELD_NUMBER: _ClassVar[int]
    OUT_OF_SERVICE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_REFUSED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_REFUSALS_FIELD_NUMBER: _ClassVar[int]
    base_model: str
    run_id: str
    policy_version: int
    weights_digest: bytes
    engine: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    running: int
    waiting: int
    tokens_sampled: int
    updates_applied: int
    last_update_pause_ms: float
    paused: bool
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    adapters: _containers.RepeatedCompositeFieldContainer[ServedAdapter]
    prefix_breaks: int
    out_of_service: str
    update_refused: str
    refused_adapters: _containers.RepeatedCompositeFieldContainer[RefusedAdapter]
    chat: _common_pb2.ChatIdentity
    update_refusals: _containers.RepeatedCompositeFieldContainer[UpdateRefusal]
    def __init__(self, base_model: _Optional[str] = ..., run_id: _Optional[str] = ..., policy_version: _Optional[int] = ..., weights_digest: _Optional[bytes] = ..., engine: _Optional[str] = ..., dtype: _Optional[str] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., tokens_sampled: _Optional[int] = ..., updates_applied: _Optional[int] = ..., last_update_pause_ms: _Optional[float] = ..., paused: _Optional[bool] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., adapters: _Optional[_Iterable[_Union[ServedAdapter, _Mapping]]] = ..., prefix_breaks: _Optional[int] = ..., out_of_service: _Optional[str] = ..., update_refused: _Optional[str] = ..., refused_adapters: _Optional[_Iterable[_Union[RefusedAdapter, _Mapping]]] = ..., chat: _Optional[_Union[_common_pb2.ChatIdentity, _Mapping]] = ..., update_refusals: _Optional[_Iterable[_Union[UpdateRefusal, _Mapping]]] = ...) -> None: ...

class UpdateRefusal(_message.Message):
    __slots__ = ("run_id", "why")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    why: str
    def __init__(self, run_id: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class RefusedAdapter(_message.Message):
    __slots__ = ("run_id", "why")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    why: str
    def __init__(self, run_id: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class ServedAdapter(_message.Message):
    __slots__ = ("run_id", "policy_version", "weights_digest")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    policy_version: int
    weights_digest: bytes
    def __init__(self, run_id: _Optional[str] = ..., policy_version: _Optional[int] = ..., weights_digest: _Optional[bytes] = ...) -> None: ...
