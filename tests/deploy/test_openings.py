"""docs/deploy.md, "Openings": what the network policies keep closed, and how an operator opens it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

COMPONENT = "app.kubernetes.io/component"
PORTS = {50051, 8000, 443}
Object = dict[str, Any]


@pytest.fixture(scope="module")
def written(repository: Path) -> str:
    """The policies of the examples."""
    section = (repository / "docs/deploy.md").read_text().partition("### Openings")[2]
    return section.partition("```yaml\n")[2].partition("```")[0]


def selected(selector: Object) -> set[str]:
    """The components that a selector of pods names."""
    named = {one for each in selector.get("matchExpressions", []) for one in each["values"]}
    return named | {*selector.get("matchLabels", {}).values()}


def test_the_policies_are_valid_strictly(written: str, tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(written)
    command = [str(Path(sys.executable).parent / "kubernetes-validate"), "--strict", "-k", "1.32", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rendered", ["gpu"], indirect=True)
def test_the_policies_open_both_ends_of_what_they_name(written: str, objects: list[Object]) -> None:
    there = {
        one["spec"]["template"]["metadata"]["labels"][COMPONENT]
        for one in objects
        if one["kind"] in ("StatefulSet", "Deployment")
    }
    egress: dict[str, set[str]] = {}
    ingress: dict[str, set[str]] = {}
    outside = set()
    for policy in yaml.safe_load_all(written):
        assert policy["metadata"]["namespace"] == "quartet"
        here = selected(policy["spec"]["podSelector"])
        for rule in policy["spec"].get("egress", []):
            assert {one["port"] for one in rule["ports"]} <= PORTS
            for peer in rule["to"]:
                if "ipBlock" in peer:
                    outside |= here
                    continue
                for one in here:
                    egress.setdefault(one, set()).update(selected(peer["podSelector"]))
        for rule in policy["spec"].get("ingress", []):
            assert {one["port"] for one in rule["ports"]} <= PORTS
            for peer in rule["from"]:
                for one in selected(peer["podSelector"]):
                    ingress.setdefault(one, set()).update(here)
    assert egress == ingress == {"program": there} and outside == {"envhost"}


def test_the_host_takes_keys_of_judges_from_a_secret_where_there_is_one(
    objects: list[Object], repository: Path
) -> None:
    (container,) = next(
        one["spec"]["template"]["spec"]["containers"]
        for one in objects
        if one["kind"] == "Deployment" and one["metadata"]["name"] == "envhost"
    )
    (taken,) = container["envFrom"]
    assert taken["secretRef"]["optional"] is True
    section = (repository / "docs/deploy.md").read_text().partition("### Openings")[2]
    assert f"create secret generic {taken['secretRef']['name']} " in section
