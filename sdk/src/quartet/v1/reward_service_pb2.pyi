from quartet.v1 import common_pb2 as _common_pb2
from quartet.v1 import envhost_service_pb2 as _envhost_service_pb2
from quartet.v1 import inference_service_pb2 as _inference_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRewardsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RewardFunction(_message.Message):
    __slots__ = ("name", "weight")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    name: str
    weight: float
    def __init__(self, name: _Optional[str] = ..., weight: _Optional[float] = ...) -> None: ...

class DescribeRewardsResponse(_message.Message):
    __slots__ = ("train_size", "eval_size", "functions", "digest", "version", "max_turns")
    TRAIN_SIZE_FIELD_NUMBER: _ClassVar[int]
    EVAL_SIZE_FIELD_NUMBER: _ClassVar[int]
    FUNCTIONS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_TURNS_FIELD_NUMBER: _ClassVar[int]
    train_size: int
    eval_size: int
    functions: _containers.RepeatedCompositeFieldContainer[RewardFunction]
    digest: str
    version: str
    max_turns: int
    def __init__(self, train_size: _Optional[int] = ..., eval_size: _Optional[int] = ..., functions: _Optional[_Iterable[_Union[RewardFunction, _Mapping]]] = ..., digest: _Optional[str] = ..., version: _Optional[str] = ..., max_turns: _Optional[int] = ...) -> None: ...

class RewardPrompt(_message.Message):
    __slots__ = ("messages", "tokens", "template_settings", "key", "data_json", "tools", "opens")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    DATA_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    messages: _inference_service_pb2.MessagesPrompt
    tokens: _inference_service_pb2.TokensPrompt
    template_settings: str
    key: str
    data_json: str
    tools: _containers.RepeatedCompositeFieldContainer[_common_pb2.ToolDefinition]
    opens: bool
    def __init__(self, messages: _Optional[_Union[_inference_service_pb2.MessagesPrompt, _Mapping]] = ..., tokens: _Optional[_Union[_inference_service_pb2.TokensPrompt, _Mapping]] = ..., template_settings: _Optional[str] = ..., key: _Optional[str] = ..., data_json: _Optional[str] = ..., tools: _Optional[_Iterable[_Union[_common_pb2.ToolDefinition, _Mapping]]] = ..., opens: _Optional[bool] = ...) -> None: ...

class GetPromptsRequest(_message.Message):
    __slots__ = ("split", "start", "count")
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    split: _envhost_service_pb2.Split
    start: int
    count: int
    def __init__(self, split: _Optional[_Union[_envhost_service_pb2.Split, str]] = ..., start: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class GetPromptsResponse(_message.Message):
    __slots__ = ("prompts",)
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[RewardPrompt]
    def __init__(self, prompts: _Optional[_Iterable[_Union[RewardPrompt, _Mapping]]] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("run_id", "split", "index", "request_id", "member")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    split: _envhost_service_pb2.Split
    index: int
    request_id: str
    member: int
    def __init__(self, run_id: _Optional[str] = ..., split: _Optional[_Union[_envhost_service_pb2.Split, str]] = ..., index: _Optional[int] = ..., request_id: _Optional[str] = ..., member: _Optional[int] = ...) -> None: ...

class OpenResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ContinueRequest(_message.Message):
    __slots__ = ("run_id", "split", "index", "member", "messages", "token_count", "request_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    split: _envhost_service_pb2.Split
    index: int
    member: int
    messages: _containers.RepeatedCompositeFieldContainer[_common_pb2.Message]
    token_count: int
    request_id: str
    def __init__(self, run_id: _Optional[str] = ..., split: _Optional[_Union[_envhost_service_pb2.Split, str]] = ..., index: _Optional[int] = ..., member: _Optional[int] = ..., messages: _Optional[_Iterable[_Union[_common_pb2.Message, _Mapping]]] = ..., token_count: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class ContinueResponse(_message.Message):
    __slots__ = ("messages", "max_tokens")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[_common_pb2.Message]
    max_tokens: int
    def __init__(self, messages: _Optional[_Iterable[_Union[_common_pb2.Message, _Mapping]]] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class RewardedCompletion(_message.Message):
    __slots__ = ("member", "token_ids", "message", "truncated", "messages")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    member: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    message: _common_pb2.Message
    truncated: bool
    messages: _containers.RepeatedCompositeFieldContainer[_common_pb2.Message]
    def __init__(self, member: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., message: _Optional[_Union[_common_pb2.Message, _Mapping]] = ..., truncated: _Optional[bool] = ..., messages: _Optional[_Iterable[_Union[_common_pb2.Message, _Mapping]]] = ...) -> None: ...

class ScoreGroupRequest(_message.Message):
    __slots__ = ("run_id", "split", "index", "completions", "request_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    split: _envhost_service_pb2.Split
    index: int
    completions: _containers.RepeatedCompositeFieldContainer[RewardedCompletion]
    request_id: str
    def __init__(self, run_id: _Optional[str] = ..., split: _Optional[_Union[_envhost_service_pb2.Split, str]] = ..., index: _Optional[int] = ..., completions: _Optional[_Iterable[_Union[RewardedCompletion, _Mapping]]] = ..., request_id: _Optional[str] = ...) -> None: ...

class FunctionScore(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: float
    def __init__(self, value: _Optional[float] = ...) -> None: ...

class CompletionReward(_message.Message):
    __slots__ = ("scores", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SCORES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedCompositeFieldContainer[FunctionScore]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, scores: _Optional[_Iterable[_Union[FunctionScore, _Mapping]]] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ScoreGroupResponse(_message.Message):
    __slots__ = ("rewards",)
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    rewards: _containers.RepeatedCompositeFieldContainer[CompletionReward]
    def __init__(self, rewards: _Optional[_Iterable[_Union[CompletionReward, _Mapping]]] = ...) -> None: ...
