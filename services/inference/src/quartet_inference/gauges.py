"""A replica, for Prometheus: what GetModel says, and what the prefix cache saves.

1. It is read on the event loop, as GetModel is: an engine may only be asked there. A loop that does not
   answer within LOOP_SECONDS has nothing to tell, and its series are absent from that scrape.
2. A run is a label while it is served: that of the model, and those of at most adapters.max_count adapters.
   Reasons are texts, so that only whether there is one is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from quartet.v1 import inference_service_pb2 as pb

#: Prometheus gives a scrape ten seconds by default.
LOOP_SECONDS = 5.0


class ReplicaGauges(Collector):
    """Asks the replica when somebody scrapes."""

    def __init__(
        self,
        model: Callable[[], pb.GetModelResponse],
        prompt_tokens: Callable[[], tuple[int, int]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Both are called on the loop; `prompt_tokens` says how many there were, and of them in the cache."""
        self._model, self._prompt_tokens, self._loop = model, prompt_tokens, loop

    def describe(self) -> Iterable[Metric]:
        """The families of a replica that serves nothing: to register them asks nobody."""
        return _families(pb.GetModelResponse(), (0, 0))

    def collect(self) -> Iterable[Metric]:
        """The families; none where the loop does not answer."""

        async def ask() -> tuple[pb.GetModelResponse, tuple[int, int]]:
            return self._model(), self._prompt_tokens()

        asked = asyncio.run_coroutine_threadsafe(ask(), self._loop)
        try:
            return _families(*asked.result(LOOP_SECONDS))
        except TimeoutError:
            asked.cancel()
            return []


def _families(model: pb.GetModelResponse, prompt_tokens: tuple[int, int]) -> list[Metric]:
    engine = GaugeMetricFamily(
        "quartet_inference_engine_info", "1, with what the replica computes by.", labels=["engine", "dtype"]
    )
    if model.engine:
        engine.add_metric([model.engine, model.dtype], 1)
    return [
        engine,
        CounterMetricFamily(
            "quartet_inference_tokens_sampled", "Tokens sampled since the start.", model.tokens_sampled
        ),
        CounterMetricFamily(
            "quartet_inference_prompt_tokens",
            "In the prompts of completions that ended, once for each completion.",
            prompt_tokens[0],
        ),
        CounterMetricFamily(
            "quartet_inference_cached_tokens",
            "Of the prompt tokens: those that were not computed again.",
            prompt_tokens[1],
        ),
        GaugeMetricFamily("quartet_inference_running", "Sequences that are being decoded.", model.running),
        GaugeMetricFamily("quartet_inference_waiting", "Sequences that wait for a place.", model.waiting),
        GaugeMetricFamily(
            "quartet_inference_max_num_seqs", "Sequences that may be decoded at once.", model.max_num_seqs
        ),
        GaugeMetricFamily(
            "quartet_inference_max_model_len_tokens",
            "The longest prompt with its completion.",
            model.max_model_len,
        ),
        _served(model),
        GaugeMetricFamily("quartet_inference_adapters", "Adapters that are served.", len(model.adapters)),
        CounterMetricFamily(
            "quartet_inference_updates", "Versions swapped in since the start.", model.updates_applied
        ),
        GaugeMetricFamily(
            "quartet_inference_last_update_pause_seconds",
            "How long decoding stood still for the last of them.",
            model.last_update_pause_ms / 1000,
        ),
        GaugeMetricFamily("quartet_inference_paused", "1 while Pause holds decoding.", model.paused),
        GaugeMetricFamily(
            "quartet_inference_out_of_service",
            "1 while it answers nothing, because its weights are not those of their version.",
            bool(model.out_of_service),
        ),
        GaugeMetricFamily(
            "quartet_inference_update_refused",
            "1 while the newest version is not served, or the trainer that is followed does not answer.",
            bool(model.update_refused),
        ),
    ]


def _served(model: pb.GetModelResponse) -> GaugeMetricFamily:
    """One series of the model, none while it has no verified weights, and one of each adapter."""
    served = GaugeMetricFamily(
        "quartet_inference_policy_version",
        "The version served, by run; of no run: the folder's own model.",
        labels=["run", "weights"],
    )
    if model.HasField("policy_version"):
        served.add_metric([model.run_id, "model"], model.policy_version)
    for adapter in model.adapters:
        served.add_metric([adapter.run_id, "adapter"], adapter.policy_version)
    return served
