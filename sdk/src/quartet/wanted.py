"""Which weights a request for tokens, or for rollouts, waits for."""

from __future__ import annotations

from quartet.errors import refused
from quartet.run.name import RULE, is_run_id
from quartet.v1.envhost_service_pb2 import RunRolloutsRequest
from quartet.v1.inference_service_pb2 import GenerateRequest

#: A run, the least version, and the only one.
Wanted = tuple[str, int | None, int | None]


def wanted(request: GenerateRequest | RunRolloutsRequest) -> Wanted:
    """The weights that a request names."""
    least = request.min_policy_version if request.HasField("min_policy_version") else None
    only = request.exact_policy_version if request.HasField("exact_policy_version") else None
    return request.run_id, least, only


def check_wanted(request: GenerateRequest | RunRolloutsRequest) -> None:
    """Refuse to wait for weights that no service can ever have. Errors: INVALID_REQUEST."""
    run_id, least, only = wanted(request)
    if run_id and not is_run_id(run_id):
        raise refused("run_id", run_id, RULE)
    if least is not None and only is not None and least > only:
        remedy = f"give at most exact_policy_version, which is {only}, or leave one of them out"
        raise refused("min_policy_version", least, remedy)
