"""The one model: what the trainer loads, what scripts call it, where its tokenizer is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet_tinker.config import GatewayConfig
from quartet_tinker.refusal import Refused
from quartet_tinker.sampling import Sampling


@dataclass(frozen=True)
class Names:
    """Of the model."""

    # A folder or hub id, for the trainer.
    folder: str
    # What scripts give as base_model.
    name: str
    # From where scripts load it.
    tokenizer: str
    max_context_length: int

    def check(self, wanted: str | None) -> None:
        """Whether this is what a script wants. Raises Refused."""
        if wanted not in (self.name, self.folder):
            raise Refused(f"base_model = {wanted!r} is not served here; give {self.name!r}")


class ServedModel:
    """Asks inference once."""

    def __init__(self, config: GatewayConfig, sampling: Sampling) -> None:
        self._config, self._sampling = config, sampling
        self._names: Names | None = None

    async def names(self) -> Names:
        """Of the model. Raises QuartetError."""
        if self._names is None:
            served = await self._sampling.model()
            folder = self._config.model or served.base_model
            name = self._config.model_name or folder
            tokenizer = _from_anywhere(self._config.tokenizer or folder)
            self._names = Names(folder, name, tokenizer, int(served.max_model_len))
        return self._names

    async def capabilities(self) -> dict[str, Any]:
        """The one model, as the SDK lists models."""
        names = await self.names()
        about = {"max_context_length": names.max_context_length, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": names.name, **about}]}


def _from_anywhere(tokenizer: str) -> str:
    """A folder by its whole path: a script's working directory is another one, where it would be a hub id."""
    path = Path(tokenizer)
    return str(path.resolve()) if path.is_dir() else tokenizer
