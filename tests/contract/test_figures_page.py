"""docs/figures.md says what benchmarks/results say, of all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_the_page_is_of_these_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    sys.modules.pop("figures", None)
    import figures_page

    recorded = {file.stem for file in (BENCHMARKS / "results").glob("*.json")}
    assert {name for names in figures_page.PARTS.values() for name in names} == recorded
    assert figures_page.PAGE.read_text() == figures_page.page(), "run python benchmarks/figures_page.py"


def test_a_missed_bar_without_a_reason_is_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import figures_page

    monkeypatch.setattr(figures_page, "LIMITS", {})
    with pytest.raises(KeyError):
        figures_page.page()
