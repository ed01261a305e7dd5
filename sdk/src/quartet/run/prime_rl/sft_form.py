"""Which files of a fine-tuning are prime-rl's: by keys that only one of the two dialects has.

1. A file with keys of prime-rl's `sft` and none of Quartet's own is prime-rl's; one with both is MIXED; one
   with neither is Quartet's (form.py).
2. An option by a key of prime-rl's is its; [ckpt], [wandb] and max_steps say the same in both, and are laid
   over what files say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quartet.run.prime_rl.form import Form
from quartet.run.sft import SftConfig

#: At the top of its file, whatever they are.
AT_THE_TOP: Final = frozenset(
    {
        *("bench", "clean", "clean_output_dir", "deployment", "dist_timeout_seconds", "dry_run", "env_vars"),
        *("experimental", "gc", "heartbeat", "inference", "log", "loss_impl", "matmul_precision"),
        *("memory_profiler_path", "monitors", "optim", "output_dir", "renderer", "run", "scheduler"),
        *("slurm", "tokenizer", "trace_path", "use_renderer", "val"),
    }
)
#: Tables of its file that are a single value here.
AS_TABLES: Final = frozenset({"data", "model"})
#: What both have.
SHARED: Final = frozenset({"ckpt", "eval", "max_steps", "wandb"})
#: Of what both have, keys that only prime-rl's has.
INSIDE: Final[Mapping[str, frozenset[str]]] = {
    "ckpt": frozenset({"keep", "output_dir", "resume_step", "weights", "weights_only"}),
    "eval": frozenset({"env", "sampling", "select", "source"}),
    "wandb": frozenset({"id", "log_extras", "offline", "shared"}),
}
#: Keys of a fine-tuning here that no file of prime-rl has at its top.
OURS: Final = frozenset(SftConfig.model_fields) - SHARED - AS_TABLES


def form_of(tables: Mapping[str, Any]) -> tuple[Form, list[str], list[str]]:
    """Whose these tables are, with the keys that say so: prime-rl's, and Quartet's."""
    theirs = [key for key in sorted(tables) if key in AT_THE_TOP]
    theirs += [f"{key}.{name}" for key in sorted(AS_TABLES & tables.keys()) for name in _keys(tables[key])]
    for key, names in INSIDE.items():
        theirs += [f"{key}.{name}" for name in _keys(tables.get(key)) if name in names]
    ours = [key for key in sorted(tables) if key.replace("-", "_") in OURS]
    ours += [key for key in sorted(AS_TABLES & tables.keys()) if isinstance(tables[key], str)]
    if not theirs:
        return Form.OURS, theirs, ours
    return (Form.MIXED if ours else Form.THEIRS), theirs, ours


def owns(path: tuple[str, ...]) -> tuple[str, ...] | None:
    """The place of an option's key in a file of prime-rl; None where it is Quartet's."""
    inside = len(path) > 1 and (path[0] in AS_TABLES or path[1] in INSIDE.get(path[0], ()))
    return path if path[0] in AT_THE_TOP or inside or path == ("max_steps",) else None


def _keys(table: Any) -> list[str]:
    return sorted(table) if isinstance(table, dict) else []
