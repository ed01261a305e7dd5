"""peft's adapter_config.json: what of an adapter its tensors do not say.

1. Whatever changes what an adapter computes, beside rank and scale, is told by its name (`beyond`): whoever
   knows low-rank matrices alone refuses it instead of leaving it out.
2. So are beginnings that have changed the base model (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA): such an adapter
   belongs to what was left of it.
3. What of a run would have to be another, to begin with an adapter, is compared here (`unlike`) for whoever
   refuses it, the client by files alone and the trainer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

#: The files of a folder as peft saves it.
SETTINGS: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
#: Where it is in the output folder of a run or a fine-tuning, and in a checkpoint of one.
BELOW: Final = ("checkpoint/adapter", "adapter")
#: What peft calls an adapter of low-rank matrices.
LORA: Final = "LORA"
#: Of modules in a refusal.
MAX_TOLD: Final = 8
#: Settings that change what an adapter computes, and the values with which they change nothing.
PLAIN: Final[Mapping[str, tuple[Any, ...]]] = {
    "peft_type": (LORA,),
    "bias": ("none",),
    # These begin an adapter and leave the base model as it is.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
    "kasa_config": (None,),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "lora_bias": (False,),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "arrow_config": (None,),
    "megatron_config": (None,),
}


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What is said of an adapter."""

    rank: int
    alpha: float
    #: Scaled by alpha / sqrt(rank) instead of alpha / rank.
    rslora: bool
    #: Modules with low-rank matrices; None where a pattern, or nothing, says which.
    target_modules: tuple[str, ...] | None
    #: Stacked experts that have low-rank matrices each.
    target_parameters: tuple[str, ...]
    #: Modules that were trained in full beside them.
    modules_to_save: tuple[str, ...]
    #: Settings by which it computes what low-rank matrices alone do not.
    beyond: Mapping[str, Any]

    @property
    def scale(self) -> float:
        """What the product of its matrices is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def refusals(self) -> list[str]:
        """Why no run here can begin with it; a sentence for each setting beyond low-rank matrices."""
        why = "adapters here are low-rank matrices alone; merge it into a model"
        return [f"its {key} = {value!r}, and {why}" for key, value in self.beyond.items()]

    def unlike(
        self,
        rank: int,
        alpha: float,
        rslora: bool,
        modules_to_save: Collection[str],
        target_parameters: Collection[str],
    ) -> dict[str, tuple[Any, Any]]:
        """What a run says otherwise, by the names of these arguments: the run's, and what is here. Stacked
        experts have several names; they are others where no name of the one is part of one of the other."""
        pairs = {
            "rank": (rank, self.rank),
            "alpha": (alpha, self.alpha),
            "rslora": (rslora, self.rslora),
            "modules_to_save": (sorted(set(modules_to_save)), sorted(set(self.modules_to_save))),
        }
        if not _may_be_alike(target_parameters, self.target_parameters):
            pairs["target_parameters"] = (sorted(target_parameters), sorted(self.target_parameters))
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _may_be_alike(wanted: Collection[str], held: Collection[str]) -> bool:
    """Whether a run may mean the stacks that an adapter has: these are named, those by their module, too."""
    if not wanted or not held:
        return not wanted and not held
    if any("." not in name for name in held):
        return True  # in whatever module: the trainer sees
    ends = {name.rpartition(".")[2] for name in wanted}
    parts = [set(name.split(".")) for name in held]
    return all(ends & one for one in parts) and ends <= set().union(*parts)


def read_adapter_config(text: str) -> AdapterConfig:
    """The text of an adapter_config.json. Raises ValueError, which says why it is none."""
    try:
        given = json.loads(text)
        kind = str(given.get("peft_type", LORA))
        if kind != LORA and "r" not in given:
            given |= {"r": 1, "lora_alpha": 1}  # it is told as `beyond`
        rank, alpha = int(given["r"]), float(given["lora_alpha"])
        stacked, saved = (
            tuple(str(name) for name in given.get(key) or ())
            for key in ("target_parameters", "modules_to_save")
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"adapter_config is not peft's: {error!r}") from error
    if rank < 1 or not math.isfinite(alpha):
        raise ValueError(f"adapter_config has r = {rank} and lora_alpha = {alpha}")
    named = given.get("target_modules")
    return AdapterConfig(
        rank,
        alpha,
        bool(given.get("use_rslora")),
        tuple(str(name) for name in named) if isinstance(named, list) else None,
        stacked,
        saved,
        {key: given[key] for key, plain in PLAIN.items() if key in given and given[key] not in plain},
    )


def adapter_config_of(folder: Path) -> AdapterConfig:
    """What a folder says of its adapter. Raises ValueError or OSError, which say why it is none."""
    file = folder / SETTINGS
    if not file.is_file():
        below = next((one for one in map(folder.joinpath, BELOW) if (one / SETTINGS).is_file()), None)
        named = "a folder as peft saves an adapter" if below is None else f"{str(below)!r}, which has one"
        raise ValueError(f"{folder} has no {SETTINGS}; name {named}")
    if not (folder / WEIGHTS).is_file():
        raise ValueError(
            f"{folder} has no {WEIGHTS}; save the adapter with save_pretrained (nothing pickled is read)"
        )
    try:
        return read_adapter_config(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"in {file} {error}; name a folder as peft saves an adapter") from error


def some_of(names: Sequence[str]) -> str:
    """Modules, for a refusal: the first of them, and how many more."""
    more = f" and {len(names) - MAX_TOLD} more" if len(names) > MAX_TOLD else ""
    return (", ".join(names[:MAX_TOLD]) or "nothing") + more
