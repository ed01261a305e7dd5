"""Every deployed TOML is read by its service, and the addresses in it are the deployment's own names.

The services themselves say whether a file is good: `python -m quartet_<name> @ file.toml --dry-run`. Paths
that exist only in a container are replaced by folders that exist here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from quartet.run.lora import LoraConfig

from tests.deploy.programs import Services

SERVICES = ("trainer", "inference", "envhost", "orchestrator")
FILES = (
    *(("base", service) for service in SERVICES),
    ("overlays/gpu", "trainer"),
    ("overlays/gpu", "inference"),
)
PORT = 50051
#: What a service makes of these arguments.
DryRun = Callable[..., dict[str, Any]]


def addresses(value: Any) -> Iterator[str]:
    """Everything in a configuration that looks like the address of another service."""
    if isinstance(value, dict):
        for key, one in value.items():
            if key != "server":
                yield from addresses(one)
    elif isinstance(value, list):
        for one in value:
            yield from addresses(one)
    elif isinstance(value, str) and value.endswith(f":{PORT}"):
        yield value.removeprefix("dns:///")


@pytest.fixture
def dry_run(services: Services) -> DryRun:
    """The configuration as the service understands it."""

    def dry_run(service: str, *arguments: str) -> dict[str, Any]:
        done = services.run(service, [*arguments, "--dry-run"], Path.cwd())
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    return dry_run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model."""
    from quartet.cli.tiny.files import write_model_files

    write_model_files(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(("folder", "service"), FILES)
def test_a_deployed_file_is_accepted(
    dry_run: DryRun, repository: Path, model: Path, folder: str, service: str
) -> None:
    file = repository / "k8s" / folder / "config" / f"{service}.toml"
    replaced = ("--model", str(model)) if service == "inference" else ()
    resolved = dry_run(service, "@", str(file), *replaced)
    assert resolved["server"]["address"] == f"0.0.0.0:{PORT}"
    for key in tomllib.loads(file.read_text()):
        assert key in resolved
    if service == "inference":
        assert resolved["vllm"]["max_lora_rank"] >= LoraConfig().r, "a run's adapter, where vLLM serves"


def test_a_run_waits_longer_than_a_service_may_take_to_start(
    objects: list[dict[str, Any]], compose: dict[str, Any], repository: Path
) -> None:
    """And comes back elsewhere: a run that was STOPPED meanwhile would wait for somebody to resume it."""
    config = tomllib.loads((repository / "k8s/base/config/orchestrator.toml").read_text())
    patience = config["patience_seconds"]
    for one in objects:
        if one["kind"] in ("StatefulSet", "Deployment"):
            (container,) = one["spec"]["template"]["spec"]["containers"]
            if probe := container.get("startupProbe"):
                assert 2 * probe["periodSeconds"] * probe["failureThreshold"] <= patience
    for name in SERVICES:
        assert 2 * int(compose["services"][name]["healthcheck"]["start_period"][:-1]) <= patience
    assert 2 * int(compose["services"]["inference-vllm"]["healthcheck"]["start_period"][:-1]) <= patience


@pytest.mark.parametrize("folder", [folder for folder, service in FILES if service == "trainer"])
def test_a_deployed_trainer_asks_no_hub(dry_run: DryRun, repository: Path, folder: str) -> None:
    """It reaches none: a dropped packet is answered after minutes, and the check of a run lasts seconds."""
    file = repository / "k8s" / folder / "config/trainer.toml"
    assert dry_run("trainer", "@", str(file))["hub"] is False


@pytest.mark.parametrize("service", SERVICES)
def test_tls_laid_over_the_base_closes_every_hop(
    dry_run: DryRun, repository: Path, model: Path, service: str
) -> None:
    """No plaintext is left: the server asks for client certificates, every client brings one."""
    files = [
        repository / "k8s" / place / f"{service}.toml" for place in ("base/config", "components/tls/config")
    ]
    replaced = ("--model", str(model)) if service == "inference" else ()
    resolved = dry_run(service, "@", str(files[0]), "@", str(files[1]), *replaced)
    assert resolved["server"]["tls"]["client_ca_file"] and not resolved["server"]["insecure_ok_off_loopback"]
    clients = [value for key, value in resolved.items() if key.endswith("security")]
    assert clients or service == "trainer"
    for client in clients:
        assert client["ca_file"] and client["cert_file"] and not client["insecure_ok_off_loopback"]


def test_a_wrong_key_in_a_deployed_file_would_be_noticed(
    dry_run: DryRun, repository: Path, tmp_path: Path
) -> None:
    file = tmp_path / "trainer.toml"
    file.write_text("adress = 1\n" + (repository / "k8s/base/config/trainer.toml").read_text())
    with pytest.raises(AssertionError, match="adress"):
        dry_run("trainer", "@", str(file))


@pytest.mark.parametrize(("profile", "ranks"), [("gpu", 1), ("ranks", 2)])
def test_a_trainer_of_compose_on_gpus_reads_its_arguments(
    dry_run: DryRun, compose: dict[str, Any], repository: Path, profile: str, ranks: int
) -> None:
    own = {
        "/etc/quartet/trainer.toml": str(repository / "k8s/base/config/trainer.toml"),
        "${TRAINER_RANKS:-2}": "2",
    }
    arguments = compose["services"][f"trainer-{profile}"]["command"]
    resolved = dry_run("trainer", *(own.get(one, one) for one in arguments))
    assert (resolved["device"], resolved["ranks"]) == ("cuda", ranks)


def test_inference_of_compose_by_vllm_reads_its_arguments(
    dry_run: DryRun, compose: dict[str, Any], repository: Path, model: Path
) -> None:
    file = repository / "k8s/base/config/inference.toml"
    arguments = compose["services"]["inference-vllm"]["command"]
    own = [str(file) if one.endswith(".toml") else one for one in arguments]
    assert dry_run("inference", *own, "--model", str(model))["engine"] == "vllm"


def test_compose_knows_every_address(compose: dict[str, Any], repository: Path) -> None:
    for config in compose["configs"].values():
        for address in addresses(tomllib.loads((repository / config["file"]).read_text())):
            assert address.rpartition(":")[0] in compose["services"], address


def test_kubernetes_knows_every_address(objects: list[dict[str, Any]]) -> None:
    """A service's name, or that of one of its pods, as many as there are."""
    services = {one["metadata"]["name"] for one in objects if one["kind"] == "Service"}
    replicas = {
        one["metadata"]["name"]: one["spec"]["replicas"] for one in objects if one["kind"] == "StatefulSet"
    }
    named: dict[str, set[str]] = {}
    for one in objects:
        if one["kind"] != "ConfigMap":
            continue
        (content,) = one["data"].values()
        for address in addresses(tomllib.loads(content)):
            pod, _, service = address.rpartition(":")[0].rpartition(".")
            assert service in services, address
            if pod:
                named.setdefault(service, set()).add(pod)
    for service, pods in named.items():
        assert pods == {f"{service}-{i}" for i in range(replicas[service])}


@pytest.mark.parametrize(
    ("caller", "key", "called"),
    [
        ("envhost", "inference_addresses", "inference"),
        ("orchestrator", "inference_addresses", "inference"),
        ("orchestrator", "envhost_addresses", "envhost"),
    ],
)
def test_a_tier_that_scales_is_followed_by_its_callers(
    objects: list[dict[str, Any]], caller: str, key: str, called: str
) -> None:
    """By a name that lists the pods: a virtual address would pin every stream to one of them, and so would a
    name of which one address is taken."""
    (content,) = next(
        one["data"].values()
        for one in objects
        if one["kind"] == "ConfigMap" and one["metadata"]["name"].startswith(caller)
    )
    assert tomllib.loads(content)[key] == [f"dns:///{called}:{PORT}"]
    (service,) = [one for one in objects if one["kind"] == "Service" and one["metadata"]["name"] == called]
    assert service["spec"]["clusterIP"] == "None"


def test_a_config_map_holds_what_its_pods_read(objects: list[dict[str, Any]]) -> None:
    maps = {one["metadata"]["name"]: one["data"] for one in objects if one["kind"] == "ConfigMap"}
    for one in objects:
        if one["kind"] not in ("StatefulSet", "Deployment"):
            continue
        spec = one["spec"]["template"]["spec"]
        sources = {
            volume["name"]: volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume
        }
        (container,) = spec["containers"]
        files = {
            f"{mount['mountPath']}/{name}"
            for mount in container["volumeMounts"]
            if mount["name"] in sources
            for name in maps[sources[mount["name"]]]
        }
        args = container["args"]
        read = [file for mark, file in pairwise(args) if mark == "@"]
        assert set(read) == files and len(args) == 2 * len(read) + 2 * sum(
            one.startswith("--") for one in args
        )


def test_yaml_files_are_loaded_as_their_authors_meant(repository: Path) -> None:
    """No duplicate keys, which YAML loaders accept in silence and yamllint finds."""
    tool = str(Path(sys.executable).parent / "yamllint")
    targets = [str(repository / name) for name in ("compose.yaml", "k8s")]
    done = subprocess.run(
        [tool, "-s", "-c", str(repository / ".yamllint"), *targets], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert yaml.safe_load((repository / "compose.yaml").read_text())["name"] == "quartet"
