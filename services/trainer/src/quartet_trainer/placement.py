"""The base model of a run, where the run computes: loaded, probed, placed on the device or spread over the
ranks, with fused layers where the machine has them.

What is placed computes rightly: it was compared with the model's own forward pass, before layers were fused
and after.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quartet_trainer import kernels
from quartet_trainer import model as base
from quartet_trainer.frozen import narrow
from quartet_trainer.logprobs import PolicyForward
from quartet_trainer.machine import Machine
from quartet_trainer.probe import probe, probe_logprobs, tolerated
from quartet_trainer.ranks.alone import WITHOUT_CONTEXT
from quartet_trainer.recompute import NOTHING
from quartet_trainer.worker import release_memory

#: What a model raises that ranks cannot share, in all of them. No RuntimeError: one rank alone may be out of
#: memory, or hear that another one died.
UNSHARED = (AssertionError, AttributeError, LookupError, TypeError, ValueError)


def placed(
    machine: Machine, folder: Path, name: str, autocast: torch.dtype | None, seed: int | None = None
) -> Any:
    """The model of a folder, or with a seed one of random weights; `name` is what errors call it.

    Errors: INVALID_CONFIG.
    """
    # A model refers to itself: one that was loaded for a run that was refused is still there.
    release_memory()
    ranks = machine.ranks
    alone: list[torch.Tensor] = []

    def logprobs(
        policy: PolicyForward, shift: int, row_tokens: int | None = machine.row_tokens
    ) -> torch.Tensor:
        return probe_logprobs(policy, base.vocab_size(policy.model), row_tokens, shift)

    def of_rows(policy: PolicyForward) -> torch.Tensor:
        """Of rows that samples share, and of rows of one sample, which attention sees otherwise."""
        return torch.cat([logprobs(policy, 0), logprobs(policy, 0, 1)])

    def load(device: torch.device) -> Any:
        model = base.load_model(folder, name, seed=seed, device=device)
        policy = PolicyForward(model, device, autocast)
        probe(policy, base.vocab_size(model), name, machine.row_tokens)
        if ranks.shares_sequences:
            alone.extend((of_rows(policy), logprobs(policy, 1)))
        return model

    model = ranks.place(load, folder, machine.device, name)
    policy = ranks.policy(model, machine.device, autocast, NOTHING)
    if ranks.shares_sequences:
        shared = _shared_logprobs(lambda: of_rows(policy), name)
        ranks.agree(lambda: _check_shared(name, shared, *alone))
    if machine.liger:
        kernels.fuse(model, partial(logprobs, policy), name)
    return model


def _shared_logprobs(logprobs: Callable[[], torch.Tensor], name: str) -> torch.Tensor:
    """Of sequences that ranks share. Errors: INVALID_CONFIG, in all ranks alike."""
    try:
        return logprobs()
    except UNSHARED as error:
        raise base.refused(name, f"ranks cannot share its sequences: {error}", WITHOUT_CONTEXT) from error


def _check_shared(name: str, shared: torch.Tensor, alone: torch.Tensor, others: torch.Tensor) -> None:
    """What ranks computed together is what the first computed alone. Errors: INVALID_CONFIG."""
    difference = float((shared.cpu() - alone).abs().max())
    if not difference <= tolerated(float((others - alone[: len(others)]).abs().max())):
        why = f"ranks that share its sequences compute other log-probabilities, by {difference:.3g}"
        raise base.refused(name, why, WITHOUT_CONTEXT)


def frozen(machine: Machine, name: str, autocast: torch.dtype | None, progress: Callable[[], None]) -> Any:
    """A reference of its own, which learns nothing, as narrow as it is computed with.

    Errors: INVALID_CONFIG.
    """
    with base.named_by("reference.model"):
        folder = machine.folder_of(name, progress)
        model = placed(machine, folder, name, autocast).requires_grad_(False)
    narrow(model, dict(model.named_parameters()), autocast)
    return model
