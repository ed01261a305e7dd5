"""Losses of one's own: applied like any other, and refused where they return nonsense."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.v1 import trainer_service_pb2 as pb
from quartet_trainer.config import TrainerConfig
from quartet_trainer.loss import Tokens, token_losses
from quartet_trainer.loss.custom import load_losses
from quartet_trainer.loss.own_metrics import OwnMetrics
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
    "own_mistake": "raised at tests/test_trainer_custom_loss.py:{line} in own_mistake: KeyError: 'advantage'",
}
NONSENSE["own_mistake"] = NONSENSE["own_mistake"].format(line=own_mistake.__code__.co_firstlineno + 1)


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


async def test_what_a_loss_raises_is_in_the_log_with_its_traceback(
    folder: Path, serve_trainer: Any, make_samples: Any, own: dict[str, str]
) -> None:
    """custom.py 4"""
    with structlog.testing.capture_logs() as logged:
        async with serve_trainer(losses=own) as trainer:
            await trainer.create(base_model=str(folder))
            spec = pb.LossSpec(kind=pb.LOSS_KIND_CUSTOM, custom="own_mistake")
            await trainer.refused(trainer.forward_backward(1, make_samples(), loss=spec), "INVALID_REQUEST")
    (line,) = [one for one in logged if one["event"] == "loss_raised"]
    assert line["loss"] == "own_mistake" and isinstance(line["exc_info"], KeyError)


def own_scaled(spec: LossSpec, tokens: Any, tau: float, *, flip: bool = False) -> Any:
    """With metrics of its own: by token, and of a micro-batch."""
    assert isinstance(tau, float) and isinstance(flip, bool)
    metrics = {"advantage": tokens.advantages_K, "advantage_max": tokens.advantages_K, "tau": tau}
    return -tau * (-1.0 if flip else 1.0) * tokens.advantages_K * tokens.logp_K, metrics


async def test_a_loss_gets_arguments_and_reports_metrics_of_its_own(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    """own_metrics.py 1: however a batch is cut."""
    found, losses = [], []
    samples = make_samples()
    advantages = [one for s in samples for one in list(s.advantages) * len(s.sample.logprobs)]
    assert all(len(s.advantages) == 1 for s in samples)
    for run_id, budget, args in (
        ("whole", 8192, '{"tau": 0.5}'),
        ("cut", 1, '{"tau": 0.5}'),
        ("flipped", 8192, '{"tau": 0.5, "flip": true}'),
    ):
        async with serve_trainer(
            losses={"scaled": f"{HERE}:own_scaled"}, microbatch_tokens=budget
        ) as trainer:
            await trainer.create(run_id, base_model=str(folder))
            spec = pb.LossSpec(kind=pb.LOSS_KIND_CUSTOM, custom="scaled", custom_args=args)
            done = await trainer.forward_backward(1, samples, run_id=run_id, loss=spec)
            found.append([done.diagnostics[name] for name in ("advantage", "advantage_max", "tau")])
            losses.append(done.loss)
    expected = [sum(advantages) / len(advantages), max(advantages), 0.5]
    for values in found:
        assert values == pytest.approx(expected, abs=1e-6)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(
        -losses[0], rel=1e-6
    )


@pytest.mark.parametrize(
    "args",
    ["[1]", "no json", '{"tau": [1]}', '{"tau": null}', '{"tau": NaN}', '{"tau": "\\ud83d"}', "[" * 10**5],
)
async def test_arguments_are_numbers_texts_and_booleans_by_name(
    folder: Path, serve_trainer: Any, make_samples: Any, args: str
) -> None:
    async with serve_trainer(losses={"scaled": f"{HERE}:own_scaled"}) as trainer:
        await trainer.create(base_model=str(folder))
        spec = pb.LossSpec(kind=pb.LOSS_KIND_CUSTOM, custom="scaled", custom_args=args)
        error = await trainer.refused(
            trainer.forward_backward(1, make_samples(), loss=spec), "INVALID_REQUEST"
        )
        assert error.metadata["field"].startswith("loss.custom_args")


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ("", "missing a required argument: 'tau'"),
        ('{"tau": 1.0, "beta": 1.0}', "unexpected keyword argument 'beta'"),
        ('{"tau": 1.0, "spec": 1.0}', "multiple values for argument 'spec'"),
    ],
)
async def test_arguments_that_a_loss_does_not_take_are_refused_before_the_run(
    folder: Path, serve_trainer: Any, args: str, why: str
) -> None:
    """custom.py 1"""
    async with serve_trainer(losses={"scaled": f"{HERE}:own_scaled"}) as trainer:
        optimizer = pb.OptimizerSpec(learning_rate=1e-3)
        asked = pb.CheckRunRequest(
            spec=pb.RunSpec(base_model=str(folder), optimizer=optimizer),
            custom_loss="scaled",
            custom_args=args,
        )
        error = await trainer.refused(trainer.stub.CheckRun(asked), "INVALID_CONFIG")
        assert why in error.message and error.metadata["key"] == "custom_args"
        asked.custom_args = '{"tau": 1.0}'
        await trainer.stub.CheckRun(asked)


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        ([1.0], "are list, not a dict"),
        ({"entropy": 1.0}, "'entropy' is one that every step has"),
        ({"a b": 1.0}, "'a b' is not 1-64"),
        ({"mine": "1"}, "'mine' is str, not a number"),
        (
            {"mine": torch.zeros(2)},
            r"'mine' is Tensor of shape (2,), not a number, nor one for each of 3 tokens",
        ),
        ({f"m{i}": 1.0 for i in range(65)}, "more than 64"),
        ({"mine": torch.zeros(3, dtype=torch.complex64)}, "'mine' is complex Tensor of shape (3,)"),
        ({"mine": torch.tensor(1j)}, "'mine' is complex Tensor of shape ()"),
        ({"mine": 10**400}, "'mine' is larger than any float"),
    ],
)
def test_metrics_that_are_none_are_refused(metrics: Any, why: str) -> None:
    """own_metrics.py 2"""
    assert why in OwnMetrics().report(metrics, 3)


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
    (tmp_path / "lacking_module.py").write_text("\nimport absent_library\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for path, why in {
        "no_colon": "write",
        "absent_module:f": r"cannot be imported: No module named .*start it where 'absent_module' is found",
        f"{HERE}:absent": "cannot be imported",
        f"{HERE}:HERE": "not a function",
        f"{HERE}:own_of_one": r"cannot be called as function\(spec, tokens\): too many positional arguments",
        "lacking_module:f": r"/lacking_module.py:2 in <module>: ModuleNotFound.*install what it imports",
        "broken_module:f": r"/broken_module.py:1 in <module>: NameError: .*; mend it",
    }.items():
        with pytest.raises(ConfigError, match=why):
            load_losses({"mine": path})
    load_losses({"mine": "operator:sub"})  # written in C
    load_losses({"mine": f"{HERE}:own_with_more"})  # what a run gives by name is seen with the run
    with pytest.raises(ConfigError, match=r"losses\.mine"):
        assemble(TrainerConfig(losses={"mine": "absent_module:f"}))


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_what_is_no_number_stays_none_in_whatever_order_it_came(values: tuple[float, float]) -> None:
    """own_metrics.py 1"""
    own, joined = OwnMetrics(), OwnMetrics()
    for value in values:
        assert not own.report({"mine": value, "mine_max": value}, 2)
        joined.join([joined.found, {"mine_max": (value, 2)}])
    assert all(map(math.isnan, (own.values()["mine_max"], own.values()["mine"], joined.values()["mine_max"])))


def own_mean_of_sample(spec: LossSpec, tokens: Any) -> torch.Tensor:
    mean_S = tokens.of_samples(tokens.logp_K) / tokens.lengths_S
    return -tokens.to_tokens(mean_S) * tokens.advantages_K


def test_where_the_model_gives_no_number_the_loss_of_all_its_sample_is_none() -> None:
    """custom.py 2: the step is skipped; refused, the same batch would come again for ever."""
    loaded = load_losses({"mean": f"{HERE}:own_mean_of_sample"})
    asked = LossSpec(kind="custom", custom="mean")
    logp = torch.tensor([-1.0, float("nan"), -2.0], requires_grad=True)
    tokens = Tokens(logp, logp.detach(), torch.ones(3), torch.tensor([2, 1]), sampled_K=logp.detach())
    assert token_losses(asked, tokens, loaded).isfinite().tolist() == [False, False, True]
    whole = torch.tensor([-1.0, -3.0, -2.0], requires_grad=True)
    sound = Tokens(
        whole, whole.detach(), torch.full((3,), torch.inf), torch.tensor([2, 1]), sampled_K=whole.detach()
    )
    with pytest.raises(QuartetError, match="3 values that are no finite numbers"):
        token_losses(asked, sound, loaded)
