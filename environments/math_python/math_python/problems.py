"""Problems that are long by hand and short in Python, with their answers.

1. Equal seeds give equal problems. Every answer is computed here, exactly, by another way than text.
2. `arithmetic` problems are two numbers and a sign, for small models; `mixed` ones are drawn from KINDS:
   all of them, or those of one difficulty. An easy one can be typed into Python as it is asked, a hard one
   needs a thought before.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Problem:
    """A question and its answer."""

    question: str
    answer: str


Maker = Callable[[random.Random], tuple[str, object]]


def _primes_between(rng: random.Random) -> tuple[str, object]:
    low = rng.randint(10, 2000)
    high = low + rng.randint(50, 500)
    count = sum(all(n % d for d in range(2, math.isqrt(n) + 1)) for n in range(low, high + 1))
    return f"How many prime numbers are there between {low} and {high}, both included?", count


def _power_modulo(rng: random.Random) -> tuple[str, object]:
    base, exponent, modulus = rng.randint(2, 99), rng.randint(20, 999), rng.randint(11, 997)
    text = f"What is the remainder when ${base}^{{{exponent}}}$ is divided by {modulus}?"
    return text, pow(base, exponent, modulus)


def _digit_sum(rng: random.Random) -> tuple[str, object]:
    n = rng.randint(20, 90)
    return f"What is the sum of the decimal digits of ${n}!$?", sum(map(int, str(math.factorial(n))))


def _multiples(rng: random.Random) -> tuple[str, object]:
    a, b = rng.sample(range(3, 20), 2)
    limit = rng.randint(200, 3000)
    total = sum(n for n in range(1, limit) if n % a == 0 or n % b == 0)
    return f"What is the sum of all positive integers below {limit} divisible by {a} or by {b}?", total


def _fractions(rng: random.Random) -> tuple[str, object]:
    n, k = rng.randint(4, 12), rng.randint(1, 5)
    value = sum(Fraction(1, i * (i + k)) for i in range(1, n + 1))
    text = rf"Compute $\sum_{{i=1}}^{{{n}}} \frac{{1}}{{i(i+{k})}}$ as a fraction in lowest terms."
    return text, value


def _divisors(rng: random.Random) -> tuple[str, object]:
    n = math.prod(rng.choice((2, 2, 3, 3, 5, 7, 11)) for _ in range(rng.randint(4, 9)))
    return f"How many positive divisors does {n} have?", sum(n % d == 0 for d in range(1, n + 1))


def _committees(rng: random.Random) -> tuple[str, object]:
    women, men = rng.randint(5, 15), rng.randint(5, 15)
    size = rng.randint(3, 5)
    least = rng.randint(1, size - 1)
    ways = sum(math.comb(women, w) * math.comb(men, size - w) for w in range(least, size + 1))
    return (
        f"In how many ways can a committee of {size} be chosen from {women} women and {men} men "
        f"if at least {least} of its members must be women?"
    ), ways


def _recurrence(rng: random.Random) -> tuple[str, object]:
    p, q, a, b, n = (
        rng.randint(1, 4),
        rng.randint(1, 4),
        rng.randint(0, 5),
        rng.randint(1, 5),
        rng.randint(8, 20),
    )
    x, y = a, b
    for _ in range(n - 1):
        x, y = y, p * y + q * x
    return (
        f"A sequence has $a_0 = {a}$, $a_1 = {b}$, and $a_{{k+2}} = {p} a_{{k+1}} + {q} a_k$. "
        f"What is $a_{{{n}}}$?"
    ), y


def _lattice(rng: random.Random) -> tuple[str, object]:
    square = rng.randint(20, 400)
    reach = math.isqrt(square)
    span = range(-reach, reach + 1)
    count = sum(x * x + y * y <= square for x in span for y in span)
    return f"How many points with integer coordinates satisfy $x^2 + y^2 \\le {square}$?", count


def _dice(rng: random.Random) -> tuple[str, object]:
    dice = rng.randint(2, 4)
    total = rng.randint(dice + 1, 6 * dice - 1)
    ways = [1]
    for _ in range(dice):
        rolled = [0] * (len(ways) + 6)
        for at, count in enumerate(ways):
            for face in range(1, 7):
                rolled[at + face] += count
        ways = rolled
    text = f"{dice} fair six-sided dice are rolled. What is the probability that their sum is {total}?"
    return f"{text} Give a fraction in lowest terms.", Fraction(ways[total], 6**dice)


KINDS: dict[str, Maker] = {
    "primes": _primes_between,
    "power_modulo": _power_modulo,
    "digit_sum": _digit_sum,
    "multiples": _multiples,
    "fractions": _fractions,
    "divisors": _divisors,
    "committees": _committees,
    "recurrence": _recurrence,
    "lattice": _lattice,
    "dice": _dice,
}

HARD = frozenset({"committees", "recurrence", "lattice", "dice"})


def kinds(difficulty: str | None) -> list[str]:
    """Names of kinds: the easy ones, the hard ones, or all."""
    return [name for name in KINDS if difficulty is None or (name in HARD) == (difficulty == "hard")]


def arithmetic(rng: random.Random, digits: int) -> Problem:
    """Two numbers of up to so many digits and a sign."""
    a, b, sign = rng.randrange(10**digits), rng.randrange(10**digits), rng.choice("+-*")
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    return Problem(f"{a}{sign}{b}=", str(value))


def problems(kind: str, digits: int, rng: random.Random, difficulty: str | None = None) -> Iterator[Problem]:
    """Problems without end."""
    makers = [KINDS[name] for name in kinds(difficulty)]
    while True:
        if kind == "arithmetic":
            yield arithmetic(rng, digits)
        else:
            text, value = rng.choice(makers)(rng)
            yield Problem(text, str(value))
