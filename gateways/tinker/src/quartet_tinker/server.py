"""The HTTP server: routes, the key of callers, and waiting for promises.

1. What is served is listed in `routes`; anything else is 404 with a sentence that names it.
2. A refusal is JSON with `detail`, which is in the text of what the SDK raises.
3. A result that is not there within WAIT_SECONDS is 408, after which the SDK asks again without a word.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Final

import structlog
from aiohttp import web
from google.protobuf.message import DecodeError
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.kit import tracing
from quartet.kit.door import tls_context
from quartet.kit.security import TokenFile
from quartet.kit.server import publish_address
from quartet.kit.unreadable import connection_log, why

from quartet_tinker import bodies, sampling_bodies
from quartet_tinker import tinker_wire_pb2 as wire
from quartet_tinker.config import GatewayConfig
from quartet_tinker.gateway import Gateway
from quartet_tinker.promises import Promise, failed
from quartet_tinker.refusal import Refused, from_quartet, unknown
from quartet_tinker.rest import PAGED, RestRoutes, in_json

#: The SDK cuts gradient requests at 5 MB; a single sequence may be longer.
MAX_BODY_BYTES: Final = 64 * 2**20
#: The SDK gives up on an answer after 45 s and asks again.
WAIT_SECONDS: Final = 25.0
#: Longer than the SDK's own pool keeps connections.
IDLE_SECONDS: Final = 75.0
KEY_HEADER: Final = "X-API-Key"
V1: Final = "/api/v1/"
#: Larger answers are fetched in two steps by an SDK that allows it: it waits until its memory has room.
WHOLE_BYTES: Final = 2**20
#: What may stand behind a "?". Everything here has one owner, so both mean the same.
QUERIES: Final = frozenset({("access_scope", "owned"), ("access_scope", "accessible")})

#: No work: what the SDK asks before any, tells of itself, and asks again and again.
UNTRACED: Final = frozenset(
    V1 + path
    for path in (
        "client/config",
        "client/dynamic_config",
        "telemetry",
        "session_heartbeat",
        "retrieve_future",
    )
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = structlog.get_logger()


class Routes:
    """The handlers."""

    def __init__(self, gateway: Gateway, key: TokenFile | None) -> None:
        self._gateway, self._key = gateway, key

    def application(self) -> web.Application:
        """All of them."""
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        posts: dict[str, Handler] = {
            "client/config": self._config,
            "client/dynamic_config": self._dynamic_config,
            "telemetry": self._telemetry,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session_id}/finish": self._finish,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "unload_model": self._unload,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampling_session,
            "join_sampling_session": self._join_sampling_session,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
        }
        gets: dict[str, Handler] = {
            "healthz": self._healthz,
            "get_server_capabilities": self._capabilities,
        }
        application.add_routes([web.post(V1 + path, handler) for path, handler in posts.items()])
        application.add_routes([web.get(V1 + path, handler) for path, handler in gets.items()])
        for (method, path), handler in RestRoutes(self._gateway).by_path().items():
            application.router.add_route(method, V1 + path, handler)
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        return await _answered(request, partial(self._behind_the_door, handler))

    async def _behind_the_door(self, handler: Handler, request: web.Request) -> web.StreamResponse:
        """In a span, where it is work."""
        if request.path != f"{V1}healthz":
            self._admit(request)
        route = request.match_info.route.resource
        if request.match_info.http_exception is None and request.path.removeprefix(V1) not in PAGED:
            _check_query(request)
        if request.method != "POST" or route is None or route.canonical in UNTRACED:
            return await handler(request)
        with tracing.answering(request.method, route.canonical, request.headers) as answer:
            response = await _answered(request, handler)
            answer.came_to(response.status)
            return response

    def _admit(self, request: web.Request) -> None:
        if self._key is not None and not self._key.accepts(request.headers.get(KEY_HEADER, "")):
            raise Refused("the API key is missing or wrong; set TINKER_API_KEY", status=401)

    # -- about the gateway

    async def _healthz(self, request: web.Request) -> web.Response:
        return in_json({"status": "ok"})

    async def _config(self, request: web.Request) -> web.Response:
        bodies.parse(bodies.ClientConfig, await request.read())
        # What the SDK may do differently with other servers; everything else is its default.
        return in_json(
            {
                "pjwt_auth_enabled": False,
                "parallel_fwdbwd_chunks": True,
                "proto_compress_fwdbwd": False,
                "sample_use_retrieve_futures": False,
                "custom_loss_server_side": False,
                "sample_join_sampling_session": True,
                "sample_max_concurrent_requests": 1024,
            }
        )

    async def _dynamic_config(self, request: web.Request) -> web.Response:
        bodies.parse(bodies.ClientConfig, await request.read())
        return in_json({"sample_cancel_enabled": True})

    async def _telemetry(self, request: web.Request) -> web.Response:
        """Nothing is kept of it."""
        return in_json({"status": "accepted"})

    async def _capabilities(self, request: web.Request) -> web.Response:
        return in_json(await self._gateway.model.capabilities())

    # -- sessions and models

    async def _create_session(self, request: web.Request) -> web.Response:
        return in_json(self._gateway.create_session(bodies.parse(bodies.CreateSession, await request.read())))

    async def _heartbeat(self, request: web.Request) -> web.Response:
        self._gateway.heartbeat(bodies.parse(bodies.Heartbeat, await request.read()).session_id)
        return in_json({"type": "session_heartbeat"})

    async def _finish(self, request: web.Request) -> web.Response:
        body = bodies.parse(bodies.Finish, await request.read())
        await self._gateway.finish(request.match_info["session_id"], body.why())
        return in_json({})

    async def _create_model(self, request: web.Request) -> web.Response:
        raw = await request.read()
        return _promised(self._gateway.create_model(bodies.parse(bodies.CreateModel, raw), raw))

    async def _get_info(self, request: web.Request) -> web.Response:
        model_id = bodies.parse(bodies.GetInfo, await request.read()).model_id
        return in_json(await self._gateway.model_info(model_id))

    async def _unload(self, request: web.Request) -> web.Response:
        raw = await request.read()
        return _promised(self._gateway.unload(bodies.parse(bodies.Unload, raw).model_id, raw))

    async def _forward_backward(self, request: web.Request) -> web.Response:
        raw = await request.read()
        message = wire.ForwardBackwardRequest()
        try:
            message.ParseFromString(raw)
        except DecodeError:
            raise Refused("the body is no ForwardBackwardRequest of the SDK, uncompressed") from None
        return _promised(self._gateway.forward_backward(message, raw))

    async def _optim_step(self, request: web.Request) -> web.Response:
        raw = await request.read()
        with self._numbered(raw):
            return _promised(self._gateway.optim_step(bodies.parse(bodies.OptimStep, raw), raw))

    async def _save_weights(self, request: web.Request) -> web.Response:
        raw = await request.read()
        with self._numbered(raw):
            return _promised(self._gateway.save_weights(bodies.parse(bodies.SaveWeights, raw), raw))

    async def _save_for_sampler(self, request: web.Request) -> web.Response:
        raw = await request.read()
        with self._numbered(raw):
            return _promised(self._gateway.save_for_sampler(bodies.parse(bodies.SaveForSampler, raw)))

    async def _save_external(self, request: web.Request) -> web.Response:
        with self._numbered(await request.read()):
            told = "save_weights_external is not served here: save a state, and `quartet export` it"
            raise Refused(told, status=404)

    async def _load_weights(self, request: web.Request) -> web.Response:
        raw = await request.read()
        with self._numbered(raw):
            return _promised(self._gateway.load_weights(bodies.parse(bodies.LoadWeights, raw), raw))

    @contextmanager
    def _numbered(self, raw: bytes) -> Iterator[None]:
        """What is refused in here has its place in its model's order all the same, unless it comes again."""
        try:
            yield
        except Refused as refused:
            place = bodies.place(raw)
            if place is not None and refused.status != 429:
                self._gateway.spend(place, raw, refused)
            raise

    # -- sampling

    async def _create_sampling_session(self, request: web.Request) -> web.Response:
        body = bodies.parse(sampling_bodies.CreateSamplingSession, await request.read())
        return in_json(await self._gateway.samplers.create(body))

    async def _join_sampling_session(self, request: web.Request) -> web.Response:
        body = bodies.parse(sampling_bodies.JoinSamplingSession, await request.read())
        return in_json(self._gateway.samplers.join(body.sampling_session_id))

    async def _sample(self, request: web.Request) -> web.Response:
        raw = await request.read()
        promise, names = self._gateway.samplers.sample(bodies.parse(sampling_bodies.SampleBody, raw), raw)
        return in_json({"request_id": promise.request_id, "sample_sequence_ids": names})

    # -- promises

    async def _retrieve(self, request: web.Request) -> web.Response:
        body = bodies.parse(bodies.RetrieveFuture, await request.read())
        request_id = body.request_id
        promise = self._gateway.promises.find(request_id)
        if promise is None:
            kept = "a result is kept for an hour"
            raise unknown("request", request_id, "send it again with another client", kept)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await promise.done.wait()
        except TimeoutError:
            later = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return in_json(later, status=408)
        assert promise.answer is not None, "it is done"
        size = len(promise.answer.body)
        if body.allow_metadata_only and size > WHOLE_BYTES:
            return in_json({"status": "complete_metadata", "response_payload_size": size})
        return web.Response(body=promise.answer.body, content_type=promise.answer.content_type)

    async def _cancel(self, request: web.Request) -> web.Response:
        """Of sampling: nobody waits for it any more."""
        request_id = bodies.parse(bodies.CancelFuture, await request.read()).request_id
        promise = self._gateway.promises.find(request_id)
        if promise is not None and promise.task is not None and promise.answer is None:
            promise.settle(failed(Refused("the request was cancelled")))
            promise.task.cancel()
        return in_json({})


@asynccontextmanager
async def serving(routes: Routes, config: GatewayConfig) -> AsyncIterator[str]:
    """Listen until left; yields the address. Raises ConfigError."""
    runner = web.AppRunner(
        routes.application(), access_log=None, logger=connection_log("quartet_tinker"),
        shutdown_timeout=1.0, keepalive_timeout=IDLE_SECONDS,
    )  # fmt: skip
    await runner.setup()
    host, _, port = config.address.rpartition(":")
    tls = tls_context(config.tls) if config.tls else None
    site = web.TCPSite(runner, host.strip("[]"), int(port), ssl_context=tls, backlog=1024)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(
            f"address = {config.address!r} cannot be bound: {error.strerror}; choose another port"
        ) from None
    address = f"{host}:{runner.addresses[0][1]}"
    try:
        if config.port_file is not None:
            publish_address(config.port_file, address, "port_file")
        log.info("serving the Tinker SDK", address=address)
        yield address
    finally:
        await runner.cleanup()


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What the handler answers; its error as an answer."""
    try:
        return await handler(request)
    except Refused as refused:
        return _refusal(refused)
    except QuartetError as error:
        return _refusal(from_quartet(error))
    except web.HTTPRequestEntityTooLarge:
        return _refusal(Refused(f"a request has at most {MAX_BODY_BYTES} bytes; cut it", status=413))
    except web.RequestPayloadError as error:
        return _refusal(Refused(f"the body cannot be read: {why(error)}"))
    except ConnectionResetError:  # its sender went away: nobody reads this
        return _refusal(Refused("the connection was lost"))
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
        return _refusal(Refused(f"{request.method} {request.path} is not served here", status=404))
    except Exception:
        log.exception("request failed", path=request.path)
        return _refusal(Refused("the gateway failed; its log says why", status=500))


def _check_query(request: web.Request) -> None:
    for key, value in request.query.items():
        if (key, value) not in QUERIES:
            raise Refused(f"{key} = {value!r} is not served here; leave it out")


def _promised(promise: Promise) -> web.Response:
    return in_json({"request_id": promise.request_id})


def _refusal(refused: Refused) -> web.Response:
    return in_json({"detail": refused.sentence}, status=refused.status)
