"""Puts the service together: model, engine, follower, servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

import torch
import transformers
from quartet.chat_identity import chat_identity
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.inference import INFERENCE
from quartet.kit.health import Health
from quartet.kit.metrics import scraped
from quartet.kit.server import Service, serve
from quartet.v1 import inference_service_pb2_grpc

from quartet_inference.adapters import Adapters
from quartet_inference.answering import Answerer
from quartet_inference.canary import Gate
from quartet_inference.chat import Chat
from quartet_inference.config import InferenceConfig
from quartet_inference.embedded import device, model
from quartet_inference.embedded.engine import EmbeddedEngine
from quartet_inference.embedded.limits import Limits
from quartet_inference.ending import end_with
from quartet_inference.engine import Engine, ServedWeights
from quartet_inference.gauges import ReplicaGauges
from quartet_inference.openai.start import front
from quartet_inference.own_model import OwnModel
from quartet_inference.replication import replicating
from quartet_inference.service import InferenceServicer
from quartet_inference.text_stream import Detokenize
from quartet_inference.updates import ServedNews
from quartet_inference.vllm import environment

#: Said of a run that is asked for in vain.
NO_SUCH_RUN = "whom this replica follows (weights_address) has no run of this name"


async def build_engine(config: InferenceConfig, chat: Chat, health: Health) -> Engine:
    """Load the model; without a weights address its own weights are version 0 of no run."""
    all_text = partial(chat.text, special=True)
    if config.engine == "vllm":
        environment.check()
        from quartet_inference.vllm.start import start_checked  # vLLM is not installed everywhere

        return await start_checked(config, chat.end_tokens, all_text, health.progress)
    return await asyncio.to_thread(_embedded, config, chat.end_tokens, all_text, health)


def _embedded(
    config: InferenceConfig, end_tokens: frozenset[int], all_text: Detokenize, health: Health
) -> EmbeddedEngine:
    settings = config.embedded
    torch.set_num_threads(settings.threads)
    # A bar has no place in a service's log, and a thread that watches it for ever none in the process.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    where = device.chosen(settings.device)
    dtype = device.dtype_on(where, settings.dtype)
    try:
        network = device.within_memory(
            lambda: model.load(config.model, dtype, weights_follow=bool(config.weights_address)).to(where)
        )
    except QuartetError as error:
        raise ConfigError(f"model = {str(config.model)!r} cannot be loaded: {error.message}") from error
    limits = Limits(
        max_model_len=model.made_for(network, config.max_model_len),
        max_num_seqs=settings.max_num_seqs,
        max_waiting=settings.max_waiting,
        kv_cache_bytes=settings.kv_cache_bytes,
        prefix_cache_bytes=settings.prefix_cache_bytes,
        packed_bytes=settings.packed_bytes,
        recompute_on_update=settings.kv_on_update == "recompute",
        max_adapters=config.adapters.max_count,
        adapter_bytes=config.adapters.max_bytes,
        routed_experts=config.routed_experts,
        cuda_graphs=settings.cuda_graphs,
    )
    digest = b"" if config.weights_address else model.ModelWeights(network).digest()
    served = None if config.weights_address else ServedWeights("", 0, digest)
    try:
        return EmbeddedEngine(network, limits, end_tokens, all_text, served, health.progress)
    except ValueError as error:
        raise ConfigError(f"model = {str(config.model)!r} cannot be served: {error}") from error


@asynccontextmanager
async def services(
    config: InferenceConfig, health: Health, bound: asyncio.Future[str] | None = None
) -> AsyncIterator[list[Service]]:
    """The services of a running replica; left, its engine and follower are ended.

    Whoever is inside is cancelled where the engine ends by itself (`ending`).
    `bound` will be the address it listens on; without it the replica is no relay.
    """
    chat = await asyncio.to_thread(
        Chat, config.model, config.chat.tool_parser, config.chat.template_file, config.chat.template_settings
    )
    made_with = await asyncio.to_thread(
        chat_identity, config.model, str(config.model), config.chat.template_file
    )
    ungated = await build_engine(config, chat, health)
    gate = Gate(ungated)
    engine = cast(Engine, gate)

    def busy() -> bool:
        info = engine.info()
        # With vLLM those that wait are at its core, too, which may hang before any first token. In an update
        # all requests may be waiting outside.
        return info.asked or (info.running + info.waiting > 0 and not info.paused)

    health.watch_progress(config.stall_seconds, busy)
    news = ServedNews(engine)
    adapters = Adapters(
        ungated,
        news,
        OwnModel(ungated, config.model),
        on_demand=config.adapters.on_demand,
        canary_tolerance=config.canary_tolerance,
        accept_push=config.accept_push,
    )

    def in_vain(run_id: str, since: float) -> str:
        return config.excludes(run_id) or (NO_SUCH_RUN if adapters.denied(run_id, since) else "")

    gate.set_trusted(adapters.verdicts.living)
    answerer = Answerer(
        engine, chat, news, config.version_wait_seconds, adapters.want, in_vain, config.follows, adapters.dead
    )
    servicer = InferenceServicer(engine, answerer, adapters, str(config.model), made_with)
    try:
        async with (
            replicating(config, ungated, gate, news, health, adapters, bound) as weights,
            front(config, engine, answerer, chat, health),
            asyncio.TaskGroup() as group,
        ):
            ends = end_with(engine, health, config.stall_seconds)
            ending = group.create_task(ends, name="end-with-engine")
            add = inference_service_pb2_grpc.add_InferenceServiceServicer_to_server
            try:
                yield [Service(INFERENCE, add, servicer), *weights]
            finally:
                ending.cancel()
    finally:
        await engine.close()


async def run(config: InferenceConfig) -> None:
    """Serve until a signal, or until the engine or the follower has ended, which is an error."""
    health = Health()
    bound: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with services(config, health, bound) as running:
        servicer = running[0].servicer
        assert isinstance(servicer, InferenceServicer)
        with scraped(ReplicaGauges(servicer.model, servicer.prompt_tokens, asyncio.get_running_loop())):
            await serve(running, config.server, health, started=bound)
