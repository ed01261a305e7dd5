"""The embedded engine's prefix cache: what it finds is what was put in, within its budget."""

from __future__ import annotations

import random

import torch
from quartet_inference.embedded.prefix_cache import BLOCK_TOKENS, Prefix, PrefixCache


def prefix(tokens: tuple[int, ...], owner: int = 0, logits: bool = False) -> Prefix:
    """Keys that say which token of whom they are of."""
    kv = torch.tensor([[owner, token] for token in tokens], dtype=torch.float32)
    return Prefix(tokens, kv, torch.ones(4) if logits else None, owner)


def test_what_is_found_is_a_true_beginning_of_the_same_owner_within_the_budget() -> None:
    """Invariants 1 to 3 of the module: owners, budget, tokens compared."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    cache = PrefixCache(40_000)
    found_any = 0
    for _ in range(3000):
        # Few distinct beginnings, so that many share some blocks.
        blocks = [rng.choice((7, 8)) for _ in range(rng.randint(0, 4))]
        tail = [rng.choice((7, 8)) for _ in range(rng.randint(1, 5))]
        tokens = (*(token for token in blocks for _ in range(BLOCK_TOKENS)), *tail)
        owner = rng.randrange(3)
        found, shared = cache.find(tokens, owner)
        if found is not None:
            found_any += 1
            assert found.owner == owner and found.tokens[:shared] == tokens[:shared]
            assert found.kv[:shared].tolist() == [[owner, token] for token in tokens[:shared]]
            whole = shared == len(tokens)
            assert not whole or (found.tokens == tokens and found.logits is not None)
        cache.add(prefix(tokens, owner, logits=rng.random() < 0.5))
        if rng.random() < 0.01:
            cache.forget(owner)
            assert cache.find(tokens, owner) == (None, 0)
        assert cache.nbytes <= 40_000
        assert cache.nbytes == sum(one.nbytes for one in cache._prefixes.values())
    assert found_any > 100
    cache.clear()
    assert (len(cache), cache.nbytes, cache._blocks) == (0, 0, {})


def test_equal_hashes_of_other_tokens_are_no_prefix() -> None:
    cache = PrefixCache(1 << 20)
    held = prefix(tuple(range(40)))
    cache.add(held)
    other = tuple(range(100, 140))
    for block in list(cache._blocks):
        cache._blocks[block + 1] = held.key
    cache._blocks.update({hash((0, other[:BLOCK_TOKENS])): held.key})
    assert cache.find(other) == (None, 0)


def test_what_was_used_longest_ago_goes_first() -> None:
    one, two, three = (prefix((number,) * 32) for number in (1, 2, 3))
    cache = PrefixCache(one.nbytes + two.nbytes)
    cache.add(one)
    cache.add(two)
    assert cache.find((1,) * 33)[1] == 32
    cache.add(three)
    assert [cache.find((number,) * 33)[1] for number in (1, 2, 3)] == [32, 0, 32]


def test_what_is_found_whole_or_given_again_is_used() -> None:
    one, two, three, four = (prefix((number,) * 32, logits=True) for number in (1, 2, 3, 4))
    cache = PrefixCache(one.nbytes + two.nbytes)
    cache.add(one)
    cache.add(two)
    assert cache.find(one.tokens) == (one, 32)
    cache.add(three)
    cache.add(prefix(one.tokens))
    cache.add(four)
    assert [cache.find(each.tokens)[0] for each in (one, two, three, four)] == [one, None, None, four]


def test_what_fits_exactly_is_kept_and_one_block_is_shared() -> None:
    """Invariants 1 and 2, at their bounds: beside the same tokens of another owner, too."""
    one, other = prefix((1,) * BLOCK_TOKENS), prefix((1,) * BLOCK_TOKENS, owner=1)
    cache = PrefixCache(one.nbytes + other.nbytes)
    for each in (one, other):
        cache.add(each)
    for each in (one, other):
        assert cache.find((*each.tokens, 2), each.owner) == (each, BLOCK_TOKENS)
    alone = PrefixCache(one.nbytes)
    alone.add(one)
    assert len(alone) == 1


def test_logits_that_come_later_make_a_prefix_whole() -> None:
    """As of a prompt that is a turn before it, which was kept as it ended."""
    kept, computed = prefix((1,) * 32), prefix((1,) * 32, logits=True)
    cache = PrefixCache(1 << 20)
    for each in (kept, computed, kept):
        cache.add(each)
    assert cache.find(kept.tokens) == (computed, 32) and cache.nbytes == computed.nbytes
