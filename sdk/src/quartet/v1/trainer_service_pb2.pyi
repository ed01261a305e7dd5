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

class LossKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOSS_KIND_UNSPECIFIED: _ClassVar[LossKind]
    LOSS_KIND_POLICY_GRADIENT: _ClassVar[LossKind]
    LOSS_KIND_CROSS_ENTROPY: _ClassVar[LossKind]
    LOSS_KIND_REFERENCE_KL: _ClassVar[LossKind]
    LOSS_KIND_CUSTOM: _ClassVar[LossKind]

class RatioTreatment(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RATIO_TREATMENT_UNSPECIFIED: _ClassVar[RatioTreatment]
    RATIO_TREATMENT_CISPO: _ClassVar[RatioTreatment]
    RATIO_TREATMENT_PPO: _ClassVar[RatioTreatment]
    RATIO_TREATMENT_DPPO: _ClassVar[RatioTreatment]
    RATIO_TREATMENT_NONE: _ClassVar[RatioTreatment]
    RATIO_TREATMENT_SAPO: _ClassVar[RatioTreatment]
    RATIO_TREATMENT_VESPO: _ClassVar[RatioTreatment]

class RatioLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RATIO_LEVEL_UNSPECIFIED: _ClassVar[RatioLevel]
    RATIO_LEVEL_TOKEN: _ClassVar[RatioLevel]
    RATIO_LEVEL_SEQUENCE: _ClassVar[RatioLevel]

class Aggregation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AGGREGATION_UNSPECIFIED: _ClassVar[Aggregation]
    AGGREGATION_TOKEN: _ClassVar[Aggregation]
    AGGREGATION_SEQUENCE: _ClassVar[Aggregation]

class KlEstimator(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KL_ESTIMATOR_UNSPECIFIED: _ClassVar[KlEstimator]
    KL_ESTIMATOR_K1: _ClassVar[KlEstimator]
    KL_ESTIMATOR_K2: _ClassVar[KlEstimator]
    KL_ESTIMATOR_K3: _ClassVar[KlEstimator]

class CorrectionMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CORRECTION_MODE_UNSPECIFIED: _ClassVar[CorrectionMode]
    CORRECTION_MODE_TRUNCATE: _ClassVar[CorrectionMode]
    CORRECTION_MODE_MASK: _ClassVar[CorrectionMode]

class OptimizerKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPTIMIZER_KIND_UNSPECIFIED: _ClassVar[OptimizerKind]
    OPTIMIZER_KIND_ADAMW: _ClassVar[OptimizerKind]
    OPTIMIZER_KIND_MUON: _ClassVar[OptimizerKind]
    OPTIMIZER_KIND_SGD: _ClassVar[OptimizerKind]

class Schedule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCHEDULE_UNSPECIFIED: _ClassVar[Schedule]
    SCHEDULE_CONSTANT: _ClassVar[Schedule]
    SCHEDULE_LINEAR: _ClassVar[Schedule]
    SCHEDULE_COSINE: _ClassVar[Schedule]
    SCHEDULE_WARMUP_STABLE_DECAY: _ClassVar[Schedule]
LOSS_KIND_UNSPECIFIED: LossKind
LOSS_KIND_POLICY_GRADIENT: LossKind
LOSS_KIND_CROSS_ENTROPY: LossKind
LOSS_KIND_REFERENCE_KL: LossKind
LOSS_KIND_CUSTOM: LossKind
RATIO_TREATMENT_UNSPECIFIED: RatioTreatment
RATIO_TREATMENT_CISPO: RatioTreatment
RATIO_TREATMENT_PPO: RatioTreatment
RATIO_TREATMENT_DPPO: RatioTreatment
RATIO_TREATMENT_NONE: RatioTreatment
RATIO_TREATMENT_SAPO: RatioTreatment
RATIO_TREATMENT_VESPO: RatioTreatment
RATIO_LEVEL_UNSPECIFIED: RatioLevel
RATIO_LEVEL_TOKEN: RatioLevel
RATIO_LEVEL_SEQUENCE: RatioLevel
AGGREGATION_UNSPECIFIED: Aggregation
AGGREGATION_TOKEN: Aggregation
AGGREGATION_SEQUENCE: Aggregation
KL_ESTIMATOR_UNSPECIFIED: KlEstimator
KL_ESTIMATOR_K1: KlEstimator
KL_ESTIMATOR_K2: KlEstimator
KL_ESTIMATOR_K3: KlEstimator
CORRECTION_MODE_UNSPECIFIED: CorrectionMode
CORRECTION_MODE_TRUNCATE: CorrectionMode
CORRECTION_MODE_MASK: CorrectionMode
OPTIMIZER_KIND_UNSPECIFIED: OptimizerKind
OPTIMIZER_KIND_ADAMW: OptimizerKind
OPTIMIZER_KIND_MUON: OptimizerKind
OPTIMIZER_KIND_SGD: OptimizerKind
SCHEDULE_UNSPECIFIED: Schedule
SCHEDULE_CONSTANT: Schedule
SCHEDULE_LINEAR: Schedule
SCHEDULE_COSINE: Schedule
SCHEDULE_WARMUP_STABLE_DECAY: Schedule

class MismatchCorrection(_message.Message):
    __slots__ = ("mode", "level", "cap", "floor")
    MODE_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    CAP_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    mode: CorrectionMode
    level: RatioLevel
    cap: float
    floor: float
    def __init__(self, mode: _Optional[_Union[CorrectionMode, str]] = ..., level: _Optional[_Union[RatioLevel, str]] = ..., cap: _Optional[float] = ..., floor: _Optional[float] = ...) -> None: ...

class VespoKernel(_message.Message):
    __slots__ = ("k_positive", "lambda_positive", "k_negative", "lambda_negative")
    K_POSITIVE_FIELD_NUMBER: _ClassVar[int]
    LAMBDA_POSITIVE_FIELD_NUMBER: _ClassVar[int]
    K_NEGATIVE_FIELD_NUMBER: _ClassVar[int]
    LAMBDA_NEGATIVE_FIELD_NUMBER: _ClassVar[int]
    k_positive: float
    lambda_positive: float
    k_negative: float
    lambda_negative: float
    def __init__(self, k_positive: _Optional[float] = ..., lambda_positive: _Optional[float] = ..., k_negative: _Optional[float] = ..., lambda_negative: _Optional[float] = ...) -> None: ...

class LossSpec(_message.Message):
    __slots__ = ("kind", "ratio", "clip_low", "clip_high", "temperature", "ratio_level", "aggregation", "delta", "kl_coef", "kl_estimator", "target_kl", "entropy_coef", "proximal_version", "correction", "custom", "custom_args", "tau_positive", "tau_negative", "kernel", "kl_weighted", "off_policy_mask", "top_entropy_quantile", "target_entropy", "entropy_coef_delta", "proximal_returns")
    KIND_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    CLIP_LOW_FIELD_NUMBER: _ClassVar[int]
    CLIP_HIGH_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    RATIO_LEVEL_FIELD_NUMBER: _ClassVar[int]
    AGGREGATION_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    KL_COEF_FIELD_NUMBER: _ClassVar[int]
    KL_ESTIMATOR_FIELD_NUMBER: _ClassVar[int]
    TARGET_KL_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_COEF_FIELD_NUMBER: _ClassVar[int]
    PROXIMAL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CORRECTION_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_ARGS_FIELD_NUMBER: _ClassVar[int]
    TAU_POSITIVE_FIELD_NUMBER: _ClassVar[int]
    TAU_NEGATIVE_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    KL_WEIGHTED_FIELD_NUMBER: _ClassVar[int]
    OFF_POLICY_MASK_FIELD_NUMBER: _ClassVar[int]
    TOP_ENTROPY_QUANTILE_FIELD_NUMBER: _ClassVar[int]
    TARGET_ENTROPY_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_COEF_DELTA_FIELD_NUMBER: _ClassVar[int]
    PROXIMAL_RETURNS_FIELD_NUMBER: _ClassVar[int]
    kind: LossKind
    ratio: RatioTreatment
    clip_low: float
    clip_high: float
    temperature: float
    ratio_level: RatioLevel
    aggregation: Aggregation
    delta: float
    kl_coef: float
    kl_estimator: KlEstimator
    target_kl: float
    entropy_coef: float
    proximal_version: int
    correction: MismatchCorrection
    custom: str
    custom_args: str
    tau_positive: float
    tau_negative: float
    kernel: VespoKernel
    kl_weighted: bool
    off_policy_mask: float
    top_entropy_quantile: float
    target_entropy: float
    entropy_coef_delta: float
    proximal_returns: bool
    def __init__(self, kind: _Optional[_Union[LossKind, str]] = ..., ratio: _Optional[_Union[RatioTreatment, str]] = ..., clip_low: _Optional[float] = ..., clip_high: _Optional[float] = ..., temperature: _Optional[float] = ..., ratio_level: _Optional[_Union[RatioLevel, str]] = ..., aggregation: _Optional[_Union[Aggregation, str]] = ..., delta: _Optional[float] = ..., kl_coef: _Optional[float] = ..., kl_estimator: _Optional[_Union[KlEstimator, str]] = ..., target_kl: _Optional[float] = ..., entropy_coef: _Optional[float] = ..., proximal_version: _Optional[int] = ..., correction: _Optional[_Union[MismatchCorrection, _Mapping]] = ..., custom: _Optional[str] = ..., custom_args: _Optional[str] = ..., tau_positive: _Optional[float] = ..., tau_negative: _Optional[float] = ..., kernel: _Optional[_Union[VespoKernel, _Mapping]] = ..., kl_weighted: _Optional[bool] = ..., off_policy_mask: _Optional[float] = ..., top_entropy_quantile: _Optional[float] = ..., target_entropy: _Optional[float] = ..., entropy_coef_delta: _Optional[float] = ..., proximal_returns: _Optional[bool] = ...) -> None: ...

class TrainingSample(_message.Message):
    __slots__ = ("sample", "advantages", "reference_logprobs")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sample: _rollout_pb2.Sample
    advantages: _containers.RepeatedScalarFieldContainer[float]
    reference_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, sample: _Optional[_Union[_rollout_pb2.Sample, _Mapping]] = ..., advantages: _Optional[_Iterable[float]] = ..., reference_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class ForwardBackwardStart(_message.Message):
    __slots__ = ("run_id", "seq_id", "loss", "normalizer", "verify_logprobs")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZER_FIELD_NUMBER: _ClassVar[int]
    VERIFY_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    seq_id: int
    loss: LossSpec
    normalizer: float
    verify_logprobs: bool
    def __init__(self, run_id: _Optional[str] = ..., seq_id: _Optional[int] = ..., loss: _Optional[_Union[LossSpec, _Mapping]] = ..., normalizer: _Optional[float] = ..., verify_logprobs: _Optional[bool] = ...) -> None: ...

class SampleBatch(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[TrainingSample]
    def __init__(self, samples: _Optional[_Iterable[_Union[TrainingSample, _Mapping]]] = ...) -> None: ...

class StreamCommit(_message.Message):
    __slots__ = ("sample_count", "token_count")
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    sample_count: int
    token_count: int
    def __init__(self, sample_count: _Optional[int] = ..., token_count: _Optional[int] = ...) -> None: ...

class ForwardBackwardRequest(_message.Message):
    __slots__ = ("start", "batch", "commit")
    START_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    start: ForwardBackwardStart
    batch: SampleBatch
    commit: StreamCommit
    def __init__(self, start: _Optional[_Union[ForwardBackwardStart, _Mapping]] = ..., batch: _Optional[_Union[SampleBatch, _Mapping]] = ..., commit: _Optional[_Union[StreamCommit, _Mapping]] = ...) -> None: ...

class ForwardBackwardResponse(_message.Message):
    __slots__ = ("loss", "loss_tokens", "tokens", "diagnostics", "verification", "compute_ms")
    class DiagnosticsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    LOSS_FIELD_NUMBER: _ClassVar[int]
    LOSS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIAGNOSTICS_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    loss: float
    loss_tokens: int
    tokens: int
    diagnostics: _containers.ScalarMap[str, float]
    verification: LogprobVerification
    compute_ms: int
    def __init__(self, loss: _Optional[float] = ..., loss_tokens: _Optional[int] = ..., tokens: _Optional[int] = ..., diagnostics: _Optional[_Mapping[str, float]] = ..., verification: _Optional[_Union[LogprobVerification, _Mapping]] = ..., compute_ms: _Optional[int] = ...) -> None: ...

class LogprobVerification(_message.Message):
    __slots__ = ("max_difference", "mean_difference", "tokens_compared", "tokens_skipped", "sample_differences", "sample_tokens")
    MAX_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    MEAN_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_COMPARED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_difference: float
    mean_difference: float
    tokens_compared: int
    tokens_skipped: int
    sample_differences: _containers.RepeatedScalarFieldContainer[float]
    sample_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, max_difference: _Optional[float] = ..., mean_difference: _Optional[float] = ..., tokens_compared: _Optional[int] = ..., tokens_skipped: _Optional[int] = ..., sample_differences: _Optional[_Iterable[float]] = ..., sample_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class OptimStepRequest(_message.Message):
    __slots__ = ("run_id", "seq_id", "learning_rate")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    seq_id: int
    learning_rate: float
    def __init__(self, run_id: _Optional[str] = ..., seq_id: _Optional[int] = ..., learning_rate: _Optional[float] = ...) -> None: ...

class OptimStepResponse(_message.Message):
    __slots__ = ("grad_norm", "learning_rate", "policy_version", "skipped_nonfinite")
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_NONFINITE_FIELD_NUMBER: _ClassVar[int]
    grad_norm: float
    learning_rate: float
    policy_version: int
    skipped_nonfinite: bool
    def __init__(self, grad_norm: _Optional[float] = ..., learning_rate: _Optional[float] = ..., policy_version: _Optional[int] = ..., skipped_nonfinite: _Optional[bool] = ...) -> None: ...

class ForwardStart(_message.Message):
    __slots__ = ("run_id", "policy_version", "temperature", "tells_best")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TELLS_BEST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    policy_version: int
    temperature: float
    tells_best: bool
    def __init__(self, run_id: _Optional[str] = ..., policy_version: _Optional[int] = ..., temperature: _Optional[float] = ..., tells_best: _Optional[bool] = ...) -> None: ...

class ForwardRequest(_message.Message):
    __slots__ = ("start", "batch", "commit")
    START_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    start: ForwardStart
    batch: SampleBatch
    commit: StreamCommit
    def __init__(self, start: _Optional[_Union[ForwardStart, _Mapping]] = ..., batch: _Optional[_Union[SampleBatch, _Mapping]] = ..., commit: _Optional[_Union[StreamCommit, _Mapping]] = ...) -> None: ...

class ForwardResponse(_message.Message):
    __slots__ = ("logprobs", "best")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    best: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, logprobs: _Optional[_Iterable[float]] = ..., best: _Optional[_Iterable[bool]] = ...) -> None: ...

class LoraSpec(_message.Message):
    __slots__ = ("rank", "alpha", "dropout", "target_modules", "rslora", "modules_to_save", "publish_merged", "initial_adapter", "target_parameters")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    DROPOUT_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    RSLORA_FIELD_NUMBER: _ClassVar[int]
    MODULES_TO_SAVE_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_MERGED_FIELD_NUMBER: _ClassVar[int]
    INITIAL_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TARGET_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    alpha: float
    dropout: float
    target_modules: _containers.RepeatedScalarFieldContainer[str]
    rslora: bool
    modules_to_save: _containers.RepeatedScalarFieldContainer[str]
    publish_merged: bool
    initial_adapter: str
    target_parameters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rank: _Optional[int] = ..., alpha: _Optional[float] = ..., dropout: _Optional[float] = ..., target_modules: _Optional[_Iterable[str]] = ..., rslora: _Optional[bool] = ..., modules_to_save: _Optional[_Iterable[str]] = ..., publish_merged: _Optional[bool] = ..., initial_adapter: _Optional[str] = ..., target_parameters: _Optional[_Iterable[str]] = ...) -> None: ...

class ReferenceSpec(_message.Message):
    __slots__ = ("sync_steps", "mixup_alpha", "model")
    SYNC_STEPS_FIELD_NUMBER: _ClassVar[int]
    MIXUP_ALPHA_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    sync_steps: int
    mixup_alpha: float
    model: str
    def __init__(self, sync_steps: _Optional[int] = ..., mixup_alpha: _Optional[float] = ..., model: _Optional[str] = ...) -> None: ...

class OptimizerSpec(_message.Message):
    __slots__ = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "max_grad_norm", "schedule", "warmup_steps", "total_steps", "kind", "momentum", "decay_steps", "adamw_learning_rate", "earlier_total_steps", "min_lr")
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    MAX_GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    WARMUP_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    DECAY_STEPS_FIELD_NUMBER: _ClassVar[int]
    ADAMW_LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    EARLIER_TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    MIN_LR_FIELD_NUMBER: _ClassVar[int]
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float
    schedule: Schedule
    warmup_steps: int
    total_steps: int
    kind: OptimizerKind
    momentum: float
    decay_steps: int
    adamw_learning_rate: float
    earlier_total_steps: _containers.RepeatedScalarFieldContainer[int]
    min_lr: float
    def __init__(self, learning_rate: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., eps: _Optional[float] = ..., weight_decay: _Optional[float] = ..., max_grad_norm: _Optional[float] = ..., schedule: _Optional[_Union[Schedule, str]] = ..., warmup_steps: _Optional[int] = ..., total_steps: _Optional[int] = ..., kind: _Optional[_Union[OptimizerKind, str]] = ..., momentum: _Optional[float] = ..., decay_steps: _Optional[int] = ..., adamw_learning_rate: _Optional[float] = ..., earlier_total_steps: _Optional[_Iterable[int]] = ..., min_lr: _Optional[float] = ...) -> None: ...

class RunSpec(_message.Message):
    __slots__ = ("base_model", "lora", "optimizer", "seed", "compute_dtype", "served_dtype", "from_scratch", "retain_versions", "microbatch_tokens", "reference", "gradient_checkpointing", "freeze_routers", "initial_state", "fresh_optimizer")
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    SERVED_DTYPE_FIELD_NUMBER: _ClassVar[int]
    FROM_SCRATCH_FIELD_NUMBER: _ClassVar[int]
    RETAIN_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_CHECKPOINTING_FIELD_NUMBER: _ClassVar[int]
    FREEZE_ROUTERS_FIELD_NUMBER: _ClassVar[int]
    INITIAL_STATE_FIELD_NUMBER: _ClassVar[int]
    FRESH_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    base_model: str
    lora: LoraSpec
    optimizer: OptimizerSpec
    seed: int
    compute_dtype: str
    served_dtype: str
    from_scratch: bool
    retain_versions: int
    microbatch_tokens: int
    reference: ReferenceSpec
    gradient_checkpointing: bool
    freeze_routers: bool
    initial_state: str
    fresh_optimizer: bool
    def __init__(self, base_model: _Optional[str] = ..., lora: _Optional[_Union[LoraSpec, _Mapping]] = ..., optimizer: _Optional[_Union[OptimizerSpec, _Mapping]] = ..., seed: _Optional[int] = ..., compute_dtype: _Optional[str] = ..., served_dtype: _Optional[str] = ..., from_scratch: _Optional[bool] = ..., retain_versions: _Optional[int] = ..., microbatch_tokens: _Optional[int] = ..., reference: _Optional[_Union[ReferenceSpec, _Mapping]] = ..., gradient_checkpointing: _Optional[bool] = ..., freeze_routers: _Optional[bool] = ..., initial_state: _Optional[str] = ..., fresh_optimizer: _Optional[bool] = ...) -> None: ...

class CreateRunRequest(_message.Message):
    __slots__ = ("run_id", "spec", "keep_last")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    KEEP_LAST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    spec: RunSpec
    keep_last: int
    def __init__(self, run_id: _Optional[str] = ..., spec: _Optional[_Union[RunSpec, _Mapping]] = ..., keep_last: _Optional[int] = ...) -> None: ...

class CreateRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: RunState
    def __init__(self, run: _Optional[_Union[RunState, _Mapping]] = ...) -> None: ...

class RunState(_message.Message):
    __slots__ = ("run_id", "applied_seq_id", "policy_version", "trainable_parameters", "parameters", "published_version", "skipped_steps")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    APPLIED_SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRAINABLE_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_VERSION_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_STEPS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    applied_seq_id: int
    policy_version: int
    trainable_parameters: int
    parameters: int
    published_version: int
    skipped_steps: int
    def __init__(self, run_id: _Optional[str] = ..., applied_seq_id: _Optional[int] = ..., policy_version: _Optional[int] = ..., trainable_parameters: _Optional[int] = ..., parameters: _Optional[int] = ..., published_version: _Optional[int] = ..., skipped_steps: _Optional[int] = ...) -> None: ...

class CheckRunRequest(_message.Message):
    __slots__ = ("spec", "custom_loss", "custom_args", "keep_states")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_LOSS_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_ARGS_FIELD_NUMBER: _ClassVar[int]
    KEEP_STATES_FIELD_NUMBER: _ClassVar[int]
    spec: RunSpec
    custom_loss: str
    custom_args: str
    keep_states: int
    def __init__(self, spec: _Optional[_Union[RunSpec, _Mapping]] = ..., custom_loss: _Optional[str] = ..., custom_args: _Optional[str] = ..., keep_states: _Optional[int] = ...) -> None: ...

class CheckRunResponse(_message.Message):
    __slots__ = ("chat", "has_routers")
    CHAT_FIELD_NUMBER: _ClassVar[int]
    HAS_ROUTERS_FIELD_NUMBER: _ClassVar[int]
    chat: _common_pb2.ChatIdentity
    has_routers: bool
    def __init__(self, chat: _Optional[_Union[_common_pb2.ChatIdentity, _Mapping]] = ..., has_routers: _Optional[bool] = ...) -> None: ...

class GetRunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class GetRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: RunState
    def __init__(self, run: _Optional[_Union[RunState, _Mapping]] = ...) -> None: ...

class CloseRunRequest(_message.Message):
    __slots__ = ("run_id", "save_at_seq_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SAVE_AT_SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    save_at_seq_id: int
    def __init__(self, run_id: _Optional[str] = ..., save_at_seq_id: _Optional[int] = ...) -> None: ...

class CloseRunResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveStateRequest(_message.Message):
    __slots__ = ("run_id", "seq_id", "name", "export_model", "keep")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXPORT_MODEL_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    seq_id: int
    name: str
    export_model: bool
    keep: bool
    def __init__(self, run_id: _Optional[str] = ..., seq_id: _Optional[int] = ..., name: _Optional[str] = ..., export_model: _Optional[bool] = ..., keep: _Optional[bool] = ...) -> None: ...

class SaveStateResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: SavedState
    def __init__(self, state: _Optional[_Union[SavedState, _Mapping]] = ...) -> None: ...

class SavedState(_message.Message):
    __slots__ = ("name", "seq_id", "policy_version", "size_bytes", "path", "model_path", "kept")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    name: str
    seq_id: int
    policy_version: int
    size_bytes: int
    path: str
    model_path: str
    kept: bool
    def __init__(self, name: _Optional[str] = ..., seq_id: _Optional[int] = ..., policy_version: _Optional[int] = ..., size_bytes: _Optional[int] = ..., path: _Optional[str] = ..., model_path: _Optional[str] = ..., kept: _Optional[bool] = ...) -> None: ...

class LoadStateRequest(_message.Message):
    __slots__ = ("run_id", "seq_id", "name")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    seq_id: int
    name: str
    def __init__(self, run_id: _Optional[str] = ..., seq_id: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class LoadStateResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: RunState
    def __init__(self, run: _Optional[_Union[RunState, _Mapping]] = ...) -> None: ...

class ListStatesRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class ListStatesResponse(_message.Message):
    __slots__ = ("states",)
    STATES_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedCompositeFieldContainer[SavedState]
    def __init__(self, states: _Optional[_Iterable[_Union[SavedState, _Mapping]]] = ...) -> None: ...

class DeleteStatesRequest(_message.Message):
    __slots__ = ("run_id", "dry_run", "spec")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    dry_run: bool
    spec: RunSpec
    def __init__(self, run_id: _Optional[str] = ..., dry_run: _Optional[bool] = ..., spec: _Optional[_Union[RunSpec, _Mapping]] = ...) -> None: ...

class DeleteStatesResponse(_message.Message):
    __slots__ = ("states", "size_bytes")
    STATES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    states: int
    size_bytes: int
    def __init__(self, states: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class DeleteStateRequest(_message.Message):
    __slots__ = ("run_id", "name", "spec")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    name: str
    spec: RunSpec
    def __init__(self, run_id: _Optional[str] = ..., name: _Optional[str] = ..., spec: _Optional[_Union[RunSpec, _Mapping]] = ...) -> None: ...

class DeleteStateResponse(_message.Message):
    __slots__ = ("states", "size_bytes")
    STATES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    states: int
    size_bytes: int
    def __init__(self, states: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class FetchModelRequest(_message.Message):
    __slots__ = ("run_id", "state", "adapter", "resume", "spec")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    state: str
    adapter: bool
    resume: _model_pb2.ModelPlace
    spec: RunSpec
    def __init__(self, run_id: _Optional[str] = ..., state: _Optional[str] = ..., adapter: _Optional[bool] = ..., resume: _Optional[_Union[_model_pb2.ModelPlace, _Mapping]] = ..., spec: _Optional[_Union[RunSpec, _Mapping]] = ...) -> None: ...

class FetchModelResponse(_message.Message):
    __slots__ = ("manifest", "chunk", "heartbeat")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    manifest: _model_pb2.ModelManifest
    chunk: _model_pb2.ModelChunk
    heartbeat: _common_pb2.Heartbeat
    def __init__(self, manifest: _Optional[_Union[_model_pb2.ModelManifest, _Mapping]] = ..., chunk: _Optional[_Union[_model_pb2.ModelChunk, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class PublishWeightsRequest(_message.Message):
    __slots__ = ("run_id", "seq_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    seq_id: int
    def __init__(self, run_id: _Optional[str] = ..., seq_id: _Optional[int] = ...) -> None: ...

class PublishWeightsResponse(_message.Message):
    __slots__ = ("version", "digest", "payload_bytes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    version: int
    digest: bytes
    payload_bytes: int
    def __init__(self, version: _Optional[int] = ..., digest: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ...) -> None: ...
