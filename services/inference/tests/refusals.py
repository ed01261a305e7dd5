"""What replicas of this process refuse to serve, told as it happens."""

from __future__ import annotations

from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet_inference.adoption import Adopter


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[QuartetError]:
    """Of every version of a whole model that was fetched, or pushed, and not taken."""
    told: list[QuartetError] = []
    adopt = Adopter.adopt

    async def watched(self: Adopter, version: Any) -> Any:
        try:
            return await adopt(self, version)
        except QuartetError as error:
            told.append(error)
            raise

    monkeypatch.setattr(Adopter, "adopt", watched)
    return told
