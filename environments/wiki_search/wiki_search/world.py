"""A small invented country, its encyclopedia, and questions about it.

1. Equal seeds give equal worlds. Names are made up, so that no model knows the answers: it has to search.
2. Every fact stands in one sentence of one page, and a question is made from the fact itself, not from the
   text. Questions of two hops need a second page, which the first one names.
3. No two things have one name, and an answer is a name or a year that its page says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

# fmt: off
ONSETS = [
    "b", "br", "c", "d", "dr", "f", "g", "gl", "h", "k", "l", "m", "n", "p", "qu", "r", "s", "st", "t", "th",
    "tr", "v", "w",
]
# fmt: on
VOWELS = ["a", "e", "i", "o", "u", "ae", "ei", "ou"]
CODAS = ["", "l", "m", "n", "nd", "r", "rn", "s", "sk", "th", "x"]
TOWN_ENDS = ["ford", "mouth", "by", "ham", "holm", "wick", "stead", "dale"]
TRADES = ["salt", "glass", "amber", "wool", "tin", "paper", "honey", "copper", "silk", "timber"]
CALLINGS = ["painter", "composer", "botanist", "engineer", "poet", "astronomer", "architect", "physician"]
WORKS = {
    "painter": "the painting", "composer": "the opera", "botanist": "the herbal", "engineer": "the treatise",
    "poet": "the poem", "astronomer": "the star atlas", "architect": "the pattern book",
    "physician": "the handbook",
}  # fmt: skip
SEASONS = ["spring", "summer", "autumn", "winter"]
FIRST_YEAR, LAST_YEAR = 1100, 1950
MAX_REDRAWS = 10_000


@dataclass
class Page:
    """A page of the encyclopedia: its text is Markdown, a heading for each section."""

    title: str
    sections: list[tuple[str, str]] = field(default_factory=list)

    @property
    def page_id(self) -> str:
        """The title as an id."""
        return normalize(self.title)

    @property
    def text(self) -> str:
        """The page as Markdown."""
        return "\n\n".join(f"# {heading}\n{body}" for heading, body in self.sections)


@dataclass(frozen=True)
class Question:
    """A question, its answer, the pages on the way to it, and what kind of thing it asks for."""

    text: str
    answer: str
    pages: tuple[str, ...]
    kind: str = ""


@dataclass(frozen=True)
class Town:
    """A town."""

    name: str
    river: str
    founded: int
    founder: str
    trade: str
    festival: str
    season: str
    bridge: int


@dataclass(frozen=True)
class Person:
    """Somebody worth a page."""

    name: str
    calling: str
    born: int
    town: Town
    teacher: str
    work: str
    work_year: int


def normalize(text: str) -> str:
    """Free text as an id: lower case, underscores for spaces."""
    return text.strip().lower().replace(" ", "_")


class World:
    """Towns, people, and what the encyclopedia says of them."""

    def __init__(self, seed: int, towns: int, people: int) -> None:
        """Make it."""
        self._rng = random.Random(f"{seed}:world")
        self._names: set[str] = set()
        self._rivers = [self._fresh(self._word) for _ in range(max(1, towns // 3))]
        self.towns = [self._town() for _ in range(towns)]
        self.people = [self._person() for _ in range(people)]
        rivers = dict.fromkeys(town.river for town in self.towns)
        self.pages = [
            *(self._town_page(town) for town in self.towns),
            *(self._person_page(person) for person in self.people),
            *(self._river_page(river) for river in rivers),
        ]

    def _fresh(self, make: Callable[[], str]) -> str:
        for _ in range(MAX_REDRAWS):
            name = make()
            if name not in self._names:
                self._names.add(name)
                return name
        raise ValueError(f"the world has no more names after {len(self._names)}")

    def _syllable(self) -> str:
        return self._rng.choice(ONSETS) + self._rng.choice(VOWELS) + self._rng.choice(CODAS)

    def _word(self, syllables: int = 2) -> str:
        return "".join(self._syllable() for _ in range(syllables)).capitalize()

    def _full_name(self) -> str:
        return self._fresh(lambda: f"{self._word(1)}{self._rng.choice('aeio')} {self._word()}")

    def _town(self) -> Town:
        rng = self._rng
        return Town(
            name=self._fresh(lambda: self._word(1) + rng.choice(TOWN_ENDS)),
            river=rng.choice(self._rivers),
            founded=rng.randint(FIRST_YEAR, 1500),
            founder=self._full_name(),
            trade=rng.choice(TRADES),
            festival=self._fresh(lambda: f"{self._word()} Fair"),
            season=rng.choice(SEASONS),
            bridge=rng.randint(1501, LAST_YEAR),
        )

    def _person(self) -> Person:
        rng = self._rng
        born = rng.randint(1600, 1880)
        return Person(
            name=self._full_name(),
            calling=rng.choice(CALLINGS),
            born=born,
            town=rng.choice(self.towns),
            teacher=self._full_name(),
            work=self._fresh(lambda: f"The {self._word()} {self._word()}"),
            work_year=born + rng.randint(22, 60),
        )

    def _town_page(self, town: Town) -> Page:
        born_here = [person.name for person in self.people if person.town is town]
        names = " and ".join(born_here) or "Nobody famous"
        return Page(
            town.name,
            [
                (town.name, f"{town.name} is a town on the river {town.river}, known for its {town.trade}."),
                ("History", f"{town.name} was founded in {town.founded} by {town.founder}."),
                ("Economy", f"For centuries the town has lived on the trade in {town.trade}."),
                ("Sights", f"The stone bridge over the {town.river} was opened in {town.bridge}."),
                ("Culture", f"The {town.festival} takes place every {town.season}."),
                ("People", f"{names} came from {town.name}."),
            ],
        )

    def _person_page(self, person: Person) -> Page:
        work = WORKS[person.calling]
        return Page(
            person.name,
            [
                (person.name, f"{person.name} was a {person.calling}."),
                ("Life", f"{person.name} was born in {person.born} in {person.town.name}."),
                ("Education", f"The most important teacher of {person.name} was {person.teacher}."),
                (
                    "Work",
                    f"{person.name} made {work} {person.work}, finished in {person.work_year}.",
                ),
            ],
        )

    def _river_page(self, river: str) -> Page:
        towns = [town.name for town in self.towns if town.river == river]
        return Page(
            river,
            [
                (river, f"The {river} is a river."),
                ("Course", f"It flows past {', '.join(towns)} and then into the sea."),
            ],
        )

    def questions(self) -> Iterator[Question]:
        """Every question about this world, in an order that does not follow the pages."""
        asked = [*self._about_towns(), *self._about_people(), *self._two_hops()]
        self._rng.shuffle(asked)
        yield from asked

    def _about_towns(self) -> Iterator[Question]:
        for town in self.towns:
            name, fair, pages = town.name, town.festival, (normalize(town.name),)
            yield Question(f"In which year was the town of {name} founded?", str(town.founded), pages, "year")
            yield Question(f"Who founded the town of {name}?", town.founder, pages, "person")
            bridge = f"In which year was the stone bridge of {name} opened?"
            yield Question(bridge, str(town.bridge), pages, "year")
            yield Question(f"In which season does the {fair} take place?", town.season, pages, "season")
            yield Question(f"In which town does the {fair} take place?", name, pages, "town")

    def _about_people(self) -> Iterator[Question]:
        for person in self.people:
            name, pages = person.name, (normalize(person.name),)
            work = f"{WORKS[person.calling]} {person.work}"
            yield Question(f"In which town was {name} born?", person.town.name, pages, "town")
            yield Question(f"Who was the most important teacher of {name}?", person.teacher, pages, "person")
            yield Question(f"In which year did {name} finish {work}?", str(person.work_year), pages, "year")
            yield Question(f"Who made {work}?", name, pages, "person")

    def _two_hops(self) -> Iterator[Question]:
        for person in self.people:
            town = person.town
            pages = (normalize(person.name), normalize(town.name))
            place = f"the town where the {person.calling} {person.name} was born"
            yield Question(f"Who founded {place}?", town.founder, pages, "person")
            yield Question(f"On which river lies {place}?", town.river, pages, "river")
            yield Question(f"In which year was {place} founded?", str(town.founded), pages, "year")
            yield Question(f"Which fair takes place in {place}?", town.festival, pages, "fair")
