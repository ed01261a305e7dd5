"""What samples the run of another trainer's file, whose own engine is vLLM.

1. A word about it in Quartet's keys wins.
2. Else vLLM, where the interpreter that the run names for inference has it, or this one. Else that which is
   made for it (docs/inference.md, "Install vLLM"), which the run then names, and which is said: where it has
   the build for GPUs, and trainer and engine get one each, as vLLM wants them.
3. Else the embedded engine, which is said with what to write for vLLM.
4. Where no service is started nobody asks another interpreter.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quartet.cli.env.installed import find, run_in
from quartet.config import ConfigError
from quartet.kit.accelerator import has_driver
from quartet.local.devices import devices_of
from quartet.run.dialect import Engine

#: Where `make install-vllm` puts it.
VLLM_PYTHON: Final = ".venv-vllm/bin/python"
#: Exit code 0 if it is the build for GPUs: that for CPUs has the same module, by another distribution, or one
#: whose version says so.
_FIND_GPU_BUILD: Final = (
    "import importlib.metadata, sys; sys.exit('cpu' in importlib.metadata.version('vllm'))"
)
#: What says in Quartet's own words how a service computes.
_COMPUTES: Final = frozenset({"replicas", "ranks", "device"})
#: Of each device that a process of CUDA may see.
_DEVICE_FILES: Final = (Path("/dev"), "nvidia[0-9]*")


@dataclass(frozen=True)
class TheirEngine:
    """The engine that samples in the place of theirs."""

    name: Engine
    #: Where nobody said that it is to be this one.
    is_chosen: bool = True
    #: The interpreter that has it, where the run does not name it.
    python: str | None = None

    def tell(self) -> None:
        """What somebody who counts on vLLM would not see otherwise."""
        said = ""
        if self.python is not None:
            said = f"sampled by vLLM, which {VLLM_PYTHON} has; otherwise --inference.engine embedded"
        elif self.is_chosen and self.name == "embedded":
            said = (
                "sampled by the embedded engine; for vLLM "
                f"--inference.engine vllm --inference.python {VLLM_PYTHON}"
            )
        if said:
            print(f"{said} (docs/inference.md)", file=sys.stderr)


def engine_of(*said: Mapping[str, Any], starts_services: bool = True) -> TheirEngine:
    """That of these tables, of which the last wins. Raises ConfigError where their interpreter fails."""
    services = [one for tables in said if isinstance(one := tables.get("inference"), dict)]
    named: list[Engine] = [one["engine"] for one in services if one.get("engine") in ("embedded", "vllm")]
    if named:
        return TheirEngine(named[-1], is_chosen=False)
    pythons = [one["python"] for one in services if isinstance(one.get("python"), str)]
    if pythons and starts_services:
        python = shutil.which(os.path.expanduser(pythons[-1]))  # none is refused by the launcher
        return TheirEngine("vllm" if python and find("vllm", python)[0] else "embedded")
    if importlib.util.find_spec("vllm") is not None:
        return TheirEngine("vllm")
    if starts_services and Path(VLLM_PYTHON).exists() and has_two_gpus(*said) and _has_gpu_build(VLLM_PYTHON):
        return TheirEngine("vllm", python=os.path.abspath(VLLM_PYTHON))
    return TheirEngine("embedded")


def has_two_gpus(*said: Mapping[str, Any]) -> bool:
    """Whether trainer and engine may have one each: of NVIDIA's, among those that are shown to this process;
    others are not counted without torch. Not where these tables say in Quartet's own words how they compute,
    which devices that are given out would contradict."""
    if not has_driver() or any(
        isinstance(one := tables.get(name), dict) and _computes(one)
        for tables in said
        for name in ("trainer", "inference")
    ):
        return False
    folder, pattern = _DEVICE_FILES
    here = len([*folder.glob(pattern)])
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return min(here, here if shown is None else len(devices_of(shown))) >= 2


def _computes(service: Mapping[str, Any]) -> bool:
    embedded = service.get("embedded")
    has_device = isinstance(embedded, dict) and "device" in embedded
    return bool(service.keys() & _COMPUTES) or has_device or service.get("gpus", 1) in (0, [])


def _has_gpu_build(python: str) -> bool:
    try:
        return run_in(python, _FIND_GPU_BUILD).returncode == 0
    except ConfigError:  # nobody named it
        return False
