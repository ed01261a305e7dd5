"""What a run asks of an environment host, from its configuration. Pure."""

from __future__ import annotations

import json

from quartet.run.config import EnvConfig, RunConfig, SamplingConfig
from quartet.v1 import common_pb2 as cpb
from quartet.v1 import envhost_service_pb2 as epb

# Conversations are for people: the first member's of each group is enough to read along.
MESSAGES_OF_MEMBERS = 1


def environment_ref(env: EnvConfig) -> epb.EnvironmentRef:
    # Sorted, because equal references share their workers.
    return epb.EnvironmentRef(id=env.id, args_json=json.dumps(env.args, sort_keys=True) if env.args else "")


def sampling_params(config: SamplingConfig, temperature: float | None = None) -> cpb.SamplingParams:
    return cpb.SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature if temperature is None else temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        stop=config.stop,
        seed=config.seed,
    )


def rollouts_request(
    run_id: str, config: RunConfig, name: str, env: EnvConfig, split: epb.Split, task_index: int
) -> epb.RunRolloutsRequest:
    """Everything but the members and the policy version."""
    return epb.RunRolloutsRequest(
        run_id=run_id,
        request_id=f"{run_id}/{name}",
        environment=environment_ref(env),
        split=split,
        task_index=task_index,
        sampling=sampling_params(config.sampling),
        timeout_ms=round(env.timeout_seconds * 1000),
        messages_of_members=MESSAGES_OF_MEMBERS,
        max_retries=env.max_retries,
    )
