"""The sampler's distribution, seeds and log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from quartet.errors import QuartetError
from quartet.inference import MAX_STOP_CHARS, MAX_STOPS, MAX_TEMPERATURE
from quartet.v1.common_pb2 import SamplingParams
from quartet.v1.inference_service_pb2 import GenerateRequest
from quartet_inference.embedded.sequence import RunningSequence
from quartet_inference.engine import Reason, Request, Sampling, ServedWeights, Span, Stamp
from quartet_inference.sampler import Sampler, uniforms
from quartet_inference.sampling import MAX_STOP_TOKENS, experts_from, resolve


def row(
    seed: int = 0, prompt: tuple[int, ...] = (0,), out: tuple[int, ...] = (), top: int = 0, **sampling: Any
) -> RunningSequence:
    request = Request(prompt, Sampling(100, **sampling), top=top)
    sequence = RunningSequence(request, 0, seed, frozenset(), None, None, None, torch.device("cpu"))
    for token in out:
        sequence.accept(token, 0.0, Stamp(0))
    return sequence


def frequencies(
    logits: torch.Tensor, draws: int = 20_000, **sampling: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    sampler = Sampler([row(seed, **sampling) for seed in range(draws)])
    tokens, logprobs, _ = sampler.draw(logits.expand(draws, -1).contiguous())
    return torch.bincount(tokens, minlength=len(logits)) / draws, logprobs


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, float("-inf")])


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_follow_the_distribution(temperature: float) -> None:
    seen, _ = frequencies(LOGITS, temperature=temperature)
    expected = torch.softmax(LOGITS / temperature, -1)
    deviation = (seen - expected).abs() / (expected * (1 - expected) / 20_000).sqrt().clamp(min=1e-9)
    assert deviation[:6].max() < 4.5
    assert seen[6] == 0


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_k": 2}, 2),
        ({"top_p": 0.6}, 2),  # 0.57 alone does not reach 0.6
        ({"top_p": 0.5}, 1),
        ({"min_p": 0.2}, 3),  # exp(-1), exp(-1.5) are above 0.2, exp(-2) is not
        ({"top_k": 3, "top_p": 0.99}, 3),
        ({"top_k": 2, "top_p": 0.7}, 1),  # after top-k the best has 0.73 of the mass
        ({"top_p": 1e-6}, 1),
    ],
)
def test_truncation_keeps_what_it_should_and_logprobs_are_from_before(
    sampling: dict[str, Any], kept: int
) -> None:
    seen, logprobs = frequencies(LOGITS, draws=4000, **sampling)
    assert torch.nonzero(seen)[:, 0].tolist() == list(range(kept))
    full = torch.log_softmax(LOGITS, -1)
    assert set(logprobs.tolist()) <= set(full.tolist())


def test_penalties_as_vllm_has_them() -> None:
    logits = torch.tensor([[1.0, -1.0, 2.0, 0.5, 0.0]] * 4)
    rows = [
        row(prompt=(0, 1), out=(2, 2), repetition_penalty=2.0, temperature=0.0),
        row(prompt=(0, 1), out=(2, 2), presence_penalty=0.5, temperature=0.0),
        row(prompt=(0, 1), out=(2, 2), frequency_penalty=0.5, temperature=0.0),
        row(prompt=(0, 1), out=(2, 2), temperature=0.0),
    ]
    expected = torch.tensor(
        [
            [0.5, -2.0, 1.0, 0.5, 0.0],
            [1.0, -1.0, 1.5, 0.5, 0.0],
            [1.0, -1.0, 1.0, 0.5, 0.0],
            [1.0, -1.0, 2.0, 0.5, 0.0],
        ]
    )
    _, logprobs, _ = Sampler(rows).draw(logits)
    torch.testing.assert_close(logprobs, torch.log_softmax(expected, -1).amax(-1))
    rows[2].accept(2, 0.0, Stamp(0))  # counts follow the tokens
    expected[2, 2] = 0.5
    tokens, logprobs, _ = Sampler(rows).draw(logits)
    torch.testing.assert_close(logprobs, torch.log_softmax(expected, -1).amax(-1))
    assert tokens.tolist()[2] == 0


def test_rows_do_not_influence_each_other() -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 300)
    kinds: list[dict[str, Any]] = [
        {},
        {"top_k": 5},
        {"temperature": 0.0},
        {"presence_penalty": 1.0},
        {"top_p": 0.5},
    ]
    rows = [row(seed, out=(1, 2), **kinds[seed % 5]) for seed in range(64)]
    together = Sampler(rows).draw(logits)
    for i in range(64):
        token, logprob, _ = Sampler([rows[i]]).draw(logits[i : i + 1])
        assert token[0] == together[0][i]
        torch.testing.assert_close(logprob[0], together[1][i])


def test_rows_that_ask_get_the_likeliest_of_the_distribution_before_truncation() -> None:
    """Point 5: each as many as it asks for, or as there are tokens."""
    kinds: list[dict[str, Any]] = [
        {},
        {"top": 2, "top_k": 1},
        {"top": 3, "temperature": 2.0},
        {"top": 20, "temperature": 0.0},
        {"top": 1, "out": (0,), "presence_penalty": 5.0},
    ]
    _, _, tops = Sampler([row(seed, **kind) for seed, kind in enumerate(kinds)]).draw(LOGITS.repeat(5, 1))
    plain = torch.log_softmax(LOGITS, -1).tolist()
    warm = torch.log_softmax(LOGITS / 2.0, -1).tolist()
    penalised = torch.log_softmax(LOGITS - torch.tensor([5.0, 0, 0, 0, 0, 0, 0]), -1).tolist()
    assert {index: list(top) for index, top in tops.items()} == {
        1: [0, 1], 2: [0, 1, 2], 3: [0, 1, 2, 3, 4, 5, 6], 4: [1],
    }  # fmt: skip
    assert [*tops[1].values(), *tops[2].values()] == pytest.approx([*plain[:2], *warm[:3]])
    assert [*tops[3].values(), *tops[4].values()] == pytest.approx([*plain, penalised[1]])


def test_rows_that_ask_for_no_alternatives_pay_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Point 4."""
    looked: list[tuple[int, ...]] = []
    topk = torch.Tensor.topk

    def spied(rows: torch.Tensor, *arguments: Any) -> Any:
        looked.append(tuple(rows.shape))
        return topk(rows, *arguments)

    monkeypatch.setattr(torch.Tensor, "topk", spied)
    logits = LOGITS.repeat(4, 1)
    assert Sampler([row(seed, top_k=3) for seed in range(4)]).draw(logits)[2] == {} and not looked
    Sampler([row(seed, top=seed % 2) for seed in range(4)]).draw(logits)
    assert looked == [(2, len(LOGITS))], "the rows that ask, alone"


def test_uniforms_depend_on_seed_and_position_and_fill_the_interval() -> None:
    seeds = np.arange(1000, dtype=np.uint64)
    values = np.stack([uniforms(seeds, np.full(1000, count, dtype=np.uint64)) for count in range(20)])
    assert len(np.unique(values)) == values.size
    assert 0 <= values.min() < 0.001 and 0.999 < values.max() < 1
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.03
    assert (values[3] == uniforms(seeds, np.full(1000, 3, dtype=np.uint64))).all()


def test_spans_are_as_long_as_one_version_sampled_and_nothing_comes_behind_an_end() -> None:
    """completion.py 1 to 3."""
    sequence = row()
    for version in (0, 0, 1):
        sequence.accept(4, -1.0, Stamp(version))
    assert sequence.tell().spans == [Span(0, 2, 0), Span(2, 1, 1)]
    sequence.accept(4, -1.0, Stamp(1))
    assert sequence.tell().spans == [Span(3, 1, 1)]
    for name in (b"0123456789", b"an earlier run's"):
        sequence.accept(4, -1.0, ServedWeights("r", 1, name).stamp)
    last = sequence.tell().spans
    assert [(one.start, one.length, one.version) for one in last] == [(4, 1, 1), (5, 1, 1)]
    assert last[0].weights_id == int.from_bytes(b"01234567", "big") != last[1].weights_id
    begun = Request((1, 5, 7, 8), Sampling(9), resumed=3)
    ended = RunningSequence(begun, 0, 0, frozenset({7}), None, None, None, torch.device("cpu"))
    assert ended.finish is not None and (ended.finish.reason, ended.out) == (Reason.STOP, [5, 7])


BOUNDS: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0.0, 0.01, MAX_TEMPERATURE], [-0.1, 0.001, MAX_TEMPERATURE * 1.01, float("nan")]),
    "top_p": ([0.01, 1.0], [0.0, 1.1, float("nan")]),
    "min_p": ([0.0, 1.0], [-0.1, 1.1]),
    "presence_penalty": ([-2.0, 2.0], [-2.1, 2.1]),
    "frequency_penalty": ([-2.0, 2.0], [-2.1, float("inf")]),
    "max_tokens": ([1], [0]),
    "stop": ([["x"] * MAX_STOPS, ["x" * MAX_STOP_CHARS]], [["x"] * (MAX_STOPS + 1), [""]]),
    "stop_token_ids": ([[0, 259], [1] * MAX_STOP_TOKENS], [[260], [1] * (MAX_STOP_TOKENS + 1)]),
}


@pytest.mark.parametrize("field", BOUNDS)
def test_what_a_request_may_say_of_sampling_reaches_to_its_bounds(field: str) -> None:
    fits, others = BOUNDS[field]
    for value in fits:
        sampling = resolve(SamplingParams(**{field: value}), 9, 260)
        have = getattr(sampling, field)
        wanted = type(have)(value) if isinstance(value, list) else pytest.approx(value)
        assert have == wanted and sampling.max_tokens == (1 if field == "max_tokens" else 9)
    for value in others:
        with pytest.raises(QuartetError, match=field) as refused:
            resolve(SamplingParams(**{field: value}), 9, 260)
        assert refused.value.metadata["field"] == field
        if isinstance(value, float):  # as it was written, not what its float32 is as a float64
            assert refused.value.message.startswith(f"{field} = {float(f'{value:.7g}')} is refused")


def test_a_request_has_no_more_than_there_is_and_a_structure_has_its_end() -> None:
    asked = resolve(SamplingParams(max_tokens=50, top_k=10**9), 9, 260)
    assert (asked.max_tokens, asked.top_k) == (9, 260)
    with pytest.raises(QuartetError, match="ignore_eos"):
        resolve(SamplingParams(ignore_eos=True), 9, 260, grammar="start: /a/")
    assert experts_from(GenerateRequest(experts_from=5), 5, kept=True, routers=1) == 5
    with pytest.raises(QuartetError, match="experts_from"):
        experts_from(GenerateRequest(experts_from=6), 5, kept=True, routers=1)


def test_alternatives_are_told_once_with_their_tokens_and_held_no_longer() -> None:
    """completion.py 4, and 3: of tokens that were sampled elsewhere there are none."""
    sequence = RunningSequence(
        Request((1, 2, 3), Sampling(9), resumed=1, top=1),
        0,
        0,
        frozenset(),
        None,
        None,
        None,
        torch.device("cpu"),
    )
    for token in (4, 5):
        sequence.accept(token, -1.0, Stamp(0), {token: -1.0})
    first = sequence.tell()
    assert (first.token_ids, list(first.tops)) == ([4, 5], [{4: -1.0}, {5: -1.0}])
    assert sequence._tops == []
    sequence.accept(6, -2.0, Stamp(0), {7: -0.5})
    assert list(sequence.tell().tops) == [{7: -0.5}]
    assert len(first.tops) == 2, "what was told is not taken back"
