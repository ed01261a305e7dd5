from quartet.v1 import envhost_service_pb2 as _envhost_service_pb2
from quartet.v1 import orchestrator_service_pb2 as _orchestrator_service_pb2
from quartet.v1 import trainer_service_pb2 as _trainer_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JournalRecord(_message.Message):
    __slots__ = ("number", "at_ms", "event", "submitted", "dispatched", "rollout", "discarded", "batch", "call", "step", "eval_rollout", "eval", "phase", "note", "acked", "changed", "met")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    DISPATCHED_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EVAL_ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    EVAL_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    ACKED_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    MET_FIELD_NUMBER: _ClassVar[int]
    number: int
    at_ms: int
    event: int
    submitted: RunSubmitted
    dispatched: GroupDispatched
    rollout: _orchestrator_service_pb2.RolloutEvent
    discarded: GroupDiscarded
    batch: BatchClosed
    call: CallApplied
    step: _orchestrator_service_pb2.StepEvent
    eval_rollout: EvalRollout
    eval: _orchestrator_service_pb2.EvalEvent
    phase: _orchestrator_service_pb2.PhaseEvent
    note: _orchestrator_service_pb2.NoteEvent
    acked: GroupAcked
    changed: RunChanged
    met: EnvironmentMet
    def __init__(self, number: _Optional[int] = ..., at_ms: _Optional[int] = ..., event: _Optional[int] = ..., submitted: _Optional[_Union[RunSubmitted, _Mapping]] = ..., dispatched: _Optional[_Union[GroupDispatched, _Mapping]] = ..., rollout: _Optional[_Union[_orchestrator_service_pb2.RolloutEvent, _Mapping]] = ..., discarded: _Optional[_Union[GroupDiscarded, _Mapping]] = ..., batch: _Optional[_Union[BatchClosed, _Mapping]] = ..., call: _Optional[_Union[CallApplied, _Mapping]] = ..., step: _Optional[_Union[_orchestrator_service_pb2.StepEvent, _Mapping]] = ..., eval_rollout: _Optional[_Union[EvalRollout, _Mapping]] = ..., eval: _Optional[_Union[_orchestrator_service_pb2.EvalEvent, _Mapping]] = ..., phase: _Optional[_Union[_orchestrator_service_pb2.PhaseEvent, _Mapping]] = ..., note: _Optional[_Union[_orchestrator_service_pb2.NoteEvent, _Mapping]] = ..., acked: _Optional[_Union[GroupAcked, _Mapping]] = ..., changed: _Optional[_Union[RunChanged, _Mapping]] = ..., met: _Optional[_Union[EnvironmentMet, _Mapping]] = ...) -> None: ...

class RunSubmitted(_message.Message):
    __slots__ = ("run_id", "config_toml", "environments", "eval_environments")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_TOML_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    EVAL_ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    config_toml: str
    environments: _containers.RepeatedCompositeFieldContainer[_envhost_service_pb2.EnvironmentInfo]
    eval_environments: _containers.RepeatedCompositeFieldContainer[_envhost_service_pb2.EnvironmentInfo]
    def __init__(self, run_id: _Optional[str] = ..., config_toml: _Optional[str] = ..., environments: _Optional[_Iterable[_Union[_envhost_service_pb2.EnvironmentInfo, _Mapping]]] = ..., eval_environments: _Optional[_Iterable[_Union[_envhost_service_pb2.EnvironmentInfo, _Mapping]]] = ...) -> None: ...

class RunChanged(_message.Message):
    __slots__ = ("config_toml", "ckpt_interval", "ckpt_keep_last", "note", "ckpt_keep_interval")
    CONFIG_TOML_FIELD_NUMBER: _ClassVar[int]
    CKPT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    CKPT_KEEP_LAST_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    CKPT_KEEP_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    config_toml: str
    ckpt_interval: int
    ckpt_keep_last: int
    note: _orchestrator_service_pb2.NoteEvent
    ckpt_keep_interval: int
    def __init__(self, config_toml: _Optional[str] = ..., ckpt_interval: _Optional[int] = ..., ckpt_keep_last: _Optional[int] = ..., note: _Optional[_Union[_orchestrator_service_pb2.NoteEvent, _Mapping]] = ..., ckpt_keep_interval: _Optional[int] = ...) -> None: ...

class EnvironmentMet(_message.Message):
    __slots__ = ("places", "environment", "host", "note")
    PLACES_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    places: _containers.RepeatedScalarFieldContainer[int]
    environment: _envhost_service_pb2.EnvironmentInfo
    host: str
    note: _orchestrator_service_pb2.NoteEvent
    def __init__(self, places: _Optional[_Iterable[int]] = ..., environment: _Optional[_Union[_envhost_service_pb2.EnvironmentInfo, _Mapping]] = ..., host: _Optional[str] = ..., note: _Optional[_Union[_orchestrator_service_pb2.NoteEvent, _Mapping]] = ...) -> None: ...

class GroupDispatched(_message.Message):
    __slots__ = ("group", "batch", "place", "environment", "task_index", "members", "passed_over")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    TASK_INDEX_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    PASSED_OVER_FIELD_NUMBER: _ClassVar[int]
    group: int
    batch: int
    place: int
    environment: int
    task_index: int
    members: int
    passed_over: int
    def __init__(self, group: _Optional[int] = ..., batch: _Optional[int] = ..., place: _Optional[int] = ..., environment: _Optional[int] = ..., task_index: _Optional[int] = ..., members: _Optional[int] = ..., passed_over: _Optional[int] = ...) -> None: ...

class GroupDiscarded(_message.Message):
    __slots__ = ("group", "reason")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    group: int
    reason: str
    def __init__(self, group: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class GroupAcked(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: int
    def __init__(self, group: _Optional[int] = ...) -> None: ...

class BatchClosed(_message.Message):
    __slots__ = ("batch", "groups")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    batch: int
    groups: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, batch: _Optional[int] = ..., groups: _Optional[_Iterable[int]] = ...) -> None: ...

class CallApplied(_message.Message):
    __slots__ = ("seq_id", "forward_backward", "optim_step", "publish", "save")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    FORWARD_BACKWARD_FIELD_NUMBER: _ClassVar[int]
    OPTIM_STEP_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    forward_backward: _trainer_service_pb2.ForwardBackwardResponse
    optim_step: _trainer_service_pb2.OptimStepResponse
    publish: _trainer_service_pb2.PublishWeightsResponse
    save: _trainer_service_pb2.SaveStateResponse
    def __init__(self, seq_id: _Optional[int] = ..., forward_backward: _Optional[_Union[_trainer_service_pb2.ForwardBackwardResponse, _Mapping]] = ..., optim_step: _Optional[_Union[_trainer_service_pb2.OptimStepResponse, _Mapping]] = ..., publish: _Optional[_Union[_trainer_service_pb2.PublishWeightsResponse, _Mapping]] = ..., save: _Optional[_Union[_trainer_service_pb2.SaveStateResponse, _Mapping]] = ...) -> None: ...

class EvalRollout(_message.Message):
    __slots__ = ("at_step", "environment", "rollout")
    AT_STEP_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    at_step: int
    environment: int
    rollout: _orchestrator_service_pb2.RolloutEvent
    def __init__(self, at_step: _Optional[int] = ..., environment: _Optional[int] = ..., rollout: _Optional[_Union[_orchestrator_service_pb2.RolloutEvent, _Mapping]] = ...) -> None: ...
