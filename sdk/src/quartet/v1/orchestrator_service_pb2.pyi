from quartet.v1 import common_pb2 as _common_pb2
from quartet.v1 import model_pb2 as _model_pb2
from quartet.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_PHASE_UNSPECIFIED: _ClassVar[RunPhase]
    RUN_PHASE_PENDING: _ClassVar[RunPhase]
    RUN_PHASE_EVALUATING: _ClassVar[RunPhase]
    RUN_PHASE_TRAINING: _ClassVar[RunPhase]
    RUN_PHASE_STOPPING: _ClassVar[RunPhase]
    RUN_PHASE_STOPPED: _ClassVar[RunPhase]
    RUN_PHASE_COMPLETED: _ClassVar[RunPhase]
    RUN_PHASE_FAILED: _ClassVar[RunPhase]

class NoteLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOTE_LEVEL_UNSPECIFIED: _ClassVar[NoteLevel]
    NOTE_LEVEL_INFO: _ClassVar[NoteLevel]
    NOTE_LEVEL_WARNING: _ClassVar[NoteLevel]
RUN_PHASE_UNSPECIFIED: RunPhase
RUN_PHASE_PENDING: RunPhase
RUN_PHASE_EVALUATING: RunPhase
RUN_PHASE_TRAINING: RunPhase
RUN_PHASE_STOPPING: RunPhase
RUN_PHASE_STOPPED: RunPhase
RUN_PHASE_COMPLETED: RunPhase
RUN_PHASE_FAILED: RunPhase
NOTE_LEVEL_UNSPECIFIED: NoteLevel
NOTE_LEVEL_INFO: NoteLevel
NOTE_LEVEL_WARNING: NoteLevel

class Ledger(_message.Message):
    __slots__ = ("dispatched", "trained", "discarded", "in_flight")
    class DiscardedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DISPATCHED_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    dispatched: int
    trained: int
    discarded: _containers.ScalarMap[str, int]
    in_flight: int
    def __init__(self, dispatched: _Optional[int] = ..., trained: _Optional[int] = ..., discarded: _Optional[_Mapping[str, int]] = ..., in_flight: _Optional[int] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("run_id", "phase", "step", "max_steps", "reward_before", "reward_after", "ledger", "max_off_policy_steps_seen", "max_logprob_difference", "error", "config_toml", "submitted_at_ms", "model_path", "last_event", "doing", "environments", "agents")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    REWARD_BEFORE_FIELD_NUMBER: _ClassVar[int]
    REWARD_AFTER_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    MAX_OFF_POLICY_STEPS_SEEN_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROB_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CONFIG_TOML_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    LAST_EVENT_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    phase: RunPhase
    step: int
    max_steps: int
    reward_before: float
    reward_after: float
    ledger: Ledger
    max_off_policy_steps_seen: int
    max_logprob_difference: float
    error: str
    config_toml: str
    submitted_at_ms: int
    model_path: str
    last_event: int
    doing: str
    environments: _containers.RepeatedCompositeFieldContainer[RunEnvironment]
    agents: _containers.RepeatedCompositeFieldContainer[RunAgent]
    def __init__(self, run_id: _Optional[str] = ..., phase: _Optional[_Union[RunPhase, str]] = ..., step: _Optional[int] = ..., max_steps: _Optional[int] = ..., reward_before: _Optional[float] = ..., reward_after: _Optional[float] = ..., ledger: _Optional[_Union[Ledger, _Mapping]] = ..., max_off_policy_steps_seen: _Optional[int] = ..., max_logprob_difference: _Optional[float] = ..., error: _Optional[str] = ..., config_toml: _Optional[str] = ..., submitted_at_ms: _Optional[int] = ..., model_path: _Optional[str] = ..., last_event: _Optional[int] = ..., doing: _Optional[str] = ..., environments: _Optional[_Iterable[_Union[RunEnvironment, _Mapping]]] = ..., agents: _Optional[_Iterable[_Union[RunAgent, _Mapping]]] = ...) -> None: ...

class RunAgent(_message.Message):
    __slots__ = ("environment", "agent", "reward_before", "reward_after")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    REWARD_BEFORE_FIELD_NUMBER: _ClassVar[int]
    REWARD_AFTER_FIELD_NUMBER: _ClassVar[int]
    environment: str
    agent: str
    reward_before: float
    reward_after: float
    def __init__(self, environment: _Optional[str] = ..., agent: _Optional[str] = ..., reward_before: _Optional[float] = ..., reward_after: _Optional[float] = ...) -> None: ...

class RunEnvironment(_message.Message):
    __slots__ = ("id", "version", "digest", "later_digests")
    ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LATER_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    version: str
    digest: str
    later_digests: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., version: _Optional[str] = ..., digest: _Optional[str] = ..., later_digests: _Optional[_Iterable[str]] = ...) -> None: ...

class SubmitRunRequest(_message.Message):
    __slots__ = ("run_id", "config_toml", "dry_run")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_TOML_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    config_toml: str
    dry_run: bool
    def __init__(self, run_id: _Optional[str] = ..., config_toml: _Optional[str] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class SubmitRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class GetRunStatusRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class GetRunStatusResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class ListRunsRequest(_message.Message):
    __slots__ = ("services",)
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    services: bool
    def __init__(self, services: _Optional[bool] = ...) -> None: ...

class ListRunsResponse(_message.Message):
    __slots__ = ("runs", "services")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    services: _containers.RepeatedCompositeFieldContainer[ServiceStatus]
    def __init__(self, runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ..., services: _Optional[_Iterable[_Union[ServiceStatus, _Mapping]]] = ...) -> None: ...

class ServiceStatus(_message.Message):
    __slots__ = ("service", "address", "release", "sdk_build", "build", "error", "ready")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    SDK_BUILD_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    service: str
    address: str
    release: str
    sdk_build: str
    build: str
    error: str
    ready: bool
    def __init__(self, service: _Optional[str] = ..., address: _Optional[str] = ..., release: _Optional[str] = ..., sdk_build: _Optional[str] = ..., build: _Optional[str] = ..., error: _Optional[str] = ..., ready: _Optional[bool] = ...) -> None: ...

class StopRunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class StopRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class DeleteRunRequest(_message.Message):
    __slots__ = ("run_id", "dry_run")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    dry_run: bool
    def __init__(self, run_id: _Optional[str] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class DeleteRunResponse(_message.Message):
    __slots__ = ("journal_bytes", "states", "states_bytes")
    JOURNAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    STATES_BYTES_FIELD_NUMBER: _ClassVar[int]
    journal_bytes: int
    states: int
    states_bytes: int
    def __init__(self, journal_bytes: _Optional[int] = ..., states: _Optional[int] = ..., states_bytes: _Optional[int] = ...) -> None: ...

class ResumeRunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class ResumeRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class WatchRunRequest(_message.Message):
    __slots__ = ("run_id", "after_event", "include_rollouts")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_EVENT_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    after_event: int
    include_rollouts: bool
    def __init__(self, run_id: _Optional[str] = ..., after_event: _Optional[int] = ..., include_rollouts: _Optional[bool] = ...) -> None: ...

class WatchRunResponse(_message.Message):
    __slots__ = ("event", "at_ms", "phase", "step", "eval", "rollout", "note", "heartbeat")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EVAL_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    event: int
    at_ms: int
    phase: PhaseEvent
    step: StepEvent
    eval: EvalEvent
    rollout: RolloutEvent
    note: NoteEvent
    heartbeat: _common_pb2.Heartbeat
    def __init__(self, event: _Optional[int] = ..., at_ms: _Optional[int] = ..., phase: _Optional[_Union[PhaseEvent, _Mapping]] = ..., step: _Optional[_Union[StepEvent, _Mapping]] = ..., eval: _Optional[_Union[EvalEvent, _Mapping]] = ..., rollout: _Optional[_Union[RolloutEvent, _Mapping]] = ..., note: _Optional[_Union[NoteEvent, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class PhaseEvent(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class StepEvent(_message.Message):
    __slots__ = ("step", "metrics", "ledger", "groups")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    step: int
    metrics: _containers.ScalarMap[str, float]
    ledger: Ledger
    groups: _containers.RepeatedCompositeFieldContainer[GroupFate]
    def __init__(self, step: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., ledger: _Optional[_Union[Ledger, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[GroupFate, _Mapping]]] = ...) -> None: ...

class GroupFate(_message.Message):
    __slots__ = ("group", "discarded", "members", "advantages", "overlong", "without_advantage")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    OVERLONG_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_ADVANTAGE_FIELD_NUMBER: _ClassVar[int]
    group: int
    discarded: str
    members: _containers.RepeatedScalarFieldContainer[int]
    advantages: _containers.RepeatedScalarFieldContainer[float]
    overlong: _containers.RepeatedScalarFieldContainer[int]
    without_advantage: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., discarded: _Optional[str] = ..., members: _Optional[_Iterable[int]] = ..., advantages: _Optional[_Iterable[float]] = ..., overlong: _Optional[_Iterable[int]] = ..., without_advantage: _Optional[_Iterable[int]] = ...) -> None: ...

class EvalEvent(_message.Message):
    __slots__ = ("step", "policy_version", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    step: int
    policy_version: int
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., policy_version: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class RolloutEvent(_message.Message):
    __slots__ = ("group", "env_id", "task_index", "step", "rollout")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ENV_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_INDEX_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    group: int
    env_id: str
    task_index: int
    step: int
    rollout: _rollout_pb2.Rollout
    def __init__(self, group: _Optional[int] = ..., env_id: _Optional[str] = ..., task_index: _Optional[int] = ..., step: _Optional[int] = ..., rollout: _Optional[_Union[_rollout_pb2.Rollout, _Mapping]] = ...) -> None: ...

class NoteEvent(_message.Message):
    __slots__ = ("level", "message")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    level: NoteLevel
    message: str
    def __init__(self, level: _Optional[_Union[NoteLevel, str]] = ..., message: _Optional[str] = ...) -> None: ...

class StreamRolloutsRequest(_message.Message):
    __slots__ = ("start", "credits", "ack")
    START_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    start: StreamRolloutsStart
    credits: int
    ack: int
    def __init__(self, start: _Optional[_Union[StreamRolloutsStart, _Mapping]] = ..., credits: _Optional[int] = ..., ack: _Optional[int] = ...) -> None: ...

class StreamRolloutsStart(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class StreamRolloutsResponse(_message.Message):
    __slots__ = ("group", "rollout", "heartbeat")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    group: CreditedGroup
    rollout: CreditedRollout
    heartbeat: _common_pb2.Heartbeat
    def __init__(self, group: _Optional[_Union[CreditedGroup, _Mapping]] = ..., rollout: _Optional[_Union[CreditedRollout, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class CreditedGroup(_message.Message):
    __slots__ = ("group", "step", "groups_of_step", "rollouts", "normalizer")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_OF_STEP_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZER_FIELD_NUMBER: _ClassVar[int]
    group: int
    step: int
    groups_of_step: int
    rollouts: int
    normalizer: float
    def __init__(self, group: _Optional[int] = ..., step: _Optional[int] = ..., groups_of_step: _Optional[int] = ..., rollouts: _Optional[int] = ..., normalizer: _Optional[float] = ...) -> None: ...

class CreditedRollout(_message.Message):
    __slots__ = ("rollout", "advantages")
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    rollout: _rollout_pb2.Rollout
    advantages: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, rollout: _Optional[_Union[_rollout_pb2.Rollout, _Mapping]] = ..., advantages: _Optional[_Iterable[float]] = ...) -> None: ...

class EvaluateRequest(_message.Message):
    __slots__ = ("run_id", "config_toml")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_TOML_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    config_toml: str
    def __init__(self, run_id: _Optional[str] = ..., config_toml: _Optional[str] = ...) -> None: ...

class EvaluateResponse(_message.Message):
    __slots__ = ("rollout", "result", "heartbeat")
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    rollout: RolloutEvent
    result: EvalEvent
    heartbeat: _common_pb2.Heartbeat
    def __init__(self, rollout: _Optional[_Union[RolloutEvent, _Mapping]] = ..., result: _Optional[_Union[EvalEvent, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class FetchRunModelRequest(_message.Message):
    __slots__ = ("run_id", "state", "adapter", "resume")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    state: str
    adapter: bool
    resume: _model_pb2.ModelPlace
    def __init__(self, run_id: _Optional[str] = ..., state: _Optional[str] = ..., adapter: _Optional[bool] = ..., resume: _Optional[_Union[_model_pb2.ModelPlace, _Mapping]] = ...) -> None: ...

class FetchRunModelResponse(_message.Message):
    __slots__ = ("manifest", "chunk", "heartbeat")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    manifest: _model_pb2.ModelManifest
    chunk: _model_pb2.ModelChunk
    heartbeat: _common_pb2.Heartbeat
    def __init__(self, manifest: _Optional[_Union[_model_pb2.ModelManifest, _Mapping]] = ..., chunk: _Optional[_Union[_model_pb2.ModelChunk, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ...) -> None: ...
