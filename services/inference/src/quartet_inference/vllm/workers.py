"""What the engine asks of the workers that hold the model: load, wipe, label; warm before the first load.

1. A load that fails before it touches a model leaves the old weights serving; one that fails later, or whose
   end is unknown, ends the engine.
2. Loaded weights are labelled, or the engine ends: nothing is stamped with a version that did not sample it.
3. Keys are wiped only where `unsound` says that non-finite ones may lie in the cache.
"""

from __future__ import annotations

from typing import Any

from quartet.errors import QuartetError
from vllm.v1.engine.exceptions import EngineDeadError

from quartet_inference.engine import ServedWeights, not_ready
from quartet_inference.vllm.running import Running
from quartet_inference.vllm.staging import StagedFile


class Workers:
    """Call it while decoding is paused, but for `warm`."""

    def __init__(self, running: Running) -> None:
        """The workers of a started engine."""
        self._running = running
        self.unsound = False  # the cache holds non-finite keys
        self._warm = False

    async def warm(self, nbytes: int) -> None:
        """Once: have the memory that a load takes touched before a pause waits for it. Errors: NOT_READY."""
        if self._warm:
            return
        self._warm = True
        try:
            await self._in_workers("quartet_warm", str(nbytes))
        except EngineDeadError:
            self._running.die("vLLM's core has ended")
            raise not_ready() from None

    async def label(self, weights: ServedWeights) -> None:
        """Say what the workers have loaded. Errors: INTERNAL; the engine has ended.

        Going on would stamp tokens with a version that did not sample them.
        """
        try:
            await self.wipe()
            await self._running.llm.update_weight_version(str(weights.version))
        except Exception as error:
            self._running.die(f"weights were loaded, and nothing after that: {error!r}")
            raise QuartetError("INTERNAL", "the weights could not be labelled") from error

    async def wipe(self) -> None:
        """Make non-finite keys finite, where there may be any. Errors: INTERNAL."""
        if not self.unsound:
            return
        failed = [one for core in await self._in_workers("quartet_wipe") for one in core if not one["ok"]]
        if failed:
            raise QuartetError("INTERNAL", f"a worker could not wipe its keys: {failed[0]['why']}")
        self.unsound = False

    async def _in_workers(self, method: str, *arguments: str) -> list[list[dict[str, Any]]]:
        answers: list[list[dict[str, Any]]] = await self._running.llm.engine_core.call_utility_all_async(
            "collective_rpc", method, None, arguments, None
        )
        return answers

    async def load(self, staged: StagedFile) -> None:
        """Load in every worker of every core. Errors: INTERNAL; the engine ends where a model was touched."""
        try:
            answers = await self._in_workers("quartet_load", str(staged.path))
        except Exception as error:
            self._running.die(f"whether weights were changed is unknown: {error!r}")
            raise QuartetError("INTERNAL", "the weights could not be loaded") from error
        failed = [answer for core in answers for answer in core if not answer["ok"]]
        if not failed:
            return
        loaded = len(failed) < sum(len(core) for core in answers)
        if loaded or any(answer["touched"] for answer in failed):
            self._running.die(f"weights were changed in part: {failed[0]['why']}")
        raise QuartetError("INTERNAL", f"the weights could not be loaded: {failed[0]['why']}")
