"""What of a script's arguments is the trainer's: its ranks and its device, and which states it keeps."""

from __future__ import annotations

from collections.abc import Sequence

from quartet.scripts.draft import Draft

#: The trainer keeps no more states of a run.
MAX_KEPT = 1000


def deployment(draft: Draft) -> None:
    """Puts where and how the trainer computes into the draft. Raises ConfigError."""
    args = draft.args
    if args.num_processes > 1:
        draft.take("num_processes", "trainer.ranks")
    # The newer name of the two, which counts where it is given, as there.
    newer = args.activation_checkpointing
    again = bool(args.gradient_checkpointing if newer is None else newer)
    draft.put("trainer.gradient_checkpointing", again, "gradient_checkpointing")
    if args.use_cpu:
        draft.put("trainer.device", "cpu", "use_cpu")


def saving(draft: Draft, strategies: Sequence[str]) -> str:
    """Puts how many states stay into the draft; by which of these strategies they are saved, or "no". Raises
    ConfigError."""
    strategy = draft.chosen("save_strategy", ("no", *strategies))
    if strategy == "no":
        draft.notes.append(
            "args.save_strategy = 'no' is without effect: the trainer keeps the last states that it goes on "
            "from when it dies, and the model is exported once, at the end"
        )
    else:
        # Without a limit every one is kept, as there, also of what is made longer.
        draft.put("ckpt.keep_last", draft.args.save_total_limit or MAX_KEPT, "save_total_limit")
    return strategy
