"""The Dockerfiles: one shape, non-root, exec form, no registry host, only the files the image is about."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from quartet.cli.tiny.command import BESIDE

SERVICES = ("trainer", "inference", "orchestrator", "envhost")
TORCH = {"trainer", "inference"}
BASE = "python:3.11-slim-bookworm"


def instructions(path: Path) -> list[tuple[str, str]]:
    """(INSTRUCTION, arguments) of a Dockerfile, continuation lines joined, comments dropped."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def stages(path: Path) -> list[list[tuple[str, str]]]:
    """The instructions of each stage, FROM first."""
    found: list[list[tuple[str, str]]] = []
    for instruction in instructions(path):
        if instruction[0] == "FROM":
            found.append([])
        found[-1].append(instruction)
    return found


@pytest.mark.parametrize("folder", [*(f"services/{name}" for name in SERVICES), "gateways/tinker"])
def test_a_service_image_has_the_one_shape(repository: Path, folder: str) -> None:
    build, final = stages(repository / folder / "Dockerfile")
    service = Path(folder).name
    assert build[0] == ("FROM", f"{BASE} AS build") and final[0] == ("FROM", BASE)
    last = dict(final)
    assert last["USER"] == "10001:10001"
    assert last["STOPSIGNAL"] == "SIGTERM"
    assert last["ENTRYPOINT"] == f'["python", "-m", "quartet_{service}"]'
    assert last["COPY"] == "--from=build /venv /venv"
    assert "CMD" not in last


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_image_copies_only_its_own_sources(repository: Path, service: str) -> None:
    build, _ = stages(repository / "services" / service / "Dockerfile")
    copied = {rest.split()[0] for word, rest in build if word == "COPY"}
    own = {"sdk", f"services/{service}"}
    assert copied == (own | {"environments"} if service == "envhost" else own)


def test_the_image_of_models_has_the_services_that_make_one(repository: Path) -> None:
    build = next(stage for stage in stages(repository / "sdk/Dockerfile") if "AS build-model" in stage[0][1])
    copied = {rest.split()[0] for word, rest in build if word == "COPY"}
    assert copied == {"sdk", *(f"services/{service}" for service in BESIDE)}
    installed = " ".join(rest for word, rest in build if word == "RUN")
    assert all(f"./services/{service}" in installed for service in BESIDE)


@pytest.mark.parametrize("service", SERVICES)
def test_torch_is_named_only_where_it_is_used(repository: Path, service: str) -> None:
    build, _ = stages(repository / "services" / service / "Dockerfile")
    named = any(word == "ARG" and rest.startswith("TORCH_REQUIREMENT=") for word, rest in build)
    assert named == (service in TORCH)


def test_no_image_names_a_registry_host(repository: Path) -> None:
    """An operator chooses where images and packages come from; the repository does not."""
    files = [
        *repository.glob("services/*/Dockerfile"),
        *repository.glob("gateways/*/Dockerfile"),
        repository / "sdk/Dockerfile",
        repository / "compose.yaml",
    ]
    assert len(files) == 7
    for path in files:
        text = path.read_text()
        assert "://" not in text, path
        for image in re.findall(r"^\s*(?:FROM|image:)\s+(\S+)", text, re.MULTILINE):
            assert "." not in image.split("/")[0].split(":")[0], (path, image)


def test_whatever_is_copied_reaches_the_builder(repository: Path) -> None:
    allowed = {
        line[1:] for line in (repository / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    sources = ("services/*", "gateways/*", "sdk")
    for path in [path for source in sources for path in repository.glob(f"{source}/Dockerfile")]:
        for word, rest in instructions(path):
            if word == "COPY" and not rest.startswith("--from"):
                assert rest.split("/")[0].split()[0] in allowed, (path, rest)
