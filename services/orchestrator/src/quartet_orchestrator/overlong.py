"""What a rollout's length takes from its reward, before rewards are compared. Pure."""

from __future__ import annotations

from quartet.run.algorithm_tables import OverlongPenaltyConfig


def penalty(config: OverlongPenaltyConfig | None, tokens: int) -> float:
    """Of so many sampled tokens: from 0 to the factor, which is taken from the reward."""
    if config is None:
        return 0.0
    beyond = (tokens - config.from_tokens) / (config.to_tokens - config.from_tokens)
    return config.factor * min(1.0, max(0.0, beyond))
