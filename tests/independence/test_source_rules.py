"""Rules of the source tree that no type checker knows.

1. No service imports another; the SDK and the gateways import no service.
2. SDK, orchestrator, envhost and gateways never import torch, not even inside a function.
3. Only the worker of an environment imports verifiers, never the front of envhost.
4. A module's name says its concept.
5. Every file and folder that a document names exists, and README.md links to every page of docs/.
6. `make bench` runs every benchmark.
7. Nothing imports in a circle, not even inside a function or for the type checker alone.
8. Nothing pickles (invariant 10), and every invariant of docs/design.md is named by a test.
9. Who requires the SDK requires this release of it: by its name alone an index gives a stranger's package.
"""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SERVICES = ("trainer", "inference", "orchestrator", "envhost")
PACKAGES = {"sdk": REPOSITORY / "sdk/src/quartet"} | {
    name: REPOSITORY / f"services/{name}/src/quartet_{name}" for name in SERVICES
}
# A gateway is a client of the contract: it imports the SDK and no service.
PACKAGES["tinker"] = REPOSITORY / "gateways/tinker/src/quartet_tinker"
TORCH_STACK = {"torch", "transformers", "safetensors", "accelerate"}
TORCH_FREE = ("sdk", "orchestrator", "envhost", "tinker")
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
INVARIANTS = range(1, 11)
# "invariant_9_...", "Invariant 3", "Invariants 1, 2 and 9", and no other number of the sentence.
NAMED = re.compile(r"[Ii]nvariants?[ _](\d+(?:(?:, | and )\d+)*)")
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "stuff", "manager"}
# What a document names in backticks or links to, as far as it looks like a path of this repository.
FOLDERS = "sdk|services|gateways|environments|configs|examples|k8s|tests|benchmarks|docs|protos"
PATH = re.compile(rf"(?:`|\]\()((?:{FOLDERS})/[\w./-]+|Makefile|README\.md|compose\.yaml|\.ci/run)(?:`|\))")
# Documents write "x" for any name.
PLACEHOLDER = re.compile(r"/x[._]")


@functools.cache
def imports_in(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Each of a file, anywhere in it."""
    nodes = ast.walk(ast.parse(path.read_text(), str(path)))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Top-level names of the packages that a file imports, with the line."""
    for node in imports_in(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif node.level == 0 and node.module:
            yield node.module.split(".")[0], node.lineno


def offences(package: str, banned: set[str]) -> list[str]:
    """Where a package imports what it must not."""
    files = sorted(PACKAGES[package].rglob("*.py"))
    assert files, package
    return [
        f"{path.relative_to(REPOSITORY)}:{line} imports {name}"
        for path in files
        for name, line in imports_of(path)
        if name in banned
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_imports_a_service_but_itself(package: str) -> None:
    assert offences(package, {f"quartet_{name}" for name in SERVICES if name != package}) == []


@pytest.mark.parametrize("package", TORCH_FREE)
def test_torch_free_packages_import_no_torch(package: str) -> None:
    assert offences(package, TORCH_STACK) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_imports_in_a_circle(package: str) -> None:
    root = PACKAGES[package]
    names = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in root.rglob("*.py")
    }
    imported: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for node in imports_in(path):
            if isinstance(node, ast.ImportFrom) and node.module:
                # Of a package either a module in it, or what its __init__ has.
                found = {f"{node.module}.{alias.name}" for alias in node.names} & names.keys()
                imported[name] |= found or {node.module} & names.keys()
            elif isinstance(node, ast.Import):
                imported[name] |= {alias.name for alias in node.names} & names.keys()
    # Raises CycleError, which has the circle.
    assert len(list(TopologicalSorter(imported).static_order())) == len(names)


@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "envhost"])
def test_only_the_environment_host_knows_verifiers(package: str) -> None:
    assert offences(package, {"verifiers"}) == []


def test_the_front_of_the_environment_host_does_not_import_verifiers() -> None:
    """It runs in an interpreter of its own, which need not have them."""
    package = "services/envhost/src/quartet_envhost"
    worker = (f"{package}/v1/", f"{package}/classic/", f"{package}/loading.py")
    assert [one for one in offences("envhost", {"verifiers"}) if not one.startswith(worker)] == []


def test_an_import_inside_a_function_is_seen(tmp_path: Path) -> None:
    """The walker itself: a lazy import is an import."""
    file = tmp_path / "lazy.py"
    file.write_text("def f():\n    from torch.nn import Linear\n    import os, verifiers.v1 as v\n")
    assert {name for name, _ in imports_of(file)} == {"torch", "os", "verifiers"}


@pytest.mark.parametrize("package", PACKAGES)
def test_invariant_10_nothing_pickles(package: str) -> None:
    assert offences(package, PICKLES) == []
    for path in PACKAGES[package].rglob("*.py"):
        assert not re.search(r"\btorch\.(load|save)\(", path.read_text()), path


def test_every_invariant_is_named_by_a_test() -> None:
    design = (REPOSITORY / "docs/design.md").read_text()
    stated = re.search(r"## 4\. Invariants.*?(?=\n## )", design, re.DOTALL)
    assert stated is not None
    assert [int(n) for n in re.findall(r"^(\d+)\. \*\*", stated[0], re.MULTILINE)] == list(INVARIANTS)
    named: set[int] = set()
    for tests in ("tests", "sdk/tests", "services/*/tests", "gateways/*/tests"):
        for path in REPOSITORY.glob(f"{tests}/**/test_*.py"):
            if "nvariant" not in path.read_text():
                continue
            for node in ast.walk(ast.parse(path.read_text(), str(path))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                    said = node.name + " " + (ast.get_docstring(node) or "").partition(":")[0]
                    for numbers in NAMED.findall(said):
                        named.update(int(n) for n in re.findall(r"\d+", numbers))
    assert set(INVARIANTS) <= named, f"no test names {sorted(set(INVARIANTS) - named)}"


def test_names_say_the_concept() -> None:
    roots = [*PACKAGES.values(), REPOSITORY / "tests", REPOSITORY / "benchmarks", REPOSITORY / "environments"]
    vague = [
        str(path.relative_to(REPOSITORY))
        for root in roots
        for path in root.rglob("*")
        if (path.suffix == ".py" or path.is_dir()) and path.stem in VAGUE_NAMES
    ]
    assert vague == []


def test_make_bench_runs_every_benchmark() -> None:
    recipe = (REPOSITORY / "Makefile").read_text().partition("\nbench:")[2].partition("\n\n")[0]
    listed = re.search(r"foreach b,([\w ]+),", recipe)
    assert listed is not None
    benchmarks = {
        path.stem
        for path in (REPOSITORY / "benchmarks").glob("*.py")
        if re.search(r"from figures import .*\breport\b", path.read_text())
    }
    assert set(listed[1].split()) == benchmarks


def test_documents_name_only_what_exists() -> None:
    documents = [
        *REPOSITORY.glob("*.md"),
        *REPOSITORY.glob("docs/**/*.md"),
        *(path for path in REPOSITORY.glob("examples/**/*.md") if "node_modules" not in path.parts),
        *REPOSITORY.glob("tests/**/*.md"),
    ]
    assert documents
    missing = [
        f"{document.relative_to(REPOSITORY)}: {name}"
        for document in documents
        for name in PATH.findall(document.read_text())
        if not PLACEHOLDER.search(name) and not (REPOSITORY / name.rstrip("/.")).exists()
    ]
    assert missing == []


def test_the_sdk_that_is_required_is_this_release() -> None:
    def project(folder: Path) -> dict[str, Any]:
        read: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        return read

    version = project(REPOSITORY / "sdk")["version"]
    folders = [*(REPOSITORY / f"services/{name}" for name in SERVICES), *(REPOSITORY / "gateways").iterdir()]
    assert len(folders) > len(SERVICES)
    for folder in folders:
        required = [one for one in project(folder)["dependencies"] if re.match(r"quartet(?![\w-])", one)]
        assert required == [f"quartet=={version}"], folder


def test_every_page_is_linked_from_the_readme() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    pages = [f"docs/{page.name}" for page in (REPOSITORY / "docs").glob("*.md")]
    assert pages
    assert [page for page in pages if f"]({page})" not in readme] == []
