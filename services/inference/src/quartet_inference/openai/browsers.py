"""Which pages of a browser may ask: cross-origin resource sharing, off unless origins are configured.

1. A page of an allowed origin reads every answer, errors too, and may send any header that it announces.
2. A page of another origin, and every page where none is configured, is told nothing: its browser keeps the
   answer from it.
3. Nothing but the browser obeys this. Who may come in is the key's to say; the question that a browser asks
   ahead of a request (a preflight) carries none, and is answered without.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from quartet_inference.openai.wishes import WISHES_HEADER

#: For so long a browser asks ahead no second time.
PREFLIGHT_SECONDS = 600
_ANY = "*"


class Origins:
    """The allowed origins."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = frozenset(allowed)

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer to what a browser asks ahead; None for any other request."""
        asked = "Access-Control-Request-Method" in request.headers
        if request.method != "OPTIONS" or not asked or not self._allows(request):
            return None
        headers = {
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Max-Age": str(PREFLIGHT_SECONDS),
        }
        wanted = request.headers.get("Access-Control-Request-Headers")
        if wanted:  # by name: "*" would not stand for Authorization
            headers["Access-Control-Allow-Headers"] = wanted
        return web.Response(status=204, headers=headers)

    def mark(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Let an allowed page read this answer."""
        if not self._allowed:
            return
        response.headers["Vary"] = "Origin"  # no cache gives one page what was marked for another
        if self._allows(request):
            response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
            response.headers["Access-Control-Expose-Headers"] = f"Retry-After, {WISHES_HEADER}"

    def _allows(self, request: web.BaseRequest) -> bool:
        origin = request.headers.get("Origin")
        return origin is not None and (_ANY in self._allowed or origin in self._allowed)
