"""Fixtures of this folder: a tiny model, a service of each engine, an OpenAI front, a fleet of replicas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conformance import conformance_folder, make, replica
from .openai_door import door
from .random_models import byte_tokenizer, qwen3
from .refusals import refusals
from .relay_fleet import fleet

__all__ = ["conformance_folder", "door", "fleet", "make", "refusals", "replica"]


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
