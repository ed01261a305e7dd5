from quartet.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FailureKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_KIND_UNSPECIFIED: _ClassVar[FailureKind]
    FAILURE_KIND_MODEL: _ClassVar[FailureKind]
    FAILURE_KIND_ENVIRONMENT: _ClassVar[FailureKind]
    FAILURE_KIND_SCORER: _ClassVar[FailureKind]
    FAILURE_KIND_TOOL: _ClassVar[FailureKind]
    FAILURE_KIND_TIMEOUT: _ClassVar[FailureKind]
    FAILURE_KIND_HOST: _ClassVar[FailureKind]
    FAILURE_KIND_CANCELLED: _ClassVar[FailureKind]
FAILURE_KIND_UNSPECIFIED: FailureKind
FAILURE_KIND_MODEL: FailureKind
FAILURE_KIND_ENVIRONMENT: FailureKind
FAILURE_KIND_SCORER: FailureKind
FAILURE_KIND_TOOL: FailureKind
FAILURE_KIND_TIMEOUT: FailureKind
FAILURE_KIND_HOST: FailureKind
FAILURE_KIND_CANCELLED: FailureKind

class PolicySpan(_message.Message):
    __slots__ = ("start", "length", "policy_version")
    START_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    start: int
    length: int
    policy_version: int
    def __init__(self, start: _Optional[int] = ..., length: _Optional[int] = ..., policy_version: _Optional[int] = ...) -> None: ...

class PolicyWeights(_message.Message):
    __slots__ = ("policy_version", "weights_id")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ID_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    weights_id: int
    def __init__(self, policy_version: _Optional[int] = ..., weights_id: _Optional[int] = ...) -> None: ...

class RoutedExperts(_message.Message):
    __slots__ = ("start", "layers", "slots", "width", "numbers")
    START_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    start: int
    layers: int
    slots: int
    width: int
    numbers: bytes
    def __init__(self, start: _Optional[int] = ..., layers: _Optional[int] = ..., slots: _Optional[int] = ..., width: _Optional[int] = ..., numbers: _Optional[bytes] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("token_ids", "spans", "logprobs", "reference_logprobs", "experts")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    spans: _containers.RepeatedCompositeFieldContainer[PolicySpan]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    reference_logprobs: _containers.RepeatedScalarFieldContainer[float]
    experts: RoutedExperts
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., spans: _Optional[_Iterable[_Union[PolicySpan, _Mapping]]] = ..., logprobs: _Optional[_Iterable[float]] = ..., reference_logprobs: _Optional[_Iterable[float]] = ..., experts: _Optional[_Union[RoutedExperts, _Mapping]] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("index", "key", "data_json")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    DATA_JSON_FIELD_NUMBER: _ClassVar[int]
    index: int
    key: str
    data_json: str
    def __init__(self, index: _Optional[int] = ..., key: _Optional[str] = ..., data_json: _Optional[str] = ...) -> None: ...

class RolloutFailure(_message.Message):
    __slots__ = ("kind", "message", "retryable", "reason")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kind: FailureKind
    message: str
    retryable: bool
    reason: _common_pb2.ErrorReason
    def __init__(self, kind: _Optional[_Union[FailureKind, str]] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ..., reason: _Optional[_Union[_common_pb2.ErrorReason, str]] = ...) -> None: ...

class RolloutPart(_message.Message):
    __slots__ = ("agent", "reward", "samples", "rewards")
    class RewardsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    AGENT_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    agent: str
    reward: float
    samples: int
    rewards: _containers.ScalarMap[str, float]
    def __init__(self, agent: _Optional[str] = ..., reward: _Optional[float] = ..., samples: _Optional[int] = ..., rewards: _Optional[_Mapping[str, float]] = ...) -> None: ...

class RolloutTiming(_message.Message):
    __slots__ = ("total_ms", "model_ms", "scoring_ms")
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    MODEL_MS_FIELD_NUMBER: _ClassVar[int]
    SCORING_MS_FIELD_NUMBER: _ClassVar[int]
    total_ms: int
    model_ms: int
    scoring_ms: int
    def __init__(self, total_ms: _Optional[int] = ..., model_ms: _Optional[int] = ..., scoring_ms: _Optional[int] = ...) -> None: ...

class Rollout(_message.Message):
    __slots__ = ("member", "samples", "reward", "rewards", "metrics", "stop_condition", "truncated", "num_turns", "usage", "timing", "messages", "prefix_breaks", "failure", "parts", "failed_attempts", "earlier_failure", "task_json", "weights", "replicas")
    class RewardsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    STOP_CONDITION_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    NUM_TURNS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BREAKS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    EARLIER_FAILURE_FIELD_NUMBER: _ClassVar[int]
    TASK_JSON_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    member: int
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    reward: float
    rewards: _containers.ScalarMap[str, float]
    metrics: _containers.ScalarMap[str, float]
    stop_condition: str
    truncated: bool
    num_turns: int
    usage: _common_pb2.Usage
    timing: RolloutTiming
    messages: _containers.RepeatedCompositeFieldContainer[_common_pb2.Message]
    prefix_breaks: int
    failure: RolloutFailure
    parts: _containers.RepeatedCompositeFieldContainer[RolloutPart]
    failed_attempts: int
    earlier_failure: RolloutFailure
    task_json: str
    weights: _containers.RepeatedCompositeFieldContainer[PolicyWeights]
    replicas: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, member: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., reward: _Optional[float] = ..., rewards: _Optional[_Mapping[str, float]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., stop_condition: _Optional[str] = ..., truncated: _Optional[bool] = ..., num_turns: _Optional[int] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., timing: _Optional[_Union[RolloutTiming, _Mapping]] = ..., messages: _Optional[_Iterable[_Union[_common_pb2.Message, _Mapping]]] = ..., prefix_breaks: _Optional[int] = ..., failure: _Optional[_Union[RolloutFailure, _Mapping]] = ..., parts: _Optional[_Iterable[_Union[RolloutPart, _Mapping]]] = ..., failed_attempts: _Optional[int] = ..., earlier_failure: _Optional[_Union[RolloutFailure, _Mapping]] = ..., task_json: _Optional[str] = ..., weights: _Optional[_Iterable[_Union[PolicyWeights, _Mapping]]] = ..., replicas: _Optional[_Iterable[str]] = ...) -> None: ...
