"""What samples the run of another trainer's file, whose own engine is vLLM.

1. A word about it in Quartet's keys wins.
2. Else vLLM, where the interpreter that the run names for inference has it, this one has it, or a machine
   with a GPU has one that is made for it (docs/inference.md, "Install vLLM"), which the run then names.
3. Else the embedded engine, which is said with what to write for vLLM.
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

from quartet.cli.env.installed import find
from quartet.kit.accelerator import has_driver
from quartet.run.dialect import Engine

#: Where `make install-vllm` puts it.
VLLM_PYTHON: Final = ".venv-vllm/bin/python"
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
        if self.is_chosen and self.name == "embedded":
            print(
                "sampled by the embedded engine: no vLLM is found beside this command; for vLLM "
                f"--inference.engine vllm --inference.python {VLLM_PYTHON} (docs/inference.md)",
                file=sys.stderr,
            )


def engine_of(*said: Mapping[str, Any]) -> TheirEngine:
    """That of these tables, of which the last wins. Raises ConfigError where their interpreter fails."""
    services = [one for tables in said if isinstance(one := tables.get("inference"), dict)]
    named: list[Engine] = [one["engine"] for one in services if one.get("engine") in ("embedded", "vllm")]
    if named:
        return TheirEngine(named[-1], is_chosen=False)
    pythons = [one["python"] for one in services if isinstance(one.get("python"), str)]
    if pythons:
        python = shutil.which(os.path.expanduser(pythons[-1]))  # none is refused by the launcher
        return TheirEngine("vllm" if python and find("vllm", python)[0] else "embedded")
    if importlib.util.find_spec("vllm") is not None:
        return TheirEngine("vllm")
    if has_driver() and Path(VLLM_PYTHON).exists() and find("vllm", VLLM_PYTHON)[0]:
        return TheirEngine("vllm", python=os.path.abspath(VLLM_PYTHON))
    return TheirEngine("embedded")


def has_two_gpus() -> bool:
    """Whether trainer and engine may have one each: of NVIDIA's, among those that are shown to this process;
    others are not counted without torch."""
    folder, pattern = _DEVICE_FILES
    here = len([*folder.glob(pattern)])
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return min(here, here if shown is None else len(list(filter(None, shown.split(","))))) >= 2
