"""An Episode of Verifiers as a Rollout of the contract: a result or a typed failure, never both.

1. A reward exists only where every scorer answered with a finite number; anything else is a failure.
2. Only turns that Verifiers committed to a trace of the policy become samples; an answer that a hook replaced
   is not trained on, nor is a summary of the context that its harness did not go on from, nor what the
   environment masks. No policy is an agent that is not trainable, or whose model is another endpoint's.
3. Where an episode has several traces of the policy, each is a part with its own reward, whether it earned
   that alone or in comparison with the others; what the rollout says of rewards and metrics are means over
   the traces that have them. A reward without weight is a metric. Parts are in the order in which their
   agents first asked.
4. An episode with a trace that failed is a failure, unless its environment takes it as it is (`complete`):
   then the others are what it was, and one alone is a part all the same, by whose role it is compared.
5. A comparison that raises or does not end fails the rollout, as a scorer.
6. A trace that its environment put into the episode once more is one.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import xxhash
from quartet.v1 import rollout_pb2

from quartet_envhost import failures
from quartet_envhost.sampler import Turn, account
from quartet_envhost.samples import SampledTurn, learned, merge_turns
from quartet_envhost.v1.harness import CUT_SHORT
from quartet_envhost.v1.interception import POLICY_CONFIG
from quartet_envhost.v1.judgement import Judgement
from quartet_envhost.v1.policy import RolloutPolicy, wire_messages
from quartet_envhost.v1.raised import key_of

_TOOL_ERRORS = {"ToolsetError", "SandboxError"}
_HOST_ERRORS = {"InterceptionError", "TunnelError"}


def rollout_of(
    episode: Any,
    policy: RolloutPolicy,
    member: int,
    *,
    accepted: bool,
    total_seconds: float,
    with_messages: bool,
) -> rollout_pb2.Rollout:
    """The rollout that an episode was; `accepted` is what its environment says of it."""
    rollout = rollout_pb2.Rollout(member=member)
    accepted = accepted and _judgement(episode, policy) is Judgement.DONE
    # Not in the order in which they ended: equal seeds give equal rollouts.
    asked = {trace_id: at for at, trace_id in enumerate(policy.asked)}
    once = traces_of(episode)
    trainable = [trace for trace in once if _is_policy(trace.agent)]
    trainable.sort(key=lambda trace: asked.get(trace.id, len(asked)))
    traces = [trace for trace in trainable if trace.ok or not accepted]
    for trace in traces:
        samples, breaks = merge_turns(_committed(trace, policy.turns.get(trace.id, [])))
        rollout.samples.extend(samples)
        if len(trainable) > 1:
            told = {name: one.score for name, one in trace.rewards.items() if one is not None and one.weight}
            rollout.parts.add(agent=trace.agent.name, reward=trace.reward, samples=len(samples), rewards=told)
        rollout.prefix_breaks += breaks
        rollout.num_turns += trace.num_turns
        rollout.truncated |= trace.is_truncated or trace.stop_condition in CUT_SHORT
        if with_messages:
            rollout.messages.extend(wire_messages(trace.messages))
    if traces:
        rollout.stop_condition = traces[-1].stop_condition or "completed"
        _record_scores(rollout, traces)
    account(rollout, chain.from_iterable(policy.turns.values()))
    rollout.timing.total_ms = round(total_seconds * 1000)
    rollout.timing.model_ms = round(policy.model_seconds * 1000)
    rollout.timing.scoring_ms = round(1000 * sum(t.timing.scoring.duration for t in once))
    found = _failure(episode, traces, policy, accepted=accepted)
    if found is not None:
        rollout.failure.CopyFrom(found)
    return rollout


def traces_of(episode: Any) -> list[Any]:
    """Its traces, each once: of several of one id the first."""
    by_id: dict[str, Any] = {}
    for trace in episode.traces:
        by_id.setdefault(trace.id, trace)
    return list(by_id.values())


def _is_policy(agent: Any) -> bool:
    return bool(agent.trainable) and agent.config.client == POLICY_CONFIG


def _committed(trace: Any, turns: Sequence[Turn]) -> Iterable[SampledTurn]:
    """The turns that the trace holds, in its order: matched by the tokens down to each sampled node. What the
    environment masks of a node is not learned."""
    by_tokens: dict[bytes, list[Turn]] = {}
    for turn in turns:
        sampled = _with(xxhash.xxh3_128(), turn.prompt_ids + turn.token_ids)
        by_tokens.setdefault(sampled.digest(), []).append(turn)
    # Digests of the tokens from the root to each node, as these would be too many; a node comes after its
    # parent.
    paths: list[xxhash.xxh3_128] = []
    left = _left(trace.nodes)
    for number, node in enumerate(trace.nodes):
        above = paths[node.parent].copy() if node.parent is not None else xxhash.xxh3_128()
        paths.append(_with(above, node.token_ids))
        if node.sampled and number not in left:
            found = by_tokens.get(paths[-1].digest())
            if found:
                turn = found.pop(0)
                # Of the node's tokens the sampled ones are the last.
                yield learned(turn, node.mask[len(node.token_ids) - len(turn.token_ids) :])


def _with(digest: xxhash.xxh3_128, tokens: list[int]) -> xxhash.xxh3_128:
    digest.update(array("Q", tokens))
    return digest


def _left(nodes: Sequence[Any]) -> set[int]:
    """Ends that a harness which compacts its context did not go on from: no training samples of Verifiers."""
    gone_on = {link.node for node in nodes for link in node.semantic_parents if link.type == "compaction"}
    gone_on |= {node.parent for node in nodes}
    tried = (
        number
        for number, node in enumerate(nodes)
        if any(link.type == "compaction_attempt" for link in node.semantic_parents)
    )
    return {number for number in tried if number not in gone_on}


def _record_scores(rollout: rollout_pb2.Rollout, traces: Sequence[Any]) -> None:
    rewards: dict[str, list[float]] = {}
    metrics: dict[str, list[float]] = {}
    for trace in traces:
        for name, reward in trace.rewards.items():
            if reward is not None:
                (rewards if reward.weight else metrics).setdefault(name, []).append(reward.score)
        for name, value in trace.metrics.items():
            if value is not None:
                metrics.setdefault(name, []).append(value)
    rollout.reward = _mean([trace.reward for trace in traces])
    for into, found in ((rollout.rewards, rewards), (rollout.metrics, metrics)):
        into.update({name: _mean(values) for name, values in found.items()})


def _mean(values: Sequence[float]) -> float:
    # Added up as floats are: the exact sum of fmean does not take two infinities of either sign.
    return sum(values) / len(values)


def _judgement(episode: Any, policy: RolloutPolicy) -> Judgement:
    return policy.judgements.get(episode.id, Judgement.NOT_BEGUN)


def _failure(
    episode: Any, traces: Sequence[Any], policy: RolloutPolicy, *, accepted: bool
) -> rollout_pb2.RolloutFailure | None:
    if episode.is_timeout:
        return failures.failure(failures.TIMEOUT, _text(episode.errors[-1], policy), retryable=False)
    if _judgement(episode, policy) is Judgement.UNDER_WAY:
        return failures.failure(failures.SCORER, _text(episode.errors[-1], policy), retryable=False)
    if not accepted:
        return _of_errors(episode, policy)
    if not traces:
        return failures.failure(failures.ENVIRONMENT, "no agent of it is the policy", retryable=False)
    for trace in traces:
        if trace.stop_condition in ("scoring_timeout", "finalize_timeout", "setup_timeout"):
            return failures.failure(
                failures.TIMEOUT, f"the task's own {trace.stop_condition}", retryable=False
            )
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if missing:
            return failures.failure(failures.SCORER, f"no value from {', '.join(missing)}", retryable=False)
        wrong = [name for name, reward in trace.rewards.items() if not math.isfinite(reward.value)]
        measured = {name: value for name, value in trace.metrics.items() if value is not None}
        wrong += [name for name, value in measured.items() if not math.isfinite(value)]
        if not wrong and not math.isfinite(trace.reward):
            wrong = ["their sum"]
        if wrong:
            return failures.failure(
                failures.SCORER, f"not a finite number: {', '.join(wrong)}", retryable=False
            )
    return None


def _of_errors(episode: Any, policy: RolloutPolicy) -> rollout_pb2.RolloutFailure:
    """The failure behind an episode: the last error of the first trace that broke, else its own last one."""
    broken = next((trace for trace in episode.traces if not trace.ok and trace.errors), None)
    error = broken.errors[-1] if broken is not None else (episode.errors[-1] if episode.errors else None)
    if error is None:
        return failures.failure(failures.ENVIRONMENT, "the episode failed without an error", retryable=False)
    if error.type == "ProviderError":
        status = error.status_code or 502
        retryable = status >= 500 or status == 429
        refusal = policy.refusals.get(error.message)  # no judge's, which another endpoint refused
        if refusal is not None:
            return failures.of_policy(refusal, _text(error, policy), retryable=retryable)
        return failures.failure(failures.MODEL, _text(error, policy), retryable=retryable)
    if error.type in _TOOL_ERRORS:
        return failures.failure(failures.TOOL, _text(error, policy), retryable=True)
    if error.type in _HOST_ERRORS:
        return failures.failure(failures.HOST, _text(error, policy), retryable=True)
    scoring = broken is not None and broken.timing.scoring.start > 0
    kind = failures.SCORER if scoring else failures.ENVIRONMENT
    return failures.failure(kind, _text(error, policy), retryable=False)


def _text(error: Any, policy: RolloutPolicy) -> str:
    return policy.told.get(key_of(error), f"{error.type}: {error.message}")
