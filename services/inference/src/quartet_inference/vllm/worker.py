"""What Quartet adds to each of vLLM's workers: changing the weights, taking adapters, wiping the
keys, telling experts.

1. Methods that the engine calls never raise: with several workers an exception would leave the answers of the
   others in the queue, to be taken for those of the next call.
2. Everything of a version is read before the first layer is touched (`loading`).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from quartet.kit.memory import tune_allocator
from safetensors import safe_open
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from quartet_inference.vllm import environment, faults, noting
from quartet_inference.vllm.fetched import Fetched
from quartet_inference.vllm.loading import Loading
from quartet_inference.vllm.mends import mend

# A load takes and frees the size of the model twice; from fresh pages that would be a third of the pause.
tune_allocator()
#: What the tuned allocator keeps once it is freed; blocks of the size of small tensors.
WARM_BYTES, WARM_BLOCK_BYTES = 256 << 20, 1 << 20
environment.end_with_service()
faults.write()
# It warns at every update of layers without weights of their own, such as a tied head; `loading` checks.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
mend()
noting.install()


class WeightWorker:
    """Mixed into vLLM's worker class."""

    quartet_fetched: Fetched | None = None
    quartet_loading: Loading | None = None
    device: torch.device
    model_runner: Any
    vllm_config: Any

    def quartet_fetch(self, path: str) -> dict[str, Any]:
        """Copy one more piece of a version to the device; whether there is more of it."""
        try:
            if self.quartet_fetched is None or self.quartet_fetched.path != path:
                self.quartet_fetched = None  # another version, which nobody has loaded
                self.quartet_fetched = Fetched(path, self.device)
            return {"ok": True, "more": self.quartet_fetched.more()}
        except Exception as error:  # noqa: BLE001 - see 1
            self.quartet_fetched = None
            return {"ok": False, "why": f"{type(error).__name__}: {error}"}

    def quartet_load(self, path: str) -> dict[str, Any]:
        """Replace all weights by those of a safetensors file, or by what was fetched of it.

        "touched" says whether a failure has left the worker without a whole model, "reloads" why versions are
        not loaded by copies alone.
        """
        touched = False
        try:
            # Whatever it is: nobody loads it after this, and the load needs its room.
            fetched, self.quartet_fetched = self.quartet_fetched, None
            if fetched is not None and fetched.path == path and fetched.complete:
                tensors = fetched.tensors
            else:
                del fetched
                with safe_open(path, "pt") as file:
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            if self.quartet_loading is None:
                self.quartet_loading = Loading(self.model_runner.get_model(), self.vllm_config)
            load = self.quartet_loading.prepared(tensors)
            touched = True
            load()
            self.model_runner.reset_lora_state()
        except Exception as error:  # noqa: BLE001 - see 1
            return {"ok": False, "touched": touched, "why": f"{type(error).__name__}: {error}"}
        return {"ok": True, "reloads": self.quartet_loading.why}

    def quartet_warm(self, nbytes: str) -> dict[str, Any]:
        """Touch as much memory as a load of a version of this size takes, and give it to the allocator."""
        share = int(nbytes) // int(self.vllm_config.parallel_config.tensor_parallel_size)
        if current_platform.is_cpu():
            count = min(share, WARM_BYTES) // WARM_BLOCK_BYTES
            blocks = [torch.ones(WARM_BLOCK_BYTES, dtype=torch.uint8) for _ in range(count)]
            del blocks
        return {"ok": True}

    def quartet_add_adapter(self, name: str, number: str, path: str) -> dict[str, Any]:
        """Take an adapter from a folder."""
        try:
            self.model_runner.add_lora(LoRARequest(lora_name=name, lora_int_id=int(number), lora_path=path))
        except Exception as error:  # noqa: BLE001 - see 1
            return {"ok": False, "touched": False, "why": f"{type(error).__name__}: {error}"}
        return {"ok": True}

    def quartet_wipe(self) -> dict[str, Any]:
        """Make every key and value finite: masking multiplies by zero, which keeps a NaN."""
        try:
            for cache in self.model_runner.kv_caches:
                if cache.is_floating_point():
                    cache.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        except Exception as error:  # noqa: BLE001 - see 1
            return {"ok": False, "touched": False, "why": f"{type(error).__name__}: {error}"}
        return {"ok": True}

    def quartet_experts(self, name: str, start: str, end: str) -> dict[str, Any]:
        """What was noted of a submission, where it is this worker that has noted it."""
        try:
            told: dict[str, Any] = self.model_runner.quartet_noting.told(name, int(start), int(end))
        except Exception as error:  # noqa: BLE001 - see 1
            return {"ok": False, "why": f"{type(error).__name__}: {error}"}
        return {"ok": True, **told}

    def quartet_forget(self, names: str) -> dict[str, Any]:
        """Keep nothing of these submissions; says of how many something is kept."""
        try:
            self.model_runner.quartet_noting.forget(names.split(","))
            kept = self.model_runner.quartet_noting.count()
        except Exception as error:  # noqa: BLE001 - see 1
            return {"ok": False, "why": f"{type(error).__name__}: {error}"}
        return {"ok": True, "kept": kept}
