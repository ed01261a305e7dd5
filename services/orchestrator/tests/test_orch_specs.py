"""From the [algorithm] table to what the trainer is asked for; the calls for a batch of several steps."""

from __future__ import annotations

import json
import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quartet.run.config import RunConfig, parse_run
from quartet.run.lora import LoraConfig
from quartet.run.presets import PRESETS
from quartet.v1 import trainer_service_pb2 as tpb
from quartet_orchestrator.calls import CallKind, CallPlan
from quartet_orchestrator.metrics import of_training, over_calls
from quartet_orchestrator.pace import Pace
from quartet_orchestrator.specs import loss_spec, run_spec


def run(algorithm: str = "", more: str = "") -> RunConfig:
    return parse_run(
        f'model = "m"\n{more}\n[sampling]\nmax_tokens = 9\n[[env]]\nid = "e"\n[algorithm]\n{algorithm}'
    )


def test_a_loss_of_ones_own_is_told_what_it_gets_by_name() -> None:
    own = 'loss = "custom"\ncustom = "mine"\n'
    args = json.loads(
        loss_spec(run(own + 'custom_args = { n = 2, tau = 2.0, on = true, of = "a" }'), 0).custom_args
    )
    assert args == {"n": 2, "tau": 2.0, "on": True, "of": "a"}
    assert [type(one) for one in args.values()] == [int, str, bool, float]
    # A trainer of an earlier release takes what it knows.
    assert loss_spec(run(own), 0).custom_args == "" and loss_spec(run(own), 0).custom == "mine"


def test_presets_ask_for_what_their_papers_say() -> None:
    teacher = {"opd": 'reference = { model = "t" }'}
    specs = {name: loss_spec(run(f'preset = "{name}"\n{teacher.get(name, "")}'), 0) for name in PRESETS}
    ppo, gradient = tpb.RATIO_TREATMENT_PPO, tpb.LOSS_KIND_POLICY_GRADIENT
    for name in ("grpo", "dr_grpo", "dapo", "gspo", "reinforce_pp"):
        assert (specs[name].kind, specs[name].ratio) == (gradient, ppo)
    assert (specs["dapo"].clip_low, specs["dapo"].clip_high) == (0.2, 0.28)
    assert (specs["gspo"].clip_low, specs["gspo"].clip_high) == (3e-4, 4e-4)
    levels = {name: spec.ratio_level for name, spec in specs.items()}
    assert [name for name, level in levels.items() if level == tpb.RATIO_LEVEL_SEQUENCE] == ["gspo", "luspo"]
    sequence = {name for name, spec in specs.items() if spec.aggregation == tpb.AGGREGATION_SEQUENCE}
    assert sequence == {"grpo", "gspo", "sapo"}
    assert specs["sapo"].ratio == tpb.RATIO_TREATMENT_SAPO and not specs["sapo"].HasField("tau_positive")
    gate = loss_spec(run('preset = "sapo"\ntau_positive = 0.5\ntau_negative = 2.0'), 0)
    assert (gate.tau_positive, gate.tau_negative) == (0.5, 2.0)
    assert (specs["luspo"].ratio, specs["luspo"].clip_low, specs["luspo"].clip_high) == (ppo, 2e-3, 2.5e-3)
    luspo = run('preset = "luspo"').algorithm
    assert (luspo.normalised_by, luspo.constant_tokens) == ("constant", 1)
    assert run('preset = "luspo"\naggregation = "token"').algorithm.constant_tokens is None
    assert specs["vespo"].ratio == tpb.RATIO_TREATMENT_VESPO and not specs["vespo"].HasField("kernel")
    kernel = loss_spec(run('preset = "vespo"\nkernel = { k_positive = 1.5 }'), 0).kernel
    assert kernel == tpb.VespoKernel(k_positive=1.5, lambda_positive=3, k_negative=3, lambda_negative=2)
    assert specs["dppo"].ratio == tpb.RATIO_TREATMENT_DPPO
    assert specs["sft"].kind == tpb.LOSS_KIND_CROSS_ENTROPY
    assert specs["opd"].kind == tpb.LOSS_KIND_REFERENCE_KL
    assert run('preset = "dr_grpo"').algorithm.normalised_by == "constant"
    assert not any(spec.HasField("proximal_version") or spec.kl_coef for spec in specs.values())
    assert not any(spec.HasField("off_policy_mask") or spec.kl_weighted for spec in specs.values())
    stale = loss_spec(run("kl_coef = 0.1\nkl_weighted = true\noff_policy_mask = 0.2"), 0)
    assert stale.kl_weighted and stale.off_policy_mask == 0.2
    settings = ("top_entropy_quantile", "target_entropy", "entropy_coef_delta")
    assert not any(spec.HasField(name) for spec in specs.values() for name in settings)
    given = "top_entropy_quantile = 0.2\ntarget_entropy = 0.3\nentropy_coef_delta = 0.01"
    assert [getattr(loss_spec(run(given), 0), name) for name in settings] == [0.2, 0.3, 0.01]


def test_names_of_the_field_and_overrides() -> None:
    algorithm = run('preset = "grpo"\nepsilon = 0.1\nbeta = 0.04\ndelta = 4.0').algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.kl_coef) == (0.1, 0.1, 0.04)
    assert run("loss = 'ppo'\nepsilon = 0.1\nepsilon-high = 0.3").algorithm.clip_high == 0.3
    other = run('preset = "gspo"\nloss = "cispo"').algorithm
    assert (other.clip_low, other.clip_high, other.ratio_level) == (None, None, "token")
    assert other.aggregation == "sequence"
    whole = run('preset = "dapo"\nreference = { sync_steps = 3 }\nkl_coef = 0.1')
    assert RunConfig.model_validate(whole.model_dump()) == whole


def test_the_reference_is_held_where_it_is_read_and_nobody_else_serves_it() -> None:
    assert not run_spec(run()).HasField("reference")
    assert not run_spec(run()).initial_state
    begun = run().model_copy(update={"initial_state": "/states/first/final@9"})
    assert run_spec(begun).initial_state == "/states/first/final@9"
    assert not run_spec(begun).fresh_optimizer
    assert run_spec(begun.model_copy(update={"initial_optimizer": "fresh"})).fresh_optimizer
    lora = LoraConfig(enabled=True, initial_adapter="/adapters/a")
    assert run_spec(run().model_copy(update={"lora": lora})).lora.initial_adapter == "/adapters/a"
    assert not run_spec(run().model_copy(update={"lora": LoraConfig(enabled=True)})).lora.initial_adapter
    assert not run_spec(run()).freeze_routers
    assert run_spec(run().model_copy(update={"freeze_routers": True})).freeze_routers
    assert run_spec(run("kl_coef = 0.1")).reference == tpb.ReferenceSpec()
    follows = run("kl_coef = 0.1\nreference = { sync_steps = 5, mixup_alpha = 0.6 }")
    assert run_spec(follows).reference == tpb.ReferenceSpec(sync_steps=5, mixup_alpha=0.6)
    served = run('preset = "opd"\nreference = { address = "h:1" }')
    assert not run_spec(served).HasField("reference")
    held = run('preset = "opd"\nreference = { model = "teacher" }')
    assert run_spec(held).reference.model == "teacher"


def test_several_iterations_count_in_versions_and_in_the_schedule() -> None:
    for steps in ("num_iterations = 3", "num_minibatches = 3"):
        config = run(
            f"{steps}\nproximal = true\nloss = 'ppo'",
            "max_steps = 7\nwarmup_steps = 2\nbatch_size = 24\nrollouts_per_example = 4",
        )
        assert (run_spec(config).optimizer.warmup_steps, run_spec(config).optimizer.total_steps) == (6, 21)
        assert {loss_spec(config, 4, step).proximal_version for step in range(3)} == {12}
        assert [loss_spec(config, 4, step).proximal_returns for step in range(3)] == [True, True, False]
    assert not loss_spec(run("proximal = true\nloss = 'ppo'"), 4).proximal_returns
    pace = Pace(max_off_policy_steps=1, groups_per_batch=2, max_steps=7, versions_per_step=3)
    assert pace.min_policy_version(4) == 9
    assert pace.violation(4, [9, 12]) is None
    assert pace.violation(4, [6]) == "stale"
    assert pace.violation(4, [10]) == pace.violation(4, [15]) == "version_unpublished"


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_the_plan_of_several_steps_on_a_batch_is_one_contiguous_list(
    max_steps: int, interval: int, keep_last: int, iterations: int, minibatches: int
) -> None:
    plan = CallPlan(
        max_steps=max_steps,
        save_interval=interval,
        keep_last=keep_last,
        num_iterations=iterations,
        num_minibatches=minibatches,
    )
    expected = [(CallKind.PUBLISH, -1, 0, 0)]
    for step in range(max_steps):
        for part in product(range(iterations), range(minibatches)):
            expected += [(CallKind.FORWARD_BACKWARD, step, *part), (CallKind.OPTIM_STEP, step, *part)]
        expected.append((CallKind.PUBLISH, step, 0, 0))
        if (step + 1) % interval == 0 and step + 1 < max_steps:
            expected.append((CallKind.SAVE, step, 0, 0))
    expected.append((CallKind.SAVE, max_steps - 1, 0, 0))
    calls = [plan.call(seq_id) for seq_id in range(1, plan.last_of(max_steps - 1) + 1)]
    assert [(call.kind, call.batch, call.iteration, call.minibatch) for call in calls] == expected
    for step in range(max_steps):
        assert plan.call(plan.first_of(step)).iteration == 0
        assert plan.call(plan.published_by(step)).kind is CallKind.PUBLISH


def test_passes_over_one_batch_are_reported_as_one() -> None:
    passes = [tpb.ForwardBackwardResponse(loss=loss, loss_tokens=8, tokens=20) for loss in (1.0, 2.0)]
    for one, ratio in zip(passes, (1.0, 3.0), strict=True):
        one.diagnostics["ratio_max"] = one.diagnostics["ratio_mean"] = ratio
    passes[0].verification.tokens_compared = 8
    whole = over_calls(passes, 1)
    assert (whole.loss, whole.tokens, whole.verification.tokens_compared) == (1.5, 20, 8)
    assert dict(whole.diagnostics) == {"ratio_max": 3.0, "ratio_mean": 2.0}
    assert over_calls(passes[:1], 1) == passes[0]


def test_the_parts_of_a_batch_are_reported_as_one() -> None:
    """Two passes over two mini-batches: what was verified and counted is that of the first pass, whole."""
    calls = [tpb.ForwardBackwardResponse(loss=loss, loss_tokens=8, tokens=20) for loss in (1, 2, 3, 6)]
    for one, compared, largest, mean in zip(calls, (3, 1), (0.5, 2.0), (0.25, 1.25), strict=False):
        one.verification.CopyFrom(
            tpb.LogprobVerification(
                max_difference=largest, mean_difference=mean, tokens_compared=compared, tokens_skipped=1
            )
        )
    whole = over_calls(calls, 2)
    assert (whole.loss, whole.tokens, whole.loss_tokens) == (3.0, 40, 16)
    assert whole.verification == tpb.LogprobVerification(
        max_difference=2.0, mean_difference=0.5, tokens_compared=4, tokens_skipped=2
    )


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_a_metric_that_some_calls_report_is_theirs_alone(order: tuple[int, ...]) -> None:
    found = ({"own": 1.0}, {"own": 3.0, "own_max": math.nan}, {"own_max": 1.0})
    calls = [tpb.ForwardBackwardResponse(diagnostics=found[number]) for number in order]
    whole = over_calls(calls, 1)
    assert whole.diagnostics["own"] == 2.0 and math.isnan(whole.diagnostics["own_max"])


@pytest.mark.parametrize("values", [(math.inf, -math.inf), (math.nan, 1.0), (1.0, -math.inf)])
def test_calls_that_found_no_finite_number_are_reported_all_the_same(values: tuple[float, ...]) -> None:
    """A run that diverged ends by its skipped steps, and not by what is said of them."""
    calls = [tpb.ForwardBackwardResponse(loss=value, diagnostics={"own": value}) for value in values]
    whole = over_calls(calls, 2)
    assert math.isnan(whole.loss) and math.isnan(whole.diagnostics["own"])


def test_the_steps_on_a_batch_are_reported_together() -> None:
    steps = [
        tpb.OptimStepResponse(grad_norm=norm, learning_rate=norm / 10, skipped_nonfinite=norm == 3.0)
        for norm in (3.0, 1.0)
    ]
    values = of_training(tpb.ForwardBackwardResponse(), steps)
    assert (values["train/grad_norm"], values["train/learning_rate"]) == (2.0, 0.1)
    assert values["train/skipped_steps"] == 1


@pytest.mark.parametrize("steps", ["num_iterations = 0", "num_iterations = 17", "num_minibatches = 0"])
def test_steps_on_a_batch_are_bounded(steps: str) -> None:
    with pytest.raises(Exception, match=steps.partition(" ")[0]):
        run(steps)


def test_minibatches_have_equally_many_groups() -> None:
    size = "batch_size = 24\nrollouts_per_example = 4"
    assert run("num_minibatches = 3\nnum_iterations = 2", size).versions_per_step == 6
    with pytest.raises(Exception, match="num_minibatches = 4 does not divide the 6 groups of a batch"):
        run("num_minibatches = 4", size)


def test_optimizer_and_adapter_are_the_trainers() -> None:
    config = parse_run(
        """
        model = "m"
        optimizer = "muon"
        momentum = 0.9
        adamw_learning_rate = 1e-4
        learning_rate = 1e-3
        lr_scheduler = "warmup_stable_decay"
        warmup_steps = 2
        decay_steps = 5
        min_lr = 1e-5
        adam_epsilon = 1e-6
        max_steps = 20
        [lora]
        enabled = true
        r = 8
        alpha = 4.0
        target_modules = ["q_proj", "v_proj"]
        target_parameters = ["experts"]
        use_rslora = true
        modules_to_save = ["norm"]
        publish = "merged"
        [algorithm]
        num_iterations = 2
        [[env]]
        id = "e"
        """
    )
    spec = run_spec(config)
    optimizer = spec.optimizer
    assert (optimizer.kind, optimizer.momentum) == (tpb.OPTIMIZER_KIND_MUON, 0.9)
    assert (optimizer.schedule, optimizer.adamw_learning_rate) == (tpb.SCHEDULE_WARMUP_STABLE_DECAY, 1e-4)
    assert (optimizer.min_lr, optimizer.eps) == (1e-5, 1e-6)
    # In optimizer steps, of which a batch takes two.
    assert (optimizer.warmup_steps, optimizer.decay_steps, optimizer.total_steps) == (4, 10, 40)
    assert spec.lora == tpb.LoraSpec(
        rank=8,
        alpha=4.0,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["experts"],
        rslora=True,
        modules_to_save=["norm"],
        publish_merged=True,
    )
    assert not run_spec(parse_run('model = "m"\n[[env]]\nid = "e"')).HasField("lora")
