"""What the RPCs of the trainer refuse, and that a refused call changes nothing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.v1 import trainer_service_pb2 as pb
from quartet_trainer.batch import check_batch
from quartet_trainer.sample import make_sample
from quartet_trainer.spec import LossSpec
from quartet_trainer.state_root import check_state_root, state_root
from quartet_trainer.states import StateStore


def test_no_folder_of_states_is_one_of_a_user_who_is_not_there() -> None:
    for look in (check_state_root, state_root):
        with pytest.raises(
            ConfigError, match=r"^state_dir = '~no-such-user/states' is refused: .*; name ano"
        ):
            look(Path("~no-such-user/states"))


async def test_create_run_refuses(folder: Path, serve_trainer: Any, tmp_path: Path) -> None:
    async with serve_trainer(max_runs=1) as trainer:
        missing = await trainer.refused(trainer.create(base_model=str(tmp_path / "absent")), "INVALID_CONFIG")
        assert str(tmp_path / "absent") in missing.message and missing.metadata["key"] == "base_model"
        for name in ("x" * 5000, "~no-such-user/model"):
            unnamed = await trainer.refused(trainer.create(base_model=name), "INVALID_CONFIG")
            assert "cannot be a folder" in unnamed.message
        empty = tmp_path / "empty"
        empty.mkdir()
        await trainer.refused(trainer.create(base_model=str(empty)), "INVALID_CONFIG")
        (empty / "config.json").write_bytes((folder / "config.json").read_bytes())
        no_weights = await trainer.refused(trainer.create(base_model=str(empty)), "INVALID_CONFIG")
        assert "from_scratch" in no_weights.metadata["remedy"]
        # Cannot be read, whoever runs the tests.
        (empty / "model.safetensors").symlink_to("elsewhere")
        unreadable = await trainer.refused(trainer.create(base_model=str(empty)), "INVALID_CONFIG")
        assert "this user cannot read" in unreadable.message and "chmod" in unreadable.metadata["remedy"]
        await trainer.refused(trainer.create("../up", base_model=str(folder)), "INVALID_REQUEST")
        await trainer.refused(trainer.create("..", base_model=str(folder)), "INVALID_REQUEST")
        dtype = await trainer.refused(
            trainer.create(base_model=str(folder), served_dtype="int8"), "INVALID_CONFIG"
        )
        assert dtype.metadata["key"] == "served_dtype"
        lora = await trainer.refused(
            trainer.create(base_model=str(folder), lora=pb.LoraSpec(rank=8)), "INVALID_CONFIG"
        )
        assert lora.metadata["key"] == "lora.alpha"
        rate = await trainer.refused(
            trainer.create(base_model=str(folder), learning_rate=-1.0), "INVALID_CONFIG"
        )
        assert rate.metadata["key"] == "optimizer.learning_rate"
        await trainer.refused(
            trainer.create(base_model=str(folder), schedule=pb.SCHEDULE_COSINE), "INVALID_CONFIG"
        )
        momentum = await trainer.refused(
            trainer.create(base_model=str(folder), momentum=0.9), "INVALID_CONFIG"
        )
        assert "sgd and muon" in momentum.message
        await trainer.create(base_model=str(folder))
        conflict = await trainer.refused(trainer.create(base_model=str(folder), beta1=0.5), "RUN_CONFLICT")
        assert conflict.metadata["field"] == "optimizer.beta1"
        full = await trainer.refused(trainer.create("second", base_model=str(folder)), "OVERLOADED")
        assert full.metadata["max_runs"] == "1" and "CloseRun" in full.metadata["remedy"]


async def test_another_spec_is_refused_after_a_restart_too(folder: Path, serve_trainer: Any) -> None:
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        await trainer.save(1, "a")
    async with serve_trainer() as trainer:
        conflict = await trainer.refused(trainer.create(base_model=str(folder), seed=3), "RUN_CONFLICT")
        assert conflict.metadata["field"] == "seed"


async def test_a_state_with_settings_of_a_newer_release_is_refused_and_stays(
    folder: Path, serve_trainer: Any
) -> None:
    """roster.py 5, whose.py 2: the release was rolled back."""
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        await trainer.save(1, "a")
        state_dir = trainer.state_dir
    store = StateStore(state_dir, keep_last=2)
    found = store.newest_sound("r")
    assert found is not None
    content = found[1]
    content.meta["spec"]["optimizer"]["warp"] = 2
    store.save("r", "b", 2, 0, content)
    async with serve_trainer() as trainer:
        newer = await trainer.refused(trainer.create(base_model=str(folder)), "INVALID_CONFIG")
        assert newer.metadata["key"] == "state_dir" and "release that wrote it" in newer.metadata["remedy"]
        assert "saved by another release" in newer.message and "optimizer.warp" in newer.message
    assert [info.name for info in store.list("r")] == ["a", "b"]


@pytest.mark.parametrize("restarted", [True, False])
async def test_a_run_is_extended_by_larger_total_steps_and_by_nothing_else(
    folder: Path, serve_trainer: Any, make_samples: Any, tmp_path: Path, restarted: bool
) -> None:
    """roster.py 1"""
    spec = {"base_model": str(folder), "schedule": pb.SCHEDULE_LINEAR, "learning_rate": 0.5}
    longer = {**spec, "total_steps": 4, "earlier_total_steps": [2]}

    async def steps(trainer: Any, *numbers: int) -> list[float]:
        rates = []
        for number in numbers:
            await trainer.forward_backward(2 * number, make_samples(seed=number))
            rates.append((await trainer.optim_step(2 * number + 1)).learning_rate)
        return rates

    async def extended(trainer: Any) -> tuple[list[float], bytes]:
        for other in ({"total_steps": 4}, {"total_steps": 4, "earlier_total_steps": [1]}):
            await trainer.refused(trainer.create(**spec, **other), "RUN_CONFLICT")
        await trainer.refused(trainer.create(**{**longer, "seed": 3}), "RUN_CONFLICT")
        for _ in range(2):
            assert (await trainer.create(**longer)).applied_seq_id == 5
        await trainer.refused(trainer.create(**spec, total_steps=2), "RUN_CONFLICT")
        return await steps(trainer, 3, 4), (await trainer.publish(10)).digest

    async with serve_trainer() as trainer:
        await trainer.create(**spec, total_steps=2)
        await trainer.publish(1)
        assert await steps(trainer, 1, 2) == [0.5, 0.25]
        if restarted:
            await trainer.stub.CloseRun(pb.CloseRunRequest(run_id="r", save_at_seq_id=5))
        else:
            rates, digest = await extended(trainer)
    if restarted:
        async with serve_trainer() as trainer:
            rates, digest = await extended(trainer)
    assert rates == [0.25, 0.125]
    # One that has lost every state comes to the same weights by the same calls.
    shutil.rmtree(tmp_path / "states" / "r")
    async with serve_trainer() as trainer:
        assert (await trainer.create(**longer)).applied_seq_id == 0
        await trainer.publish(1)
        assert await steps(trainer, 1, 2, 3, 4) == [0.5, 0.25, 0.25, 0.125]
        assert (await trainer.publish(10)).digest == digest


def broken(change: str, one: pb.TrainingSample) -> None:
    sample = one.sample
    match change:
        case "a token outside the vocabulary":
            sample.token_ids[0] = 96
        case "more tokens than positions":
            sample.token_ids.extend([1] * 128)
        case "no tokens":
            sample.Clear()
        case "a span outside the tokens":
            sample.spans[0].length += 1
        case "a span over the first token":
            sample.spans[0].start = 0
        case "a version that nobody counts to":
            sample.spans[0].policy_version = 2**64 - 1
        case "overlapping spans":
            sample.spans.append(sample.spans[0])
        case "too few logprobs":
            del sample.logprobs[0]
        case "no logprobs":
            del sample.logprobs[:]
        case "a logprob that is not finite":
            sample.logprobs[0] = float("nan")
        case "a negative log-probability":
            sample.logprobs[0] = 2.5
        case "an advantage that is not finite":
            one.advantages[0] = float("inf")
        case "no advantages":
            del one.advantages[:]
        case "a negative log-probability of the reference":
            one.reference_logprobs.extend([2.5] * len(sample.logprobs))
        case "too many reference logprobs":
            one.reference_logprobs.extend([0.0] * 20)
        case _:
            raise AssertionError(change)


CHANGES = [
    "a token outside the vocabulary",
    "more tokens than positions",
    "no tokens",
    "a span outside the tokens",
    "a span over the first token",
    "a version that nobody counts to",
    "overlapping spans",
    "too few logprobs",
    "no logprobs",
    "a logprob that is not finite",
    "a negative log-probability",
    "an advantage that is not finite",
    "no advantages",
    "a negative log-probability of the reference",
    "too many reference logprobs",
]


async def test_malformed_batches_are_refused_by_name_and_change_nothing(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        for change in CHANGES:
            samples = make_samples()
            broken(change, samples[3])
            error = await trainer.refused(trainer.forward_backward(1, samples), "INVALID_REQUEST")
            assert re.fullmatch(r"samples\[3\]\.\w+", error.metadata["field"]), change
        no_kind = pb.LossSpec()
        cold = pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT, temperature=0.0)
        meaningless = [
            pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT, **fields)
            for fields in (
                {"ratio": pb.RATIO_TREATMENT_DPPO, "ratio_level": pb.RATIO_LEVEL_SEQUENCE},
                {"delta": 2.0},
                {"target_kl": 0.1},
                {"correction": pb.MismatchCorrection(cap=3.0)},
                {"correction": pb.MismatchCorrection()},
                {"correction": pb.MismatchCorrection(mode=pb.CORRECTION_MODE_MASK)},
                {"custom": "mine"},
                {"ratio": 17},
            )
        ]
        for loss in (no_kind, cold, *meaningless):
            error = await trainer.refused(
                trainer.forward_backward(1, make_samples(), loss=loss), "INVALID_REQUEST"
            )
            assert error.metadata["field"].startswith("loss")
        capped = pb.MismatchCorrection(mode=pb.CORRECTION_MODE_MASK, cap=-1.0)
        capless = pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT, proximal_version=0, correction=capped)
        call = trainer.forward_backward(1, make_samples(), loss=capless)
        error = await trainer.refused(call, "INVALID_REQUEST")
        assert error.metadata["field"] == "loss.correction.cap"
        shapeless = pb.LossSpec(
            kind=pb.LOSS_KIND_POLICY_GRADIENT,
            ratio=pb.RATIO_TREATMENT_VESPO,
            kernel=pb.VespoKernel(k_negative=-1.0),
        )
        call = trainer.forward_backward(1, make_samples(), loss=shapeless)
        error = await trainer.refused(call, "INVALID_REQUEST")
        assert error.metadata["field"] == "loss.kernel.k_negative"
        # Taken against another policy, and still about how far the sampler is away.
        masked = pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT, proximal_version=0, off_policy_mask=0.1)
        unsaid = make_samples()
        del unsaid[2].sample.logprobs[:]
        error = await trainer.refused(trainer.forward_backward(1, unsaid, loss=masked), "INVALID_REQUEST")
        assert error.metadata["field"] == "samples[2].logprobs"
        for normalizer in (0.0, -1.0, float("nan")):
            call = trainer.forward_backward(1, make_samples(), normalizer=normalizer)
            await trainer.refused(call, "INVALID_REQUEST")
        await trainer.refused(trainer.forward_backward(1, []), "INVALID_REQUEST")
        await trainer.refused(trainer.forward_backward(0, make_samples()), "INVALID_REQUEST")
        await trainer.refused(trainer.forward_backward(1, make_samples(), run_id="other"), "RUN_UNKNOWN")
        await trainer.refused(trainer.save(1, "a/b"), "INVALID_REQUEST")
        assert (await trainer.create(base_model=str(folder))).applied_seq_id == 0


async def test_a_call_that_is_too_large_is_refused(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 8."""
    monkeypatch.setattr("quartet_trainer.intake.MAX_CALL_BYTES", 500)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        await trainer.refused(trainer.forward_backward(1, make_samples()), "INVALID_REQUEST")
        monkeypatch.setattr("quartet_trainer.intake.MAX_CALL_BYTES", 2**20)
        assert (await trainer.forward_backward(1, make_samples())).loss_tokens > 0


@pytest.mark.parametrize(
    "spans",
    [
        [(2, 2, 0), (1, 1, 0)],
        [(1, 2, 0), (2, 1, 0)],
        [(2, 3, 0)],
        [(1, 0, 0)],
    ],
    ids=["descending", "overlapping", "beyond the tokens", "empty"],
)
def test_spans_that_are_not_ascending_disjoint_and_inside_are_refused(
    spans: list[tuple[int, int, int]],
) -> None:
    """sample.py 1: a position that is covered twice would count twice."""
    with pytest.raises(
        QuartetError, match=r"sample 3: spans is \[.* of 4 tokens; spans are ascending"
    ) as raised:
        make_sample(3, [1, 2, 3, 4], spans, [], [])
    assert raised.value.metadata["field"] == "samples[3].spans"


def test_a_reference_is_told_for_all_samples_or_for_none() -> None:
    """batch.py 1: what some were sent with, the run's own reference does not fill in for the others."""
    told, untold = (
        make_sample(index, [1, 2], [(1, 1, 0)], [-1.0], [1.0], reference)
        for index, reference in enumerate(([-1.0], []))
    )
    model = {"vocab_size": 8, "max_tokens": 8, "holds_reference": True, "custom": ()}
    for samples in ([told, told], [untold, untold]):
        check_batch(samples, LossSpec(kl_coef=0.1), **model)
    with pytest.raises(QuartetError, match=r"samples\[1\]\.reference_logprobs"):
        check_batch([told, untold], LossSpec(kl_coef=0.1), **model)


@pytest.mark.parametrize("field", ["logprobs", "reference_logprobs"])
def test_a_loss_of_ones_own_reads_of_all_samples_or_of_none(field: str) -> None:
    """batch.py: else what it sees would depend on which of them share a micro-batch."""
    values = {"logprobs": ([-1.0], []), "reference_logprobs": ([], [-1.0])}[field]
    told = make_sample(0, [1, 2], [(1, 1, 0)], values[0], [1.0], values[1])
    untold = make_sample(1, [1, 2], [(1, 1, 0)], [], [1.0], [])
    uncovered = make_sample(2, [1, 2], [], [], [], [])
    model = {"vocab_size": 8, "max_tokens": 8, "holds_reference": False, "custom": ("own",)}
    own = LossSpec(kind="custom", custom="own")
    for samples in ([told, told, uncovered], [untold, untold]):
        check_batch(samples, own, **model)
    with pytest.raises(QuartetError, match=rf"samples\[1\]\.{field}: others of the batch have them"):
        check_batch([told, untold], own, **model)
