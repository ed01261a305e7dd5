"""Episodes of alphabet-sort: which names come in which turn, what the user says, what is right.

1. Equal settings and seeds give equal episodes; the stream never ends.
2. No two names of an episode have the same sorting key, so that there is one right order.
3. Names are made by joining the lists of given.txt and family.txt, or come from a file of the user's.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Literal

SortBy = Literal["either", "first", "last"]
# Draws in a row that may find too few distinct names before the names themselves are to blame.
MAX_REDRAWS = 1000


def _words(file: str) -> list[str]:
    return resources.files(__package__).joinpath(file).read_text(encoding="utf-8").split()


GIVEN = _words("given.txt")
FAMILY = _words("family.txt")
# For small models: one syllable or two, and the first letter decides.
SHORT = _words("short.txt")


@dataclass(frozen=True)
class Shape:
    """How episodes look."""

    min_turns: int = 1
    max_turns: int = 3
    min_names_per_turn: int = 1
    max_names_per_turn: int = 5
    sort_by: SortBy = "either"
    show_format: bool = True


@dataclass(frozen=True)
class Episode:
    """A scripted user: its messages, and the right list after each."""

    user_turns: list[str]
    ground_truths: list[list[str]]


def sorting_key(name: str, by_first: bool) -> str:
    """The first or the last name in a joined one: "IdaKeller" is cut before its second capital."""
    cut = next((at for at in range(1, len(name)) if name[at].isupper()), len(name))
    return name[:cut] if by_first else name[cut:]


def episodes(shape: Shape, names: Sequence[str], rng: random.Random) -> Iterator[Episode]:
    """Episodes without end. Raises ValueError where the names are too few for the shape."""
    while True:
        turns = rng.randint(shape.min_turns, shape.max_turns)
        counts = [rng.randint(shape.min_names_per_turn, shape.max_names_per_turn) for _ in range(turns)]
        by_first = shape.sort_by == "first" or (shape.sort_by == "either" and rng.random() < 0.5)
        yield _episode(_draw(names, counts, by_first, rng), by_first, shape, rng)


def _draw(names: Sequence[str], counts: list[int], by_first: bool, rng: random.Random) -> list[list[str]]:
    """Names for each turn, no two with the same key."""
    drawn: dict[str, str] = {}
    for _ in range(MAX_REDRAWS):
        name = rng.choice(names)
        drawn.setdefault(sorting_key(name, by_first), name)
        if len(drawn) == sum(counts):
            break
    else:
        raise ValueError(f"the names have too few different keys for an episode of {sum(counts)} names")
    rest = iter(drawn.values())
    return [list(islice(rest, count)) for count in counts]


def _episode(turns: list[list[str]], by_first: bool, shape: Shape, rng: random.Random) -> Episode:
    which = "FIRST" if by_first else "LAST"
    said: list[str] = []
    right: list[list[str]] = []
    known: list[str] = []
    for number, names in enumerate(turns):
        known += names
        ordered = sorted(known, key=lambda name: sorting_key(name, by_first))
        if number == 0:
            said.append(_opening(names, which, shape, rng))
            right.append(ordered)
        else:
            said.append(_follow_up(names, which, number, len(known), shape, rng))
            right.append([f"{name} // new name!" if name in names else name for name in ordered])
    return Episode(said, right)


def _opening(names: list[str], which: str, shape: Shape, rng: random.Random) -> str:
    text = f"Sort these names in alphabetical order by {which} name: {', '.join(names)}"
    if not shape.show_format:
        return text
    # The number of lines shown is drawn too: it must not tell how many names there are.
    shown = rng.randint(shape.min_names_per_turn, shape.max_names_per_turn)
    lines = [f"Name{i}" for i in range(1, shown + 1)]
    return f"{text}\n\n{_format('alphabetical_sorted', lines)}"


def _follow_up(
    names: list[str], which: str, number: int, known: int, shape: Shape, rng: random.Random
) -> str:
    text = f"Now sort ALL of these names alphabetically by {which} name: {', '.join(names)}"
    if not shape.show_format:
        return text
    text += (
        "\n\nThese are in addition to the prior list. Mark any NEW names (that weren't in the prior list) "
        "with `// new name!` at the end."
    )
    if number > 1:
        return f"{text} Follow the same format as before."
    shown = rng.randint(shape.min_names_per_turn, known)
    first_new = rng.randint(1, shown)
    lines = [f"Name{i} // new name!" if i >= first_new else f"Name{i}" for i in range(1, shown + 1)]
    return f"{text}\n\n{_format('combined_alphabetical_sorted', lines)}"


def _format(tag: str, lines: list[str]) -> str:
    return "\n".join(["Use exactly this format:", f"<{tag}>", *lines, f"</{tag}>"])


def joined_names() -> list[str]:
    """Every given name with every family name, joined."""
    return [given + family for given in GIVEN for family in FAMILY]


def read_names(path: Path) -> list[str]:
    """The distinct names of a JSON Lines file: strings, {"name": ...} or {"names": [...]}; blanks removed."""
    names: dict[str, None] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: it is no JSON ({error})") from None
        found = row.get("names", [row.get("name")]) if isinstance(row, dict) else [row]
        if not all(isinstance(name, str) and name.strip() for name in found):
            raise ValueError(f'{path}, line {number}: no "name"; write {{"name": "Ida Keller"}}')
        names |= {name.replace(" ", ""): None for name in found}
    return list(names)
