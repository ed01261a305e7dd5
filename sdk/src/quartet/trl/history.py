"""The metrics of a run by the names of TRL's GRPOTrainer.

1. Each is what TRL calls so, and some are counted otherwise, as docs/trl.md says of them; of a name that is
   missing nothing like it was measured.
2. What reward functions log is called as they call it; what is of Quartet alone keeps its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from quartet.grpo.history import History
from quartet.scripts.loop import Moment
from quartet.trl.translate import ENVIRONMENT

NAMES: Mapping[str, str] = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "reward": "train/reward",
    "reward_std": "train/reward_std",
    "frac_reward_zero_std": f"env/{ENVIRONMENT}/no_spread",
    "completions/mean_length": "rollout/mean_length",
    "completions/clipped_ratio": "rollout/truncated_fraction",
    "kl": "train/reference_kl",
    "entropy": "train/entropy",
    "entropy_coef": "train/entropy_coef",
    "sampling/sampling_logp_difference/mean": "train/mismatch_mean",
    "sampling/sampling_logp_difference/max": "train/mismatch_max",
    "step_time": "time/step_s",
}
#: What of the ratio TRL tells, by loss_type.
CLIPPED: Mapping[str, str] = {
    **dict.fromkeys(("grpo", "bnpo", "dr_grpo", "dapo", "luspo"), "clip_ratio/region_mean"),
    "cispo": "cispo_clip_ratio",
}


def history_of(loss_type: str, unweighted: Sequence[str] = ()) -> History:
    """Of runs with such a loss; `unweighted`: reward functions of weight 0, which are metrics of a run."""
    clipped = {CLIPPED[loss_type]: "train/clipped_fraction"} if loss_type in CLIPPED else {}
    measured = {f"metrics/{name}": f"rewards/{name}/mean" for name in unweighted}
    told = {"rewards/": "rewards/{}/mean", "metrics/": "{}"}
    return History(
        {**NAMES, **clipped, **{called: key for key, called in measured.items()}},
        {**told, "staleness/": "staleness/{}"},
        {"mean_length": "completions/mean_length", **measured},
        told,
        ENVIRONMENT,
    )


def with_epoch(moment: Moment, steps_of_epoch: int) -> Moment:
    """Its row says how many passes over the prompts were done by then."""
    if moment.row is None:
        return moment
    return replace(moment, row={**moment.row, "epoch": moment.step / steps_of_epoch})
