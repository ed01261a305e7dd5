"""Packing: equal to each sample alone, everything predicted once, within the budget."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quartet_trainer import logprobs, packing
from quartet_trainer.logprobs import PolicyForward
from quartet_trainer.model import load_model
from quartet_trainer.packing import pack
from quartet_trainer.sample import Sample, make_sample


def ragged(seed: int, groups: int = 4, members: int = 3, vocab: int = 96) -> list[Sample]:
    """Groups with shared prompts, two covered spans in each sample."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(groups):
        prompt = rng.integers(0, vocab, rng.integers(1, 24)).tolist()
        for _ in range(members):
            first, between, second = rng.integers(1, 6, 3)
            tail = rng.integers(0, vocab, first + between + second).tolist()
            spans = [(len(prompt), int(first), 0), (len(prompt) + int(first + between), int(second), 1)]
            made.append(make_sample(len(made), prompt + tail, spans, [], [float(rng.normal())]))
    order = rng.permutation(len(made))
    return [made[index] for index in order]


def load(folder: Path) -> PolicyForward:
    cpu = torch.device("cpu")
    return PolicyForward(load_model(folder, "m", device=cpu), cpu, None)


def packed(policy: PolicyForward, samples: list[Sample], budget: int, row: int) -> list[torch.Tensor]:
    out: list[torch.Tensor] = [torch.empty(0)] * len(samples)
    for batch in pack(samples, range(len(samples)), budget, row):
        logp, _ = policy(batch, 0.7)
        parts = torch.split(logp, [len(samples[member].covered_K) for member in batch.members])
        for member, part in zip(batch.members, parts, strict=True):
            out[member] = part
    return out


def alone(policy: PolicyForward, sample: Sample) -> torch.Tensor:
    logits = policy.model(input_ids=torch.from_numpy(sample.tokens_T)[None]).logits[0] / 0.7
    covered = torch.from_numpy(sample.covered_K)
    return torch.log_softmax(logits, -1)[covered - 1, torch.from_numpy(sample.tokens_T)[covered]]


def gradients(policy: PolicyForward, logps: list[torch.Tensor], samples: list[Sample]) -> list[torch.Tensor]:
    policy.zero_grad()
    loss = sum((lp * float(s.advantages_K[0])).sum() for lp, s in zip(logps, samples, strict=True)) / 100
    loss.backward()
    return [p.grad.clone() for p in policy.parameters()]


def test_packed_equals_unpacked_within_1e_6(folder: Path) -> None:
    """Log-probabilities and gradients, against one forward pass of the model for each sample."""
    policy, samples = load(folder), ragged(1)
    for budget, row in ((10_000, 256), (64, 48), (1, 1)):
        ours = packed(policy, samples, budget, row)
        plain = [alone(policy, sample) for sample in samples]
        for one, other in zip(ours, plain, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
        ours_grad, plain_grad = gradients(policy, ours, samples), gradients(policy, plain, samples)
        for one, other in zip(ours_grad, plain_grad, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_rows_that_share_a_prompt_and_rows_that_do_not_are_computed_together(folder: Path) -> None:
    """packing.py 1, where one mask serves both; and a sample that covers nothing is left out."""
    policy = load(folder)
    samples = [make_sample(i, [*range(20), 50 + i, 60, 61], [(20, 3, 0)], [], []) for i in range(3)]
    samples += [make_sample(3, list(range(40, 64)), [(5, 19, 0)], [], [])]
    samples += [make_sample(4, [*range(20), 70], [], [], [])]
    (batch,) = pack(samples, range(5), 10_000, 64)
    assert set(batch.members) == {0, 1, 2, 3} and len(batch.token_ids_RL) == 2 and batch.needs_mask
    for sample, ours in zip(samples[:4], packed(policy, samples[:4], 10_000, 64), strict=True):
        torch.testing.assert_close(ours, alone(policy, sample), atol=1e-6, rtol=0)


def test_chunked_output_layer_equals_one_piece(folder: Path, monkeypatch: object) -> None:
    policy, samples = load(folder), ragged(2)
    whole = packed(policy, samples, 10_000, 256)
    whole_grad = gradients(policy, whole, samples)
    monkeypatch.setattr(logprobs, "LOGIT_CHUNK_ELEMENTS", 96 * 7)
    parts = packed(policy, samples, 10_000, 256)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    for one, other in zip(whole_grad, gradients(policy, parts, samples), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 400), row=st.integers(1, 300))
def test_every_covered_position_is_predicted_once_within_the_budget(seed: int, budget: int, row: int) -> None:
    samples = ragged(seed, groups=3, members=4)
    batches = pack(samples, range(len(samples)), budget, row)
    assert sorted(m for batch in batches for m in batch.members) == list(range(len(samples)))
    for batch in batches:
        assert batch.tokens <= budget or len(batch.token_ids_RL) == 1
        padding = np.count_nonzero(batch.segments_RL == packing.PADDING)
        assert padding <= packing.MICROBATCH_COST_TOKENS + batch.tokens / packing.SIZES_PER_DOUBLING
        assert batch.token_ids_RL.shape[1] <= row or not batch.needs_mask
        expected = np.concatenate([samples[m].tokens_T[samples[m].covered_K] for m in batch.members])
        np.testing.assert_array_equal(batch.targets_K, expected)
        before = np.concatenate([samples[m].tokens_T[samples[m].covered_K - 1] for m in batch.members])
        np.testing.assert_array_equal(batch.token_ids_RL.reshape(-1)[batch.predictors_K], before)


def test_sizes_are_few_and_little_larger_than_what_they_hold() -> None:
    """packing.py 5"""
    sizes, most = [packing.padded(count) for count in range(5000)], 1 + 1 / packing.SIZES_PER_DOUBLING
    assert all(count <= size <= count * most for count, size in enumerate(sizes))
    assert sizes[:32] == list(range(32)) and sizes == sorted(sizes)
    assert len({size for size in sizes if 512 <= size < 1024}) == packing.SIZES_PER_DOUBLING
    rows = [make_sample(i, [i, *range(1, 500 + i)], [(400, 100 + i, 0)], [], []) for i in range(3)]
    (batch,) = pack(rows, range(3), 10_000, 4096)
    assert batch.token_ids_RL.shape == (3, 512)
    (batch,) = packing.cut(rows, packing.rows_of(rows, range(3), 4096), 10_000, 4096, max_positions=503)
    assert batch.token_ids_RL.shape == (3, 503), "nor beyond the positions of the model"
    (batch,) = packing.cut(rows, packing.rows_of(rows, [2], 4096), 502, 4096)
    assert batch.token_ids_RL.shape == (1, 502), "nor beyond the budget"
    (batch,) = pack(rows, range(3), 10_000, 505)
    assert batch.token_ids_RL.shape == (3, 505), "rows of at most row_tokens stay within them"


def test_long_samples_are_computed_without_a_mask(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one long sample among short groups costs a mask of its length squared, in every row."""
    short = [make_sample(i, [*range(20), 50 + i, 60], [(20, 2, 0)], [], []) for i in range(4)]
    long = [make_sample(4 + i, list(range(70 + i)), [(60, 10 + i, 0)], [], []) for i in range(3)]
    shared, plain = pack([*short, *long], range(7), 10_000, 64)
    assert shared.needs_mask and set(shared.members) == {0, 1, 2, 3}
    assert not plain.needs_mask and set(plain.members) == {4, 5, 6}
    np.testing.assert_array_equal(plain.position_ids_RL, [list(range(plain.token_ids_RL.shape[1]))] * 3)
    policy, seen = load(folder), []
    attention = policy.model.model.layers[0].self_attn
    plainly = attention.forward
    monkeypatch.setattr(
        attention, "forward", lambda *a, **k: seen.append(k["attention_mask"]) or plainly(*a, **k)
    )
    policy(plain, 1.0)
    assert seen == [None]


def test_a_group_shares_its_prompt() -> None:
    prompt = list(range(20))
    samples = [make_sample(i, [*prompt, 50 + i, 60, 70], [(20, 3, 0)], [], []) for i in range(8)]
    (batch,) = pack(samples, range(8), 10_000, 256)
    assert batch.token_ids_RL.shape == (1, 20 + 8 * 2)  # the last token of a sample predicts nothing


def test_a_shared_row_has_at_most_row_tokens_and_may_have_as_many() -> None:
    """packing.py 4: wherever the next of the sizes lies."""
    prompt = list(range(25))
    samples = [make_sample(i, [*prompt, 50 + i, 60, 70], [(25, 3, 0)], [], []) for i in range(8)]
    assert packing.padded(25 + 4 * 2) > 25 + 4 * 2
    (batch,) = pack(samples, range(8), 10_000, 25 + 4 * 2)
    assert batch.token_ids_RL.shape == (2, 25 + 4 * 2) and batch.needs_mask


def test_too_short_a_prompt_is_not_shared() -> None:
    prompt = list(range(packing.MIN_SHARED_TOKENS))
    shared, single = (
        pack(
            [make_sample(i, [*some, 50 + i], [(len(some), 1, 0)], [], []) for i in range(2)], range(2), 99, 99
        )
        for some in (prompt, prompt[1:])
    )
    assert [len(batch.token_ids_RL) for batch in (*shared, *single)] == [1, 2]


def test_on_an_accelerator_more_padding_is_cheaper_than_another_micro_batch() -> None:
    samples = [make_sample(n, list(range(38 + 9 * n)), [(5, 33 + 9 * n, 0)], [], []) for n in range(24)]
    rows = packing.rows_of(samples, range(len(samples)), 1)
    budget = 8192
    few, many = (
        packing.cut(samples, rows, budget, 1, packing.cost_of_one_more(budget, accelerated=fast))
        for fast in (True, False)
    )
    assert len(few) < len(many)
    padding = [np.count_nonzero(batch.segments_RL == packing.PADDING) for batch in few]
    assert packing.MICROBATCH_COST_TOKENS < max(padding) <= packing.ACCELERATOR_COST_SHARE * budget
    assert packing.cost_of_one_more(64, accelerated=True) == packing.MICROBATCH_COST_TOKENS


def test_padding_is_the_last_token_of_its_row() -> None:
    """A model may embed another one as zero, of which a norm has no gradient."""
    samples = ragged(5)
    padded_rows = 0
    for batch in pack(samples, range(len(samples)), 300, 64):
        for tokens_L, segments_L in zip(batch.token_ids_RL, batch.segments_RL, strict=True):
            held = int((segments_L != packing.PADDING).sum())
            assert (tokens_L[held:] == tokens_L[held - 1]).all()
            padded_rows += held < len(tokens_L)
    assert padded_rows
