"""What a trained token may cost between host and orchestrator: 9 bytes, of the demo's short sequences, too.

`benchmarks/wire.py` counts every byte of the job itself; this is a group of it as its host frames it, so that
a field more for each rollout is seen at once.
"""

from __future__ import annotations

from quartet.sampled_by import Told
from quartet.v1.common_pb2 import Message, Usage
from quartet.v1.rollout_pb2 import PolicySpan, PolicyWeights, Rollout, RolloutTiming, Sample

MAX_BYTES_PER_TOKEN = 9.0
#: What gRPC and HTTP/2 put before each message, and its share of a group's request, headers and
#: acknowledgements, as the benchmark counted them.
FRAMING_BYTES, SHARED_BYTES = 14, 25
#: The mean of the job, and how many of it are sampled.
TOKENS, SAMPLED = 29, 9
GROUP = 8


def a_rollout(member: int) -> Rollout:
    prompt = TOKENS - SAMPLED
    sample = Sample(
        # Two of five are letters, of one byte, as in the job.
        token_ids=[64 + at if at % 5 < 2 else 257 + at for at in range(TOKENS)],
        spans=[PolicySpan(start=prompt, length=SAMPLED, policy_version=7)],
        logprobs=[-0.25] * SAMPLED,
    )
    rollout = Rollout(
        member=member,
        samples=[sample],
        reward=0.25,
        rewards={"lcs_reward": 0.25},
        metrics={"exact_match": 0.0},
        stop_condition="agent_completed",
        num_turns=1,
        usage=Usage(prompt_tokens=prompt, completion_tokens=SAMPLED),
        timing=RolloutTiming(total_ms=904, model_ms=858, scoring_ms=3),
        replicas=["127.0.0.1:20170"],
        weights=[PolicyWeights(policy_version=7, weights_id=1 << 63)],
    )
    if member == 0:  # of which alone the orchestrator asks for the conversation
        said = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
        rollout.messages.extend(
            [
                Message(role="system", content=said),
                Message(role="user", content="hrailmg"),
                Message(role="assistant", content="<reversed_text>gmliarh</reversed_text>"),
            ]
        )
        rollout.task_json = '{"answer":"gmliarh"}'
    return rollout


def test_a_group_of_the_demo_stays_below_nine_bytes_for_each_token() -> None:
    told = Told()
    frames = [told.frame(a_rollout(member)) for member in range(GROUP)]
    frames[0].environment_digest = "448feddd1d19"
    size = sum(frame.ByteSize() + FRAMING_BYTES + SHARED_BYTES for frame in frames)
    assert size / (GROUP * TOKENS) <= MAX_BYTES_PER_TOKEN
    # What is told once is what makes the difference: in each rollout it would be too much.
    apart = sum(a_rollout(member).ByteSize() + FRAMING_BYTES + SHARED_BYTES for member in range(GROUP))
    assert apart / (GROUP * TOKENS) > MAX_BYTES_PER_TOKEN
