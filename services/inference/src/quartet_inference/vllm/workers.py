"""What the engine asks of the workers that hold the model: load, wipe, label, take adapters, tell experts.

1. A load that fails before it touches a model leaves the old weights serving; one that fails later, or whose
   end is unknown, ends the engine.
2. Loaded weights are labelled, or the engine ends: nothing is stamped with a version that did not sample it.
3. Keys are wiped only where non-finite logits were seen (`spoiled`): non-finite keys may lie in the cache.
4. An adapter that one worker refuses is in none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import structlog
from quartet.errors import QuartetError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

from quartet_inference.engine import Experts, ServedWeights, not_ready
from quartet_inference.vllm.flight import label_of
from quartet_inference.vllm.running import Running
from quartet_inference.vllm.staging import StagedFile

log = structlog.get_logger()


class Workers:
    """`label` and `load` are called while decoding is paused."""

    def __init__(self, running: Running) -> None:
        """The workers of a started engine."""
        self._running = running
        self._unsound = False  # the cache holds non-finite keys
        self._warm = False
        self._reloads = ""  # why versions are not loaded by copies alone

    async def prepare(self, staged: StagedFile) -> None:
        """Do before a pause what a load can do without one. Errors: NOT_READY."""
        if not self._warm:
            self._warm = True
            await self._running.of_core(self._in_workers("quartet_warm", str(staged.nbytes)))
        await self._running.of_core(self._fetch(staged))

    async def _fetch(self, staged: StagedFile) -> None:
        """Have the workers copy it to where they have room for it, while they decode."""
        has_more = True
        while has_more:
            cores = await self._in_workers("quartet_fetch", str(staged.path))
            answers = [one for core in cores for one in core]
            failed = [one["why"] for one in answers if not one["ok"]]
            if failed:
                log.warning("weights_not_fetched", why=failed[0])  # a load reads the file where it can
                return
            has_more = any(one["more"] for one in answers)

    async def label(self, weights: ServedWeights) -> None:
        """Say what the workers have loaded. Errors: INTERNAL; the engine has ended.

        Going on would stamp tokens with a version that did not sample them.
        """
        try:
            await self._wipe()
            await self._running.llm.update_weight_version(label_of(weights.stamp))
        except Exception as error:
            self._running.die(f"weights were loaded, and nothing after that: {error!r}")
            raise QuartetError("INTERNAL", "the weights could not be labelled") from error

    def spoiled(self) -> None:
        """Non-finite logits were seen: have the keys behind them wiped, once for all that saw them."""
        self._unsound = True
        self._running.spawn(self.heal(), "vllm-heal")

    async def heal(self) -> None:
        """Pause decoding, wipe what non-finite logits have left behind, and have what runs recomputed."""
        async with self._running.changing:
            if self._running.info.closed or not self._unsound:
                return
            core = self._running.llm.engine_core
            try:
                await core.pause_scheduler_async(mode="keep", clear_cache=True)
                await self._wipe()
                if not self._running.info.paused:
                    await core.resume_scheduler_async()
            except Exception as error:  # noqa: BLE001 - nobody awaits this task
                self._running.die(f"keys could not be wiped: {error!r}")

    async def _wipe(self) -> None:
        """Make non-finite keys finite, where there may be any. Errors: INTERNAL."""
        if not self._unsound:
            return
        failed = [one for core in await self._in_workers("quartet_wipe") for one in core if not one["ok"]]
        if failed:
            raise QuartetError("INTERNAL", f"a worker could not wipe its keys: {failed[0]['why']}")
        self._unsound = False

    async def add_adapter(self, lora: LoRARequest) -> None:
        """Take an adapter into every worker of every core. Errors: INVALID_REQUEST, NOT_READY, INTERNAL.

        Not by AsyncLLM.add_lora: where a worker refuses, that leaves the others' answers to the next call.
        """
        arguments = (lora.lora_name, str(lora.lora_int_id), lora.lora_path)
        try:
            answers = await self._in_workers("quartet_add_adapter", *arguments)
            failed = [one for core in answers for one in core if not one["ok"]]
            if not failed:
                return
            await self._running.llm.remove_lora(lora.lora_int_id)
        except EngineDeadError:
            self._running.core_ended()
            raise not_ready() from None
        except Exception as error:
            raise QuartetError(
                "INTERNAL", f"adapter {lora.lora_name} could not be loaded: {error!r}"
            ) from error
        raise QuartetError(
            "INVALID_REQUEST",
            f"adapter {lora.lora_name} refused by vLLM: {failed[0]['why']}",
            field="adapter",
            value=lora.lora_name,
            remedy="publish an adapter that vLLM can load, or merged weights",
        )

    async def experts(self, name: str, start: int, end: int) -> Experts | None:
        """What a worker has noted of a submission, from there on, at most to there; None where none has."""
        cores = await self._in_workers("quartet_experts", name, str(start), str(end))
        told = next((one for core in cores for one in core if "experts" in one), None)
        if told is None:
            log.error("no experts", answers=cores)
            return None
        return np.frombuffer(told["experts"], told["dtype"]).reshape(told["shape"])

    async def forget(self, names: Sequence[str]) -> None:
        """Let the workers forget what they have noted of submissions that are in vLLM no more."""
        await self._in_workers("quartet_forget", ",".join(names))

    async def _in_workers(self, method: str, *arguments: str) -> list[list[dict[str, Any]]]:
        calling = self._running.llm.engine_core.call_utility_all_async(
            "collective_rpc", method, None, arguments, None
        )
        answers: list[list[dict[str, Any]]] = await self._running.asked(calling)
        self._running.on_step()  # a version is fetched in many pieces
        return answers

    async def load(self, staged: StagedFile) -> None:
        """Load in every worker of every core. Errors: INTERNAL; the engine ends where a model was touched."""
        try:
            answers = await self._in_workers("quartet_load", str(staged.path))
        except EngineDeadError:
            raise
        except Exception as error:
            self._running.die(f"whether weights were changed is unknown: {error!r}")
            raise QuartetError("INTERNAL", "the weights could not be loaded") from error
        failed = [answer for core in answers for answer in core if not answer["ok"]]
        if not failed:
            self._tell_how(next((one["reloads"] for core in answers for one in core if one["reloads"]), ""))
            return
        loaded = len(failed) < sum(len(core) for core in answers)
        if loaded or any(answer["touched"] for answer in failed):
            self._running.die(f"weights were changed in part: {failed[0]['why']}")
        raise QuartetError("INTERNAL", f"the weights could not be loaded: {failed[0]['why']}")

    def _tell_how(self, reloads: str) -> None:
        """Say in the log, once for each reason, that updates take the longer road."""
        if reloads != self._reloads:
            self._reloads = reloads
            if reloads:
                log.info("weights_are_reloaded_layer_by_layer", why=reloads)
