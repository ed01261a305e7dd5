"""The base models in memory that adapters are trained upon: one for all runs on it, gone with the last.

1. Runs that train copies of whole modules, or have matrices for stacked experts, share a base with those
   alone that do so with the same ones: peft puts these around their originals, so what others would find in
   there, and where, is not what they find alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from quartet_trainer.spec import RunSpec

if TYPE_CHECKING:
    import torch

    from quartet_trainer.lora import Base


class Bases:
    """Bases by what they were made of. For one thread."""

    def __init__(self) -> None:
        self._held: WeakValueDictionary[tuple[object, ...], Base] = WeakValueDictionary()

    def open(
        self, folder: Path, spec: RunSpec, load: Callable[[], Any], autocast: torch.dtype | None
    ) -> Base:
        """The base of a run, loaded unless it is there; `autocast` is what its products are computed in."""
        from quartet_trainer.lora import Base  # peft takes seconds to import

        lora = spec.lora
        around = (lora.modules_to_save, lora.target_parameters) if lora is not None else ()
        seed = spec.seed if spec.from_scratch else None
        key = (folder.resolve(), spec.from_scratch, seed, autocast, *map(frozenset, around))
        shared = self._held.get(key)
        # One that all runs have left may still be in memory, in this rank and not in others: it is gone.
        if shared is None or not shared.in_use:
            shared = self._held[key] = Base(load(), autocast)
        return shared
