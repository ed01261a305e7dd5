"""What a run asks of its trainer, from its configuration: the run's spec and the loss of each batch. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from quartet.run.algorithm import AlgorithmConfig
from quartet.run.algorithm_tables import CorrectionConfig
from quartet.run.config import RunConfig
from quartet.run.learning import optimizer_spec
from quartet.run.lora import lora_spec
from quartet.v1 import trainer_service_pb2 as tpb

RATIOS = {
    "cispo": tpb.RATIO_TREATMENT_CISPO,
    "ppo": tpb.RATIO_TREATMENT_PPO,
    "dppo": tpb.RATIO_TREATMENT_DPPO,
    "sapo": tpb.RATIO_TREATMENT_SAPO,
    "vespo": tpb.RATIO_TREATMENT_VESPO,
    "none": tpb.RATIO_TREATMENT_NONE,
}
LEVELS = {"token": tpb.RATIO_LEVEL_TOKEN, "sequence": tpb.RATIO_LEVEL_SEQUENCE}
AGGREGATIONS = {
    "token": tpb.AGGREGATION_TOKEN,
    "sequence": tpb.AGGREGATION_SEQUENCE,
    # Equal weights, and a constant as normalizer.
    "constant": tpb.AGGREGATION_TOKEN,
}
ESTIMATORS = {"k1": tpb.KL_ESTIMATOR_K1, "k2": tpb.KL_ESTIMATOR_K2, "k3": tpb.KL_ESTIMATOR_K3}
MODES = {"truncate": tpb.CORRECTION_MODE_TRUNCATE, "mask": tpb.CORRECTION_MODE_MASK}


def run_spec(config: RunConfig, earlier_ends: Sequence[int] = ()) -> tpb.RunSpec:
    """What CreateRun asks for, of a run whose max_steps were these before it was extended. Its steps are
    optimizer steps, of which a step of the run may be several."""
    optimizer = optimizer_spec(
        config,
        config.max_steps,
        earlier_ends=earlier_ends,
        versions_per_step=config.versions_per_step,
    )
    return tpb.RunSpec(
        base_model=config.model,
        optimizer=optimizer,
        lora=lora_spec(config.lora),
        seed=config.seed,
        # The versions that a batch's tokens may come from, and one to spare.
        retain_versions=config.max_off_policy_steps + 2 if config.checks.verify_logprobs else 0,
        microbatch_tokens=config.microbatch_tokens,
        compute_dtype=config.compute_dtype or "",
        served_dtype=config.served_dtype or "",
        reference=_held_reference(config.algorithm),
        freeze_routers=config.freeze_routers,
        initial_state=config.initial_state or "",
        fresh_optimizer=config.initial_optimizer == "fresh",
    )


def loss_spec(config: RunConfig, batch: int, step: int = 0) -> tpb.LossSpec:
    """The loss of a batch, in one of the optimizer steps that are made of it, from 0."""
    algorithm = config.algorithm
    loss = tpb.LossSpec(
        kind=_kind(algorithm),
        ratio=RATIOS.get(algorithm.loss, tpb.RATIO_TREATMENT_UNSPECIFIED),
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        temperature=config.sampling.temperature,
        ratio_level=LEVELS[algorithm.ratio_level],
        aggregation=AGGREGATIONS[algorithm.normalised_by],
        delta=algorithm.delta,
        tau_positive=algorithm.tau_positive,
        tau_negative=algorithm.tau_negative,
        off_policy_mask=algorithm.off_policy_mask,
        top_entropy_quantile=algorithm.top_entropy_quantile,
        target_entropy=algorithm.target_entropy,
        entropy_coef_delta=algorithm.entropy_coef_delta,
        custom=algorithm.custom or "",
    )
    if algorithm.custom_args:
        loss.custom_args = custom_args(config)
    if algorithm.kl_coef:
        loss.kl_coef = algorithm.kl_coef
        loss.kl_estimator = ESTIMATORS[algorithm.kl_estimator]
        loss.kl_weighted = algorithm.kl_weighted
    if algorithm.target_kl is not None:
        loss.target_kl = algorithm.target_kl
    if algorithm.entropy_coef:
        loss.entropy_coef = algorithm.entropy_coef
    if algorithm.proximal:
        # The version that was published before the batch: the newest, so the trainer has it.
        loss.proximal_version = batch * config.versions_per_step
        loss.proximal_returns = step + 1 < config.versions_per_step
    if algorithm.kernel is not None:
        loss.kernel.CopyFrom(tpb.VespoKernel(**algorithm.kernel.model_dump()))
    if algorithm.correction is not None:
        loss.correction.CopyFrom(_correction(algorithm.correction))
    return loss


def publishes_adapters(config: RunConfig) -> bool:
    """Whether its versions are an adapter's, served beside the base model."""
    return config.lora.enabled and config.lora.publish == "adapter"


def custom_args(config: RunConfig) -> str:
    """What a loss of one's own gets by name, as the trainer is told it; empty for nothing."""
    args = config.algorithm.custom_args
    return json.dumps(args, sort_keys=True) if args else ""


def _kind(algorithm: AlgorithmConfig) -> tpb.LossKind:
    if algorithm.distill:
        return tpb.LOSS_KIND_REFERENCE_KL
    return {
        "cross_entropy": tpb.LOSS_KIND_CROSS_ENTROPY,
        "custom": tpb.LOSS_KIND_CUSTOM,
    }.get(algorithm.loss, tpb.LOSS_KIND_POLICY_GRADIENT)


def _held_reference(algorithm: AlgorithmConfig) -> tpb.ReferenceSpec | None:
    """What the trainer holds; nothing where nobody reads it, or a service gives it."""
    reference = algorithm.reference
    if not algorithm.needs_reference or (reference is not None and reference.address):
        return None
    if reference is None:
        return tpb.ReferenceSpec()
    return tpb.ReferenceSpec(
        model=reference.model or "", sync_steps=reference.sync_steps, mixup_alpha=reference.mixup_alpha
    )


def _correction(correction: CorrectionConfig) -> tpb.MismatchCorrection:
    return tpb.MismatchCorrection(
        mode=MODES[correction.mode],
        level=LEVELS[correction.level],
        cap=correction.cap,
        floor=correction.floor if correction.mode == "mask" else None,
    )
