"""docs/deploy.md, "Sizes": the overlays on GPUs have room for the models that they are said to be for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from quartet import experts, trainable
from quartet.run.learning import CheckpointConfig
from quartet_envhost.config import EnvHostConfig
from quartet_inference.config import InferenceConfig

GIB = 2**30
Object = dict[str, Any]


def gibibytes(quantity: str) -> int:
    """Of a quantity written so, in bytes."""
    return int(quantity.removesuffix("Gi")) * GIB


def stateful(objects: list[Object], name: str) -> Object:
    """The specification of a tier."""
    (found,) = [
        one["spec"] for one in objects if one["kind"] == "StatefulSet" and one["metadata"]["name"] == name
    ]
    return dict(found)


@pytest.mark.parametrize(
    ("rendered", "billions"), [("gpu", 4), ("vllm", 4), ("ranks", 8), ("nodes", 8)], indirect=["rendered"]
)
def test_states_of_the_largest_model_fit_on_their_volume(objects: list[Object], billions: int) -> None:
    """Those that are kept, the next one while it is written, and the model at the end in float32."""
    claims = [one for one in objects if one["kind"] == "PersistentVolumeClaim"]
    claims += stateful(objects, "trainer").get("volumeClaimTemplates", [])
    (volume,) = [one["spec"] for one in claims if one["metadata"]["name"] in ("data", "trainer-states")]
    needed = billions * 10**9 * ((CheckpointConfig().keep_last + 1) * 12 + 4)
    assert gibibytes(volume["resources"]["requests"]["storage"]) >= needed


@pytest.mark.parametrize("rendered", ["cpu", "gpu"], indirect=True)
def test_the_orchestrator_has_room_for_twenty_journals(objects: list[Object], repository: Path) -> None:
    """What a run that is over left stays until it is deleted."""
    (claim,) = stateful(objects, "orchestrator")["volumeClaimTemplates"]
    config = tomllib.loads((repository / "k8s/base/config/orchestrator.toml").read_text())
    assert gibibytes(claim["spec"]["resources"]["requests"]["storage"]) >= 20 * config["journal_keep_bytes"]


@pytest.mark.parametrize("rendered", ["gpu"], indirect=True)
def test_the_orchestrator_has_memory_for_the_largest_batches_of_two_runs(
    objects: list[Object], compose: Object
) -> None:
    """As large as the trainer takes; in memory they are twice what they are on the wire."""
    needed = 2 * 2 * trainable.MAX_CALL_BYTES + GIB
    (container,) = stateful(objects, "orchestrator")["template"]["spec"]["containers"]
    assert gibibytes(container["resources"]["limits"]["memory"]) >= needed
    service = compose["services"]["orchestrator"]
    assert int(service["deploy"]["resources"]["limits"]["memory"].removesuffix("g")) * GIB >= needed


def test_the_trainer_has_memory_for_the_two_largest_calls(compose: Object, repository: Path) -> None:
    """docs/trainer.md: five times what they are on the wire, and experts as large as there; eight times where
    they have no log-probabilities, and so no experts."""
    sampled = 5 * trainable.MAX_CALL_BYTES + experts.MAX_CALL_BYTES
    needed = 2 * max(sampled, 8 * trainable.MAX_CALL_BYTES) + GIB
    base = yaml.safe_load_all((repository / "k8s/base/trainer.yaml").read_text())
    (container,) = stateful(list(base), "trainer")["template"]["spec"]["containers"]
    assert gibibytes(container["resources"]["limits"]["memory"]) >= needed
    service = compose["services"]["trainer"]
    assert int(service["deploy"]["resources"]["limits"]["memory"].removesuffix("g")) * GIB >= needed


@pytest.mark.parametrize("rendered", ["gpu", "ranks", "nodes"], indirect=True)
def test_an_embedded_replica_has_memory_for_its_model_and_the_versions_that_it_holds(
    objects: list[Object],
) -> None:
    """In float32 the one, in bfloat16 the others and the next, and its caches; of 2 billion parameters."""
    config = InferenceConfig.model_construct()
    caches = config.embedded.kv_cache_bytes + config.embedded.prefix_cache_bytes + config.held_delta_bytes
    needed = 2 * 10**9 * (4 + 2 * (config.held_versions + 1)) + caches
    (container,) = stateful(objects, "inference")["template"]["spec"]["containers"]
    assert gibibytes(container["resources"]["limits"]["memory"]) >= needed


@pytest.mark.parametrize("rendered", ["cpu", "gpu", "nodes"], indirect=True)
def test_a_worker_meets_its_own_limits_before_the_whole_host_does(
    objects: list[Object], compose: Object, repository: Path
) -> None:
    """docs/environments.md, "Limits": of what one environment takes the others do not die."""
    with (repository / "k8s/base/config/envhost.toml").open("rb") as file:
        config = EnvHostConfig.model_validate(tomllib.load(file))
    (pod,) = [
        one["spec"]["template"]["spec"]
        for one in objects
        if one["kind"] == "Deployment" and one["metadata"]["name"] == "envhost"
    ]
    (container,) = pod["containers"]
    (tmp,) = [one["emptyDir"] for one in pod["volumes"] if one["name"] == "tmp"]
    service = compose["services"]["envhost"]
    # Beside a worker there is the host itself, and the process that workers are forks of.
    own = GIB // 2
    assert config.max_memory_gb * GIB + own <= gibibytes(container["resources"]["limits"]["memory"])
    assert (
        config.max_memory_gb * GIB + own <= int(service["deploy"]["resources"]["limits"]["memory"][:-1]) * GIB
    )
    (room,) = re.findall(r"^/tmp:size=(\d+)m", "\n".join(service["tmpfs"]))
    assert config.max_file_gb * GIB < min(gibibytes(tmp["sizeLimit"]), int(room) * 2**20)
