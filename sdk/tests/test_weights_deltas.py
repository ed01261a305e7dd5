"""The deltas at hand: the cheapest road over them, and those that no shorter road leads over."""

from __future__ import annotations

import os
import sys
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quartet.v1 import weights_pb2 as pb
from quartet.weights.cores import threads
from quartet.weights.delta import Delta
from quartet.weights.deltas import DeltaKey, Deltas
from quartet.weights.payload import Payload

#: Bytes by base and version; numbers may fall, as where a publisher goes back to a saved state.
Sizes = dict[tuple[int, int], int]

VERSIONS = range(6)
NUMBERS = st.sampled_from(VERSIONS)
SIZES = st.dictionaries(
    st.tuples(NUMBERS, NUMBERS).filter(lambda ends: ends[0] != ends[1]), st.integers(1, 20), max_size=16
)


def digest(version: int) -> bytes:
    return b"%d" % version


def at_hand(sizes: Sizes) -> Deltas:
    deltas = Deltas(1 << 20)
    for (base, version), size in sizes.items():
        manifest = pb.WeightManifest(version=version, base_version=base, base_digest=digest(base))
        deltas.add(DeltaKey(1, base, version), Delta(manifest, Payload([bytes(size)])))
    return deltas


def roads(sizes: Sizes) -> dict[tuple[int, int], float]:
    """The bytes of the cheapest road from every version to every other, tried one by one."""
    spent: dict[tuple[int, int], float] = {(one, other): inf for one in VERSIONS for other in VERSIONS}
    spent |= {(one, one): 0 for one in VERSIONS}
    for _ in VERSIONS:
        for (base, version), size in sizes.items():
            for start in VERSIONS:
                spent[start, version] = min(spent[start, version], spent[start, base] + size)
    return spent


@given(SIZES, NUMBERS)
def test_what_is_reached_is_reached_by_the_fewest_bytes(sizes: Sizes, base: int) -> None:
    """deltas.py 3"""
    deltas, spent = at_hand(sizes), roads(sizes)
    found = deltas.reachable(1, (base, digest(base)))
    assert {version: bytes_ for version, (bytes_, _) in found.items()} == {
        version: spent[base, version] for version in VERSIONS if 0 < spent[base, version] < inf
    }
    for version, (bytes_, first) in found.items():
        assert first.base == (base, digest(base))
        assert bytes_ == first.payload.size + spent[int(first.manifest.version), version]
    assert not deltas.reachable(2, (base, digest(base))) and not deltas.reachable(1, (base, b"other"))


@given(SIZES, st.sets(NUMBERS, max_size=3), st.integers(1, 40))
def test_what_leads_to_nothing_held_by_fewer_bytes_than_all_is_forgotten(
    sizes: Sizes, held: set[int], full_bytes: int
) -> None:
    """deltas.py 4: and what does is kept."""
    deltas, spent = at_hand(sizes), roads(sizes)
    another = deltas.add(DeltaKey(2, 0, 1), Delta(pb.WeightManifest(), Payload([bytes(100)])))
    deltas.forget_detours(1, held, full_bytes)
    for (base, version), size in sizes.items():
        on = min((spent[version, one] for one in held), default=inf)
        assert (deltas.get(DeltaKey(1, base, version)) is not None) == (size + on < full_bytes)
    assert deltas.get(DeltaKey(2, 0, 1)) is another


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process has all cores")
@pytest.mark.parametrize(("cores", "wanted"), [(1, 2), (8, 2), (16, 4), (64, 8)])
def test_deltas_are_made_by_a_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, wanted: int
) -> None:
    """Of the process's own: a container may have few of its machine's."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert threads() == wanted
