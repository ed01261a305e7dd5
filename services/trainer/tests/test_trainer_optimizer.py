"""Schedules, optimizers and clipping against definitions and torch.optim; state comes back bit-equal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from quartet.errors import QuartetError
from quartet.v1 import trainer_service_pb2 as pb
from quartet_trainer import offload
from quartet_trainer.optimizer import Optimizer
from quartet_trainer.schedule import scheduled_rate
from quartet_trainer.spec.optimizer import OptimizerKind, OptimizerSpec, Schedule
from quartet_trainer.wire import run_spec


def test_schedules() -> None:
    constant = OptimizerSpec(learning_rate=2.0, warmup_steps=4)
    assert [scheduled_rate(constant, s) for s in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    linear = OptimizerSpec(learning_rate=2.0, warmup_steps=2, total_steps=6, schedule=Schedule.LINEAR)
    assert [scheduled_rate(linear, s) for s in range(8)] == [1.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    cosine = OptimizerSpec(learning_rate=2.0, total_steps=4, schedule=Schedule.COSINE)
    assert scheduled_rate(cosine, 1) == pytest.approx(1 + math.cos(math.pi / 4))
    assert scheduled_rate(cosine, 4) == 0.0


def test_warmup_stable_decay() -> None:
    spec = OptimizerSpec(
        learning_rate=2.0, warmup_steps=2, total_steps=8, decay_steps=4, schedule=Schedule.WARMUP_STABLE_DECAY
    )
    assert [scheduled_rate(spec, s) for s in range(10)] == [1, 2, 2, 2, 2, 1.5, 1, 0.5, 0, 0]


@pytest.mark.parametrize("schedule", [Schedule.LINEAR, Schedule.COSINE])
def test_a_rate_that_ends_above_zero_is_that_of_torch(schedule: Schedule) -> None:
    spec = OptimizerSpec(learning_rate=0.3, min_lr=0.1, total_steps=7, schedule=schedule)
    theirs = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler: Any = (
        torch.optim.lr_scheduler.CosineAnnealingLR(theirs, T_max=7, eta_min=0.1)
        if schedule is Schedule.COSINE
        else torch.optim.lr_scheduler.LinearLR(theirs, 1.0, 0.1 / 0.3, total_iters=7)
    )
    for step in range(8):
        assert scheduled_rate(spec, step) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12)
        theirs.step()
        scheduler.step()
    assert scheduled_rate(spec, 20) == 0.1


def test_a_spec_that_an_earlier_release_saved_falls_to_zero() -> None:
    spec = OptimizerSpec(learning_rate=0.3, total_steps=7, schedule=Schedule.LINEAR)
    saved = spec.model_dump(mode="json")
    del saved["min_lr"]
    assert OptimizerSpec.model_validate(saved) == spec
    assert scheduled_rate(spec, 1) == 0.3 * (1 - 1 / 7), "to the bit"


def test_a_decay_that_ends_above_zero() -> None:
    spec = OptimizerSpec(
        learning_rate=2.0, min_lr=1.0, total_steps=8, decay_steps=4, schedule=Schedule.WARMUP_STABLE_DECAY
    )
    assert [scheduled_rate(spec, s) for s in range(3, 10)] == [2, 2, 1.75, 1.5, 1.25, 1, 1]
    warm = spec.model_copy(update={"warmup_steps": 4})
    assert [scheduled_rate(warm, s) for s in range(4)] == [0.5, 1, 1.5, 2], "the warm-up begins where it did"


@pytest.mark.parametrize("schedule", Schedule)
def test_an_extended_run_keeps_the_rates_of_its_earlier_steps(schedule: Schedule) -> None:
    decay = 2 if schedule is Schedule.WARMUP_STABLE_DECAY else 0

    def rates(total: int, *earlier: int) -> list[float]:
        spec = OptimizerSpec(
            learning_rate=2.0,
            warmup_steps=1,
            schedule=schedule,
            total_steps=total,
            decay_steps=decay,
            earlier_total_steps=earlier,
            min_lr=0.0 if schedule is Schedule.CONSTANT else 0.5,
        )
        return [scheduled_rate(spec, step) for step in range(total)]

    short, middle, long = rates(4), rates(6), rates(9)
    assert rates(9, 4, 6) == [*short, *middle[4:], *long[6:]]
    with pytest.raises(ValueError, match="earlier_total_steps ascend"):
        rates(6, 6)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"schedule": "warmup_stable_decay", "total_steps": 8}, "decay_steps from 1 to 8"),
        (
            {"schedule": "warmup_stable_decay", "total_steps": 8, "warmup_steps": 4, "decay_steps": 5},
            "1 to 4",
        ),
        ({"decay_steps": 5}, "belongs to the schedule"),
        ({"min_lr": 0.5}, "a constant one does not"),
        ({"min_lr": 1.0, "schedule": "cosine", "total_steps": 8}, "min_lr 1.0 is not below learning_rate"),
        ({"momentum": 0.5}, "sgd and muon"),
        ({"kind": "sgd", "adamw_learning_rate": 0.5}, "belongs to muon"),
    ],
)
def test_what_a_kind_or_schedule_does_not_use_is_refused(fields: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        OptimizerSpec.model_validate({"learning_rate": 1.0, **fields})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -0.1),
        *((beta, value) for beta in ("beta1", "beta2") for value in (-0.1, 1.0)),
        ("eps", 0.0),
        ("weight_decay", -0.1),
        ("max_grad_norm", -0.1),
        ("warmup_steps", -1),
        ("total_steps", -1),
        ("decay_steps", -1),
        ("min_lr", -0.1),
        *(("momentum", value) for value in (-0.1, 1.0)),
        ("adamw_learning_rate", -0.1),
    ],
)
def test_numbers_out_of_their_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name}\n  Input should be (greater|less) than"):
        OptimizerSpec.model_validate({"kind": "muon", "learning_rate": 1.0, name: value})


def test_an_optimizer_of_which_nothing_is_said() -> None:
    spec = OptimizerSpec(learning_rate=1.0)
    assert (spec.kind, spec.schedule) == (OptimizerKind.ADAMW, Schedule.CONSTANT)
    assert (spec.beta1, spec.beta2, spec.eps) == (0.9, 0.999, 1e-8)
    assert spec.weight_decay == spec.max_grad_norm == spec.warmup_steps == spec.total_steps == 0
    held = torch.nn.Parameter(torch.zeros(1))
    optimizer = Optimizer([("w", held)], OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=1.0))
    for _ in range(2):
        held.grad = torch.ones(1)
        optimizer.step(1.0, 1.0)
    assert float(held.detach()) == pytest.approx(-(1 + 1 + 0.9)), "SGD has momentum"


def test_a_schedule_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="total_steps above warmup_steps"):
        OptimizerSpec(learning_rate=1.0, schedule=Schedule.LINEAR, warmup_steps=5, total_steps=5)


def parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.nn.Parameter(torch.randn(4, 3, generator=generator)),
        "norm": torch.nn.Parameter(torch.randn(3, generator=generator)),
    }


def set_gradients(held: dict[str, torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in held.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_adamw_equals_its_definition() -> None:
    spec = OptimizerSpec(learning_rate=0.1, beta1=0.8, beta2=0.9, weight_decay=0.05, max_grad_norm=1.0)
    held = parameters()
    optimizer = Optimizer(held.items(), spec)
    ours = {name: parameter.detach().double().numpy().copy() for name, parameter in held.items()}
    first = {name: np.zeros_like(value) for name, value in ours.items()}
    second = {name: np.zeros_like(value) for name, value in ours.items()}
    for step in range(1, 4):
        set_gradients(held, step)
        gradients = {name: parameter.grad.double().numpy().copy() for name, parameter in held.items()}
        norm = math.sqrt(sum((g**2).sum() for g in gradients.values()))
        assert optimizer.gradient_norm() == pytest.approx(norm, rel=1e-6)
        optimizer.step(0.1, optimizer.gradient_norm())
        for name, gradient in gradients.items():
            clipped = gradient * min(1.0, 1.0 / norm)
            first[name] = 0.8 * first[name] + 0.2 * clipped
            second[name] = 0.9 * second[name] + 0.1 * clipped**2
            if name == "matrix":
                ours[name] *= 1 - 0.1 * 0.05
            denominator = np.sqrt(second[name] / (1 - 0.9**step)) + 1e-8
            ours[name] -= 0.1 * first[name] / (1 - 0.8**step) / denominator
            np.testing.assert_allclose(held[name].detach(), ours[name], atol=1e-6)
    with pytest.raises(QuartetError, match="there are no gradients to apply"):
        optimizer.gradient_norm()


def test_sgd_equals_its_definition() -> None:
    spec = OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=0.1, momentum=0.7, weight_decay=0.05)
    held = parameters()
    optimizer = Optimizer(held.items(), spec)
    ours = {name: parameter.detach().double().numpy().copy() for name, parameter in held.items()}
    velocity = {name: np.zeros_like(value) for name, value in ours.items()}
    for step in range(3):
        set_gradients(held, step)
        for name, parameter in held.items():
            assert parameter.grad is not None
            decayed = parameter.grad.double().numpy() + (0.05 * ours[name] if name == "matrix" else 0.0)
            velocity[name] = 0.7 * velocity[name] + decayed
            ours[name] -= 0.1 * velocity[name]
        optimizer.step(0.1, optimizer.gradient_norm())
        for name in ours:
            np.testing.assert_allclose(held[name].detach(), ours[name], atol=1e-6)


@pytest.mark.parametrize(("most", "factor"), [(0.0, 1.0), (2.5, 0.5), (5.0, 1.0), (7.0, 1.0)])
def test_clipping_makes_no_gradient_longer(most: float, factor: float) -> None:
    held = torch.nn.Parameter(torch.zeros(2))
    spec = OptimizerSpec(kind=OptimizerKind.SGD, learning_rate=1.0, momentum=0.0, max_grad_norm=most)
    optimizer = Optimizer([("w", held)], spec)
    held.grad = torch.tensor([3.0, -4.0])
    optimizer.step(1.0, optimizer.gradient_norm())
    assert held.tolist() == [-3.0 * factor, 4.0 * factor]


def test_eps_is_added_to_the_root_of_the_second_moment() -> None:
    held = torch.nn.Parameter(torch.zeros(2))
    optimizer = Optimizer([("w", held)], OptimizerSpec(learning_rate=1.0, eps=0.5))
    held.grad = torch.tensor([0.5, -1.5])
    optimizer.step(1.0, 1.0)
    torch.testing.assert_close(held.detach(), torch.tensor([-0.5 / 1.0, 1.5 / 2.0]))


def test_muon_moves_matrices_of_blocks_and_adamw_the_rest() -> None:
    spec = OptimizerSpec(
        kind=OptimizerKind.MUON, learning_rate=0.1, weight_decay=0.05, adamw_learning_rate=0.02
    )
    held = parameters() | {"embedding": torch.nn.Parameter(torch.ones(5, 3))}
    held["stack"] = torch.nn.Parameter(torch.ones(2, 3, 3))
    held["stack_bias"] = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = Optimizer(held.items(), spec, apart={"embedding"})
    copies = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in held.items()}
    muon = torch.optim.Muon(
        [copies["matrix"]], lr=0.05, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    decayed = {"params": [copies["embedding"], copies["stack"]], "weight_decay": 0.05}
    groups = [decayed, {"params": [copies["norm"], copies["stack_bias"]], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.01)  # half the spec's rates, as the step is told
    for step in range(3):
        set_gradients(held, step)
        set_gradients(copies, step)
        optimizer.step(0.05, optimizer.gradient_norm())
        muon.step()
        adamw.step()
        for name in held:
            torch.testing.assert_close(held[name], copies[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", OptimizerKind)
@pytest.mark.parametrize(
    "name", ["layers.0.self_attn.q_norm.weight", "layers.0.mixer.A_log", "layers.0.experts.down_bias"]
)
def test_a_vector_of_two_dimensions_is_moved_as_vectors_are(kind: OptimizerKind, name: str) -> None:
    """optimizer.py 2 and 3: Cohere's norms of each head, Mamba's rates, biases of gpt-oss."""
    found = []
    for shape in ((2, 3), (6,)):
        held = {name: torch.nn.Parameter(torch.arange(1.0, 7.0).view(shape))}
        optimizer = Optimizer(held.items(), OptimizerSpec(kind=kind, learning_rate=0.1, weight_decay=0.5))
        held[name].grad = torch.linspace(-1, 1, 6).view(shape)
        optimizer.step(0.1, 1.0)
        found.append(held[name].detach().flatten())
    assert torch.equal(*found)


def test_a_setting_of_0_is_no_default() -> None:
    """Of a momentum nothing is kept; with a rate of 0 what is no matrix of a block stays."""
    kinds = {OptimizerKind.SGD: {}, OptimizerKind.MUON: {"adamw_learning_rate": 0.0}}
    for kind, more in kinds.items():
        held = parameters()
        began = {name: one.detach().clone() for name, one in held.items()}
        optimizer = Optimizer(held.items(), OptimizerSpec(kind=kind, learning_rate=1.0, momentum=0.0, **more))
        moved = []
        for _ in range(2):
            before = held["matrix"].detach().clone()
            set_gradients(held, 1)
            optimizer.step(1.0, 1.0)
            moved.append(held["matrix"].detach() - before)
        torch.testing.assert_close(moved[0], moved[1], atol=1e-5, rtol=0)
        assert torch.equal(held["norm"], began["norm"]) == (kind is OptimizerKind.MUON)


def test_a_rate_for_a_step_is_taken_where_the_spec_says_0() -> None:
    """By both parts of Muon, which have no proportion then."""
    held = parameters()
    began = {name: one.detach().clone() for name, one in held.items()}
    optimizer = Optimizer(held.items(), OptimizerSpec(kind=OptimizerKind.MUON, learning_rate=0.0))
    for rate in (0.0, 0.1):
        set_gradients(held, 1)
        optimizer.step(rate, 1.0)
        assert [torch.equal(held[name], began[name]) for name in held] == [rate == 0.0] * 2


def test_an_update_of_muon_is_nearly_orthogonal() -> None:
    """Newton-Schulz brings every singular value near one: what is left of the gradient is its directions."""
    matrix = torch.nn.Parameter(torch.zeros(6, 4))
    optimizer = Optimizer([("m", matrix)], OptimizerSpec(kind=OptimizerKind.MUON, learning_rate=1.0))
    matrix.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    optimizer.step(1.0, 1.0)
    values = torch.linalg.svdvals(matrix.detach() / (0.2 * math.sqrt(6)))
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3


@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_restored_state_continues_bit_equal(kind: OptimizerKind) -> None:
    spec = OptimizerSpec(kind=kind, learning_rate=0.1)
    held = parameters()
    optimizer = Optimizer(held.items(), spec)
    for step in range(3):
        set_gradients(held, step)
        optimizer.step(0.1, optimizer.gradient_norm())
    copies = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in held.items()}
    other = Optimizer(copies.items(), spec)
    other.restore({name: tensor.clone() for name, tensor in optimizer.moments().items()}, 3)
    for one, of in ((optimizer, held), (other, copies)):
        set_gradients(of, 9)
        one.step(0.1, one.gradient_norm())
    assert all(torch.equal(held[name], copies[name]) for name in held)


@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_a_return_to_before_the_first_step_has_no_moments(kind: OptimizerKind) -> None:
    held = parameters()
    optimizer = Optimizer(held.items(), OptimizerSpec(kind=kind, learning_rate=0.1))
    assert optimizer.moments() == {}
    set_gradients(held, 0)
    optimizer.step(0.1, 1.0)
    assert optimizer.moments()
    optimizer.restore({}, 0)
    assert optimizer.moments() == {}


def test_moments_of_what_another_release_moved_otherwise_are_refused() -> None:
    """Of a bias of stacked experts, that Muon moved; at the next step AdamW would not know them."""
    spec = OptimizerSpec(kind=OptimizerKind.MUON, learning_rate=0.1)
    held = parameters() | {"experts_bias": torch.nn.Parameter(torch.ones(2, 3))}
    optimizer = Optimizer(held.items(), spec)
    set_gradients(held, 0)
    optimizer.step(0.1, optimizer.gradient_norm())
    moments = optimizer.moments()
    optimizer.check(moments)
    optimizer.check({})
    older = {name: one for name, one in moments.items() if not name.endswith("experts_bias")}
    with pytest.raises(QuartetError, match="of experts_bias the state has moments that this release's AdamW"):
        optimizer.check(older | {"momentum.experts_bias": torch.zeros(2, 3)})
    with pytest.raises(QuartetError, match="of matrix the state has moments that this release's Muon"):
        optimizer.check(moments | {"first.matrix": held["matrix"].detach()})


@pytest.mark.parametrize("bucket_bytes", [1, 60, 1 << 20], ids=["one each", "some", "all"])
@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_offloaded_moments_move_parameters_to_the_same_bits(
    kind: OptimizerKind, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """offload.py 1, through a restart and over a parameter without a gradient."""
    monkeypatch.setattr(offload, "BUCKET_BYTES", bucket_bytes)
    spec = OptimizerSpec(kind=kind, learning_rate=0.1, weight_decay=0.05)
    found = []
    for offloaded in (False, True):
        held = parameters() | {"embedding": torch.nn.Parameter(torch.ones(5, 3))}
        optimizer = Optimizer(held.items(), spec, {"embedding"}, offloaded)
        for step in range(4):
            set_gradients(held, step)
            if step == 0:
                held["norm"].grad = None
            optimizer.step(0.1, optimizer.gradient_norm())
            if step == 2:
                moments = {name: one.clone() for name, one in optimizer.moments().items()}
                optimizer = Optimizer(held.items(), spec, {"embedding"}, offloaded)
                optimizer.restore(moments, 3)
        found.append([*held.values(), *optimizer.moments().values()])
    assert len(found[0]) == len(found[1]) > 3
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_buckets_have_every_parameter_once_and_a_bound() -> None:
    named = {str(size): torch.nn.Parameter(torch.zeros(size << 18)) for size in (3, 100, 300, 2, 200, 50, 6)}
    found = [list(bucket) for bucket in offload.buckets(named)]
    assert found == [["3", "100"], ["300"], ["2", "200", "50"], ["6"]]
    assert offload.BUCKET_BYTES == 256 << 20


def test_what_no_single_key_is_at_fault_for_is_refused_by_its_table() -> None:
    spec = pb.RunSpec(base_model="m", optimizer={"learning_rate": 1.0, "min_lr": 0.5})
    with pytest.raises(QuartetError, match="optimizer is refused: min_lr is where a rate ends that falls"):
        run_spec(spec)


@pytest.mark.parametrize(
    ("fields", "key", "value", "why"),
    [
        ({"schedule": "SCHEDULE_LINEAR"}, "total_steps", "0", "a linear schedule needs total_steps above"),
        (
            {"schedule": "SCHEDULE_COSINE", "warmup_steps": 5, "total_steps": 5},
            "total_steps",
            "5",
            "5 is not",
        ),
        (
            {"schedule": "SCHEDULE_WARMUP_STABLE_DECAY", "warmup_steps": 1, "total_steps": 5},
            "decay_steps",
            "0",
            "from 1 to 4",
        ),
        ({"decay_steps": 3}, "decay_steps", "3", "belongs to the schedule warmup_stable_decay"),
    ],
)
def test_a_schedule_without_its_end_is_refused_by_the_key_that_lacks(
    fields: dict[str, Any], key: str, value: str, why: str
) -> None:
    spec = pb.RunSpec(base_model="m", optimizer={"learning_rate": 1.0, **fields})
    with pytest.raises(QuartetError, match=why) as raised:
        run_spec(spec)
    assert (raised.value.metadata["key"], raised.value.metadata["value"]) == (f"optimizer.{key}", value)
