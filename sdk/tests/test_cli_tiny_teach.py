"""A lesson of `quartet model tiny` beside services that do not do their part."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from quartet.cli.tiny import teach
from quartet.errors import QuartetError
from quartet.v1.inference_service_pb2 import GetModelResponse


async def test_a_replica_that_serves_no_new_version_ends_it_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def older(*_: object, **__: object) -> GetModelResponse:
        return GetModelResponse(run_id="r", policy_version=1)

    monkeypatch.setattr(teach, "unary", older)
    monkeypatch.setattr(teach, "SERVE_SECONDS", 0.1)
    lesson = teach.Lesson(Mock(), Mock(), "r", Mock())
    with pytest.raises(QuartetError, match="inference does not serve version 2 after"):
        await lesson._served(2)
