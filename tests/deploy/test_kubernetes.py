"""The rendered overlays: valid against the schemas, hardened, wired to each other without a loose end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from quartet.kit.server import ServerConfig

SCHEMAS = "1.32"  # the newest release that both kubectl here and the bundled schemas know
SERVICES = {"trainer", "inference", "envhost", "orchestrator"}
EDGES = {
    ("client", "orchestrator"),
    ("orchestrator", "trainer"),
    ("orchestrator", "envhost"),
    ("orchestrator", "inference"),
    ("envhost", "inference"),
    ("inference", "trainer"),
    ("inference", "inference"),
}
#: Of a trainer over several nodes: the ranks after those of the first.
NODES = "trainer-nodes"
EDGES_OF_NODES = {("trainer", NODES), (NODES, "trainer"), (NODES, NODES)}
COMPONENT = "app.kubernetes.io/component"

Object = dict[str, Any]


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    """The objects of these kinds."""
    return [one for one in objects if one["kind"] in kinds]


def pods(objects: list[Object]) -> dict[str, Object]:
    """Pod templates by the name of their workload."""
    return {
        one["metadata"]["name"]: one["spec"]["template"]
        for one in of_kind(objects, "StatefulSet", "Deployment", "Job")
    }


def containers(objects: list[Object]) -> list[tuple[str, Object]]:
    """Every container, init containers included, with the name of its workload."""
    found = []
    for name, template in pods(objects).items():
        spec = template["spec"]
        found += [(name, one) for one in [*spec.get("initContainers", []), *spec["containers"]]]
    return found


def probed(probe: Object) -> tuple[int, str]:
    """Port and health key that a probe asks for, by the kubelet or by our own command."""
    if "grpc" in probe:
        return probe["grpc"]["port"], probe["grpc"].get("service", "")
    command = probe["exec"]["command"]
    assert command[:3] == ["python", "-m", "quartet.kit.probe"]
    options = dict(zip(command[3::2], command[4::2], strict=True))
    assert "--ca-file" in options, "only TLS needs a command"
    return int(options["--address"].rpartition(":")[2]), options["--service"]


def selects(labels: dict[str, str], template: Object) -> bool:
    """Whether a selector of these labels matches pods of the template."""
    return labels.items() <= template["metadata"]["labels"].items()


def test_every_object_is_valid_strictly(rendered: str, tmp_path: Path) -> None:
    file = tmp_path / "rendered.yaml"
    file.write_text(rendered)
    command = [str(Path(sys.executable).parent / "kubernetes-validate"), "--strict", "-k", SCHEMAS, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") + done.stderr.count("passed") >= len(SERVICES)


def test_the_pod_that_loads_models_is_valid_hardened_and_mounts_their_volume(
    repository: Path, objects: list[Object]
) -> None:
    file = repository / "k8s" / "load-models.yaml"
    command = [str(Path(sys.executable).parent / "kubernetes-validate"), "--strict", "-k", SCHEMAS, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    pod = yaml.safe_load(file.read_text())
    # As a workload, so that it is held to what theirs are held to.
    workload = {"kind": "Job", "metadata": pod["metadata"], "spec": {"template": pod}}
    claims = of_kind(objects, "PersistentVolumeClaim")
    test_every_pod_is_hardened([workload])
    test_every_container_says_what_it_needs([workload])
    test_every_mount_has_its_volume_and_every_claim_exists([workload, *claims])


def test_the_four_services_are_there_once(objects: list[Object]) -> None:
    names = [one["metadata"]["name"] for one in of_kind(objects, "StatefulSet", "Deployment")]
    assert sorted({*names} - {NODES}) == sorted(SERVICES) and len({*names}) == len(names)


def test_everything_lives_in_the_namespace(objects: list[Object]) -> None:
    for one in objects:
        if one["kind"] != "Namespace":
            assert one["metadata"].get("namespace") == "quartet", one["metadata"]


def test_every_pod_is_hardened(objects: list[Object]) -> None:
    for name, template in pods(objects).items():
        security = template["spec"]["securityContext"]
        assert security["runAsNonRoot"] is True and security["runAsUser"] == 10001, name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert template["spec"]["automountServiceAccountToken"] is False, name
    for name, container in containers(objects):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True, name
        assert security["allowPrivilegeEscalation"] is False, name
        assert security["capabilities"] == {"drop": ["ALL"]}, name


def test_what_environments_leave_behind_is_reaped(objects: list[Object]) -> None:
    """As by compose's `init`: the host, as a container's first process, waits for its workers alone."""
    assert pods(objects)["envhost"]["spec"]["shareProcessNamespace"] is True


def test_every_container_says_what_it_needs(objects: list[Object]) -> None:
    for name, container in containers(objects):
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), name
        assert "memory" in container["resources"]["limits"], name


def test_images_that_a_node_has_are_not_pulled(objects: list[Object]) -> None:
    """A name without a tag would be pulled each time, and a local cluster has no registry."""
    assert {one["imagePullPolicy"] for _, one in containers(objects)} == {"IfNotPresent"}


def test_every_image_can_be_given_another_tag_in_place(objects: list[Object]) -> None:
    """What a Job or a Pod runs cannot be changed: applied anew, all the rest would be, and this refused."""
    assert not of_kind(objects, "Job", "Pod")


@pytest.mark.parametrize("rendered", ["cpu"], indirect=True)
def test_the_small_overlay_fits_a_local_cluster(objects: list[Object]) -> None:
    """Two cores, 6 GiB: of which the system's own pods take a half core and a GiB."""
    needs = [one["resources"] for _, one in containers(objects)]
    assert sum(millicores(one["requests"]["cpu"]) for one in needs) <= 1500
    assert sum(mebibytes(one["requests"]["memory"]) for one in needs) <= 5 * 1024


def millicores(quantity: str) -> int:
    """Of a quantity written so, or of whole cores."""
    return int(quantity.removesuffix("m")) if quantity.endswith("m") else 1000 * int(quantity)


def mebibytes(quantity: str) -> int:
    """Of a quantity in either unit."""
    return int(quantity.removesuffix("Mi")) if quantity.endswith("Mi") else 1024 * gibibytes(quantity)


def ranks(container: Object) -> int:
    """Of a pod of the trainer."""
    words = [*container.get("command", []), *container["args"]]
    flag = next((one for one in ("--nproc-per-node", "--ranks") if one in words), None)
    return int(words[words.index(flag) + 1]) if flag else 1


def test_a_trainer_of_several_ranks_has_a_gpu_for_each(objects: list[Object]) -> None:
    """And memory between them for NCCL, within its limit."""
    for name in {"trainer", NODES} & pods(objects).keys():
        spec = pods(objects)[name]["spec"]
        (container,) = spec["containers"]
        assert container["resources"]["limits"].get("nvidia.com/gpu", 1) == ranks(container)
        assert has_shared_memory(spec) == (ranks(container) > 1)


def test_the_nodes_of_a_trainer_find_each_other(objects: list[Object]) -> None:
    """One torchrun on each, which agree in all but their number, and one folder of states."""
    from torch.distributed.run import get_args_parser

    sets = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "StatefulSet")}
    if NODES not in sets:
        return
    said = {}
    for name in ("trainer", NODES):
        (container,) = sets[name]["template"]["spec"]["containers"]
        assert container["command"][:3] == ["python", "-m", "torch.distributed.run"]
        words = [*container["command"][3:], *container["args"]]
        filled = ["1" if one == "$(NODE_RANK)" else one for one in words]
        said[name] = vars(get_args_parser().parse_args(filled))
    first, others = said["trainer"], said[NODES]
    assert (first.pop("node_rank"), others.pop("node_rank")) == (0, 1) and first == others
    assert first["module"] and first["training_script"] == "quartet_trainer"
    assert first["training_script_args"] == ["@", "/etc/quartet/trainer.toml"]
    assert first["master_addr"] == f"trainer-0.{sets['trainer']['serviceName']}"
    assert int(first["nnodes"]) == sets["trainer"]["replicas"] + sets[NODES]["replicas"]
    (container,) = sets[NODES]["template"]["spec"]["containers"]
    (variable,) = container["env"]
    assert variable["name"] == "NODE_RANK" and sets[NODES]["ordinals"] == {"start": 1}
    assert "apps.kubernetes.io/pod-index" in variable["valueFrom"]["fieldRef"]["fieldPath"]
    claims = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "PersistentVolumeClaim")}
    for name in ("trainer", NODES):
        volumes = {one["name"]: one for one in sets[name]["template"]["spec"]["volumes"]}
        claim = claims[volumes["data"]["persistentVolumeClaim"]["claimName"]]
        assert claim["accessModes"] == ["ReadWriteMany"]


def test_vllm_has_its_image_a_gpu_and_room_for_weights(objects: list[Object]) -> None:
    """And nothing of it is asked for where the embedded engine serves."""
    spec = pods(objects)["inference"]["spec"]
    (container,) = spec["containers"]
    is_vllm = "vllm" in container["args"]
    assert container["image"] == ("quartet-inference-vllm" if is_vllm else "quartet-inference")
    assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == is_vllm
    assert has_shared_memory(spec) == is_vllm
    tolerated = [one["key"] for one in spec.get("tolerations", [])]
    assert tolerated == (["nvidia.com/gpu"] if is_vllm else [])


def has_shared_memory(spec: Object) -> bool:
    """Whether a pod has memory at /dev/shm; if so, within the limit of its container."""
    (container,) = spec["containers"]
    memory = {one["name"]: one["emptyDir"] for one in spec["volumes"] if "emptyDir" in one}
    shared = [memory[one["name"]] for one in container["volumeMounts"] if one["mountPath"] == "/dev/shm"]
    for one in shared:
        limit = container["resources"]["limits"]["memory"]
        assert one["medium"] == "Memory" and gibibytes(one["sizeLimit"]) < gibibytes(limit)
    return bool(shared)


def gibibytes(quantity: str) -> int:
    """Of a quantity written so."""
    return int(quantity.removesuffix("Gi"))


def test_every_service_is_probed_for_progress(objects: list[Object]) -> None:
    for name, template in pods(objects).items():
        if name not in SERVICES:
            continue
        (container,) = template["spec"]["containers"]
        ports = {one["containerPort"] for one in container["ports"]}
        # Without a run inference has no weights, and yet has to count as updated.
        ready = "liveness" if name == "inference" else ""
        for kind, asked in (("startup", "liveness"), ("liveness", "liveness"), ("readiness", ready)):
            port, service = probed(container[f"{kind}Probe"])
            assert port in ports and service == asked, (name, kind)


def test_a_pod_has_longer_to_end_than_its_service_takes(objects: list[Object]) -> None:
    config = ServerConfig()
    for name in SERVICES:
        files = [one for one in of_kind(objects, "ConfigMap") if one["metadata"]["name"].startswith(name)]
        assert not any("drain" in text or "flush" in text for one in files for text in one["data"].values())
        seconds = config.drain_delay_seconds + config.flush_seconds + config.drain_seconds
        assert pods(objects)[name]["spec"]["terminationGracePeriodSeconds"] >= seconds + 5


def test_every_selector_matches_exactly_its_workload(objects: list[Object]) -> None:
    templates = pods(objects)
    for service in of_kind(objects, "Service"):
        matched = [name for name, one in templates.items() if selects(service["spec"]["selector"], one)]
        assert matched == [service["metadata"]["name"]]
    for budget in of_kind(objects, "PodDisruptionBudget"):
        labels = budget["spec"]["selector"]["matchLabels"]
        assert [name for name, one in templates.items() if selects(labels, one)] == [
            budget["metadata"]["name"]
        ]
    for workload in of_kind(objects, "StatefulSet", "Deployment"):
        assert selects(workload["spec"]["selector"]["matchLabels"], workload["spec"]["template"])


def test_every_service_port_is_a_port_of_its_pods(objects: list[Object]) -> None:
    templates = pods(objects)
    for service in of_kind(objects, "Service"):
        (container,) = templates[service["metadata"]["name"]]["spec"]["containers"]
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]


def test_stateful_sets_have_a_headless_service(objects: list[Object]) -> None:
    services = {one["metadata"]["name"]: one for one in of_kind(objects, "Service")}
    for one in of_kind(objects, "StatefulSet"):
        assert services[one["spec"]["serviceName"]]["spec"]["clusterIP"] == "None"


def test_every_mount_has_its_volume_and_every_claim_exists(objects: list[Object]) -> None:
    claims = {one["metadata"]["name"] for one in of_kind(objects, "PersistentVolumeClaim")}
    maps = {one["metadata"]["name"] for one in of_kind(objects, "ConfigMap")}
    templated = {
        one["metadata"]["name"]: {
            claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", [])
        }
        for one in of_kind(objects, "StatefulSet")
    }
    for name, template in pods(objects).items():
        volumes = template["spec"]["volumes"]
        have = {one["name"] for one in volumes} | templated.get(name, set())
        for container in template["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == have, name
        for one in volumes:
            if "persistentVolumeClaim" in one:
                assert one["persistentVolumeClaim"]["claimName"] in claims
            if "configMap" in one:
                assert one["configMap"]["name"] in maps


def test_writers_are_alone_and_keep_their_data(objects: list[Object]) -> None:
    writers = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "StatefulSet")}
    for name in ("trainer", "orchestrator"):
        assert writers[name]["replicas"] == 1
        own = [one["metadata"]["name"] for one in writers[name].get("volumeClaimTemplates", [])]
        claimed = [
            one["name"]
            for one in writers[name]["template"]["spec"]["volumes"]
            if "persistentVolumeClaim" in one
        ]
        assert "data" in own + claimed, name


def test_nothing_is_allowed_by_default(objects: list[Object]) -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "NetworkPolicy")}
    assert policies["default-deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_the_open_edges_are_those_of_the_circle(objects: list[Object]) -> None:
    """Both ends of an edge must open it; a policy that opens one end only, or another edge, fails here."""
    ingress, egress = set(), set()
    for policy in of_kind(objects, "NetworkPolicy"):
        here = policy["spec"]["podSelector"].get("matchLabels", {}).get(COMPONENT)
        for rule in policy["spec"].get("ingress", []):
            for peer in rule["from"]:
                if "podSelector" in peer:
                    ingress.add((peer["podSelector"]["matchLabels"][COMPONENT], here))
        for rule in policy["spec"].get("egress", []):
            for peer in rule["to"]:
                if "podSelector" in peer:
                    egress.add((here, peer["podSelector"]["matchLabels"][COMPONENT]))
    edges = EDGES | (EDGES_OF_NODES if NODES in pods(objects) else set())
    assert ingress == edges
    assert egress == edges


def test_ports_of_network_policies_exist(objects: list[Object]) -> None:
    names = {port["name"] for _, one in containers(objects) for port in one.get("ports", [])}
    for policy in of_kind(objects, "NetworkPolicy"):
        for rule in [*policy["spec"].get("ingress", []), *policy["spec"].get("egress", [])]:
            for port in rule.get("ports", []):
                assert port["port"] in names or port["port"] == 53, policy["metadata"]["name"]
