"""The loss of TRL's GRPOTrainer 1.16 as a run's [algorithm]: docs/algorithms.md has each formula, docs/trl.md
says where TRL differs.

1. What has an equal is that; what has none is refused, with the nearest that there is.
2. What TRL does not read beside another argument is without effect here, too, and said to be so.
"""

from __future__ import annotations

from collections.abc import Mapping

from quartet.config.model import ConfigError
from quartet.scripts.draft import Draft

#: loss_type to algorithm.aggregation; "constant" by what each completion adds.
AGGREGATIONS: Mapping[str, str] = {
    "dapo": "token",
    "grpo": "sequence",
    "bnpo": "token",
    "dr_grpo": "constant",
    "luspo": "constant",
    "cispo": "token",
    "sapo": "sequence",
    "vespo": "token",
}
#: Of these algorithm.loss; of the others "ppo".
LOSSES: Mapping[str, str] = {name: name for name in ("cispo", "sapo", "vespo")}
#: Arguments that one loss_type reads alone.
OF_ONE: Mapping[str, str] = {
    "sapo_temperature_pos": "sapo",
    "sapo_temperature_neg": "sapo",
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), "vespo"),
}
#: Of the correction, its mode and its level.
CORRECTIONS: Mapping[str, tuple[str, str]] = {
    "token_truncate": ("truncate", "token"),
    "token_mask": ("mask", "token"),
    "sequence_truncate": ("truncate", "sequence"),
    "sequence_mask": ("mask", "sequence"),
}
#: No weight is larger: log-ratios are bounded below.
NO_CAP = 1e9
#: What use_adaptive_entropy keeps the coefficient within.
ENTROPY_BOUNDS = {"entropy_coef_min": 0.0, "entropy_coef_max": 1.0}


def algorithm(draft: Draft, weights: Mapping[str, float], *, adapted: bool) -> None:
    """Puts credit and loss; `weights` are those of the reward functions, by name. Raises ConfigError."""
    args = draft.args
    loss_type = draft.chosen("loss_type", tuple(AGGREGATIONS))
    _credit(draft, weights)
    draft.put("algorithm.loss", LOSSES.get(loss_type, "ppo"), "loss_type")
    draft.put("algorithm.aggregation", AGGREGATIONS[loss_type], "loss_type")
    if loss_type == "dr_grpo":
        if args.max_completion_length is None:
            raise ConfigError("args.loss_type = 'dr_grpo' divides by max_completion_length; set it")
        draft.take("max_completion_length", "algorithm.constant_tokens")
    elif loss_type == "luspo":
        draft.put("algorithm.constant_tokens", 1, "loss_type")
    _ratio(draft, loss_type)
    _bounds(draft, loss_type)
    draft.take("mask_truncated_completions", "algorithm.overlong_filtering")
    if args.off_policy_mask_threshold is not None:
        draft.take("off_policy_mask_threshold", "algorithm.off_policy_mask")
    _reference(draft, loss_type, adapted=adapted)
    _entropy(draft, loss_type)
    if args.router_aux_loss_coef:
        raise ConfigError(
            f"args.router_aux_loss_coef = {args.router_aux_loss_coef!r} is refused: routers are trained by "
            "the loss alone; leave it out"
        )


def _credit(draft: Draft, weights: Mapping[str, float]) -> None:
    """Raises ConfigError."""
    name = "multi_objective_aggregation"
    if draft.chosen(name, ("sum_then_normalize", "normalize_then_sum")) == "sum_then_normalize":
        draft.put("algorithm.advantage", _advantage(draft), "scale_rewards")
        return
    draft.put("algorithm.advantage", "gdpo", name)
    # One without weight is a metric, which no reward is.
    told = {function: weight for function, weight in weights.items() if weight not in (0.0, 1.0)}
    if told:
        draft.put("algorithm.reward_weights", told, "reward_weights")
    if draft.args.scale_rewards != _default(draft, "scale_rewards"):
        _unread(draft, "scale_rewards", f"{name} = 'normalize_then_sum' divides by its own deviations")


def _advantage(draft: Draft) -> str:
    """Raises ConfigError."""
    match draft.args.scale_rewards:
        case True | "group":
            return "grpo"
        case False | "none":
            return "dr_grpo"
    raise ConfigError(
        f'args.scale_rewards = {draft.args.scale_rewards!r} is refused: should be True ("group") or False '
        '("none"); overrides = {"algorithm": {"advantage": "reinforce_pp"}} divides by one deviation of the '
        "batch, that of rewards from the means of their groups"
    )


def _ratio(draft: Draft, loss_type: str) -> None:
    """Against whom it is taken, and of what."""
    args = draft.args
    level = draft.chosen("importance_sampling_level", ("token", "sequence"))
    if level == "sequence" and loss_type == "vespo":
        _unread(
            draft, "importance_sampling_level", "loss_type = 'vespo' takes the ratio of whole completions"
        )
    elif level == "sequence":
        draft.take("importance_sampling_level", "algorithm.ratio_level")
    corrects = args.use_vllm and args.vllm_importance_sampling_correction
    if not corrects:
        # Against the policy at the beginning of the batch.
        draft.put("algorithm.proximal", True, "num_iterations")
        return
    mode, of = CORRECTIONS[draft.chosen("vllm_importance_sampling_mode", tuple(CORRECTIONS))]
    cap = args.vllm_importance_sampling_cap or args.vllm_importance_sampling_clip_max
    floor = args.vllm_importance_sampling_clip_min
    if mode == "truncate" and floor is not None:
        raise ConfigError(
            f"args.vllm_importance_sampling_clip_min = {floor!r} is refused: weights are cut from above "
            f"alone; leave it out, or set vllm_importance_sampling_mode to '{of}_mask'"
        )
    if loss_type == "vespo":
        # Its kernel bounds the ratio of completions to their sampler.
        draft.notes.append(
            "args.vllm_importance_sampling_correction = True is a part of loss_type = 'vespo': its ratio is "
            "that to the sampler, and no token's part of it is bounded by itself"
        )
        return
    draft.put("algorithm.proximal", True, "vllm_importance_sampling_correction")
    draft.put("algorithm.correction.mode", mode, "vllm_importance_sampling_mode")
    draft.put("algorithm.correction.level", of, "vllm_importance_sampling_mode")
    draft.put("algorithm.correction.cap", NO_CAP if cap is None else cap, "vllm_importance_sampling_clip_max")
    if floor is not None:
        draft.put("algorithm.correction.floor", floor, "vllm_importance_sampling_clip_min")


def _bounds(draft: Draft, loss_type: str) -> None:
    """What the ratio is bounded by."""
    args = draft.args
    high = "epsilon" if args.epsilon_high is None else "epsilon_high"
    if draft.table["algorithm"]["loss"] == "ppo":
        draft.take("epsilon", "algorithm.clip_low")
        draft.take(high, "algorithm.clip_high")
        if args.delta is not None:
            draft.take("delta", "algorithm.delta")
    else:
        if args.delta is not None:
            _unread(draft, "delta", f"loss_type = '{loss_type}' does not read it")
        if loss_type == "cispo":
            draft.take(high, "algorithm.clip_high")
    if loss_type == "sapo":
        draft.take("sapo_temperature_pos", "algorithm.tau_positive")
        draft.take("sapo_temperature_neg", "algorithm.tau_negative")
    if loss_type == "vespo":
        for sign, side in (("pos", "positive"), ("neg", "negative")):
            draft.take(f"vespo_k_{sign}", f"algorithm.kernel.k_{side}")
            draft.take(f"vespo_lambda_{sign}", f"algorithm.kernel.lambda_{side}")
    for name, of in OF_ONE.items():
        if loss_type != of and getattr(args, name) != _default(draft, name):
            _unread(draft, name, f"loss_type = '{of}' alone reads it")


def _reference(draft: Draft, loss_type: str, *, adapted: bool) -> None:
    """The divergence from the model as it began."""
    args = draft.args
    draft.take("beta", "algorithm.kl_coef")
    if args.sync_ref_model and not args.beta:
        raise ConfigError(
            "args.sync_ref_model = True is refused: beta = 0 reads no reference; set beta, or leave it False"
        )
    if args.sync_ref_model and adapted:
        raise ConfigError(
            "args.sync_ref_model = True is refused: with peft_config the reference is the model without its "
            "adapter; leave it False"
        )
    if args.sync_ref_model:
        draft.take("ref_model_sync_steps", "algorithm.reference.sync_steps")
        draft.take("ref_model_mixup_alpha", "algorithm.reference.mixup_alpha")
    if not args.beta or not args.use_bias_correction_kl:
        return
    draft.take("use_bias_correction_kl", "algorithm.kl_weighted")
    if args.importance_sampling_level == "sequence":
        draft.notes.append(
            "args.use_bias_correction_kl = True weighs the divergence of each token by its own ratio, also "
            "with importance_sampling_level = 'sequence', where TRL takes that of the completion"
        )


def _entropy(draft: Draft, loss_type: str) -> None:
    """Which tokens are learned from, and what uncertainty is worth. Raises ConfigError."""
    args = draft.args
    if args.top_entropy_quantile != 1.0:
        draft.take("top_entropy_quantile", "algorithm.top_entropy_quantile")
    if not args.entropy_coef and not args.use_adaptive_entropy:
        return
    name = "use_adaptive_entropy" if args.use_adaptive_entropy else "entropy_coef"
    said = f"args.{name} = {getattr(args, name)!r}"
    if AGGREGATIONS[loss_type] == "constant":
        raise ConfigError(
            f"{said} is refused: the entropy is divided as the loss is, and loss_type = '{loss_type}' does "
            'not divide by tokens; give overrides = {"algorithm": {"entropy_coef": ...}} for that'
        )
    if args.top_entropy_quantile != 1.0:
        raise ConfigError(
            f"{said} is refused beside top_entropy_quantile = {args.top_entropy_quantile!r}: the entropy is "
            'that of all tokens; give overrides = {"algorithm": {"entropy_coef": ...}} for that'
        )
    draft.take("entropy_coef", "algorithm.entropy_coef")
    if not args.use_adaptive_entropy:
        return
    for bound, value in ENTROPY_BOUNDS.items():
        if getattr(args, bound) != value:
            raise ConfigError(
                f"args.{bound} = {getattr(args, bound)!r} is refused: the coefficient is kept within 0 and "
                "1; leave it out"
            )
    draft.take("entropy_target", "algorithm.target_entropy")
    draft.take("entropy_coef_delta", "algorithm.entropy_coef_delta")


def _unread(draft: Draft, name: str, why: str) -> None:
    draft.notes.append(f"args.{name} = {getattr(draft.args, name)!r} is without effect, as in TRL: {why}")


def _default(draft: Draft, name: str) -> object:
    """What a script that does not set it has."""
    return getattr(type(draft.args), name)
