"""The inference tier as one client: sessions spread over replicas, generations that outlive a replica.

    from quartet.replicas import Replicas
    from quartet.v1 import inference_service_pb2 as pb

    async with Replicas(["dns:///inference:50051"], security) as replicas:
        async for frame in replicas.generate(request, timeout_s=600):
            ...                                     # start, then deltas, then one finish for each completion
        generated = await replicas.complete(request, timeout_s=600)
        generated.completions[0].token_ids          # and logprobs, spans of policy versions, message

Made for any trainer and any harness, not only Quartet's: it needs the addresses of the replicas and nothing
else. docs/replicas.md says how it chooses, what it carries on, and what it raises.
"""

from quartet.replicas.answer import Completion, Generated
from quartet.replicas.client import Replicas, Settings

__all__ = ["Completion", "Generated", "Replicas", "Settings"]
