"""What the orchestrator's modules promise in numbered lines is held by tests that cite it: "pace.py 5"."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import quartet_orchestrator

HERE = Path(__file__).resolve().parent
SOURCES = Path(quartet_orchestrator.__file__).resolve().parent
# "pace.py 1-4", "training.py 1 and 2", "runs.py 2, shelf.py 1"
CITED = re.compile(r"\b(\w+)\.py ((?:\d+(?:-\d+)?)(?:(?:, | and )\d+(?:-\d+)?(?!\w|\.py))*)")


def promised() -> set[tuple[str, int]]:
    found = set()
    for path in SOURCES.glob("*.py"):
        contract = ast.get_docstring(ast.parse(path.read_text())) or ""
        found |= {(path.stem, int(number)) for number in re.findall(r"^(\d+)\. ", contract, re.MULTILINE)}
    return found


def cited() -> set[tuple[str, int]]:
    found = set()
    for path in HERE.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            said = ast.get_docstring(node) if node.name.startswith("test_") else None
            for module, numbers in CITED.findall(said or ""):
                for first, last in re.findall(r"(\d+)(?:-(\d+))?", numbers):
                    found |= {(module, number) for number in range(int(first), int(last or first) + 1)}
    return found


def test_every_promise_of_a_module_is_cited_by_a_test_and_none_that_is_not_made():
    assert len(promised()) > 60
    assert promised() - cited() == set()
    # Tests may cite other modules of other packages; of these modules nothing that they do not say.
    modules = {module for module, _ in promised()}
    assert {one for one in cited() if one[0] in modules} - promised() == set()
