"""What of a model a run trains: the whole of it here, an adapter in lora.py.

1. `parameters` have the names under which they are saved. Published names are those of the Hugging Face
   checkpoint, or peft's for an adapter.
2. `published` is a function of the given masters alone.
3. Passes compute inside `standing` or `learning` and nowhere else: a model may be shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from quartet.errors import QuartetError
from torch import Tensor, nn

from quartet_trainer import model as base
from quartet_trainer.publish import Snapshot, cast, gathered

Masters = Mapping[str, Tensor]


class Trained(Protocol):
    """A model with something in it that learns."""

    #: The model as transformers knows it.
    model: Any
    parameters: Mapping[str, nn.Parameter]
    #: Those of them that learn.
    moved: Mapping[str, nn.Parameter]
    #: The names of those that are no matrices of blocks, whatever their shape (optimizer.py, 3).
    apart: frozenset[str]
    #: adapter_config.json of what is published; empty for a whole model.
    adapter_config: str
    #: Whether a pass that learns computes what the published tensors compute, where no cast is between them.
    exact: bool

    def counts(self) -> tuple[int, int]:
        """Parameters: (trainable, all), tied ones once."""
        ...

    def frozen(self) -> Masters:
        """What never learns, by the names that it would have in `parameters`: tied ones by each of theirs."""
        ...

    def published(self, masters: Masters, served_dtype: str) -> Snapshot:
        """What is published of masters of these names: a copy."""
        ...

    def standing(self, weights: Snapshot | None) -> AbstractContextManager[Mapping[str, Tensor]]:
        """The model as it scores: the parameters of it to replace, for it to be that version; None: live."""
        ...

    def learning(self) -> AbstractContextManager[None]:
        """The model as it learns from one batch; from the same one again, until that is applied."""
        ...

    def learned(self) -> None:
        """The batch was applied."""
        ...

    def export(self, source: Path, target: Path, served_dtype: str, writes: bool = True) -> None:
        """Write the live model as a Hugging Face folder; `source` has its tokenizer.

        Or, where this rank does not write, give its part of the tensors.
        """
        ...

    def meta(self) -> dict[str, Any]:
        """What a state says of it, besides the parameters."""
        ...

    def check(self, meta: Mapping[str, Any]) -> None:
        """Whether a state can be restored upon this model. Errors: CHECKSUM_MISMATCH."""
        ...

    def restore(self, meta: Mapping[str, Any]) -> None:
        """Go on where a state was taken."""
        ...

    def close(self) -> None:
        """Nobody uses it any more. From any thread."""
        ...


def check_weights(parameters: Masters, weights: Masters) -> None:
    """Whether weights of a state are those of these parameters. Errors: CHECKSUM_MISMATCH."""
    ours, theirs = ({name: tuple(one.shape) for name, one in of.items()} for of in (parameters, weights))
    wrong = next((name for name in sorted(ours | theirs) if ours.get(name) != theirs.get(name)), None)
    if wrong is not None:
        there, here = (f"has shape {of[wrong]}" if wrong in of else "is not" for of in (theirs, ours))
        raise QuartetError(
            "CHECKSUM_MISMATCH",
            f"the state is of another model than base_model with its lora is now: {wrong} {there} in it, and "
            f"{here} here; nothing was loaded. An adapter's target_modules have to be those of the state",
            what="base_model",
        )


@contextmanager
def replaced(weights: Snapshot | None) -> Iterator[Mapping[str, Tensor]]:
    """How a whole model stands as a version."""
    yield weights or {}


class WholeModel:
    """Every parameter of a model learns, but for what is frozen in it."""

    adapter_config = ""
    exact = True

    def __init__(self, model: Any) -> None:
        self.model = model
        self.parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        self.moved: Mapping[str, nn.Parameter] = {
            name: one for name, one in self.parameters.items() if one.requires_grad
        }
        self.apart = base.embedding_names(model)

    def counts(self) -> tuple[int, int]:
        """Those that learn, and all of them."""
        return base.parameter_counts(self.model)

    def frozen(self) -> Masters:
        """What the model holds still, and routers, where the run freezes them."""
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: one for name, one in named if not one.requires_grad}

    def published(self, masters: Masters, served_dtype: str) -> Snapshot:
        """Their cast."""
        return cast(masters.items(), served_dtype)

    def standing(self, weights: Snapshot | None) -> AbstractContextManager[Mapping[str, Tensor]]:
        """All parameters, or none, are replaced."""
        return replaced(weights)

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Nothing changes."""
        yield

    def learned(self) -> None:
        """Nothing to count."""

    def export(self, source: Path, target: Path, served_dtype: str, writes: bool = True) -> None:
        """Write the folder."""
        tensors = gathered(base.untied(self.model).items(), served_dtype, writes)
        if writes:
            base.export_folder(self.model, tensors, source, target, served_dtype)

    def meta(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def check(self, meta: Mapping[str, Any]) -> None:
        """It can."""

    def restore(self, meta: Mapping[str, Any]) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""
