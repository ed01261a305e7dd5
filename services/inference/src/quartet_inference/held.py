"""What an engine holds, by digest: it gets another name only if that is the name of the same weights."""

from __future__ import annotations

from quartet.errors import QuartetError

from quartet_inference.engine import ServedWeights


def held_digest(served: ServedWeights | None, base_digest: bytes) -> bytes:
    """Digest of the base weights in an engine that serves this and was started with those."""
    return base_digest if served is None else served.digest


def check_name(weights: ServedWeights, served: ServedWeights | None, base_digest: bytes) -> None:
    """Refuse a name of other weights: whoever gave it saw those that were held before. Errors: NOT_READY."""
    if weights.digest != held_digest(served, base_digest):
        raise QuartetError(
            "NOT_READY", f"other weights came before version {weights.version} of run {weights.run_id!r}"
        )
