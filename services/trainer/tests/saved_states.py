"""States to save in the tests of their store."""

from __future__ import annotations

import torch
from quartet_trainer.content import Content
from quartet_trainer.states import StateStore


def content(value: float) -> Content:
    return Content({"value": value}, {"weights": {"w": torch.full((5,), value)}})


def save(store: StateStore, name: str, seq_id: int, **more: object) -> None:
    store.save("r", name, seq_id, seq_id // 2, content(float(seq_id)), **more)
