"""Spans of the OpenAI-compatible front: a caller's trace goes on in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import openai
import pytest
from quartet.kit import tracing
from span_collector import Collector, collecting_here

from .openai_door import opened

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PLACE = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
CHAT = "POST /v1/chat/completions"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting_here(monkeypatch) as running, tracing.exporting("inference"):
        yield running


async def test_an_answer_is_below_its_callers_place_with_what_the_engine_did(
    model_folder: Path, collector: Collector
) -> None:
    async with opened(model_folder) as door:
        await door.chat(max_tokens=3, extra_headers=PLACE)
        async for _ in await door.chat(max_tokens=3, stream=True):
            pass
        spans = collector.wait(lambda: len(found := collector.named(CHAT, "SERVER")) == 2 and found)
    placed, of_its_own = sorted(spans, key=lambda one: one.start_ns)
    assert (placed.trace_id, placed.parent_id) == (TRACE_ID, SPAN_ID)
    assert of_its_own.trace_id != TRACE_ID and not of_its_own.parent_id, "by the same connection"
    for one in spans:
        assert [*one.events] == ["queued", "first_token"]
        assert one.attributes["http.request.method"] == "POST"
        assert one.attributes["http.route"] == "/v1/chat/completions"
        assert (one.attributes["http.response.status_code"], one.status) == (200, "")


async def test_what_is_refused_says_its_status_and_a_fault_is_an_error(
    model_folder: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(model_folder) as door:
        with pytest.raises(openai.BadRequestError):
            await door.chat(max_tokens=-1)
        monkeypatch.setattr(door.engine, "generate", None)
        with pytest.raises(openai.InternalServerError):
            await door.chat(max_tokens=3)
        spans = collector.wait(lambda: len(found := collector.named(CHAT)) == 2 and found)
    told = [(one.attributes["http.response.status_code"], one.status) for one in spans]
    assert told == [(400, ""), (500, "ERROR")]
    assert [one.attributes.get("error.type") for one in spans] == [None, "500"]


async def test_who_is_kept_out_and_questions_how_it_stands_have_no_spans(
    model_folder: Path, collector: Collector, tmp_path: Path
) -> None:
    (key := tmp_path / "key").write_text("secret\n")
    async with opened(model_folder, openai={"api_key_file": key}) as door:
        with pytest.raises(openai.AuthenticationError):
            await door.chat(extra_headers=PLACE)
        async with door.client("secret") as known:
            await known.models.list()
            await known.chat.completions.create(
                model=door.model, messages=[{"role": "user", "content": "hi"}], max_tokens=1
            )
        async with aiohttp.ClientSession() as session, session.get(f"http://{door.address}/health") as health:
            assert health.status == 200
        collector.wait(lambda: collector.spans)
    assert [one.name for one in collector.spans] == [CHAT]
    assert collector.spans[0].trace_id != TRACE_ID
