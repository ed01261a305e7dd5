"""The routes of the front: who may ask, what is asked for, which answer it gets.

1. Every answer is OpenAI's JSON, errors too; a fault's details stay in the log.
2. Bodies, requests at a time and choices are bounded, and so is the time that a body takes to come; so are
   connections (`connections`), what is tokenized of a prompt that cannot fit (`chat.lengths`), and how many
   that come together are worked at before the event loop does anything else (`pace`).
3. While the service drains new requests get 503.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import structlog
from aiohttp import web
from quartet.errors import QuartetError
from quartet.inference import INFERENCE
from quartet.kit import metrics, tracing
from quartet.kit.door import api_key
from quartet.kit.health import Health
from quartet.kit.unreadable import why
from quartet.replicas.merge import merged
from quartet.v1 import inference_service_pb2 as pb

from quartet_inference.answering import INLINE_BYTES, Answerer
from quartet_inference.chat import Chat
from quartet_inference.engine import Engine
from quartet_inference.openai.answers import at_most, numbered, stream, whole
from quartet_inference.openai.bodies import ChatBody, CompletionBody, parse_chat, parse_completion
from quartet_inference.openai.browsers import Origins
from quartet_inference.openai.chat_reply import ChatReply
from quartet_inference.openai.completion_reply import CompletionReply
from quartet_inference.openai.config import OpenAiConfig
from quartet_inference.openai.echo import Echo, Part
from quartet_inference.openai.errors import OpenAiError, from_quartet, malformed
from quartet_inference.openai.forms import as_sent
from quartet_inference.openai.reply import Reply
from quartet_inference.openai.responses.body import parse_responses, sent_as
from quartet_inference.openai.responses.items import NOT_KEPT
from quartet_inference.openai.responses.reply import ResponsesReply
from quartet_inference.openai.wishes import WISHES_HEADER, Wishing

#: As a message of the contract.
MAX_BODY_BYTES = 4 << 20
# What a wrong URL is told, such as a client's base_url without /v1.
SERVED_HERE = "/v1/chat/completions, /v1/responses, /v1/completions, /v1/models and /health are"

# Of the Responses API, about a response that a server keeps.
KEPT = (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel"))

#: The wishes of a request, for the head of its answer.
WISHES = web.RequestKey("wishes", list[str])

log = structlog.get_logger()
B = TypeVar("B", ChatBody, CompletionBody)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Front:
    """The routes."""

    def __init__(
        self,
        config: OpenAiConfig,
        engine: Engine,
        answerer: Answerer,
        chat: Chat,
        health: Health,
        base_model: str,
    ) -> None:
        self._config = config
        self._engine = engine
        self._answerer = answerer
        self._chat = chat
        self._health = health
        self._base_model = base_model
        self._name = config.model_name or os.path.basename(os.path.normpath(base_model))
        self._wishing = Wishing(
            config.best_effort, chat.enforces_calls, chat.enforces_answers, chat.enforces_forms
        )
        self._key = api_key(config, "openai.")
        self._origins = Origins(config.allowed_origins)
        self._running = 0
        self._created = int(time.time())

    def application(self) -> web.Application:
        """The application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.router.add_get("/health", self._healthy)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_post("/v1/chat/completions", self._chat_completions)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/responses", self._responses)
        for method, of_one in KEPT:
            app.router.add_route(method, r"/v1/responses/{id:resp_[^/]+}" + of_one, _not_kept)
        app.on_response_prepare.append(self._head)
        return app

    async def _head(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """What is said above any answer."""
        self._origins.mark(request, response)
        wishes = request.get(WISHES)
        if wishes:
            response.headers[WISHES_HEADER] = ", ".join(wishes)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Key, bounds, and errors as JSON."""
        ahead = self._origins.preflight(request)
        if ahead is not None:
            return ahead
        known = request.match_info.route.resource
        route = known.canonical if known is not None else "unknown"
        with metrics.observe("openai", route) as seen:
            response = await _answered(request, partial(self._behind_the_door, handler, route))
            if response.status >= web.HTTPBadRequest.status_code:
                seen.code = str(response.status)
            return response

    async def _behind_the_door(
        self, handler: Handler, route: str, request: web.Request
    ) -> web.StreamResponse:
        """In a span, where it is work and no question how something stands."""
        self._admit(request)
        self._running += 1
        try:
            if request.method != "POST":
                return await handler(request)
            await self._answerer.pace.turn()
            with tracing.answering(request.method, route, request.headers) as answer:
                response = await _answered(request, handler)
                answer.came_to(response.status)
                return response
        finally:
            self._running -= 1

    def _admit(self, request: web.Request) -> None:
        if request.path == "/health":
            return
        if self._key is not None:
            scheme, _, offered = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not self._key.accepts(offered.strip()):
                raise QuartetError("UNAUTHENTICATED", "the API key is missing or wrong")
        if self._health.draining.is_set():
            raise QuartetError("NOT_READY", "the service is draining")
        if self._running >= self._config.max_concurrent_requests:
            raise QuartetError("OVERLOADED", f"{self._running} requests are under way", retry_after_ms=500)

    async def _healthy(self, request: web.Request) -> web.Response:
        why = "draining" if self._health.draining.is_set() else self._health.why_not(INFERENCE)
        if why:
            raise QuartetError("NOT_READY", why)
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._card(name) for name in self._names()]})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self._run_of(name)
        return web.json_response(self._card(name))

    def _names(self) -> list[str]:
        """The policy, by the model's name and by the runs whose weights or adapters are served."""
        info = self._engine.info()
        runs = [one.run_id for one in (info.served, *info.adapters) if one is not None and one.run_id]
        return list(dict.fromkeys([self._name, *runs]))

    def _card(self, name: str) -> dict[str, Any]:
        info = self._engine.info()
        served = info.serving(name)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "quartet",
            "root": self._base_model,
            "parent": None,
            "max_model_len": info.max_model_len,
            "policy_version": served.version if served is not None else None,
        }

    def _run_of(self, model: str) -> str:
        """The run that a model's name asks for; empty: any."""
        if any(one.run_id == model for one in self._engine.info().adapters):
            return model
        if model in (self._name, self._base_model):
            return ""
        if model in self._names():
            return model
        raise OpenAiError(
            404,
            f"the model {model!r} is not served; {', '.join(self._names())} is",
            param="model",
            code="model_not_found",
        )

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with at_most(self._config.request_seconds, waited_for="the body"):
                return await request.read()
        except web.RequestPayloadError as error:
            raise OpenAiError(400, f"the body cannot be read: {why(error)}", code="invalid_body") from error

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        raw = await self._body(request)
        taken = (raw, self._wishing)
        small = len(raw) <= INLINE_BYTES
        body, wishes = parse_chat(*taken) if small else await asyncio.to_thread(parse_chat, *taken)
        request[WISHES] = wishes
        room = self._engine.info().max_model_len
        return await self._complete(request, body, body.requests(room), ChatReply)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        raw = await self._body(request)
        taken = (raw, self._wishing)
        small = len(raw) <= INLINE_BYTES
        parsed = parse_responses(*taken) if small else await asyncio.to_thread(parse_responses, *taken)
        asked, body, request[WISHES] = parsed
        try:
            requests = body.requests(self._engine.info().max_model_len)
            return await self._complete(request, body, requests, partial(ResponsesReply, asked))
        except OpenAiError as error:
            raise error.renamed(sent_as) from None
        except QuartetError as error:
            raise from_quartet(error).renamed(sent_as) from error

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        raw = await self._body(request)
        small = len(raw) <= INLINE_BYTES
        parsed = self._prompts(raw) if small else await asyncio.to_thread(self._prompts, raw)
        body, requests, request[WISHES] = parsed
        return await self._complete(request, body, requests, CompletionReply)

    def _prompts(self, raw: bytes) -> tuple[CompletionBody, list[pb.GenerateRequest], list[str]]:
        (body, wishes), room = parse_completion(raw, self._wishing), self._engine.info().max_model_len
        prompts = [
            self._chat.encode(prompt, body.add_special_tokens, room) if isinstance(prompt, str) else prompt
            for prompt in body.prompts()
        ]
        return body, body.requests(prompts), wishes

    async def _complete(
        self,
        http: web.Request,
        body: B,
        requests: list[pb.GenerateRequest],
        reply_of: Callable[[Chat, B, str], Reply],
    ) -> web.StreamResponse:
        run_id, session_id = self._run_of(body.model), _session_of(http)
        for request in requests:
            request.run_id = request.run_id or run_id
            request.session_id = request.session_id or session_id
        served = self._engine.info().serving(requests[0].run_id)
        fingerprint = f"{served.run_id or self._name}@{served.version}" if served is not None else ""
        reply = reply_of(self._chat, body, fingerprint)
        limit_s = self._config.request_seconds
        answer: Callable[[pb.GenerateRequest, float], AsyncIterator[Part]]
        answer = partial(self._answerer.answer, top=body.alternatives, watched=body.stream)
        if isinstance(body, CompletionBody) and body.echo:
            answer = Echo(self._answerer, self._engine, body).answer
        answers = [answer(request, limit_s) for request in requests]
        try:
            async with aclosing(merged([numbered(*one) for one in enumerate(answers)])) as events:
                if body.stream:
                    return await stream(http, body, reply, events, limit_s)
                return await whole(http, body, reply, events, len(requests), limit_s)
        except QuartetError as error:
            raise as_sent(error, body.form_name) from error


def _session_of(http: web.Request) -> str:
    """The session that the head of a request names. Raises OpenAiError."""
    named = http.headers.get("X-Session-ID", "")
    try:
        named.encode()
    except UnicodeEncodeError:  # aiohttp hands on bytes that are no text as half surrogate pairs
        raise malformed("X-Session-ID", "send UTF-8") from None
    return named


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What the handler answers; its error as an answer."""
    try:
        return await handler(request)
    except (OpenAiError, QuartetError, web.HTTPException) as error:
        return _error_response(_as_error(error))
    except Exception:
        log.exception("a request failed", path=request.path)
        return _error_response(from_quartet(QuartetError("INTERNAL", "fault")))


async def _not_kept(request: web.Request) -> web.StreamResponse:
    message = f"Response with id {request.match_info['id']!r} not found; {NOT_KEPT}"
    raise OpenAiError(404, message, code="not_found")


def _as_error(error: OpenAiError | QuartetError | web.HTTPException) -> OpenAiError:
    if isinstance(error, OpenAiError):
        return error
    if isinstance(error, QuartetError):
        return from_quartet(error)
    if error.status == 413:
        return OpenAiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="body_too_large")
    if error.status == 404:
        return OpenAiError(404, f"nothing is served at this URL; {SERVED_HERE}", code="unknown_url")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{error.method} is not served at this URL; {allowed} is"
        return OpenAiError(405, message, code="wrong_method", allowed=allowed)
    return OpenAiError(error.status, error.reason)


def _error_response(error: OpenAiError) -> web.Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if error.allowed:
        headers["Allow"] = error.allowed
    if error.hopeless:
        headers["x-should-retry"] = "false"  # OpenAI's clients repeat a 504 twice else
    return web.json_response(error.body, status=error.status, headers=headers)
