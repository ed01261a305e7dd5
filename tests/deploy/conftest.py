"""What the deployment tests share: the rendered overlays, the compose file with its anchors merged, the
programs of the services.
"""

from __future__ import annotations

import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.programs import Services

REPOSITORY = Path(__file__).resolve().parent.parent.parent
# Those that are shipped, and those that an operator writes: the example of docs/deploy.md, and that upon
# another, with one component more.
OVERLAYS = ("cpu", "gpu", "ranks", "nodes", "vllm", "tls", "ranks-vllm-tls")
WRITTEN = {
    "tls": {},
    "ranks-vllm-tls": {
        "resources": ["../ranks"],
        "components": ["../../components/vllm", "../../components/tls"],
    },
}


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def compose(repository: Path) -> dict[str, Any]:
    """compose.yaml as a compose engine reads it: anchors resolved, merge keys merged."""
    return yaml.safe_load((repository / "compose.yaml").read_text())


def example(repository: Path) -> dict[str, Any]:
    """The overlay with mutual TLS, as docs/deploy.md has it for whoever writes one."""
    section = (repository / "docs/deploy.md").read_text().partition("- **TLS.**")[2]
    return dict(yaml.safe_load(textwrap.dedent(section.partition("```yaml\n")[2].partition("```")[0])))


@pytest.fixture(scope="session", params=OVERLAYS)
def rendered(
    request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """One overlay as `kubectl kustomize` renders it, offline."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed: the Kubernetes overlays are not rendered and not checked here")
    k8s = repository / "k8s"
    if request.param in WRITTEN:
        k8s = shutil.copytree(k8s, tmp_path_factory.mktemp("written") / "k8s")
        (k8s / "overlays" / request.param).mkdir()
        overlay = {**example(repository), **WRITTEN[request.param]}
        (k8s / "overlays" / request.param / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    command = [kubectl, "kustomize", str(k8s / "overlays" / request.param)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def objects(rendered: str) -> list[dict[str, Any]]:
    """The objects of the overlay."""
    return [one for one in yaml.safe_load_all(rendered) if one]


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """All of them, to be run again and again."""
    with ExitStack() as opened:
        yield Services(tmp_path_factory.mktemp("programs"), opened)
