"""samples.py 1-4, and as_told.py."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quartet.replicas import Completion, Generated
from quartet.v1 import envhost_service_pb2, rollout_pb2
from quartet.v1.common_pb2 import SamplingParams
from quartet.v1.envhost_service_pb2 import (
    EnvironmentRef,
    ModelAnswer,
    ModelQuestion,
    RunRolloutsRequest,
)
from quartet.v1.inference_service_pb2 import GenerateRequest
from quartet_envhost import failures, sampler
from quartet_envhost.as_told import MAX_NAME, described, name_of, told
from quartet_envhost.classic.scoring import watch
from quartet_envhost.frames import MAX_MESSAGE_BYTES
from quartet_envhost.samples import learned, merge_turns
from structlog.testing import capture_logs


@dataclass
class Turn:
    prompt_ids: list[int]
    token_ids: list[int]
    spans: list[tuple[int, int, int]]
    logprobs: list[float] = field(default_factory=list)
    experts: rollout_pb2.RoutedExperts | None = None

    def __post_init__(self) -> None:
        self.logprobs = [float(token) for token in self.token_ids]


def turn(prompt: list[int], tokens: list[int], version: int = 1) -> Turn:
    return Turn(prompt, tokens, [(0, len(tokens), version)] if tokens else [])


def covered(sample: rollout_pb2.Sample) -> list[int]:
    return [sample.token_ids[s.start + i] for s in sample.spans for i in range(s.length)]


def test_later_turn_extends_the_sample_and_keeps_each_version() -> None:
    samples, breaks = merge_turns([turn([1, 2], [3, 4], 7), turn([1, 2, 3, 4, 5], [6], 8)])
    assert breaks == 0 and len(samples) == 1
    assert list(samples[0].token_ids) == [1, 2, 3, 4, 5, 6]
    assert [(s.start, s.length, s.policy_version) for s in samples[0].spans] == [(2, 2, 7), (5, 1, 8)]
    assert list(samples[0].logprobs) == [3.0, 4.0, 6.0]


def test_changed_prefix_breaks() -> None:
    samples, breaks = merge_turns([turn([1, 2], [3, 4]), turn([1, 2, 9, 5], [6])])
    assert breaks == 1 and [covered(s) for s in samples] == [[3, 4], [6]]


def test_breaks_in_every_turn_cost_no_copies_of_all_earlier_samples() -> None:
    copied = 0

    class Counted(list[int]):
        def __getitem__(self, at: Any) -> Any:
            nonlocal copied
            found = super().__getitem__(at)
            copied += len(found) if isinstance(at, slice) else 0
            return found

    thoughts = [[10_000 + number, 9_999] for number in range(40)]
    turns = [turn(Counted(range(100 + 100 * number)), said) for number, said in enumerate(thoughts)]
    samples, breaks = merge_turns(turns)
    assert breaks == 39 and [covered(one) for one in samples] == thoughts
    assert copied <= 40 * 40, "of some 2,000 tokens each"


def test_fork_trains_shared_tokens_once() -> None:
    root = turn([1], [2])
    samples, breaks = merge_turns([root, turn([1, 2, 3], [4]), turn([1, 2, 5], [6])])
    assert breaks == 1 and [covered(s) for s in samples] == [[2, 4], [6]]
    assert list(samples[1].token_ids) == [1, 2, 5, 6]


def test_a_later_turn_shares_the_tokens_that_it_goes_on_from() -> None:
    """A number of its own is 32 bytes, and each turn of a long conversation has all of those before it."""

    def answered(prompt: list[int], tokens: list[int], before: sampler.Turn | None = None) -> sampler.Turn:
        prompt, tokens = ([int(str(token)) for token in given] for given in (prompt, tokens))
        return sampler.Turn.of(Generated(prompt, True, [Completion(token_ids=tokens)]), before)

    first = answered([1001, 1002], [1003])
    later = answered([1001, 1002, 1003, 1004], [1005], first)
    assert (later.prompt_ids, later.token_ids) == ([1001, 1002, 1003, 1004], [1005])
    whole = first.prompt_ids + first.token_ids
    assert all(one is other for one, other in zip(whole, later.prompt_ids[:3], strict=True))
    assert answered([1001, 1009, 1003, 1004], [1005], first).prompt_ids == [1001, 1009, 1003, 1004]


async def test_a_turn_of_a_client_holds_none_of_its_answer() -> None:
    """sampler.py 4"""
    asked = asyncio.Queue[bytes]()
    client = sampler.ClientSampler(0, asked.put_nowait)
    turn = asyncio.create_task(client.complete(GenerateRequest(), lambda: [], 60))
    question = ModelQuestion.FromString(await asked.get())
    answer = ModelAnswer(call_id=question.call_id, prompt_token_ids=[1], token_ids=[2], logprobs=[-1.0])
    answer.message.content = "so"
    client.take(answer)
    (completion,) = (await turn).completions
    answer.message.content = "another"
    assert (completion.message.role, completion.message.content) == ("assistant", "so")


def test_a_temperature_of_the_request_holds_for_what_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """sampler.py 5: it is said once."""
    monkeypatch.setattr(sampler, "_gave_way", itertools.count())
    own, environment = {"temperature": 0.5, "top_k": 4}, EnvironmentRef(id="x")
    wanted = RunRolloutsRequest(environment=environment, sampling=SamplingParams(temperature=2.0))
    with capture_logs() as lines:
        for values in (own, own, {}):
            assert sampler.sampling_of(values, wanted).temperature == 2.0
    (line,) = lines
    assert (line["env_id"], line["own"], line["wanted"]) == ("x", 0.5, 2.0)
    for learned_from, said in ((True, RunRolloutsRequest()), (False, wanted)):
        found = sampler.sampling_of(own, said, learned=learned_from)
        assert (found.temperature, found.top_k) == (0.5, 4)


def test_of_parts_that_name_a_function_alike_the_least_weight_is_told() -> None:
    """classic/scoring.py: so that a penalty in one of them is known."""

    def short() -> float:
        return 1.0

    def part(weight: float, funcs: list[Any]) -> Any:
        none = dict.fromkeys(("_call_individual_reward_func", "_call_group_reward_func"))
        rubric = SimpleNamespace(funcs=funcs, weights=[weight], _is_group_func=lambda _: False, **none)
        return SimpleNamespace(rubric=rubric)

    def least(weights: Sequence[float], *, shared: bool) -> dict[str, float]:
        funcs: list[Any] = [short]
        parts = [part(weight, funcs if shared else [short]) for weight in weights]
        own: Any = None
        return watch(SimpleNamespace(rubric=parts[0].rubric, envs=parts), own)

    for weights in ((1.0, -0.5, 2.0), (-0.5, 1.0)):
        assert least(weights, shared=False) == least(weights, shared=True) == {"short": -0.5}
    assert least((1.0, 0.0, -0.5), shared=True) == least((0.0, -0.5, 1.0), shared=True) == {"short": -0.5}


def test_what_is_masked_is_carried_uncovered() -> None:
    """2."""
    first = Turn([1], [2, 3, 4, 5], [(0, 2, 7), (2, 2, 8)])
    (sample,), _ = merge_turns([learned(first, [1, 0, 0, 1]), turn([1, 2, 3, 4, 5, 6], [9], 8)])
    assert list(sample.token_ids) == [1, 2, 3, 4, 5, 6, 9] and covered(sample) == [2, 5, 9]
    assert [(s.start, s.length, s.policy_version) for s in sample.spans] == [(1, 1, 7), (4, 1, 8), (6, 1, 8)]
    assert list(sample.logprobs) == [2.0, 5.0, 9.0]
    assert learned(first, []) is learned(first, [True, True]) is first, "behind the mask all is learned"
    samples, breaks = merge_turns([learned(first, [0] * 4), turn([1, 2, 3, 4, 5], [6])])
    assert breaks == 0 and [covered(sample) for sample in samples] == [[6]]


def test_adjacent_spans_of_one_version_are_one() -> None:
    (sample,), _ = merge_turns([Turn([1], [2, 3, 4], [(0, 2, 5), (2, 1, 5)])])
    assert [(s.start, s.length) for s in sample.spans] == [(1, 3)]


def routed(turn: Turn, start: int) -> Turn:
    """The turn, telling experts from a position on: each token went to the two that its number says."""
    tokens = [*turn.prompt_ids, *turn.token_ids][start:-1]
    numbers = bytes(number for token in tokens for number in (token, token + 1))
    turn.experts = rollout_pb2.RoutedExperts(start=start, layers=1, slots=2, width=1, numbers=numbers)
    return turn


def experts_of(sample: rollout_pb2.Sample) -> list[int] | None:
    return list(sample.experts.numbers[::2]) if sample.HasField("experts") else None


def test_experts_of_turns_are_those_of_the_whole_sample() -> None:
    """Guarantee 4: a later turn tells them from the last token of the one before on."""
    turns = [routed(turn([1, 2], [3, 4]), 0), routed(turn([1, 2, 3, 4, 5], [6]), 3)]
    (sample,), _ = merge_turns(turns)
    assert experts_of(sample) == [1, 2, 3, 4, 5] and sample.experts.start == 0
    # The prompt was computed anew, whole: what was told last stands.
    (sample,), _ = merge_turns([turns[0], routed(turns[1], 0)])
    assert experts_of(sample) == [1, 2, 3, 4, 5]


def test_what_forks_shares_the_experts_of_what_it_shares() -> None:
    root = routed(turn([1, 2], [3]), 0)
    left, right = routed(turn([1, 2, 3, 4], [5]), 2), routed(turn([1, 2, 3, 6], [7]), 2)
    samples, _ = merge_turns([root, left, right])
    assert [experts_of(sample) for sample in samples] == [[1, 2, 3, 4], [1, 2, 3, 6]]


def test_experts_are_told_as_far_as_they_are_known_without_a_gap() -> None:
    """Guarantee 4."""
    known, silent = routed(turn([1, 2], [3, 4]), 0), turn([1, 2], [3, 4])
    late, nothing = routed(turn([1, 2, 3, 4, 5], [6]), 4), turn([1, 2, 3, 4, 5], [6])
    told = [
        ([silent, late], None),
        ([known, late], [1, 2, 3]),
        ([known, nothing], [1, 2, 3]),
        ([routed(turn([1, 2], [3]), 1)], None),
    ]
    for turns, expected in told:
        (sample,), _ = merge_turns(turns)
        assert experts_of(sample) == expected


def test_nothing_sampled_gives_no_sample() -> None:
    assert merge_turns([turn([1], [])]) == ([], 0)
    assert merge_turns([]) == ([], 0)


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 4)), max_size=6)
)
def test_every_sampled_token_is_covered_exactly_once(plan: list[tuple[bool, list[int], int]]) -> None:
    turns: list[Turn] = []
    for extends, tail, sampled in plan:
        before = turns[-1].prompt_ids + turns[-1].token_ids if extends and turns else []
        turns.append(turn([*before, 100, *tail], list(range(10, 10 + sampled)), version=len(turns)))
    samples, breaks = merge_turns(turns)
    want = sorted((t.spans[0][2], token) for t in turns for token in t.token_ids)
    got = []
    for sample in samples:
        at = 0
        for span in sample.spans:
            assert span.start >= at, "ascending and disjoint"
            at = span.start + span.length
            got += [(span.policy_version, sample.token_ids[i]) for i in range(span.start, at)]
        assert list(sample.logprobs) == [float(token) for token in covered(sample)]
    assert sorted(got) == want
    assert breaks <= sum(not extends for extends, _, _ in plan)


def test_rollout_over_the_message_limit_loses_messages_then_experts_then_fails() -> None:
    rollout = rollout_pb2.Rollout(member=3, reward=1.0)
    rollout.messages.add(role="user", content="x" * MAX_MESSAGE_BYTES)
    rollout.task_json = '{"answer":"x"}'
    small = told(rollout)
    assert (
        not small.messages and not small.task_json and small.reward == 1.0 and not small.HasField("failure")
    )
    rollout.samples.add(logprobs=[0.0])
    for size in (MAX_MESSAGE_BYTES // 2, MAX_MESSAGE_BYTES // 2 + 1):
        experts = rollout_pb2.RoutedExperts(layers=4, slots=8, width=1, numbers=bytes(size // 32 * 32))
        rollout.samples.add(experts=experts)
    small = told(rollout)
    first, half, cut = (len(sample.experts.numbers) for sample in small.samples)
    assert first == 0 and {half, cut} != {half} and max(half, cut) == MAX_MESSAGE_BYTES // 2
    assert min(half, cut) % 32 == 0 and MAX_MESSAGE_BYTES - 200 < small.ByteSize() <= MAX_MESSAGE_BYTES
    assert not small.HasField("failure")
    rollout.samples.add(logprobs=[0.0] * (MAX_MESSAGE_BYTES // 4 + 1))
    failed = told(rollout)
    assert failed.failure.kind == failures.HOST and failed.member == 3 and not failed.samples
    assert not failed.failure.retryable


def test_names_of_an_environment_are_names_that_a_line_has_room_for() -> None:
    """as_told.py 1"""
    kept = ["judge/clarity", "format reward", "Höflichkeit", "a" * MAX_NAME, "~", "a:b=c"]
    odd = ["", " ", "is it\npolite?", "is it\tpolite?", "is it\n\npolite?", "\x1b[2J", "a\u2028b", "b" * 999]
    odd.append("b" * 998)
    names = [*kept, *odd]
    rollout = rollout_pb2.Rollout(member=1, reward=3.0)
    agents = rollout.parts.add(agent="judge\n2", reward=1.0, rewards={"is it\npolite?": 1.0})
    for at, name in enumerate(names):
        rollout.rewards[name] = rollout.metrics[name] = at
    told(rollout)
    assert [rollout.rewards[name] for name in kept] == [*range(len(kept))]
    assert dict(rollout.rewards) == dict(rollout.metrics) and rollout.reward == 3.0
    assert sorted(rollout.rewards.values()) == [*range(len(names))], "none stands for two"
    assert all(name.strip() and name.isprintable() and len(name) <= MAX_NAME for name in rollout.rewards)
    assert name_of("is it\npolite?").startswith("is it polite?~") and agents.agent.startswith("judge 2~")
    assert list(agents.rewards) == [name_of("is it\npolite?")] and name_of(name_of("")) == name_of("")
    info = envhost_service_pb2.EnvironmentInfo(
        rewards=names, metrics=names, weights=dict.fromkeys(names, -1.0)
    )
    assert set(described(info).rewards) == set(info.metrics) == set(rollout.rewards), "by the same names"
    assert set(info.weights) == set(info.rewards)
