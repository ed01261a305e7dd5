"""The tool server: one process for all rollouts of an environment worker; it keeps nothing of them."""

from __future__ import annotations

from pathlib import Path

import verifiers.v1 as vf

from wiki_search.library import Library, invented, read_pages
from wiki_search.world import World


class WikiConfig(vf.SharedToolsetConfig):
    """Which pages there are."""

    corpus: Path | None = None
    seed: int = 0
    towns: int = 60
    people: int = 120
    max_results: int = 10

    def library(self) -> Library:
        """The pages, indexed."""
        if self.corpus is not None:
            return Library(read_pages(self.corpus))
        return Library(invented(World(self.seed, self.towns, self.people)))


class WikiToolset(vf.Toolset[WikiConfig, vf.State]):
    """Search, look through, read."""

    TOOL_PREFIX = None

    async def setup(self) -> None:
        """Index the pages."""
        self._library = self.config.library()

    @vf.tool
    def search_pages(self, query: str) -> list[dict[str, str]]:
        """Search for the most relevant pages. Returns page_id and title of each."""
        found = self._library.search(query, self.config.max_results)
        return [{"page_id": page.page_id, "title": page.title} for page in found]

    @vf.tool
    def view_sections(self, page_id: str) -> list[dict[str, str]]:
        """View the sections of a page. Returns section_id and section_name of each."""
        sections = self._library.sections(page_id)
        return [{"section_id": one, "section_name": name} for one, name in sections]

    @vf.tool
    def read_section(self, section_id: str) -> str:
        """Read a section of a page."""
        return self._library.read(section_id)


if __name__ == "__main__":
    WikiToolset.run()
