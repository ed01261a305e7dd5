"""The dialect of prime-rl: what is refused, and what is told to have no effect."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from prime_rl_tables import tables
from quartet.config import ConfigError
from quartet.run.prime_rl import translate
from quartet.run.prime_rl.form import AT_THE_TOP, OF_SERVICES
from quartet.run.prime_rl.keys import LEFT_OUT, OF_A_JOB, REFUSED
from quartet.run.prime_rl.machines import GPUS_PER_NODE, INFER_NODES, TRAIN_NODES
from read_or_refused import is_read_or_refused


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ('trainer.optim.type = "sign_sgd"', 'choose "adamw", "muon" or "sgd"'),
        ('trainer.optim.type = "sgd"', "SGD has plain momentum here"),
        ('trainer.scheduler = { type = "cosine", min_lr = "x" }', "should be a number"),
        ("trainer.loss.token_mask_low = 0.1", "loss.token_mask_low = 0.1 is refused: it is of a loss"),
        ('trainer.loss.type = "custom"', "write it as a loss of your own"),
        ("trainer.optim.weight_decy = 1", "did you mean 'trainer.optim.weight_decay'?"),
        ("orchestrator.buffer.max_reward = 0.9", "set [difficulty_filter] enabled, min_reward"),
        ("orchestrator.curriculum = 'x'", "tasks come in a new order in each epoch; remove it"),
        ("orchestrator.buffer.shape = 3", "Quartet has no such setting; remove it"),
        ("trainer.optim.learning_rate = 1e-4", "did you mean 'trainer.optim.lr'?"),
        ("inference.model.tensor_parallel_size = 2", "did you mean 'inference.parallel.tp'?"),
        ("orchestrator.sampling.temprature = 0.8", "not sampled by it here; did you mean 'temperature'?"),
        ("trainer.optim = 3", "trainer.optim = 3 is refused: should be a table"),
        ("trainer = 3", "trainer = 3 is refused: should be a table"),
        ("trainer.model.fp8 = true", "the trainer computes in bfloat16 or float32"),
        ("trainer.model.trust_remote_code = true", "no code of a model folder is run"),
        ("ckpt.resume_step = 10", "write --resume with --output-dir"),
        ('orchestrator.algo.type = "opd"', "[algorithm] preset"),
        ('orchestrator.algo = { type = "grpo", length_penalty = { type = "x" } }', "a function of your own"),
        ("orchestrator.token_batch_size = 10", "set orchestrator.batch_size, in rollouts"),
        ("orchestrator.buffer.easy_threshold = 0.9", "set [difficulty_filter]"),
        ("orchestrator.sampling.temp_scheduler = { a = 1 }", "the temperature is one for the whole run"),
        ("orchestrator.train.sampling.n = 3", "rollouts are not sampled by it here"),
        ('orchestrator.filters = [{ type = "repetition", enforce = true }]', "not judged by their tokens"),
        ("orchestrator.eval = { interval = 3 }", "give it environments"),
        ("bench = true", "there are benchmarks/"),
        ("trainer.max_steps = 3", "trainer.max_steps = 3 is refused: max_steps says otherwise"),
        ("orchestrator.rollouts_per_example = 4", "= 4 is refused: orchestrator.group_size says otherwise"),
        ("no_such = 3", "no_such = 3 is refused: Quartet has no such setting"),
        ("trainer.loss.ratio_high = 4.0", 'say of which loss: type = "icepop", "cispo" or "ppo"'),
        ("orchestrator.buffer.env_ratios = [0.5, 0.5]", "give a number for each environment"),
        ("orchestrator.sampling.extra_body = 3", "sampling.extra_body = 3 is refused: should be a table"),
        (
            'orchestrator.post_batch_filters = [{ type = "zero_advantage", window = 3 }]',
            "post_batch_filters.0.window = 3 is refused: Quartet has no such setting",
        ),
        (
            "orchestrator.sampling = { max_tokens = 1, max_completion_tokens = 2 }",
            "sampling.max_tokens = 1 is refused: orchestrator.sampling.max_completion_tokens says otherwise",
        ),
        (
            "orchestrator.train.sampling.extra_body.chat_template_kwargs = { thinks = true }\n"
            'orchestrator.eval = { env = [{ id = "e" }], sampling = { extra_body = { chat_template_kwargs = '
            "{ style = 1 } } } }",
            'chat_template_kwargs = {"style": 1} is refused: settings of a chat template add up here; say',
        ),
        ('wandb = { project = "p", offline = "no" }', 'wandb.offline = "no" is refused: should be true or'),
        # No module at all would be every linear one here.
        ('trainer.model.lora.target_modules = ["experts"]', "name linear modules; experts are lora"),
        ("trainer.model.lora.target_modules = []", "name linear modules; experts are lora"),
    ],
)  # fmt: skip
def test_refusals(said: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(tables(said))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value), "one thing is wrong, and told once"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("trainer.optim.mu = 0.5", "trainer.optim.mu = 0.5 (AdamW has none)"),
        (
            'trainer.optim = { type = "sgd", nesterov = false, betas1 = 0.8 }',
            "trainer.optim.betas1 = 0.8 (SGD has none)",
        ),
        (
            "trainer.scheduler.warmup_steps = 7",
            "trainer.scheduler.warmup_steps = 7 (a constant rate has none)",
        ),
        (
            "trainer.scheduler.min_lr = 1e-7",
            "trainer.scheduler.min_lr = 1e-07 (a constant rate has none)",
        ),
        (
            'trainer.scheduler = { type = "linear", decay_steps = 0, min_lr = 1e-7 }',
            "trainer.scheduler.min_lr = 1e-07 (without decay_steps the rate never falls)",
        ),
        (
            "trainer.model.lora = {}",
            "prime-rl's default of trainer.model.lora.target_modules = "
            '["experts", "fc1_latent_proj", "fc2_latent_proj"] '
            "(a model that has none of these lacks nothing; experts are lora.target_parameters)",
        ),
        (
            'trainer.model.lora.target_modules = ["q_proj", "experts"]',
            'trainer.model.lora.target_modules = ["experts"] '
            "(a model that has none of these lacks nothing; experts are lora.target_parameters)",
        ),
        (
            'trainer.scheduler = { type = "cosine", decay_steps = 3 }',
            "trainer.scheduler.decay_steps = 3 (a cosine falls to the end)",
        ),
        (
            'trainer.loss = { type = "ipo", dppo_mask_low = 0.5 }',
            'trainer.loss.dppo_mask_low = 0.5 (type = "ipo" has none)',
        ),
        (
            'trainer.loss = { type = "cispo", kl_tau = 0.5 }',
            'trainer.loss.kl_tau = 0.5 (type = "cispo" has none)',
        ),
        (
            "orchestrator.max_inflight_groups = 16\norchestrator.oversampling_factor = 2.0",
            "orchestrator.oversampling_factor = 2.0 (orchestrator.max_inflight_groups decides)",
        ),
    ],
)
def test_what_has_no_effect_beside_other_keys_is_told(said: str, told: str) -> None:
    """given.py 3, translation.py 1"""
    assert translate(tables(said)).without_effect == (told,)


def test_a_state_to_begin_from_is_named_on_the_command_line() -> None:
    told = translate(tables("ckpt.resume_step = -1")).without_effect
    assert told == ("ckpt.resume_step = -1 (there is --resume)",)


def test_a_rollout_that_ends_sooner_than_the_context_of_inference_is_told() -> None:
    (told,) = translate(tables("inference.model.max_model_len = 9000")).without_effect
    assert told.startswith(
        "inference.model.max_model_len = 9000 (a rollout ends at prime-rl's default of seq_len"
    )
    assert translate(tables("seq_len = 9000\ninference.model.max_model_len = 9000")).without_effect == ()


def test_where_services_run_already_nothing_of_devices_is_read() -> None:
    given = tables('deployment = { type = "multi_node", num_train_nodes = 2 }\nslurm.job_name = "j"')
    run = translate(given, starts_services=False)
    assert "gpus" not in run.tables.get("trainer", {})
    assert [line.partition(" = ")[0] for line in run.without_effect] == ["deployment", "slurm"]


SCALAR = st.booleans() | st.integers(-3, 2**40) | st.floats() | st.text(max_size=5) | st.just("None")


ANY = SCALAR | st.lists(SCALAR, max_size=2) | st.dictionaries(st.text(max_size=3), SCALAR, max_size=2)


PATHS = sorted(
    {
        *LEFT_OUT, *OF_A_JOB, *REFUSED, *AT_THE_TOP,
        *("max_steps", "model.name", "wandb.project", "ckpt.interval"),
        *(f"{service}.{key}" for service, keys in OF_SERVICES.items() for key in keys),
        *("trainer.optim.lr", "trainer.optim.type", "trainer.loss.type", "trainer.loss.kl_tau"),
        *("trainer.scheduler.type", "trainer.scheduler.decay_steps", "trainer.model.lora.rank"),
        *("orchestrator.train.source", "orchestrator.train.sampling", "orchestrator.algo.type"),
        *("orchestrator.eval.interval", "orchestrator.eval.env", "inference.parallel.tp", "inference.vllm"),
        *("deployment.type", "inference.deployment.type", "inference.deployment.num_nodes", "slurm.nodelist"),
        *("slurm.pre_run_command", "slurm.partition", *TRAIN_NODES, *INFER_NODES, *GPUS_PER_NODE),
    }
)  # fmt: skip


@drawn(st.dictionaries(st.sampled_from(PATHS), ANY, max_size=4), st.sampled_from(["vllm", "embedded"]))
def test_whatever_a_file_says_is_read_or_refused_in_a_sentence(said: dict[str, Any], engine: Any) -> None:
    given = tables()
    for path, value in said.items():
        node: Any = given
        *outer, key = path.split(".")
        for part in outer:
            node = node.setdefault(part, {}) if isinstance(node, dict) else {}
        if isinstance(node, dict):
            node[key] = value
    is_read_or_refused(translate, given, engine)
