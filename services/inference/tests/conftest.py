"""Fixtures of this folder: a tiny model, a service of each engine, an OpenAI front, a fleet of replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from .conformance import conformance_folder, make, replica
from .openai_door import door
from .random_models import byte_tokenizer, qwen3
from .refusals import refusals
from .relay_fleet import fleet

__all__ = ["conformance_folder", "door", "fleet", "make", "refusals", "replica"]


@pytest.fixture(scope="session", autouse=True)
def engines_draw_the_same() -> Iterator[None]:
    """What an engine draws where a request has no seed: which tokens meet a bound is no matter of chance."""
    plain = np.random.default_rng
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.random, "default_rng", lambda seed=0: plain(seed))
        yield


@pytest.fixture(autouse=True)
def weights_are_the_same() -> None:
    """Of models that a test makes without a seed of its own."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of model seed 0 and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    qwen3(0).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """`make_model(seed, **config)`: a random Qwen3."""
    return qwen3
