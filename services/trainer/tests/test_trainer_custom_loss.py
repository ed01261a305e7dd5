"""Losses of one's own: applied like any other, and refused where they return nonsense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quartet.config import ConfigError
from quartet.v1 import trainer_service_pb2 as pb
from quartet_trainer.config import TrainerConfig
from quartet_trainer.loss.custom import load_losses
from quartet_trainer.spec import LossSpec

HERE = __name__


def own_cispo(spec: LossSpec, tokens: Any) -> torch.Tensor:
    ratio = (tokens.logp_K - tokens.sampled_K).exp().clamp(max=4.0).detach()
    return -ratio * tokens.advantages_K * tokens.logp_K


def own_nan(spec: LossSpec, tokens: Any) -> torch.Tensor:
    return tokens.logp_K * float("nan")


def own_number(spec: LossSpec, tokens: Any) -> Any:
    return 3.0


def own_sum(spec: LossSpec, tokens: Any) -> torch.Tensor:
    return tokens.logp_K.sum()


def own_detached(spec: LossSpec, tokens: Any) -> torch.Tensor:
    return -tokens.logp_K.detach()


def own_mistake(spec: LossSpec, tokens: Any) -> torch.Tensor:
    raise KeyError("advantage")


NONSENSE = {
    "own_nan": "no finite numbers",
    "own_number": "returned float, not a tensor",
    "own_sum": "returned shape ()",
    "own_detached": "does not depend on tokens.logp_K",
    "own_mistake": "raised KeyError",
}


@pytest.fixture
def own() -> dict[str, str]:
    return {name: f"{HERE}:{name}" for name in ("own_cispo", *NONSENSE)}


async def test_a_loss_of_ones_own_is_applied_like_any_other(
    folder: Path, serve_trainer: Any, make_samples: Any, own: dict[str, str]
) -> None:
    results = []
    for spec in (
        pb.LossSpec(kind=pb.LOSS_KIND_CUSTOM, custom="own_cispo"),
        pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT),
    ):
        async with serve_trainer(losses=own) as trainer:
            await trainer.create(str(len(results)), base_model=str(folder))
            done = await trainer.forward_backward(1, make_samples(), run_id=str(len(results)), loss=spec)
            request = pb.OptimStepRequest(run_id=str(len(results)), seq_id=2)
            results.append((done.loss, (await trainer.stub.OptimStep(request)).grad_norm))
    assert results[0] == pytest.approx(results[1], rel=1e-6)


async def test_a_loss_that_returns_nonsense_is_refused_and_nothing_is_applied(
    folder: Path, serve_trainer: Any, make_samples: Any, own: dict[str, str]
) -> None:
    async with serve_trainer(losses=own) as trainer:
        await trainer.create(base_model=str(folder))
        for name, why in NONSENSE.items():
            spec = pb.LossSpec(kind=pb.LOSS_KIND_CUSTOM, custom=name)
            error = await trainer.refused(
                trainer.forward_backward(1, make_samples(), loss=spec), "INVALID_REQUEST"
            )
            assert why in error.message and f"losses.{name}" in error.message
        unknown = pb.LossSpec(kind=pb.LOSS_KIND_CUSTOM, custom="absent")
        error = await trainer.refused(
            trainer.forward_backward(1, make_samples(), loss=unknown), "INVALID_REQUEST"
        )
        assert "own_cispo" in error.message
        assert (await trainer.refused(trainer.optim_step(1), "INVALID_REQUEST")).metadata["field"] == "seq_id"


def own_of_one(tokens: Any) -> torch.Tensor:
    return -tokens.logp_K


def own_with_more(spec: LossSpec, tokens: Any, scale: float) -> torch.Tensor:
    return -scale * tokens.logp_K


def test_functions_that_cannot_be_loaded_are_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """custom.py 1"""
    from quartet_trainer.assembly import assemble

    (tmp_path / "broken_module.py").write_text("f = nothing_of_the_kind\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for path, why in {
        "no_colon": "write",
        "absent_module:f": "cannot be imported",
        f"{HERE}:absent": "cannot be imported",
        f"{HERE}:HERE": "not a function",
        f"{HERE}:own_of_one": r"cannot be called as function\(spec, tokens\): too many positional arguments",
        f"{HERE}:own_with_more": "missing a required argument: 'scale'",
        "broken_module:f": r"cannot be imported: NameError\(",
    }.items():
        with pytest.raises(ValueError, match=why):
            load_losses({"mine": path})
    load_losses({"mine": "operator:sub"})  # written in C
    with pytest.raises(ConfigError, match=r"losses\.mine"):
        assemble(TrainerConfig(losses={"mine": "absent_module:f"}))
