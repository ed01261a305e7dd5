"""compose.yaml: valid against the specification, hardened, and naming nothing that does not exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from quartet.kit.server import ServerConfig

SERVICES = {"trainer", "inference", "envhost", "orchestrator"}
JOBS = {"model", "run"}
Compose = dict[str, Any]


def default_profile(compose: Compose) -> set[str]:
    """What a plain `docker compose up` starts."""
    return {name for name, one in compose["services"].items() if not one.get("profiles")}


def test_it_follows_the_specification(repository: Path) -> None:
    tool = str(Path(sys.executable).parent / "check-jsonschema")
    command = [tool, "--builtin-schema", "vendor.compose-spec", str(repository / "compose.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_default_profile_is_the_whole_job(compose: Compose) -> None:
    assert default_profile(compose) == SERVICES | JOBS


def test_every_container_is_hardened(compose: Compose) -> None:
    for name, one in compose["services"].items():
        assert one["user"] == "10001:10001", name
        assert one["read_only"] is True and one["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in one["security_opt"], name
        assert "memory" in one["deploy"]["resources"]["limits"], name
        assert "container_name" not in one and "ports" not in one and not one.get("privileged"), name


def test_every_service_is_probed_for_progress(compose: Compose) -> None:
    for name in SERVICES:
        test = compose["services"][name]["healthcheck"]["test"]
        assert test[:4] == ["CMD", "python", "-m", "quartet.kit.probe"], name
        assert test[-2:] == ["--service", "liveness"], name


def test_a_container_has_longer_to_end_than_its_service_takes(compose: Compose) -> None:
    config = ServerConfig()
    seconds = config.drain_delay_seconds + config.flush_seconds + config.drain_seconds
    for name in SERVICES:
        assert int(compose["services"][name]["stop_grace_period"].removesuffix("s")) >= seconds + 5, name


def test_names_and_files_exist(compose: Compose, repository: Path) -> None:
    for config in compose["configs"].values():
        assert (repository / config["file"]).is_file()
    for name, one in compose["services"].items():
        build = one["build"]
        dockerfile = repository / build["context"] / build["dockerfile"]
        assert dockerfile.is_file(), name
        if "target" in build:
            assert f" AS {build['target']}\n" in dockerfile.read_text(), name
        for config in one.get("configs", []):
            assert config["source"] in compose["configs"], name
            assert config["target"] in one["command"], name
        for volume in one.get("volumes", []):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (repository / source).exists(), (name, volume)
        if "networks" in one:
            assert set(one["networks"]) <= set(compose["networks"]), name
        else:
            # The network of another container is gone for all who share it when that one starts again.
            assert one["network_mode"] == "none", name


def test_what_is_waited_for_can_come(compose: Compose) -> None:
    """A dependency exists, and has a health check where health is waited for."""
    for name, one in compose["services"].items():
        for other, condition in one.get("depends_on", {}).items():
            waited = compose["services"][other]
            if condition["condition"] == "service_healthy":
                assert "healthcheck" in waited, (name, other)
            else:
                assert other in JOBS, (name, other)
    # A submission is refused where one of these does not answer yet.
    waited_for = compose["services"]["run"]["depends_on"]
    assert all(waited_for[one]["condition"] == "service_healthy" for one in ("orchestrator", "envhost"))


@pytest.mark.parametrize("profile", ["gpu", "ranks"])
def test_a_trainer_on_gpus_answers_under_the_same_names(compose: Compose, profile: str) -> None:
    one = compose["services"][f"trainer-{profile}"]
    assert one["profiles"] == [profile]
    assert one["networks"]["circle"]["aliases"] == ["trainer"]
    assert one["image"] == compose["services"]["trainer"]["image"]
    (device,) = one["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


def test_a_trainer_of_several_ranks_has_a_gpu_for_each(compose: Compose) -> None:
    one = compose["services"]["trainer-ranks"]
    (device,) = one["deploy"]["resources"]["reservations"]["devices"]
    assert one["command"][-2:] == ["--ranks", device["count"]]
    assert int(one["shm_size"].removesuffix("g")) < int(
        one["deploy"]["resources"]["limits"]["memory"].removesuffix("g")
    )


def test_inference_by_vllm_answers_under_the_same_name_on_a_gpu_of_its_own(compose: Compose) -> None:
    one = compose["services"]["inference-vllm"]
    assert one["profiles"] == ["vllm"]
    assert one["networks"]["circle"]["aliases"] == ["inference"]
    assert one["image"] != compose["services"]["inference"]["image"], "it has another engine in it"
    assert one["build"]["args"]["EXTRAS"].split(",") == ["openai", "vllm"]
    (device,) = one["deploy"]["resources"]["reservations"]["devices"]
    (trainers,) = compose["services"]["trainer-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"] and device["device_ids"] != trainers["device_ids"]
    # What it compiles lies in /tmp, which is mounted without the right to run anything unless asked for.
    assert "exec" in one["tmpfs"][0].split(",")
    assert int(one["shm_size"].removesuffix("g")) < int(
        one["deploy"]["resources"]["limits"]["memory"].removesuffix("g")
    )


def test_nothing_starts_what_another_one_replaces(compose: Compose) -> None:
    """Both answer to one name: whatever the GPU command starts must not pull the other in by a dependency."""
    for name, one in compose["services"].items():
        assert not {"trainer", "inference"} & one.get("depends_on", {}).keys(), name


def test_the_network_is_private(compose: Compose) -> None:
    """The services speak plaintext here: nobody else may reach them, and none publishes a port."""
    assert compose["networks"] == {"circle": {"internal": True}}
    for name in SERVICES:
        assert "network_mode" not in compose["services"][name], name


def test_one_writer_of_each_data_volume(compose: Compose) -> None:
    """The models are written by the one-shot job alone; everyone else mounts them read-only."""
    writers: dict[str, list[str]] = {}
    for name in default_profile(compose):
        for volume in compose["services"][name].get("volumes", []):
            if not volume.endswith(":ro"):
                writers.setdefault(volume.split(":")[0], []).append(name)
    assert writers == {"models": ["model"], "trainer": ["trainer"], "orchestrator": ["orchestrator"]}
