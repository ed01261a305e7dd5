from quartet.v1 import common_pb2 as _common_pb2
from quartet.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Split(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPLIT_UNSPECIFIED: _ClassVar[Split]
    SPLIT_TRAIN: _ClassVar[Split]
    SPLIT_EVAL: _ClassVar[Split]
SPLIT_UNSPECIFIED: Split
SPLIT_TRAIN: Split
SPLIT_EVAL: Split

class EnvironmentRef(_message.Message):
    __slots__ = ("id", "args_json")
    ID_FIELD_NUMBER: _ClassVar[int]
    ARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    id: str
    args_json: str
    def __init__(self, id: _Optional[str] = ..., args_json: _Optional[str] = ...) -> None: ...

class ListEnvironmentsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListEnvironmentsResponse(_message.Message):
    __slots__ = ("environments",)
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    environments: _containers.RepeatedCompositeFieldContainer[EnvironmentInfo]
    def __init__(self, environments: _Optional[_Iterable[_Union[EnvironmentInfo, _Mapping]]] = ...) -> None: ...

class EnvironmentInfo(_message.Message):
    __slots__ = ("id", "version", "api", "verifiers_version", "train_size", "eval_size", "infinite", "group_scoring", "rewards", "metrics", "workers", "digest", "files", "examples_digest", "max_members", "weights")
    class FilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class WeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    API_FIELD_NUMBER: _ClassVar[int]
    VERIFIERS_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRAIN_SIZE_FIELD_NUMBER: _ClassVar[int]
    EVAL_SIZE_FIELD_NUMBER: _ClassVar[int]
    INFINITE_FIELD_NUMBER: _ClassVar[int]
    GROUP_SCORING_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MAX_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    version: str
    api: str
    verifiers_version: str
    train_size: int
    eval_size: int
    infinite: bool
    group_scoring: bool
    rewards: _containers.RepeatedScalarFieldContainer[str]
    metrics: _containers.RepeatedScalarFieldContainer[str]
    workers: int
    digest: str
    files: _containers.ScalarMap[str, str]
    examples_digest: str
    max_members: int
    weights: _containers.ScalarMap[str, float]
    def __init__(self, id: _Optional[str] = ..., version: _Optional[str] = ..., api: _Optional[str] = ..., verifiers_version: _Optional[str] = ..., train_size: _Optional[int] = ..., eval_size: _Optional[int] = ..., infinite: _Optional[bool] = ..., group_scoring: _Optional[bool] = ..., rewards: _Optional[_Iterable[str]] = ..., metrics: _Optional[_Iterable[str]] = ..., workers: _Optional[int] = ..., digest: _Optional[str] = ..., files: _Optional[_Mapping[str, str]] = ..., examples_digest: _Optional[str] = ..., max_members: _Optional[int] = ..., weights: _Optional[_Mapping[str, float]] = ...) -> None: ...

class DescribeEnvironmentRequest(_message.Message):
    __slots__ = ("environment",)
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    environment: EnvironmentRef
    def __init__(self, environment: _Optional[_Union[EnvironmentRef, _Mapping]] = ...) -> None: ...

class DescribeEnvironmentResponse(_message.Message):
    __slots__ = ("environment",)
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    environment: EnvironmentInfo
    def __init__(self, environment: _Optional[_Union[EnvironmentInfo, _Mapping]] = ...) -> None: ...

class GetTasksRequest(_message.Message):
    __slots__ = ("environment", "split", "start", "count", "include_data")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_DATA_FIELD_NUMBER: _ClassVar[int]
    environment: EnvironmentRef
    split: Split
    start: int
    count: int
    include_data: bool
    def __init__(self, environment: _Optional[_Union[EnvironmentRef, _Mapping]] = ..., split: _Optional[_Union[Split, str]] = ..., start: _Optional[int] = ..., count: _Optional[int] = ..., include_data: _Optional[bool] = ...) -> None: ...

class GetTasksResponse(_message.Message):
    __slots__ = ("tasks",)
    TASKS_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.Task]
    def __init__(self, tasks: _Optional[_Iterable[_Union[_rollout_pb2.Task, _Mapping]]] = ...) -> None: ...

class RunRolloutsRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "environment", "split", "task_index", "members", "sampling", "min_policy_version", "exact_policy_version", "timeout_ms", "messages_of_members", "max_retries", "routed_experts", "template_settings")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    TASK_INDEX_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MIN_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXACT_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_OF_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    MAX_RETRIES_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    environment: EnvironmentRef
    split: Split
    task_index: int
    members: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    min_policy_version: int
    exact_policy_version: int
    timeout_ms: int
    messages_of_members: int
    max_retries: int
    routed_experts: bool
    template_settings: str
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., environment: _Optional[_Union[EnvironmentRef, _Mapping]] = ..., split: _Optional[_Union[Split, str]] = ..., task_index: _Optional[int] = ..., members: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., min_policy_version: _Optional[int] = ..., exact_policy_version: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., messages_of_members: _Optional[int] = ..., max_retries: _Optional[int] = ..., routed_experts: _Optional[bool] = ..., template_settings: _Optional[str] = ...) -> None: ...

class SampledBy(_message.Message):
    __slots__ = ("replicas", "weights")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedScalarFieldContainer[str]
    weights: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.PolicyWeights]
    def __init__(self, replicas: _Optional[_Iterable[str]] = ..., weights: _Optional[_Iterable[_Union[_rollout_pb2.PolicyWeights, _Mapping]]] = ...) -> None: ...

class RunRolloutsResponse(_message.Message):
    __slots__ = ("rollout", "heartbeat", "held_up", "environment_digest", "waits_for", "sampled_by", "queued", "places")
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    HELD_UP_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_BY_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    rollout: _rollout_pb2.Rollout
    heartbeat: _common_pb2.Heartbeat
    held_up: str
    environment_digest: str
    waits_for: str
    sampled_by: SampledBy
    queued: int
    places: int
    def __init__(self, rollout: _Optional[_Union[_rollout_pb2.Rollout, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ..., held_up: _Optional[str] = ..., environment_digest: _Optional[str] = ..., waits_for: _Optional[str] = ..., sampled_by: _Optional[_Union[SampledBy, _Mapping]] = ..., queued: _Optional[int] = ..., places: _Optional[int] = ...) -> None: ...

class InteractRequest(_message.Message):
    __slots__ = ("run", "answer")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    run: RunRolloutsRequest
    answer: ModelAnswer
    def __init__(self, run: _Optional[_Union[RunRolloutsRequest, _Mapping]] = ..., answer: _Optional[_Union[ModelAnswer, _Mapping]] = ...) -> None: ...

class ModelAnswer(_message.Message):
    __slots__ = ("call_id", "prompt_token_ids", "token_ids", "logprobs", "message", "truncated", "policy_version", "error")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    message: _common_pb2.Message
    truncated: bool
    policy_version: int
    error: str
    def __init__(self, call_id: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., message: _Optional[_Union[_common_pb2.Message, _Mapping]] = ..., truncated: _Optional[bool] = ..., policy_version: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class InteractResponse(_message.Message):
    __slots__ = ("question", "rollout", "heartbeat")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    question: ModelQuestion
    rollout: _rollout_pb2.Rollout
    heartbeat: _common_pb2.Heartbeat
    def __init__(self, question: _Optional[_Union[ModelQuestion, _Mapping]] = ..., rollout: _Optional[_Union[_rollout_pb2.Rollout, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class ModelQuestion(_message.Message):
    __slots__ = ("call_id", "member", "messages", "tools", "prefix_token_ids", "prefix_messages", "sampling", "template_settings")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    member: int
    messages: _containers.RepeatedCompositeFieldContainer[_common_pb2.Message]
    tools: _containers.RepeatedCompositeFieldContainer[_common_pb2.ToolDefinition]
    prefix_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prefix_messages: int
    sampling: _common_pb2.SamplingParams
    template_settings: str
    def __init__(self, call_id: _Optional[int] = ..., member: _Optional[int] = ..., messages: _Optional[_Iterable[_Union[_common_pb2.Message, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[_common_pb2.ToolDefinition, _Mapping]]] = ..., prefix_token_ids: _Optional[_Iterable[int]] = ..., prefix_messages: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., template_settings: _Optional[str] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_ids", "run_id")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    run_id: str
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., run_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("cancelled",)
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    cancelled: int
    def __init__(self, cancelled: _Optional[int] = ...) -> None: ...
