"""The transformers model of the embedded engine, and its weights by name.

1. Weights have the names of the Hugging Face model's `named_parameters()`: a tied parameter once, under its
   first name.
2. `stage` accepts a version only if its names, shapes and dtypes fit the model (layout.py); nothing is
   changed by it.
3. `apply` copies into the parameters in place; whatever views them sees the new weights.
4. On a GPU `stage` copies in a stream of its own: no decode step waits for it. `apply` has ended when its
   copies have.
5. A folder's own Python is never run, and nothing pickled is read.
6. Weights that a checkpoint has quantized are widened as they are loaded, or it is refused
   (quartet.quantized); so is one that has an adapter beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from quartet import quantized
from quartet.config import ConfigError
from quartet.weights.manifest import build_manifest
from quartet.weights.tensor import Tensor
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from quartet_inference.embedded import attention
from quartet_inference.layout import Layout, check_layout, layout_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
#: Errors of loading a model: ImportError as where accelerate is missing, without which nothing is widened.
UNLOADED = (
    *(ImportError, KeyError, OSError, RuntimeError, ValueError),
    *(SafetensorError, StrictDataclassError),
)
_NAMED = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


def has_weights(folder: Path) -> bool:
    """Whether a model's folder has more than its configuration."""
    return any(folder.glob("*.safetensors"))


def load(folder: Path, dtype: str, *, weights_follow: bool) -> nn.Module:
    """The causal LM of a local folder, on the CPU. Errors: ConfigError.

    Where its first weights come from a trainer, config.json is enough, and quantized weights are left unread.
    """
    lacking: list[str] = []
    unread = ""
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        found = quantized.refusal(config, folder)
        # An adapter is soon moved: no reason to begin with random weights where good ones lie beside it.
        unreadable = found and not quantized.has_adapter(folder)
        if weights_follow and (unreadable or not has_weights(folder)):
            model: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                quantized.plain(config), dtype=DTYPES[dtype]
            )
        else:
            if found:
                raise ConfigError(f"model = {str(folder)!r} cannot be loaded: {'; '.join(found)}")
            # Annotated as a model; with output_loading_info it is a pair.
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(folder),
                config=quantized.widening(config),
                dtype=DTYPES[dtype],
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
            model, report = loaded
            lacking = sorted(report["missing_keys"])
            unread = quantized.unread(config, report["unexpected_keys"])
            quantized.plain(model.config)
    except UNLOADED as error:
        raise ConfigError(f"model = {str(folder)!r} cannot be loaded: {error}") from error
    if lacking and not weights_follow:  # transformers fills them with random numbers, and says so in a log
        raise ConfigError(
            f"model = {str(folder)!r} cannot be served: its weights lack {len(lacking)} tensors, the first "
            f"is {lacking[0]}; give a complete checkpoint"
        )
    if unread and not weights_follow:
        raise ConfigError(f"model = {str(folder)!r} cannot be served: {unread}; {quantized.REMEDY}")
    attention.use(model)
    model.eval()
    model.requires_grad_(False)
    return model


def read(folder: Path, dtype: str) -> dict[str, Tensor]:
    """The weights of a local folder as a version's tensors, while another model computes in this process."""
    # transformers makes the dtype of a load the default of the whole process meanwhile; float32 is it anyway.
    return ModelWeights(load(folder, "float32", weights_follow=False).to(DTYPES[dtype])).tensors()


def as_torch(tensor: Tensor) -> torch.Tensor:
    """A checked tensor in its own dtype, and in its own memory where that is writable."""
    raw = np.frombuffer(tensor.data, dtype=np.uint8)
    raw = raw if raw.flags.writeable else raw.copy()  # torch wants its memory writable
    return torch.from_numpy(raw).view(_NAMED[tensor.dtype]).view(tensor.shape)


def as_wire(tensor: torch.Tensor) -> Tensor:
    """A tensor as a version has it: a view where it lies on the CPU in one piece."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return Tensor(SAFETENSORS_NAMES[tensor.dtype], tuple(tensor.shape), memoryview(flat.numpy().data))


def made_for(model: nn.Module, asked: int | None) -> int:
    """The longest sequence to serve: as asked for, or what the model was made for. Errors: ConfigError."""
    config: Any = model.config
    # Where there is no end XLNet says -1.
    positions = max(0, getattr(config.get_text_config(), "max_position_embeddings", None) or 0)
    most = positions or asked
    if most is None:
        raise ConfigError(f"max_model_len: {type(model).__name__} does not say what it was made for; set it")
    if asked is not None and asked > most:
        raise ConfigError(
            f"max_model_len = {asked} is refused: the model was made for {most}; choose at most that"
        )
    return asked or most


@dataclass(frozen=True)
class StagedWeights:
    """Checked tensors on the device of the model, ready to be copied. On the CPU they may be views of the
    payload they came in."""

    tensors: dict[str, torch.Tensor]


class ModelWeights:
    """The parameters of a model."""

    def __init__(self, model: nn.Module) -> None:
        # Of some mixtures transformers keeps routers in float32, whatever it is asked for.
        self._parameters = dict(model.named_parameters())
        self._stream: torch.cuda.Stream | None = None
        device = next(iter(self._parameters.values())).device
        if device.type == "cuda":
            # One for good: the allocator keeps what a stream gives back for the same stream.
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def layout(self) -> Layout:
        """What a version must consist of."""
        return {
            key: (SAFETENSORS_NAMES[parameter.dtype], tuple(parameter.shape))
            for key, parameter in self._parameters.items()
        }

    def tensors(self) -> dict[str, Tensor]:
        """What is held now, as a version has it: views, where the model is on the CPU."""
        return {name: as_wire(parameter) for name, parameter in self._parameters.items()}

    def digest(self) -> bytes:
        """WeightManifest.digest of what is held now. Hashes every byte."""
        return bytes(build_manifest("", 0, self.tensors()).digest)

    def stage(self, tensors: Mapping[str, Tensor]) -> StagedWeights:
        """Check a version against the model. Errors: INVALID_REQUEST."""
        check_layout(layout_of(tensors), self.layout())
        staged = {}
        # It waits for each copy before it makes the next.
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for name, parameter in self._parameters.items():
                staged[name] = as_torch(tensors[name]).to(parameter).view(parameter.shape)
        return StagedWeights(staged)

    def apply(self, staged: StagedWeights) -> None:
        """Copy staged weights into the model."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(staged.tensors[name])
        if self._stream is not None:
            # Whoever drops what was staged gives its memory to the next version.
            torch.cuda.current_stream(self._stream.device).synchronize()
