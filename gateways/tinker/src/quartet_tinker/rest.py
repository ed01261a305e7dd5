"""What a RestClient and the SDK's command line ask: runs, checkpoints, sessions, samplers.

1. It deletes a state, and changes nothing else. Who lists sessions, or looks at one, is not its script: a
   silent one stays silent.
2. What such clients ask and is not served (`REMEDIES`) is refused with what to do instead.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final, Literal

import pydantic
from aiohttp import web

from quartet_tinker import bodies
from quartet_tinker.gateway import Gateway
from quartet_tinker.refusal import Refused

#: Of one answer; the SDK's command line asks for as many.
MAX_PAGE: Final = 1000

_STATE: Final = "training_runs/{model_id}/checkpoints/{kind}/{name}"
_KEPT: Final = "the trainer keeps the newest states of a run (keep_last)"
_PUBLIC: Final = "every caller of this gateway can use every path, and nobody else any"
#: Method and path -> why not, and what instead.
REMEDIES: Final[dict[tuple[str, str], str]] = {
    ("PUT", f"{_STATE}/ttl"): f"ttl_seconds is not kept: {_KEPT}, whatever their age",
    ("POST", f"{_STATE}/publish"): f"checkpoints are not published here: {_PUBLIC}",
    ("DELETE", f"{_STATE}/publish"): f"checkpoints are not published here: {_PUBLIC}",
    ("GET", f"{_STATE}/external_weights_urls"): "weights are not downloaded here: `quartet export` a state",
    ("POST", "copy_weights"): f"weights are not copied here: {_PUBLIC}; make a client of the path itself",
    ("POST", "sessions/search"): "sessions are not searched here; list them (list_sessions)",
    ("PUT", "sessions/{session_id}/project"): "there are no projects here",
    ("GET", "sessions/{session_id}/trace_export"): (
        "traces are not kept here: start the gateway with OTEL_EXPORTER_OTLP_ENDPOINT, and they go there"
    ),
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Page(bodies.Body):
    """Which part of a list."""

    limit: Annotated[int, pydantic.Field(ge=0, le=MAX_PAGE)] = 20
    offset: Annotated[int, pydantic.Field(ge=0)] = 0
    # Everything here has one owner, so both mean the same.
    access_scope: Literal["owned", "accessible"] = "owned"

    @classmethod
    def of(cls, request: web.Request) -> Page:
        """Behind the "?". Raises Refused."""
        return bodies.parse(cls, json.dumps(dict(request.query)).encode())

    def part(self, total: int) -> dict[str, int]:
        """As the SDK reads it."""
        return {"offset": self.offset, "limit": self.limit, "total_count": total}


class RestRoutes:
    """The handlers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def by_path(self) -> dict[tuple[str, str], Handler]:
        """All of them, by method and path."""
        return {
            ("GET", "training_runs"): self._training_runs,
            ("GET", "training_runs/{model_id}"): self._training_run,
            ("GET", "training_runs/{model_id}/checkpoints"): self._states,
            ("DELETE", _STATE): self._delete_state,
            ("GET", "checkpoints"): self._all_states,
            ("GET", "sessions"): self._list_sessions,
            ("GET", "sessions/{session_id}"): self._session,
            ("GET", "samplers/{sampling_session_id}"): self._sampler,
            ("POST", "weights_info"): self._weights_info,
            **{place: _refusing(sentence) for place, sentence in REMEDIES.items()},
        }

    async def _training_runs(self, request: web.Request) -> web.Response:
        page = Page.of(request)
        runs, total = await self._gateway.checkpoints.training_runs(page.offset, page.limit)
        return in_json({"training_runs": runs, "cursor": page.part(total)})

    async def _training_run(self, request: web.Request) -> web.Response:
        return in_json(self._gateway.checkpoints.training_run(request.match_info["model_id"]))

    async def _states(self, request: web.Request) -> web.Response:
        return in_json(
            {"checkpoints": await self._gateway.checkpoints.states(request.match_info["model_id"])}
        )

    async def _all_states(self, request: web.Request) -> web.Response:
        page = Page.of(request)
        states = await self._gateway.checkpoints.all_states()
        part = states[page.offset : page.offset + page.limit]
        return in_json({"checkpoints": part, "cursor": page.part(len(states))})

    async def _delete_state(self, request: web.Request) -> web.Response:
        named = (request.match_info[key] for key in ("model_id", "kind", "name"))
        await self._gateway.checkpoints.delete(*named)
        return web.Response(status=204)

    async def _list_sessions(self, request: web.Request) -> web.Response:
        page = Page.of(request)
        return in_json({"sessions": self._gateway.sessions.ids()[page.offset : page.offset + page.limit]})

    async def _session(self, request: web.Request) -> web.Response:
        return in_json(self._gateway.sessions.about(request.match_info["session_id"]))

    async def _sampler(self, request: web.Request) -> web.Response:
        return in_json(await self._gateway.samplers.about(request.match_info["sampling_session_id"]))

    async def _weights_info(self, request: web.Request) -> web.Response:
        path = bodies.parse(bodies.WeightsInfo, await request.read()).tinker_path
        return in_json(self._gateway.checkpoints.weights_info(path))


#: Paths of lists.
PAGED: Final = frozenset({"training_runs", "checkpoints", "sessions"})


def in_json(values: dict[str, Any], status: int = 200) -> web.Response:
    """An answer."""
    return web.Response(body=json.dumps(values).encode(), status=status, content_type="application/json")


def _refusing(sentence: str) -> Handler:
    async def refuse(request: web.Request) -> web.StreamResponse:
        raise Refused(sentence, status=404)

    return refuse
