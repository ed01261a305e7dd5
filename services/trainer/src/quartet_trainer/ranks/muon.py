"""Muon over matrices that are spread over the ranks: it orthogonalises whole ones.

1. One matrix after the other is whole, in every rank, while it moves; each rank keeps its part.
2. What moves it is torch.optim.Muon: bits are those of one process with the same gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quartet_trainer.ranks.layout import part, part_like, whole


class WholeMuon(torch.optim.Muon):
    """torch.optim.Muon, whose state is spread as the matrices are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._move(matrix, options)

    def _move(self, matrix: nn.Parameter, options: dict[str, Any]) -> None:
        momentum: Tensor = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
        moved = nn.Parameter(whole(matrix.detach()))
        moved.grad = whole(matrix.grad)
        mover = torch.optim.Muon([moved], **options)
        mover.state[moved]["momentum_buffer"] = gathered = whole(momentum)
        mover.step()  # type: ignore[no-untyped-call]
        for mine, new in ((matrix, moved.detach()), (momentum, gathered)):
            part(mine).copy_(part_like(new, mine))
