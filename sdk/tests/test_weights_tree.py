"""The tree by which versions spread: its shape, its order, and who steps in for whom."""

from __future__ import annotations

import random
import time

import pytest
from quartet.errors import QuartetError
from quartet.weights.tree import FANOUT, MAX_RELAYS, MAX_SOURCES, RANK_SECONDS, RelayTree, Watcher


def grown(count: int) -> tuple[RelayTree, list[Watcher]]:
    tree = RelayTree()
    return tree, [tree.join("", f"10.0.0.{i}:1") for i in range(count)]


def names(addresses: list[str]) -> list[int]:
    return [int(address.rpartition(":")[0].rpartition(".")[2]) for address in addresses]


def test_one_child_of_the_publisher_and_two_of_each_relay() -> None:
    tree, relays = grown(200)
    parents = [tree.sources(relay)[:1] for relay in relays]
    assert parents.count([]) == 1 and parents[0] == []
    children = [parent[0] for parent in parents[1:]]
    assert max(children.count(child) for child in set(children)) == FANOUT


def test_the_place_of_a_lost_relay_is_taken_by_its_elder_child() -> None:
    tree, relays = grown(7)
    assert [names(tree.sources(relay)) for relay in relays] == [
        [], [0], [0, 1], [1, 0], [1, 3, 0], [2, 0, 1], [2, 5, 0, 1],
    ]  # fmt: skip


def test_whichever_relay_is_gone_the_publisher_has_one_child() -> None:
    for count in range(2, 60):
        tree, relays = grown(count)
        for dead in range(count):
            firsts = [
                next((source for source in names(tree.sources(relay)) if source != dead), None)
                for place, relay in enumerate(relays)
                if place != dead
            ]
            assert firsts.count(None) == 1, (count, dead)


def test_nobody_is_sent_to_whoever_joined_later_however_the_members_change() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    tree = RelayTree()
    members: list[Watcher] = []
    joined = 0
    for _ in range(600):
        if members and chance.random() < 0.4:
            tree.leave(members.pop(chance.randrange(len(members))))
        else:
            address = f"10.0.0.{joined}:1" if chance.random() < 0.8 else ""
            members.append(tree.join("", address))
            joined += 1
        relays = [member for member in members if member.address]
        order = {member.address: place for place, member in enumerate(relays)}
        for member in members:
            sources = tree.sources(member)
            assert len(sources) <= MAX_SOURCES and set(sources) <= order.keys()
            if member.address:
                assert all(order[source] < order[member.address] for source in sources)
            else:
                assert bool(sources) == bool(relays)
        assert sum(not tree.sources(relay) for relay in relays) == min(1, len(relays))


def test_whoever_comes_back_has_its_place_again_and_after_a_while_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise two that fail at once could be sent to each other, each by what was true before."""
    tree, relays = grown(4)
    tree.leave(relays[0])
    assert names(tree.sources(relays[2])) == [1]
    again = tree.join("", relays[0].address)
    assert tree.sources(again) == [] and names(tree.sources(relays[1])) == [0]
    twice = tree.join("", relays[0].address)
    assert twice.rank == again.rank, "its old watch is not yet known to be gone"
    tree.leave(again)
    tree.leave(twice)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + RANK_SECONDS + 1)
    late = tree.join("", relays[0].address)
    assert names(tree.sources(late))[0] == 2 and tree.sources(relays[1]) == []


def test_watchers_that_serve_nobody_are_spread_over_the_relays() -> None:
    tree, relays = grown(4)
    leaves = [tree.join("", "") for _ in range(8)]
    parents = [names(tree.sources(leaf))[0] for leaf in leaves]
    assert parents == [3, 2, 1, 0, 3, 2, 1, 0]
    assert all(not set(tree.sources(relay)) & {""} for relay in relays)


def test_runs_have_trees_of_their_own_and_ended_watches_leave_nothing() -> None:
    tree = RelayTree()
    a, b = tree.join("a", "x:1"), tree.join("b", "y:1")
    again = tree.join("a", "x:1")
    assert tree.sources(a) == tree.sources(b) == []
    assert tree.sources(again) == [], "a replica that is listed twice is not sent to itself"
    for watcher in (a, b, again):
        tree.leave(watcher)
        tree.leave(watcher)
    assert not tree._relays and not tree._leaves


def test_more_relays_than_the_bound_only_fetch() -> None:
    tree, _ = grown(MAX_RELAYS)
    late = tree.join("", "late:1")
    after = tree.join("", "after:1")
    assert tree.sources(late)
    assert "late:1" not in tree.sources(after)


@pytest.mark.parametrize(
    "address", ["host", "host:port", "a/b:1", "http://a:1", "h:123456", "a" * 300 + ":1"]
)
def test_an_address_that_nobody_can_dial_is_refused(address: str) -> None:
    with pytest.raises(QuartetError, match="relay_address"):
        RelayTree().join("", address)


@pytest.mark.parametrize("address", ["10.0.0.1:50051", "inference-0.inference:1", "[::1]:5", "unix:/tmp/x"])
def test_addresses_of_every_kind_are_taken(address: str) -> None:
    assert RelayTree().join("", address).address == address
