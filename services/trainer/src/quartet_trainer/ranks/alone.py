"""The group of one process: it has all rows, all values, all tensors. Nothing here computes.

`Ranks` says what the rest of the trainer asks of the processes that it is spread over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from quartet.errors import QuartetError

if TYPE_CHECKING:
    import torch

    from quartet_trainer.logprobs import PolicyForward
    from quartet_trainer.one_pass import Pass
    from quartet_trainer.packing import MicroBatch, Row
    from quartet_trainer.recompute import Recomputed

T = TypeVar("T")

#: What to do where ranks cannot share the sequences of a model.
WITHOUT_CONTEXT = "set the trainer's context_parallel = 1"


class Ranks(Protocol):
    """The processes of one trainer. Every call is made by all of them, in the same order."""

    @property
    def first(self) -> bool:
        """Whether this is the one that serves, and keeps what is served."""
        ...

    def mine(self, rows: Sequence[Row], width: int) -> Sequence[Row]:
        """The rows that this process computes, of a model so wide."""
        ...

    def even(self, batches: list[MicroBatch], token: int) -> list[MicroBatch]:
        """The same, and empty ones of this token until there are as many as in any other process."""
        ...

    def settle(self, refused: QuartetError | None) -> None:
        """Raise what was refused in any process."""
        ...

    def join(self, done: Pass, lengths: Sequence[int]) -> None:
        """Put together what each process found; so many values belong to each sample."""
        ...

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Add up the gradients of parameters that every process has whole."""
        ...

    def agree(self, job: Callable[[], T]) -> T | None:
        """Let the first process do something without the others: its result, None in these, or its error."""
        ...

    @property
    def shares_sequences(self) -> bool:
        """Whether processes have parts of one row (ranks/context.py)."""
        ...

    def place(
        self, load: Callable[[torch.device], Any], folder: Path, device: torch.device, name: str
    ) -> Any:
        """A model, spread over the processes; `load` makes all of it on a device, errors call it `name`."""
        ...

    def policy(
        self,
        model: Any,
        device: torch.device,
        autocast: torch.dtype | None,
        recomputed: Recomputed,
    ) -> PolicyForward:
        """The function that a placed model computes; as the constructor of PolicyForward."""
        ...


class Alone:
    """One process."""

    first = True
    shares_sequences = False

    def mine(self, rows: Sequence[Row], width: int) -> Sequence[Row]:
        """All of them."""
        return rows

    def even(self, batches: list[MicroBatch], token: int) -> list[MicroBatch]:
        """As they are."""
        return batches

    def settle(self, refused: QuartetError | None) -> None:
        """Raise what was refused here."""
        if refused is not None:
            raise refused

    def join(self, done: Pass, lengths: Sequence[int]) -> None:
        """It is together."""

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """They are the sums."""

    def agree(self, job: Callable[[], T]) -> T | None:
        """Do it."""
        return job()

    def place(
        self, load: Callable[[torch.device], Any], folder: Path, device: torch.device, name: str
    ) -> Any:
        """On the device."""
        return load(device)

    def policy(
        self,
        model: Any,
        device: torch.device,
        autocast: torch.dtype | None,
        recomputed: Recomputed,
    ) -> PolicyForward:
        """The model's own."""
        from quartet_trainer.logprobs import PolicyForward

        return PolicyForward(model, device, autocast, recomputed)
