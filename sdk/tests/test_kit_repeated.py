"""quartet.kit.repeated: what is told, what is held back, and how much is remembered."""

from __future__ import annotations

from quartet.kit.repeated import MAX_REMEMBERED, TOLD_EVERY_SECONDS, Repeated


class Clock:
    """Seconds that pass when they are told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_it_is_told_once_a_minute_with_how_often_it_was_held_back() -> None:
    clock = Clock()
    repeated = Repeated(clock)
    assert [repeated.held_back("a") for _ in range(4)] == [0, None, None, None]
    assert repeated.held_back("b") == 0
    clock.now += TOLD_EVERY_SECONDS
    assert [repeated.held_back("a") for _ in range(2)] == [3, None]
    clock.now += TOLD_EVERY_SECONDS
    assert repeated.held_back("a") == 1


def test_of_too_many_the_one_told_longest_ago_is_forgotten() -> None:
    """repeated.py 1."""
    clock = Clock()
    repeated = Repeated(clock)
    for number in range(MAX_REMEMBERED - 1):
        repeated.held_back(number)
    clock.now += TOLD_EVERY_SECONDS
    for thing in (0, "the last that has room", "one more"):
        repeated.held_back(thing)
    assert repeated.held_back(0) is None, "told a moment ago"
    assert len(repeated._told) == MAX_REMEMBERED and 1 not in repeated._told
