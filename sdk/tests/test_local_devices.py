"""GPUs of one machine, divided among the processes of a run."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path
from typing import Any

import pytest
from quartet.config import ConfigError
from quartet.kit import accelerator
from quartet.local.child import Child, ChildSpec
from quartet.local.deployment import check, without_device, write
from quartet.local.devices import shared_out
from quartet.local.fork_client import ForkServer
from quartet.local.wiring import SERVICES, wire


def vllm(**inference: Any) -> dict[str, Any]:
    spans = {"tensor_parallel_size": 2}
    return {"engine": "vllm", "vllm": {"args": spans}, **inference}


def started(tmp_path: Path, inference: dict[str, Any], trainer: dict[str, Any]) -> dict[str, ChildSpec]:
    tables = {name: {} for name in SERVICES} | {"inference": inference, "trainer": trainer}
    specs = write(wire("models/x", tmp_path / "data", tables), tmp_path)
    for spec in specs:
        assert "gpus" not in tomllib.loads(Path(spec.command[-1]).read_text()), "no key of a service"
    return {spec.name: spec for spec in specs}


def visible(specs: dict[str, ChildSpec]) -> dict[str, str]:
    return {
        name: spec.environment["CUDA_VISIBLE_DEVICES"] for name, spec in specs.items() if spec.environment
    }


def test_eight_devices_in_two_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """devices.py 1 and 3: six for three replicas of two each, two for two ranks."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    specs = started(tmp_path, vllm(gpus=6), {"gpus": 2})
    assert visible(specs) == {
        "inference-1": "0,1", "inference-2": "2,3", "inference-3": "4,5", "trainer": "6,7",
    }  # fmt: skip
    assert tomllib.loads(Path(specs["trainer"].command[-1]).read_text())["ranks"] == 2


def test_devices_are_those_that_the_launcher_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b,5")
    specs = started(tmp_path, {"engine": "vllm", "gpus": 2}, {"gpus": [0]})
    assert visible(specs) == {"inference-1": "GPU-b", "inference-2": "5", "trainer": "GPU-a"}
    config = tomllib.loads(Path(specs["trainer"].command[-1]).read_text())
    assert config["device"] == "cuda", "and never the CPU, which auto would take where there is none"


def test_the_embedded_engine_has_a_replica_on_each_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """devices.py 3: and computes there or not at all."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    specs = started(tmp_path, {"gpus": 2, "embedded": {"max_num_seqs": 8}}, {"gpus": 1})
    assert visible(specs) == {"inference-1": "0", "inference-2": "1", "trainer": "2"}
    config = tomllib.loads(Path(specs["inference-1"].command[-1]).read_text())
    assert config["embedded"] == {"device": "cuda", "max_num_seqs": 8}


def test_none_is_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    specs = started(tmp_path, {"engine": "vllm", "gpus": 1}, {"gpus": 0})
    assert visible(specs) == {"inference": "0", "trainer": ""}
    assert "device" not in tomllib.loads(Path(specs["trainer"].command[-1]).read_text())


def test_where_nobody_says_anything_nothing_is_set(tmp_path: Path) -> None:
    """devices.py 2."""
    specs = started(tmp_path, {"replicas": 2}, {})
    assert visible(specs) == {}


@pytest.mark.parametrize(
    ("inference", "trainer", "seen", "sentence"),
    [
        ({"gpus": 1}, {}, None, "set trainer.gpus, too"),
        ({}, {"gpus": 2}, None, "trainer.gpus = 2 leaves open which devices inference computes on"),
        ({}, {"gpus": "abc"}, None, "trainer.gpus = 'abc' is refused: give how many, such as 2, or which"),
        ({"gpus": -1}, {"gpus": 1}, None, "inference.gpus = -1 is refused"),
        ({"gpus": True}, {"gpus": 1}, None, "inference.gpus = True is refused"),
        ({"gpus": "0,1"}, {"gpus": 1}, None, "give how many, such as 2, or which, such as"),
        ({"gpus": [0]}, {"gpus": [1, 0]}, None, "device 0 stands twice in inference and trainer"),
        ({"gpus": 3}, {"gpus": 2}, "0,1,2,3", "trainer.gpus = 2 is more than there is"),
        (
            {"gpus": 1},
            {"gpus": 0},
            "-1,0",
            "inference.gpus = 1 is more than there is: CUDA_VISIBLE_DEVICES leaves 0",
        ),
        ({"gpus": 2, "replicas": 3}, {"gpus": 1}, None, "inference.gpus are 2, but 3 replicas of 1 devices"),
        ({"gpus": [[0]]}, {"gpus": 1}, None, "inference.gpus = [[0]] is refused"),
        ({"engine": "vllm", "gpus": 1, "vllm": 3}, {"gpus": -1}, None, "trainer.gpus = -1 is refused"),
        (
            vllm(gpus=1) | {"vllm": {"args": {"tensor_parallel_size": "two"}}},
            {"gpus": 1},
            None,
            "'two' is refused",
        ),
        (vllm(gpus=1) | {"vllm": {"args": {"data_parallel_size": 0}}}, {"gpus": 1}, None, "= 0 is refused"),
        ({"gpus": [4]}, {"gpus": 1}, "0,1,2,3", "CUDA_VISIBLE_DEVICES leaves 4 devices"),
        ({"gpus": 1}, {"gpus": 2, "ranks": 4}, None, "trainer.ranks = 4 is refused"),
        (vllm(gpus=3), {"gpus": 1}, None, "inference.gpus are 3, but 1 replicas of 2 devices each"),
        (vllm(gpus=8, replicas=2), {"gpus": 1}, None, "2 replicas of 2 devices each"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    inference: dict[str, Any], trainer: dict[str, Any], seen: str | None, sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        shared_out({"inference": inference, "trainer": trainer}, seen)
    assert sentence in str(caught.value)


def test_a_service_alone_has_nobody_to_divide_with() -> None:
    assert shared_out({"trainer": {"gpus": 2}}, None) == {
        "trainer": {"gpus": ["0", "1"], "ranks": 2, "device": "cuda"}
    }


async def test_a_process_sees_what_it_was_given(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = ["/bin/sh", "-c", 'echo "sees $CUDA_VISIBLE_DEVICES"']
    spec = ChildSpec("x", command, "", log, tmp_path / "port", {"CUDA_VISIBLE_DEVICES": "2,3"})
    child = await Child.start(spec, ForkServer([], {}))
    assert await asyncio.wait_for(child.wait(), 20) == 0
    assert "sees 2,3" in log.read_text()


async def test_gpus_where_there_is_none_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerator.py: by the keys that were written."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(accelerator, "DRIVERS", (tmp_path / "none",))
    specs = list(started(tmp_path, {"gpus": 1}, {"gpus": 1}).values())
    with pytest.raises(ConfigError, match=r"inference\.gpus and trainer\.gpus ask for GPUs, and"):
        await check(specs)


async def test_a_dry_run_needs_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it needs of a machine is left out; all else of it is looked at."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(accelerator, "DRIVERS", (tmp_path / "none",))
    specs = list(started(tmp_path, {"gpus": 1}, {"gpus": 1}).values())
    assert without_device(specs) == ["inference", "trainer"]
    await check([spec for spec in specs if spec.name == "trainer"], needs_gpus=False)
    specs = list(started(tmp_path / "two", {}, {"device": "cuda"}).values())
    assert without_device(specs) == ["trainer"]
    await check([spec for spec in specs if spec.name == "trainer"], needs_gpus=False)
    with pytest.raises(ConfigError, match=r'^\[trainer\] device = "cuda", but this machine has no GPU'):
        await check([spec for spec in specs if spec.name == "trainer"])
    specs = list(started(tmp_path / "three", {"gpus": 0}, {"gpus": 1, "nonsense": 1}).values())
    with pytest.raises(ConfigError, match=r"^\[trainer\] unknown key 'nonsense'"):
        await check([spec for spec in specs if spec.name == "trainer"], needs_gpus=False)
    (tmp_path / "none").touch()
    assert without_device(specs) == []


def test_cuda_is_refused_where_no_driver_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "DRIVERS", (tmp_path / "driver",))
    with pytest.raises(ConfigError, match=r'trainer\.device = "cuda", but this machine has no GPU'):
        accelerator.check_device("cuda", "trainer.device")
    for device in ("auto", "cpu"):
        accelerator.check_device(device, "device")
    (tmp_path / "driver").touch()
    accelerator.check_device("cuda", "device")
