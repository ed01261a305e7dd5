"""Worded problems of two to six steps, with solutions that were checked.

1. Equal seeds give equal problems. A story draws its numbers, tells them in words, and writes its solution
   as steps `left = right` of plain arithmetic.
2. Every problem is checked before it leaves: each step's left side is computed from its text and equals its
   right side, every intermediate result is a number that can be (nothing negative, no part of a person),
   and the last right side is the answer, a positive whole number.
"""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

NAMES = [
    "Ana",
    "Ben",
    "Chloe",
    "Dev",
    "Elif",
    "Finn",
    "Gita",
    "Hugo",
    "Ines",
    "Jack",
    "Kofi",
    "Lena",
    "Marco",
    "Nia",
]
THINGS = ["marbles", "stickers", "shells", "stamps", "pencils", "cards", "buttons", "beads"]
FOODS = ["apples", "oranges", "muffins", "cookies", "bagels", "pears"]
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


class _CannotBe(Exception):
    """The drawn numbers make no story."""


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


class _Steps:
    """Writes a solution down, each result at once usable in the next step."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def __call__(self, left: str) -> int:
        value = value_of(left)
        if value.denominator != 1 or value <= 0:
            raise _CannotBe
        self.written.append(f"{left} = {value}")
        return int(value)


Teller = Callable[[random.Random, _Steps], str]


def _sharing(rng: random.Random, step: _Steps) -> str:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    has, packs, each, friends = rng.randint(5, 60), rng.randint(2, 9), rng.randint(4, 20), rng.randint(2, 8)
    bought = step(f"{packs} * {each}")
    total = step(f"{has} + {bought}")
    step(f"{total} / {friends + 1}")
    return (
        f"{name} has {has} {thing} and buys {packs} packs of {each} {thing} each. {name} shares all "
        f"of them equally "
        f"among {friends} friends and {name}. How many {thing} does each of them get?"
    )


def _shopping(rng: random.Random, step: _Steps) -> str:
    name, (first, second) = rng.choice(NAMES), rng.sample(FOODS, 2)
    count_a, price_a, count_b, price_b = (rng.randint(2, 12) for _ in range(4))
    paid = rng.choice((50, 100, 200))
    a, b = step(f"{count_a} * {price_a}"), step(f"{count_b} * {price_b}")
    cost = step(f"{a} + {b}")
    step(f"{paid} - {cost}")
    return (
        f"At the market {name} buys {count_a} {first} at ${price_a} each and {count_b} {second} at "
        f"${price_b} each, and "
        f"pays with ${paid}. How many dollars of change does {name} get?"
    )


def _wages(rng: random.Random, step: _Steps) -> str:
    name = rng.choice(NAMES)
    rate, hours, limit = rng.randint(8, 30) * 2, rng.randint(41, 60), 40
    normal = step(f"{limit} * {rate}")
    over = step(f"{hours} - {limit}")
    higher = step(f"{rate} * 3 / 2")
    extra = step(f"{over} * {higher}")
    step(f"{normal} + {extra}")
    return (
        f"{name} earns ${rate} an hour for the first {limit} hours of a week, and one and a half "
        f"times as much for each "
        f"hour after that. How many dollars does {name} earn in a week of {hours} hours?"
    )


def _discount(rng: random.Random, step: _Steps) -> str:
    name, price = rng.choice(NAMES), rng.randint(4, 40) * 10
    percent, count = rng.choice((10, 20, 25, 30, 40, 50)), rng.randint(2, 6)
    off = step(f"{price} * {percent} / 100")
    reduced = step(f"{price} - {off}")
    step(f"{reduced} * {count}")
    return (
        f"A jacket costs ${price}. In a sale its price is reduced by {percent}%. How many dollars "
        f"does {name} pay for "
        f"{count} of these jackets in the sale?"
    )


def _journey(rng: random.Random, step: _Steps) -> str:
    name = rng.choice(NAMES)
    fast, fast_hours, slow, slow_hours = (
        rng.randint(50, 110),
        rng.randint(2, 6),
        rng.randint(20, 45),
        rng.randint(2, 5),
    )
    first, second = step(f"{fast} * {fast_hours}"), step(f"{slow} * {slow_hours}")
    total = step(f"{first} + {second}")
    hours = step(f"{fast_hours} + {slow_hours}")
    step(f"{total} / {hours}")
    return (
        f"{name} drives {fast_hours} hours at {fast} kilometres an hour and then {slow_hours} hours "
        f"at {slow} kilometres "
        "an hour. What is the average speed of the whole journey, in kilometres an hour?"
    )


def _ages(rng: random.Random, step: _Steps) -> str:
    younger, older = rng.sample(NAMES, 2)
    age, times, years = rng.randint(4, 15), rng.randint(2, 4), rng.randint(3, 20)
    now = step(f"{age} * {times}")
    later, later_young = step(f"{now} + {years}"), step(f"{age} + {years}")
    step(f"{later} + {later_young}")
    return (
        f"{older} is {times} times as old as {younger}, who is {age} years old. How old will the two "
        f"of them be together "
        f"in {years} years?"
    )


def _buses(rng: random.Random, step: _Steps) -> str:
    classes, pupils, adults = rng.randint(3, 12), rng.randint(18, 30), rng.randint(4, 20)
    seats = rng.choice((20, 25, 30, 40, 45, 50))
    children = step(f"{classes} * {pupils}")
    people = step(f"{children} + {adults}")
    step(f"{people} / {seats}")
    return (
        f"{classes} classes of {pupils} pupils go on a trip with {adults} adults. Every bus has "
        f"{seats} seats, and all "
        "buses are full. How many buses are there?"
    )


def _savings(rng: random.Random, step: _Steps) -> str:
    name = rng.choice(NAMES)
    income, spent, already, goal = (
        rng.randint(30, 90),
        rng.randint(5, 29),
        rng.randint(10, 200),
        rng.randint(300, 900),
    )
    kept = step(f"{income} - {spent}")
    missing = step(f"{goal} - {already}")
    step(f"{missing} / {kept}")
    return (
        f"{name} wants a bicycle that costs ${goal} and has saved ${already} already. Every week "
        f"{name} gets ${income} "
        f"and spends ${spent} of it. After how many weeks does {name} have enough, if the rest is saved?"
    )


def _garden(rng: random.Random, step: _Steps) -> str:
    long, wide, path = rng.randint(8, 40), rng.randint(5, 30), rng.randint(1, 3)
    outer_long, outer_wide = step(f"{long} + 2 * {path}"), step(f"{wide} + 2 * {path}")
    outer, inner = step(f"{outer_long} * {outer_wide}"), step(f"{long} * {wide}")
    step(f"{outer} - {inner}")
    return (
        f"A rectangular garden is {long} metres long and {wide} metres wide. All around it, outside, "
        f"runs a path that is "
        f"{path} metres wide. How many square metres does the path cover?"
    )


def _reading(rng: random.Random, step: _Steps) -> str:
    name = rng.choice(NAMES)
    pages, part, days = rng.randint(10, 60) * 12, rng.choice((2, 3, 4, 6)), rng.randint(2, 12)
    read = step(f"{pages} / {part}")
    left = step(f"{pages} - {read}")
    step(f"{left} / {days}")
    words = {2: "half", 3: "a third", 4: "a quarter", 6: "a sixth"}[part]
    return (
        f"{name} has read {words} of a book of {pages} pages and wants to finish it in {days} days, "
        f"with the same number "
        "of pages every day. How many pages is that a day?"
    )


def _factory(rng: random.Random, step: _Steps) -> str:
    machines, rate, hours, faulty = (
        rng.randint(3, 9),
        rng.randint(10, 60),
        rng.randint(4, 12),
        rng.choice((2, 5, 10, 20)),
    )
    hourly = step(f"{machines} * {rate}")
    made = step(f"{hourly} * {hours}")
    bad = step(f"{made} * {faulty} / 100")
    step(f"{made} - {bad}")
    return (
        f"{machines} machines make {rate} lamps an hour each and run for {hours} hours. {faulty}% of "
        f"all lamps are faulty "
        "and thrown away. How many good lamps are there in the end?"
    )


def _animals(rng: random.Random, step: _Steps) -> str:
    hens, cows = rng.randint(5, 60), rng.randint(3, 40)
    heads = hens + cows
    legs = 2 * hens + 4 * cows
    all_two = step(f"2 * {heads}")
    more = step(f"{legs} - {all_two}")
    found = step(f"{more} / 2")
    step(f"{heads} - {found}")
    return f"On a farm there are hens and cows, {heads} animals in all, with {legs} legs together. "
    "How many hens are there?"


TELLERS: dict[str, Teller] = {
    "sharing": _sharing,
    "shopping": _shopping,
    "wages": _wages,
    "discount": _discount,
    "journey": _journey,
    "ages": _ages,
    "buses": _buses,
    "savings": _savings,
    "garden": _garden,
    "reading": _reading,
    "factory": _factory,
    "animals": _animals,
}


def check(story: Story) -> None:
    """Compute every step again from its text. Raises ValueError."""
    for written in story.steps:
        left, _, right = written.partition(" = ")
        if value_of(left) != int(right) or int(right) <= 0:
            raise ValueError(f"{story.question!r}: {written} is wrong")
    if int(story.steps[-1].rpartition(" = ")[2]) != story.answer:
        raise ValueError(f"{story.question!r}: the last step is not the answer")


def stories(rng: random.Random) -> Iterator[Story]:
    """Problems without end."""
    tellers = list(TELLERS.values())
    while True:
        yield tell(rng.choice(tellers), rng)


def tell(teller: Teller, rng: random.Random) -> Story:
    """A problem of one kind, checked."""
    for _ in range(MAX_REDRAWS):
        step = _Steps()
        try:
            question = teller(rng, step)
        except _CannotBe:
            continue
        story = Story(question, tuple(step.written), int(step.written[-1].rpartition(" = ")[2]))
        check(story)
        return story
    raise ValueError(f"{teller.__name__} found no numbers in {MAX_REDRAWS} draws")
