"""Searching and reading pages.

1. `search` ranks by BM25 over title and text; a word of the title counts as TITLE_WEIGHT words of the text.
   Equal scores keep the order of the pages.
2. A section goes from its heading to the next; its id is the page's id and the heading's. Several under one
   heading are one section. A page without headings is one section, `full`.
3. What is asked for and is not there is a LookupError that says what to do.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from wiki_search.world import World, normalize

FULL = "full"
TITLE_WEIGHT = 5
K1, B = 1.2, 0.75  # the usual saturation of a word's count, and weight of a page's length
_WORD = re.compile(r"\w+")


class Document(NamedTuple):
    """A page as it is searched and read."""

    page_id: str
    title: str
    content: str


def terms(text: str) -> list[str]:
    """Words in lower case."""
    return _WORD.findall(text.lower())


class Library:
    """All pages, indexed."""

    def __init__(self, documents: Iterable[Document]) -> None:
        """Index them. Raises ValueError where two have one id."""
        self._pages: dict[str, Document] = {}
        self._postings: dict[str, list[tuple[str, int]]] = defaultdict(list)
        self._lengths: dict[str, int] = {}
        for document in documents:
            if document.page_id in self._pages:
                raise ValueError(f"two pages have the id {document.page_id!r}")
            self._pages[document.page_id] = document
            found = terms(document.title) * TITLE_WEIGHT + terms(document.content)
            self._lengths[document.page_id] = len(found)
            for term, count in Counter(found).items():
                self._postings[term].append((document.page_id, count))
        self._mean = sum(self._lengths.values()) / max(1, len(self._lengths))

    def __len__(self) -> int:
        return len(self._pages)

    def search(self, query: str, limit: int) -> list[Document]:
        """The best pages, best first."""
        scores: dict[str, float] = dict.fromkeys(self._pages, 0.0)
        for term in set(terms(query)):
            postings = self._postings.get(term, [])
            rarity = math.log(1 + (len(self._pages) - len(postings) + 0.5) / (len(postings) + 0.5))
            for page_id, count in postings:
                norm = K1 * (1 - B + B * self._lengths[page_id] / self._mean)
                scores[page_id] += rarity * count * (K1 + 1) / (count + norm)
        best = sorted((page_id for page_id in scores if scores[page_id] > 0), key=lambda one: -scores[one])
        return [self._pages[page_id] for page_id in best[:limit]]

    def sections(self, page_id: str) -> list[tuple[str, str]]:
        """Section ids and names of a page."""
        lines = self._page(page_id).splitlines()
        headings = [line.lstrip("#").strip() for line in lines if line.startswith("#")]
        if not headings:
            return [(f"{page_id}:{FULL}", "Full Page")]
        return list(dict.fromkeys((f"{page_id}:{normalize(heading)}", heading) for heading in headings))

    def read(self, section_id: str) -> str:
        """The text of a section, with its heading."""
        page_id, colon, wanted = section_id.partition(":")
        if not colon:
            raise LookupError(f"{section_id!r} is no section id; write page_id:section_id")
        content = self._page(page_id)
        if wanted == FULL:
            return content
        kept, inside = list[str](), False
        for line in content.splitlines():
            if line.startswith("#"):
                inside = normalize(line.lstrip("#")) == wanted
            if inside:
                kept.append(line)
        if not kept:
            raise LookupError(f"{page_id!r} has no section {wanted!r}; view_sections tells which it has")
        return "\n".join(kept).strip()

    def _page(self, page_id: str) -> str:
        if page_id not in self._pages:
            raise LookupError(f"there is no page {page_id!r}; search_pages finds pages")
        return self._pages[page_id].content


def invented(world: World) -> list[Document]:
    """The pages of an invented world."""
    return [Document(page.page_id, page.title, page.text) for page in world.pages]


def read_pages(file: Path) -> list[Document]:
    """The pages of a JSON Lines file of {"id": ..., "title": ..., "content": ...}. Raises ValueError."""
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            row = row_of(line, f"{file}, line {number}")
            if not all(isinstance(row.get(key), str) for key in ("title", "content")):
                raise ValueError(f"{file}, line {number}: a page needs a title and a content, both text")
            page_id = str(row.get("id", normalize(row["title"]))).replace(":", "_")
            found.append(Document(page_id, row["title"], row["content"]))
    return found


def row_of(line: str, place: str) -> dict[str, Any]:
    """The object that a line of a file is. Raises ValueError, which says where."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: it is no JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{place}: it is no object")
    return row
