"""Worded problems of two to six steps, with solutions that were checked.

1. Equal seeds give equal problems. A plot says what is drawn, how it is told and how it is solved; a story is
   one draw of it, its solution written as steps `left = right` of plain arithmetic.
2. Every problem is checked before it leaves: each step's left side is computed from its text and equals its
   right side, every intermediate result is a number that can be (nothing negative, no part of a person),
   and the last right side is the answer, a positive whole number.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

NAMES = [
    "Ana", "Ben", "Chloe", "Dev", "Elif", "Finn", "Gita",
    "Hugo", "Ines", "Jack", "Kofi", "Lena", "Marco", "Nia",
]  # fmt: skip
THINGS = ["marbles", "stickers", "shells", "stamps", "pencils", "cards", "buttons", "beads"]
FOODS = ["apples", "oranges", "muffins", "cookies", "bagels", "pears"]
PARTS = {2: "half", 3: "a third", 4: "a quarter", 6: "a sixth"}
# Drawn numbers may make a story that cannot be, such as half a bus; another draw then mostly can.
MAX_REDRAWS = 1000
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True)
class Story:
    """A problem with its solution."""

    question: str
    steps: tuple[str, ...]
    answer: int

    @property
    def text(self) -> str:
        """The question and its solution."""
        return "\n".join([self.question, *self.steps])


@lru_cache(maxsize=50_000)  # a story of small numbers has the same steps as many others
def value_of(text: str) -> Fraction:
    """The value of plain arithmetic: numbers, + - * / and brackets. Raises ValueError."""

    def visit(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int() as number):
                return Fraction(number)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](visit(left), visit(right))
        raise ValueError(f"{text!r} is not plain arithmetic")

    return visit(ast.parse(text, mode="eval").body)


Drawn = dict[str, Any]


@dataclass(frozen=True)
class Plot:
    """A kind of story."""

    # What is drawn, in this order: one of a sequence (of a list, one not yet drawn), or what follows from it.
    draws: Mapping[str, Sequence[Any] | Callable[[Drawn], Any]]
    # The solution: "name = arithmetic"; a step may use what is drawn and the steps before it.
    steps: Sequence[str]
    question: str


PLOTS = {
    "sharing": Plot(
        {"name": NAMES, "thing": THINGS, "has": range(5, 61), "packs": range(2, 10), "each": range(4, 21),
         "friends": range(2, 9), "people": lambda d: d["friends"] + 1},
        ["bought = {packs} * {each}", "total = {has} + {bought}", "share = {total} / {people}"],
        "{name} has {has} {thing} and buys {packs} packs of {each} {thing} each. {name} shares all of "
        "them equally among {friends} friends and {name}. How many {thing} does each of them get?",
    ),
    "shopping": Plot(
        {"name": NAMES, "food": FOODS, "other": FOODS, "count": range(2, 13), "price": range(2, 13),
         "others": range(2, 13), "other_price": range(2, 13), "paid": (50, 100, 200)},
        ["first = {count} * {price}", "second = {others} * {other_price}", "cost = {first} + {second}",
         "change = {paid} - {cost}"],
        "At the market {name} buys {count} {food} at ${price} each and {others} {other} at ${other_price}"
        " each, and pays with ${paid}. How many dollars of change does {name} get?",
    ),
    "wages": Plot(
        {"name": NAMES, "rate": range(16, 61, 2), "hours": range(41, 61)},
        ["normal = 40 * {rate}", "over = {hours} - 40", "higher = {rate} * 3 / 2",
         "extra = {over} * {higher}",
         "pay = {normal} + {extra}"],
        "{name} earns ${rate} an hour for the first 40 hours of a week, and one and a half times as much "
        "for each hour after that. How many dollars does {name} earn in a week of {hours} hours?",
    ),
    "discount": Plot(
        {"name": NAMES, "price": range(40, 401, 10), "percent": (10, 20, 25, 30, 40, 50),
         "count": range(2, 7)},
        ["off = {price} * {percent} / 100", "reduced = {price} - {off}", "paid = {reduced} * {count}"],
        "A jacket costs ${price}. In a sale its price is reduced by {percent}%. How many dollars does "
        "{name} pay for {count} of these jackets in the sale?",
    ),
    "journey": Plot(
        {"name": NAMES, "fast": range(50, 111), "fast_hours": range(2, 7), "slow": range(20, 46),
         "slow_hours": range(2, 6)},
        ["first = {fast} * {fast_hours}", "second = {slow} * {slow_hours}", "total = {first} + {second}",
         "hours = {fast_hours} + {slow_hours}", "speed = {total} / {hours}"],
        "{name} drives {fast_hours} hours at {fast} kilometres an hour and then {slow_hours} hours at "
        "{slow} kilometres an hour. What is the average speed of the whole journey, in kilometres an "
        "hour?",
    ),
    "ages": Plot(
        {"younger": NAMES, "older": NAMES, "age": range(4, 16), "times": range(2, 5), "years": range(3, 21)},
        ["now = {age} * {times}", "later = {now} + {years}", "later_young = {age} + {years}",
         "together = {later} + {later_young}"],
        "{older} is {times} times as old as {younger}, who is {age} years old. How old will the two of "
        "them be together in {years} years?",
    ),
    "buses": Plot(
        {"classes": range(3, 13), "pupils": range(18, 31), "adults": range(4, 21),
         "seats": (20, 25, 30, 40, 45, 50)},
        ["children = {classes} * {pupils}", "people = {children} + {adults}", "buses = {people} / {seats}"],
        "{classes} classes of {pupils} pupils go on a trip with {adults} adults. Every bus has {seats} "
        "seats, and all buses are full. How many buses are there?",
    ),
    "savings": Plot(
        {"name": NAMES, "income": range(30, 91), "spent": range(5, 30), "already": range(10, 201),
         "goal": range(300, 901)},
        ["kept = {income} - {spent}", "missing = {goal} - {already}", "weeks = {missing} / {kept}"],
        "{name} wants a bicycle that costs ${goal} and has saved ${already} already. Every week {name} "
        "gets ${income} and spends ${spent} of it. After how many weeks does {name} have enough, if the "
        "rest is saved?",
    ),
    "garden": Plot(
        {"long": range(8, 41), "wide": range(5, 31), "path": range(1, 4)},
        ["outer_long = {long} + 2 * {path}", "outer_wide = {wide} + 2 * {path}",
         "outer = {outer_long} * {outer_wide}",
         "inner = {long} * {wide}", "covered = {outer} - {inner}"],
        "A rectangular garden is {long} metres long and {wide} metres wide. All around it, outside, runs "
        "a path that is {path} metres wide. How many square metres does the path cover?",
    ),
    "reading": Plot(
        {"name": NAMES, "pages": range(120, 721, 12), "part": tuple(PARTS),
         "words": lambda d: PARTS[d["part"]],
         "days": range(2, 13)},
        ["read = {pages} / {part}", "left = {pages} - {read}", "daily = {left} / {days}"],
        "{name} has read {words} of a book of {pages} pages and wants to finish it in {days} days, with "
        "the same number of pages every day. How many pages is that a day?",
    ),
    "factory": Plot(
        {"machines": range(3, 10), "rate": range(10, 61), "hours": range(4, 13), "faulty": (2, 5, 10, 20)},
        ["hourly = {machines} * {rate}", "made = {hourly} * {hours}", "bad = {made} * {faulty} / 100",
         "good = {made} - {bad}"],
        "{machines} machines make {rate} lamps an hour each and run for {hours} hours. {faulty}% of all "
        "lamps are faulty and thrown away. How many good lamps are there in the end?",
    ),
    "animals": Plot(
        {"hens": range(5, 61), "cows": range(3, 41), "heads": lambda d: d["hens"] + d["cows"],
         "legs": lambda d: 2 * d["hens"] + 4 * d["cows"]},
        ["all_hens = 2 * {heads}", "more = {legs} - {all_hens}", "found = {more} / 2",
         "left = {heads} - {found}"],
        "On a farm there are hens and cows, {heads} animals in all, with {legs} legs together. How many "
        "hens are there?",
    ),
}  # fmt: skip


def check(story: Story) -> None:
    """Compute every step again from its text. Raises ValueError."""
    for written in story.steps:
        left, _, right = written.partition(" = ")
        if value_of(left) != int(right) or int(right) <= 0:
            raise ValueError(f"{story.question!r}: {written} is wrong")
    if int(story.steps[-1].rpartition(" = ")[2]) != story.answer:
        raise ValueError(f"{story.question!r}: the last step is not the answer")


def stories(rng: random.Random, kinds: Collection[str] = (), largest: int | None = None) -> Iterator[Story]:
    """Problems without end, of these kinds, or of all; the order in which kinds are named does not matter.

    No number in them or in their solutions is above `largest`. Raises ValueError where a kind has none such.
    """
    plots = [plot for kind, plot in PLOTS.items() if not kinds or kind in kinds]
    while True:
        yield tell(rng.choice(plots), rng, largest)


def tell(plot: Plot, rng: random.Random, largest: int | None = None) -> Story:
    """A problem of one kind, checked. Raises ValueError where none is found."""
    for _ in range(MAX_REDRAWS):
        drawn = _draw(plot, rng)
        written = _solve(plot, drawn, largest)
        if written is None:
            continue
        story = Story(plot.question.format(**drawn), written, int(written[-1].rpartition(" = ")[2]))
        if largest is None or max(map(int, re.findall(r"\d+", story.text))) <= largest:
            check(story)
            return story
    below = "" if largest is None else f" with no number above {largest}"
    raise ValueError(f"{plot.question!r}: no story{below} in {MAX_REDRAWS} draws")


def _draw(plot: Plot, rng: random.Random) -> Drawn:
    drawn: Drawn = {}
    for name, source in plot.draws.items():
        if callable(source):
            drawn[name] = source(drawn)
        elif isinstance(source, list):
            drawn[name] = rng.choice([word for word in source if word not in drawn.values()])
        else:
            drawn[name] = rng.choice(source)
    return drawn


def _solve(plot: Plot, drawn: Drawn, largest: int | None) -> tuple[str, ...] | None:
    """The steps, written out; None where a result on the way cannot be, or is above `largest`."""
    known, written = dict(drawn), []
    for step in plot.steps:
        name, _, formula = step.partition(" = ")
        left = formula.format(**known)
        value = value_of(left)
        if value.denominator != 1 or value <= 0 or (largest is not None and value > largest):
            return None
        known[name] = int(value)
        written.append(f"{left} = {value}")
    return tuple(written)
