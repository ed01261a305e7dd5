"""What `--dry-run` says of keys that a file leaves out: what the orchestrator asks of the trainer, and what
the trainer takes where it is asked for nothing."""

from __future__ import annotations

import pytest
from quartet.local.toml_text import dumps
from quartet.run.config import RunConfig, parse_run
from quartet.run.left_out import of_a_run, of_the_optimizer
from quartet.run.sft import SftConfig
from quartet.run.written_out import ENTROPY_COEF_DELTA, MOMENTUM
from quartet_orchestrator.specs import loss_spec as asked
from quartet_trainer import optimizer
from quartet_trainer.spec import loss
from quartet_trainer.wire.loss import loss_spec as understood

RUN = 'model = "m"\n{}\n[[env]]\nid = "e"\n[sampling]\nmax_tokens = 7\n[algorithm]\n{}'


def filled_in(config: RunConfig) -> RunConfig:
    """The same run, whose file says it all."""
    tables = config.model_dump(mode="json", exclude_none=True)
    for key, value in of_a_run(config).items():
        *above, name = key.split(".")
        table = tables
        for part in above:
            table = table.setdefault(part, {})
        table[name] = value
    return parse_run(dumps(tables))


@pytest.mark.parametrize("name", ["cispo", "ppo", "dppo", "sapo", "vespo", "none", "cross_entropy"])
@pytest.mark.parametrize(
    "more", ["", 'advantage = "dr_grpo"', "target_entropy = 0.1", "dynamic_sampling = true"]
)
def test_a_loss_is_the_same_where_all_that_is_left_out_is_said(name: str, more: str) -> None:
    """left_out.py 2."""
    config = parse_run(RUN.format("", f'loss = "{name}"\n{more}'))
    said = filled_in(config)
    assert of_a_run(said) == {} and said != config
    without, with_ = (understood(asked(one, 3)) for one in (config, said))
    assert with_.clip_bounds == without.clip_bounds and with_.taus == without.taus
    assert with_.aggregation == without.aggregation and said.constant_tokens == config.constant_tokens
    assert (with_.kernel or loss.VespoKernel()) == loss.VespoKernel()
    assert said.resamples == config.resamples
    if config.algorithm.target_entropy is not None:
        assert with_.entropy_coef_delta == ENTROPY_COEF_DELTA == loss.ENTROPY_COEF_DELTA


def test_nothing_is_told_of_what_is_not_read() -> None:
    """left_out.py 1."""
    assert of_a_run(parse_run(RUN.format("", 'preset = "grpo"'))) == {}
    assert of_a_run(parse_run(RUN.format("", 'loss = "none"'))) == {"algorithm.aggregation": "token"}
    kernel = of_a_run(parse_run(RUN.format("", 'loss = "vespo"\nkernel = { k_positive = 1.0 }')))
    assert kernel == {"algorithm.aggregation": "token"}, "the rest of a table that is given is in it"
    reference = of_a_run(parse_run(RUN.format("", 'preset = "grpo"\nbeta = 0.04')))
    assert reference == {"algorithm.reference": {}}


def test_an_optimizer_is_told_with_its_momentum() -> None:
    """left_out.py 1 and 2."""
    assert MOMENTUM == {"muon": optimizer.MUON_MOMENTUM, "sgd": optimizer.SGD_MOMENTUM}
    muon = parse_run(RUN.format('optimizer = "muon"\nlearning_rate = 1e-4', 'preset = "grpo"'))
    assert of_a_run(muon) == {"momentum": 0.95, "adamw_learning_rate": 1e-4}
    sgd = SftConfig(model="m", data="d", optimizer="sgd")  # type: ignore[call-arg, arg-type]
    assert of_the_optimizer(sgd) == {"momentum": 0.9}
    external = parse_run(RUN.format("external_trainer = true", 'preset = "grpo"'))
    assert of_a_run(external) == {}
