"""What the decoding thread says of the engine, in one value that any thread may read.

1. It is replaced as a whole and never changed: a reader sees one moment.
2. The decoding thread alone replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from quartet_inference.embedded.limits import Limits
from quartet_inference.engine import EngineInfo, ServedWeights


class Snapshot:
    """The newest `info`."""

    def __init__(
        self,
        network: nn.Module,
        limits: Limits,
        end_tokens: Iterable[int],
        served: ServedWeights | None,
        routers: int,
    ) -> None:
        """Of an engine that has done nothing yet."""
        config: Any = network.config
        self.info = EngineInfo(
            name="embedded",
            dtype=str(next(network.parameters()).dtype).removeprefix("torch."),
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            vocab_size=int(config.get_text_config().vocab_size),
            end_token_ids=tuple(sorted(end_tokens)),
            served=served,
            running=0,
            waiting=0,
            tokens_sampled=0,
            updates_applied=0,
            last_update_pause_ms=0.0,
            paused=False,
            routers=routers,
        )

    def change(self, **changes: Any) -> None:
        """Say something else in these fields."""
        self.info = replace(self.info, **changes)
