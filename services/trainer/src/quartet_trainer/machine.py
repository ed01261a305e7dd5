"""What a trainer computes on, and how: its device, its ranks and its configuration's limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from quartet.errors import QuartetError

from quartet_trainer.loss.custom import CustomLoss
from quartet_trainer.model import resolve_folder
from quartet_trainer.ranks.alone import Alone, Ranks


@dataclass(frozen=True, slots=True)
class Machine:
    """What the service's configuration says about computing."""

    device: torch.device
    microbatch_tokens: int
    row_tokens: int | None
    hub: bool
    gradient_checkpointing: bool = False
    # Losses that the configuration names.
    losses: Mapping[str, CustomLoss] = field(default_factory=dict)
    # The processes that compute together.
    ranks: Ranks = field(default_factory=Alone)
    # Whether models use Liger's kernels.
    liger: bool = False
    # Whether moments rest in host memory (offload.py).
    optimizer_offload: bool = False
    # Whether layers that are computed anew keep what attention gave (recompute.py 5).
    keep_attention: bool = False

    def folder_of(self, model: str, progress: Callable[[], None]) -> Path:
        """Where a model lies, fetched by now. Errors: INVALID_CONFIG, in every rank where one lacks it."""
        refused = None
        try:
            folder = resolve_folder(model, self.hub, progress=progress)
        except QuartetError as error:
            refused = error
        self.ranks.settle(refused)
        return folder
