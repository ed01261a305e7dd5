"""The dialect of prime-rl: what becomes of its keys, its defaults, and what is refused.

Defaults are those of prime-rl 0.8.0, read off prime_rl/configs/{trainer,orchestrator,shared,rl,inference}.py.
"""

from __future__ import annotations

import copy
import tomllib
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from prime_rl_files import CLASSIC, LATER, SOURCES, TASKSETS
from quartet.config import ConfigError
from quartet.config.load import validate
from quartet.run.config import RunConfig
from quartet.run.dialect import Translation
from quartet.run.hosted import MAX_TIMEOUT_SECONDS
from quartet.run.prime_rl import Form, form_of, translate
from quartet.run.prime_rl.form import AT_THE_TOP, OF_OUR_SERVICES, OF_SERVICES, OURS
from quartet.run.prime_rl.keys import LEFT_OUT, REFUSED
from read_or_refused import is_read_or_refused
from vf_rl_tables import value_at

#: A file that says as little as a run may.
LEAST = """
max_steps = 20
[model]
name = "m"
[orchestrator]
group_size = 8
[[orchestrator.train.source]]
env.taskset.id = "reverse-text"
"""
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def tables(more: str = "", least: str = LEAST) -> dict[str, Any]:
    """A file's, with more beside it: lines of `key = value` by dotted keys."""
    given = tomllib.loads(least)
    for line in filter(None, map(str.strip, more.splitlines())):
        path, value = dotted(tomllib.loads(line))
        table = given
        for part in path[:-1]:
            table = table.setdefault(part, {})
        table[path[-1]] = value
    return given


def dotted(table: dict[str, Any], prefix: tuple[str, ...] = ()) -> tuple[tuple[str, ...], Any]:
    """Of tables with one key each."""
    ((key, value),) = table.items()
    deeper = isinstance(value, dict) and len(value) == 1
    return dotted(value, (*prefix, key)) if deeper else ((*prefix, key), value)


def run_of(given: dict[str, Any], **how: Any) -> RunConfig:
    return validate(RunConfig, translate(given, **how).tables)


def values(config: RunConfig, expected: dict[str, Any]) -> dict[str, Any]:
    return {path: value_at(config, path) for path in expected}


#: The run of a file that says nothing more.
DEFAULT_RUN = {
    "batch_size": 128,
    "rollouts_per_example": 8,
    "max_off_policy_steps": 1,
    "max_concurrent": 1024,
    "microbatch_tokens": 2048,
    "learning_rate": 1e-6,
    "lr_scheduler": "constant",
    "optimizer": "adamw",
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "sampling.temperature": 1.0,
    "sampling.max_tokens": None,
    "sampling.top_p": None,
    "env.0.id": "reverse-text",
    "env.0.weight": 1.0,
    "env.0.timeout_seconds": MAX_TIMEOUT_SECONDS,
    "algorithm.advantage": "dr_grpo",
    "algorithm.aggregation": "token",
    "algorithm.loss": "custom",
    "algorithm.custom": "prime_rl_dppo",
    "algorithm.custom_args": {"mask_low": 0.2, "mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3},
    "algorithm.zero_advantage_filtering": True,
    "algorithm.dynamic_sampling": False,
    "algorithm.overlong_filtering": False,
    "algorithm.kl_coef": 0.0,
    "algorithm.num_iterations": 1,
    "lora.enabled": False,
    "eval.num_examples": 0,
    "wandb.project": None,
    "inference.max_model_len": 2048,
}


def test_what_a_file_leaves_out_has_the_default_of_prime_rl() -> None:
    found = translate(tables())
    assert values(validate(RunConfig, found.tables), DEFAULT_RUN) == DEFAULT_RUN
    assert found.without_effect == ()
    assert found.origins["learning_rate",] == "prime-rl's default of trainer.optim.lr"


def test_a_group_of_one_is_its_default_and_refused_with_its_place() -> None:
    given = tables()
    del given["orchestrator"]["group_size"]
    assert translate(given).origins["rollouts_per_example",].startswith("prime-rl's default of")
    with pytest.raises(ConfigError, match=r"rollouts_per_example = 1 is refused: algorithm\.advantage"):
        run_of(given)


@pytest.mark.parametrize(
    ("said", "becomes"),
    [
        ("trainer.optim.lr = 3e-6", {"learning_rate": 3e-6}),
        ('trainer.optim.max_norm = "None"', {"max_grad_norm": 0.0}),
        ("trainer.optim.betas2 = 0.99", {"adam_beta2": 0.99}),
        ('trainer.optim.type = "muon"', {"optimizer": "muon", "momentum": 0.95, "adam_beta2": 0.95}),
        ('trainer.optim = { type = "sgd", nesterov = false, momentum = 0.8 }', {"momentum": 0.8}),
        ('trainer.scheduler.type = "cosine"', {"lr_scheduler": "cosine", "warmup_steps": 10}),
        (
            'trainer.scheduler = { type = "linear", warmup_steps = 4 }',
            {"lr_scheduler": "warmup_stable_decay", "warmup_steps": 4, "decay_steps": 10},
        ),
        (
            'trainer.scheduler = { type = "linear", decay_steps = 0 }',
            {"lr_scheduler": "constant", "warmup_steps": 10},
        ),
        (
            "trainer.loss = { kl_tau = 0.0, dppo_mask_high = 0.28 }",
            {"algorithm.loss": "dppo", "algorithm.clip_high": 0.28, "algorithm.clip_low": 0.2},
        ),
        ("trainer.loss.adv_tau = 0.5", {"algorithm.custom_args.adv_tau": 0.5}),
        ('trainer.loss.type = "ipo"', {"algorithm.custom": "prime_rl_ipo", "algorithm.custom_args.eps": 0.1}),
        (
            'trainer.loss.type = "icepop"',
            {"algorithm.loss": "ppo", "algorithm.correction.floor": 0.2, "algorithm.correction.cap": 5.0},
        ),
        ('trainer.loss.type = "cispo"', {"algorithm.loss": "cispo", "algorithm.clip_high": 5.0}),
        ('trainer.loss = { type = "ppo", ratio_high = 1.5 }', {"algorithm.clip_high": 0.5}),
        ("trainer.model.freeze_moe_router = true", {"freeze_routers": True}),
        ("trainer.enable_router_replay = true", {"algorithm.router_replay": True}),
        ("trainer.model.ac = {}", {"trainer.gradient_checkpointing": True}),
        ('trainer.model.ac = "None"', {"trainer.gradient_checkpointing": False}),
        ("trainer.model.full_offload = true", {"trainer.optimizer_offload": True}),
        ("trainer.model.lora = {}", {"lora.r": 16, "lora.alpha": 32.0, "lora.target_modules": SEVEN}),
        (
            'trainer.model.experimental.lora = { rank = 4, modules_to_save = ["lm_head"] }',
            {"lora.r": 4, "lora.publish": "merged", "lora.modules_to_save": ("lm_head",)},
        ),
        ("ckpt.interval = 7", {"ckpt.interval": 7}),
        ("ckpt.keep = 3", {"ckpt.keep_last": 3}),
        ("orchestrator.batch_size = 64", {"batch_size": 64}),
        ("orchestrator.oversampling_factor = 2.0", {"max_concurrent": 256}),
        ("orchestrator.max_inflight_rollouts = 300", {"max_concurrent": 300}),
        ("orchestrator.max_inflight_groups = 16", {"max_concurrent": 128}),
        ("orchestrator.max_off_policy_steps = 0", {"max_off_policy_steps": 0}),
        ("max_async_level = 2", {"max_off_policy_steps": 2}),
        ("orchestrator.mask_truncated_completions = true", {"algorithm.overlong_filtering": True}),
        ('orchestrator.algo.type = "max_rl"', {"algorithm.advantage": "max_rl"}),
        ('orchestrator.advantage = "None"', {"algorithm.advantage": "none"}),
        ("orchestrator.train.filter_zero_advantages = false", {"algorithm.zero_advantage_filtering": False}),
        (
            'orchestrator.post_batch_filters = [{ type = "zero_advantage", enforce = false }]',
            {"algorithm.zero_advantage_filtering": False, "algorithm.dynamic_sampling": False},
        ),
        ("orchestrator.constant_trainer_batch_size = true", {"algorithm.dynamic_sampling": True}),
        (
            "orchestrator.train.sampling = { top_k = -1, min_p = 0.1 }",
            {"sampling.top_k": 0, "sampling.min_p": 0.1},
        ),
        (
            "orchestrator.train.sampling.extra_body.chat_template_kwargs = { enable_thinking = false }",
            {"inference.chat": {"template_settings": {"enable_thinking": False}}},
        ),
        ("inference.model.max_model_len = 1024", {"inference.max_model_len": 1024}),
        ("inference.model.max_model_len = 9000", {"inference.max_model_len": 2048}),
        ("inference.vllm.max_model_len = 512", {"inference.max_model_len": 512}),
        ('inference.model.dtype = "float32"', {"inference.embedded.dtype": "float32"}),
        ('inference.model.tool_call_parser = "None"', {"inference.chat.tool_parser": "none"}),
        ('tokenizer.chat_template = "t.jinja"', {"inference.chat.template_file": "t.jinja"}),
        ("wandb = {}", {"wandb.project": "prime-rl"}),
        ("deployment = {}", {"inference.max_model_len": 2048}),
        ("trainer.model.debug = {}", {"microbatch_tokens": 2048}),
        ('trainer.model.lora = "None"', {"lora.enabled": False}),
        ('orchestrator.eval = "None"', {"eval.num_examples": 0}),
        ("wandb.offline = true", {"wandb.mode": "offline"}),
        # A file of each service calls its own run otherwise there.
        (
            'trainer.wandb.name = "x-trainer"\norchestrator.wandb.name = "x-orchestrator"',
            {"wandb.project": "prime-rl", "wandb.name": "x-trainer"},
        ),
        (
            "orchestrator.buffer.online_difficulty_filtering = true\n"
            "orchestrator.constant_trainer_batch_size = false",
            {"algorithm.dynamic_sampling": True, "algorithm.max_resample": 1000},
        ),
        ("deployment = { num_train_gpus = 2, num_infer_gpus = 6 }", {"trainer.gpus": 2, "inference.gpus": 6}),
    ],
)
def test_what_becomes_of_a_key(said: str, becomes: dict[str, Any]) -> None:
    assert values(run_of(tables(said)), becomes) == becomes


def test_arguments_of_vllm_reach_the_engine() -> None:
    given = tables("inference.gpu_memory_utilization = 0.8\ndeployment.num_infer_gpus = 4")
    given["inference"] |= {"parallel": {"tp": 2}, "vllm_extra": {"max_num_seqs": 8, "enable_lora": True}}
    run = translate(given, "vllm")
    assert run.tables["inference"] == {
        "engine": "vllm",
        "max_model_len": 2048,
        "gpus": 4,
        "vllm": {"max_num_seqs": 8, "args": {"gpu_memory_utilization": 0.8, "tensor_parallel_size": 2}},
    }
    assert run.without_effect == (
        "inference.vllm_extra.enable_lora = true (the engine has room for the run's adapter)",
    )
    given["inference"]["parallel"]["dp"] = 4
    with pytest.raises(ConfigError, match=r"inference\.parallel\.dp = 4 is refused: deployment\.num_infer"):
        translate(given, "vllm")


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ('trainer.optim.type = "sign_sgd"', 'choose "adamw", "muon" or "sgd"'),
        ('trainer.optim.type = "sgd"', "SGD has plain momentum here"),
        ("trainer.scheduler.min_lr = 1e-7", "a rate that falls ends at 0 here"),
        ("trainer.loss.token_mask_low = 0.1", "loss.token_mask_low = 0.1 is refused: it is of a loss"),
        ('trainer.loss.type = "custom"', "write it as a loss of your own"),
        ("trainer.optim.weight_decy = 1", "did you mean 'trainer.optim.weight_decay'?"),
        ("trainer.optim = 3", "trainer.optim = 3 is refused: should be a table"),
        ("trainer = 3", "trainer = 3 is refused: should be a table"),
        ("trainer.model.fp8 = true", "the trainer computes in bfloat16 or float32"),
        ("trainer.model.trust_remote_code = true", "no code of a model folder is run"),
        ("ckpt.resume_step = 10", "write --resume with --output-dir"),
        ("ckpt.keep_interval = 100", "set keep_last, or export"),
        ('orchestrator.algo.type = "opd"', "[algorithm] preset"),
        ('orchestrator.algo = { type = "grpo", length_penalty = { type = "x" } }', "a function of your own"),
        ("orchestrator.token_batch_size = 10", "set orchestrator.batch_size, in rollouts"),
        ("orchestrator.buffer.easy_threshold = 0.9", "set [difficulty_filter]"),
        ("orchestrator.sampling.temp_scheduler = { a = 1 }", "the temperature is one for the whole run"),
        ("orchestrator.train.sampling.min_tokens = 3", "rollouts are not sampled by it here"),
        ('orchestrator.filters = [{ type = "repetition", enforce = true }]', "not judged by their tokens"),
        ("orchestrator.eval = { interval = 3 }", "give it environments"),
        ('deployment = { type = "multi_node" }', "quartet rl starts its services on one machine"),
        ("slurm.job_name = 'j'", "quartet rl starts its services on one machine"),
        ("bench = true", "there are benchmarks/"),
        ("trainer.max_steps = 3", "trainer.max_steps = 3 is refused: max_steps says otherwise"),
        ("no_such = 3", "no_such = 3 is refused: Quartet has no such setting"),
        ("trainer.loss.ratio_high = 4.0", 'say of which loss: type = "icepop", "cispo" or "ppo"'),
        ("orchestrator.buffer.env_ratios = [0.5, 0.5]", "give a number for each environment"),
        ("orchestrator.sampling.extra_body = 3", "sampling.extra_body = 3 is refused: should be a table"),
        (
            'orchestrator.post_batch_filters = [{ type = "zero_advantage", window = 3 }]',
            "post_batch_filters.0.window = 3 is refused: Quartet has no such setting",
        ),
        # No module at all would be every linear one here.
        ('trainer.model.lora.target_modules = ["experts"]', "linear modules alone have adapters; name some"),
        ("trainer.model.lora.target_modules = []", "linear modules alone have adapters; name some"),
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


def test_what_is_of_training_or_of_evaluations_is_told_of_the_other() -> None:
    """given.py 3"""
    given = tables()
    given["orchestrator"]["train"]["source"][0]["interval"] = 5
    source = {"taskset": {"id": "a"}, "ratio": 2, "sampling": {"temperature": 1.0}}
    given["orchestrator"]["eval"] = {"source": [source]}
    assert translate(given).without_effect == (
        "orchestrator.train.source.0.interval = 5 (it is of evaluations)",
        "orchestrator.eval.source.0.ratio = 2 (it is of training)",
    )


def test_no_time_at_all_is_not_a_week() -> None:
    given = tables()
    given["orchestrator"]["train"]["source"][0]["timeout"] = 0
    with pytest.raises(ConfigError, match=r"timeout_seconds = 0"):
        run_of(given)


def test_a_run_has_an_end() -> None:
    given = tables()
    del given["max_steps"]
    with pytest.raises(ConfigError, match="max_steps = null is refused: a run ends here; set it"):
        translate(given)
    assert "max_steps" not in translate(given, own={"max_steps": 3}).tables


def test_a_loss_or_preset_of_quartets_own_is_that_alone() -> None:
    loss = {"loss": "ppo", "proximal": True, "correction": {"mode": "mask", "floor": 0.125, "cap": 8.0}}
    run = translate(tables(), own={"algorithm": loss})
    assert run.tables["algorithm"] == {
        "aggregation": "token",
        "advantage": "dr_grpo",
        "zero_advantage_filtering": True,
    }
    assert translate(tables(), own={"algorithm": {"preset": "opd"}}).tables["algorithm"] == {}


def test_every_form_of_an_environment() -> None:
    classic = tables('orchestrator.env = [{ id = "o/e@1", args = { a = 1 }, timeout = 60, ratio = 2 }]')
    del classic["orchestrator"]["train"]
    assert translate(classic).tables["env"] == [
        {"id": "o/e@1", "args": {"a": 1}, "timeout_seconds": 60.0, "weight": 2.0}
    ]
    alone = tables('orchestrator.environment = { id = "e" }')
    del alone["orchestrator"]["train"]
    assert translate(alone).tables["env"][0]["id"] == "e"
    given = tables()
    (source,) = given["orchestrator"]["train"]["source"]
    source["env"] = {
        "id": "best-of-n",
        "n": 4,
        "taskset": {"id": "gsm8k", "split": "train"},
        "agent": {"harness": {"id": "null"}, "runtime": {"type": "docker"}, "max_turns": 3},
    }
    (env,) = translate(given).tables["env"]
    agent = {"runtime": {"type": "docker"}, "max_turns": 3}
    assert (env["id"], env["args"]) == (
        "gsm8k",
        {"split": "train", "env": "best-of-n", "n": 4, "agent": agent},
    )


def test_a_role_has_its_harness_with_or_without_a_runtime_in_it() -> None:
    given = tables()
    (source,) = given["orchestrator"]["train"]["source"]
    here = {"id": "null", "runtime": {"type": "subprocess"}}
    source["env"] |= {
        "player": {"harness": here},
        "judge": {"harness": {"id": "bash", "runtime": {"type": "docker"}}},
    }
    judge = {"harness": {"id": "bash"}, "runtime": {"type": "docker"}}
    assert translate(given).tables["env"][0]["args"] == {"judge": judge}


def test_what_is_none_for_an_environment_is_told() -> None:
    given = tables()
    given["orchestrator"]["train"]["source"][0]["env"]["agent"] = {
        "runtime": {"type": "prime", "idle": "None"}
    }
    run = translate(given)
    assert run.tables["env"][0]["args"] == {"agent": {"runtime": {"type": "prime"}}}
    (told,) = run.without_effect
    assert told.endswith("0.args.agent.runtime.idle = null (the environment's own default holds)")


def test_a_state_to_begin_from_is_named_on_the_command_line() -> None:
    told = translate(tables("ckpt.resume_step = -1")).without_effect
    assert told == ("ckpt.resume_step = -1 (there is --resume)",)


def test_what_environments_of_one_run_cannot_differ_in() -> None:
    given = tables()
    source = given["orchestrator"]["train"]["source"]
    source.append({**copy.deepcopy(source[0]), "name": "two", "group_size": 4})
    with pytest.raises(ConfigError, match=r"source\.1\.group_size = 4 is refused: all environments"):
        translate(given)
    source[1] |= {"group_size": 8, "sampling": {"temperature": 0.5}}
    with pytest.raises(ConfigError, match=r"source\.1\.sampling .* all environments of a run have one kind"):
        translate(given)


def test_evaluations() -> None:
    given = tables("orchestrator.eval.interval = 5")
    given["orchestrator"]["eval"]["source"] = [
        {"env": {"taskset": {"id": "a"}}, "group_size": 4},
        {"env": {"taskset": {"id": "b"}}, "num_examples": 12},
    ]
    run = run_of(given)
    expected = {
        "eval.interval": 5,
        "eval.before": True,
        "eval.after": True,
        "eval.timeout_seconds": MAX_TIMEOUT_SECONDS,
        "eval.env.0.rollouts_per_example": 4,
        "eval.env.1.num_examples": 12,
    }
    assert values(run, expected) == expected
    assert [trial.num_examples for trial in run.trials] == [1_000_000, 12], "all that there are"
    given["orchestrator"]["eval"]["sampling"] = {"temperature": 0.0, "max_completion_tokens": 9}
    with pytest.raises(ConfigError, match="max_completion_tokens = 9 is refused: evaluations sample as"):
        translate(given)


def test_tasks_of_an_evaluation_are_its_examples() -> None:
    given = tables("orchestrator.eval.num_tasks = 64")
    sources = [{"env": {"taskset": {"id": "a"}}}, {"env": {"taskset": {"id": "b"}}, "num_tasks": 12}]
    given["orchestrator"]["eval"]["source"] = sources
    assert [trial.num_examples for trial in run_of(given).trials] == [64, 12]


def test_what_evaluations_take_from_training_is_told() -> None:
    """There an answer to an evaluation is not cut where training's are."""
    given = tables("orchestrator.train.sampling.max_completion_tokens = 128")
    given["orchestrator"]["eval"] = {"source": [{"env": {"taskset": {"id": "a"}}}]}
    (told,) = translate(given).without_effect
    assert told.startswith("orchestrator.eval.sampling = {} (evaluations sample as training does where it")
    assert "temperature = 1.0, max_tokens = 128;" in told
    given["orchestrator"]["eval"]["sampling"] = {"temperature": 0.6, "max_completion_tokens": 128}
    assert translate(given).without_effect == ()


def test_a_rollout_that_ends_sooner_than_the_context_of_inference_is_told() -> None:
    (told,) = translate(tables("inference.model.max_model_len = 9000")).without_effect
    assert told.startswith(
        "inference.model.max_model_len = 9000 (a rollout ends at prime-rl's default of seq_len"
    )
    assert translate(tables("seq_len = 9000\ninference.model.max_model_len = 9000")).without_effect == ()


def test_a_gate_by_its_path_is_told_how_it_is_written() -> None:
    given = tables()
    gate = {"import_path": "prime_rl.orchestrator.curricula.AdvantageRangeGate"}
    given["orchestrator"]["train"]["source"][0]["curriculum"] = {"gates": {"zero": gate}}
    with pytest.raises(ConfigError, match=r'write { type = "advantage_range" } for that, or remove it'):
        translate(given)


def test_where_services_run_already_nothing_of_devices_is_read() -> None:
    given = tables('deployment = { type = "multi_node", num_train_nodes = 2 }\nslurm.job_name = "j"')
    run = translate(given, starts_services=False)
    assert "gpus" not in run.tables.get("trainer", {})
    assert [line.partition(" = ")[0] for line in run.without_effect] == ["deployment", "slurm"]


@pytest.mark.parametrize("text", [CLASSIC, TASKSETS, SOURCES, LATER])
@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_files_of_every_release_are_runs(text: str, engine: Any) -> None:
    given = tomllib.loads(text)
    before = copy.deepcopy(given)
    assert form_of(given)[0] is Form.THEIRS
    found: Translation = translate(given, engine)
    validate(RunConfig, found.tables)
    assert given == before


def test_no_key_of_a_run_is_taken_for_one_of_prime_rl() -> None:
    """What tells the forms apart is in one of them alone."""
    assert not OURS & AT_THE_TOP
    for service, keys in OF_SERVICES.items():
        assert not OF_OUR_SERVICES[service] & keys


SCALAR = st.booleans() | st.integers(-3, 2**40) | st.floats() | st.text(max_size=5) | st.just("None")
ANY = SCALAR | st.lists(SCALAR, max_size=2) | st.dictionaries(st.text(max_size=3), SCALAR, max_size=2)
PATHS = sorted(
    {
        *LEFT_OUT, *REFUSED, *AT_THE_TOP, "max_steps", "model.name", "wandb.project", "ckpt.interval",
        *(f"{service}.{key}" for service, keys in OF_SERVICES.items() for key in keys),
        *("trainer.optim.lr", "trainer.optim.type", "trainer.loss.type", "trainer.loss.kl_tau"),
        *("trainer.scheduler.type", "trainer.scheduler.decay_steps", "trainer.model.lora.rank"),
        *("orchestrator.train.source", "orchestrator.train.sampling", "orchestrator.algo.type"),
        *("orchestrator.eval.interval", "orchestrator.eval.env", "inference.parallel.tp", "inference.vllm"),
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
