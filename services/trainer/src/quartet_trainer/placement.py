"""The base model of a run, where the run computes: loaded, probed, placed on the device or spread over the
ranks, with fused layers where the machine has them.

What is placed computes rightly: it was compared with the model's own forward pass, before layers were fused
and after.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quartet_trainer import kernels
from quartet_trainer import model as base
from quartet_trainer.frozen import narrow
from quartet_trainer.logprobs import PolicyForward
from quartet_trainer.passes import Machine
from quartet_trainer.probe import probe, probe_logprobs
from quartet_trainer.worker import release_memory


def placed(
    machine: Machine, folder: Path, name: str, autocast: torch.dtype | None, seed: int | None = None
) -> Any:
    """The model of a folder, or with a seed one of random weights; `name` is what errors call it.

    Errors: INVALID_CONFIG.
    """
    # A model refers to itself: one that was loaded for a run that was refused is still there.
    release_memory()

    def load(device: torch.device) -> Any:
        model = base.load_model(folder, name, seed=seed, device=device)
        probe(PolicyForward(model, device, autocast), base.vocab_size(model), name, machine.row_tokens)
        return model

    model = machine.ranks.place(load, folder, machine.device)
    if machine.liger:
        policy = machine.ranks.policy(model, machine.device, autocast, ())
        size = base.vocab_size(model)

        def logprobs(shift: int) -> torch.Tensor:
            return probe_logprobs(policy, size, machine.row_tokens, shift)

        kernels.fuse(model, logprobs, name)
    return model


def frozen(machine: Machine, name: str, autocast: torch.dtype | None) -> Any:
    """Another model that learns nothing, as narrow as it is computed with. Errors: INVALID_CONFIG."""
    model = placed(machine, machine.folder_of(name), name, autocast).requires_grad_(False)
    narrow(model, dict(model.named_parameters()), autocast)
    return model
