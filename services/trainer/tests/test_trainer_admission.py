"""CheckRun: what is known against a run before anything is loaded for it (admission.py)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from quartet.v1 import trainer_service_pb2 as pb

from .conftest import run_spec


def own(spec: Any, tokens: Any) -> torch.Tensor:
    return -tokens.advantages_K * tokens.logp_K


async def test_what_creation_or_the_first_batch_would_refuse_is_refused_at_once(
    folder: Path, serve_trainer: Any, tmp_path: Path
) -> None:
    bare, broken, good = tmp_path / "bare", tmp_path / "broken", str(folder)
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(folder, broken)
    (broken / "config.json").write_text('{"model_type": "nothing-of-the-kind"}')
    teacher = pb.ReferenceSpec(model=str(tmp_path / "gone"))
    cases = (
        (run_spec(base_model=str(tmp_path / "gone")), "", "base_model", "there is no folder"),
        (run_spec(base_model="nobody/has-this"), "", "base_model", "neither a folder here nor a model"),
        (run_spec(base_model=str(bare)), "", "base_model", "has no weights (*.safetensors)"),
        (run_spec(base_model=str(broken)), "", "base_model", "cannot be read: "),
        (run_spec(base_model=good, reference=teacher), "", "reference.model", "there is no folder"),
        (run_spec(base_model=good, learning_rate=-1.0), "", "optimizer.learning_rate", "greater than"),
        (
            run_spec(base_model=good),
            "yours",
            "custom_loss",
            "its losses are mine; name one of them, or start",
        ),
    )
    async with serve_trainer(losses={"mine": f"{__name__}:own"}) as trainer:
        for spec, loss, key, says in cases:
            asked = pb.CheckRunRequest(spec=spec, custom_loss=loss)
            error = await trainer.refused(trainer.stub.CheckRun(asked), "INVALID_CONFIG")
            assert error.metadata["key"] == key and says in error.message, error
            assert "yours" not in error.message or 'losses.yours = "package.module:function"' in error.message
        for spec, loss in (
            (run_spec(base_model=good), "mine"),
            (run_spec(base_model=str(bare), from_scratch=True), ""),
        ):
            await trainer.stub.CheckRun(pb.CheckRunRequest(spec=spec, custom_loss=loss))
        assert not [one for one in trainer.state_dir.iterdir() if one.is_dir()], "nothing is kept"
        await trainer.refused(trainer.stub.GetRun(pb.GetRunRequest(run_id="r")), "RUN_UNKNOWN")


async def test_a_trainer_without_losses_says_how_to_get_one(folder: Path, serve_trainer: Any) -> None:
    async with serve_trainer() as trainer:
        asked = pb.CheckRunRequest(spec=run_spec(base_model=str(folder)), custom_loss="mine")
        error = await trainer.refused(trainer.stub.CheckRun(asked), "INVALID_CONFIG")
        assert 'it has none; start the trainer with losses.mine = "package.module:function"' in error.message
