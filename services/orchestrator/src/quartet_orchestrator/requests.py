"""What a run asks of an environment host, from its configuration. Pure."""

from __future__ import annotations

import json

import xxhash
from quartet.run import sampling as run_sampling
from quartet.run.hosted import HostedConfig
from quartet.run.sampling import EvalSamplingConfig, SamplingConfig
from quartet.template_settings import written
from quartet.v1 import common_pb2 as cpb
from quartet.v1 import envhost_service_pb2 as epb


def environment_ref(env: HostedConfig) -> epb.EnvironmentRef:
    """The environment as its host knows it; equal id and args give equal references."""
    # Sorted, because equal references share their workers.
    return epb.EnvironmentRef(id=env.id, args_json=json.dumps(env.args, sort_keys=True) if env.args else "")


def sampling_params(config: SamplingConfig | EvalSamplingConfig, name: str) -> cpb.SamplingParams:
    """`name` makes the seed of each group its own: a task that comes again in a later epoch is sampled
    afresh."""
    seed = None
    if config.seed is not None:
        seed = xxhash.xxh3_64_intdigest(f"{config.seed}/{name}".encode()) >> 1
    return run_sampling.sampling_params(config, seed)


def rollouts_request(
    run_id: str,
    sampling: SamplingConfig | EvalSamplingConfig,
    name: str,
    env: HostedConfig,
    split: epb.Split,
    task_index: int,
    messages_of_members: int = 1,
) -> epb.RunRolloutsRequest:
    """Everything but the members and the policy version.

    Conversations are for people: those of the first members of a group are enough to read along.
    """
    return epb.RunRolloutsRequest(
        run_id=run_id,
        request_id=f"{run_id}/{name}",
        environment=environment_ref(env),
        split=split,
        task_index=task_index,
        sampling=sampling_params(sampling, name),
        template_settings=written(sampling.template_settings or {}),
        timeout_ms=round(env.timeout_seconds * 1000),
        messages_of_members=messages_of_members,
        max_retries=env.max_retries,
    )
