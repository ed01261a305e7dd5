"""The adapters that a vLLM engine serves beside its base model.

1. Each version of an adapter is an adapter of its own inside vLLM. Where one replaces another, the requests
   of its run are submitted again with the tokens that they have; nothing else is paused. Whatever
   kv_on_update says, keys come from one version.
2. A version that is served no more is removed from vLLM when nothing uses it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count

from quartet.errors import QuartetError
from quartet.weights.tensor import Tensor
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

from quartet_inference.adapter import no_place
from quartet_inference.engine import ServedWeights, adapter_gone, no_base
from quartet_inference.layout import Layout
from quartet_inference.lora import read_adapter
from quartet_inference.vllm.flight import ServedAdapter
from quartet_inference.vllm.running import Running
from quartet_inference.vllm.staging import StagedAdapter, Staging
from quartet_inference.vllm.workers import Workers


class Adapters:
    """At most `max_count`, each the newest of its run."""

    def __init__(
        self,
        running: Running,
        workers: Workers,
        staging: Staging,
        layout: Layout,
        digest: bytes,
        max_count: int,
    ) -> None:
        """They are made for the base weights of this layout and digest."""
        lora = running.llm.vllm_config.lora_config
        self._running = running
        self._workers = workers
        self._staging = staging
        self._layout = layout
        self._digest = digest
        self._max_rank = lora.max_lora_rank if lora is not None else 0
        self._max_count = max_count
        self._served: dict[str, ServedAdapter] = {}
        self._lora_ids = count(1)

    def get(self, run_id: str) -> ServedAdapter | None:
        """What answers this run, where it is an adapter."""
        return self._served.get(run_id)

    @asynccontextmanager
    async def using(self, adapter: ServedAdapter | None) -> AsyncIterator[LoRARequest | None]:
        """Keep an adapter inside vLLM meanwhile."""
        if adapter is None:
            yield None
            return
        adapter.users += 1
        try:
            yield adapter.lora
        finally:
            adapter.users -= 1
            self._remove_unused(adapter)

    def _remove_unused(self, adapter: ServedAdapter) -> None:
        if adapter.retired and not adapter.users and not self._running.info.closed:
            self._running.spawn(self._remove(adapter), "vllm-remove-adapter")

    async def _remove(self, adapter: ServedAdapter) -> None:
        try:
            await self._running.llm.remove_lora(adapter.lora.lora_int_id)
        except EngineDeadError:
            self._running.core_ended()

    async def stage(self, config_json: str, tensors: Mapping[str, Tensor]) -> StagedAdapter:
        """Check an adapter against the model and lay it where the workers find it."""
        adapter = read_adapter(config_json, tensors, self._layout)
        if adapter.rank > self._max_rank:
            raise QuartetError(
                "INVALID_REQUEST",
                f"the adapter has rank {adapter.rank}, this engine was started for at most {self._max_rank}; "
                "raise vllm.max_lora_rank",
                field="adapter",
                value=adapter.rank,
                remedy="raise vllm.max_lora_rank",
            )
        return await asyncio.to_thread(self._staging.write_adapter, config_json, tensors, adapter.rank)

    async def swap(self, staged: StagedAdapter | None, weights: ServedWeights) -> None:
        """Serve a staged adapter, or the one held, under a name."""
        self._running.check_open()
        await self._running.to_the_end(self._swap(staged, weights), "vllm-adapter")

    async def _swap(self, staged: StagedAdapter | None, weights: ServedWeights) -> None:
        async with self._running.changing:
            self._running.check_open()
            held = self._served.get(weights.run_id)
            if staged is None:
                assert held is not None, "only what is served can be renamed"
                self._running.end_pinned(weights, held)
                held.weights = weights
                self._tell()
                return
            served = self._running.info.served
            if served is None or served.digest != self._digest:
                raise no_base(served)
            if held is None and len(self._served) >= self._max_count:
                raise no_place(self._max_count)
            number = next(self._lora_ids)
            # vLLM finds prefixes by the name.
            name = f"{weights.run_id}@{weights.version}-{number}"
            lora = LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(staged.path))
            await self._workers.add_adapter(lora)
            began = time.perf_counter()
            adapter = self._served[weights.run_id] = ServedAdapter(weights, lora, staged)
            if held is not None:
                self._running.end_pinned(weights, held)
                self._move(held, adapter)
            self._tell()
            self._running.updated(began)

    def _move(self, held: ServedAdapter, adapter: ServedAdapter) -> None:
        """What one version answered is answered by another from now on."""
        for flight in self._running.flights:
            if flight.adapter is held:
                flight.adapter, flight.again = adapter, True
                if flight.submission is not None:
                    flight.submission.move()
        held.retired = True
        self._remove_unused(held)

    async def drop(self, run_id: str, why: QuartetError) -> None:
        """Serve it no more."""
        async with self._running.changing:
            self._retire(run_id, why)

    def retire_all(self) -> None:
        """The weights that they were made for go."""
        for run_id in list(self._served):
            self._retire(run_id, adapter_gone(run_id))

    def _retire(self, run_id: str, why: QuartetError) -> None:
        adapter = self._served.pop(run_id, None)
        if adapter is None:
            return
        for flight in [flight for flight in self._running.flights if flight.adapter is adapter]:
            self._running.stop(flight, why)
        adapter.retired = True
        self._remove_unused(adapter)
        self._tell()

    def _tell(self) -> None:
        served = tuple(adapter.weights for adapter in self._served.values())
        self._running.info = replace(self._running.info, adapters=served)
