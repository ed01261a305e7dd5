"""What the probe of vLLM asks an engine, answered as a test says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from quartet.errors import QuartetError


class Scores:
    """An engine that says what it is told to."""

    def __init__(self, *said: Any, reloading: QuartetError | None = None) -> None:
        self.said, self.reloading, self.reloads = list(said), reloading, 0

    def info(self) -> Any:
        return SimpleNamespace(dtype="float32", max_model_len=4, ended="", routers=2)

    async def score_unnamed(self, request: Any) -> list[float]:
        assert request.tokens == (3, 10, 17, 24)
        said = self.said.pop(0)
        if isinstance(said, QuartetError):
            raise said
        return said

    async def load_again(self, tensors: Any) -> None:
        self.reloads += 1
        if self.reloading is not None:
            raise self.reloading
