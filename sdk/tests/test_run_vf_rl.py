"""The dialect of vf-rl: every key of its RLConfig, every default, and what its files are refused for.

rl_config.json holds the names and defaults of RLConfig, read off verifiers/rl/trainer/config.py of
0.1.9.post3.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from quartet.cli.run_file import RunFile, load_run
from quartet.config import ConfigError
from quartet.config.load import parse_toml, validate
from quartet.local.devices import shared_out
from quartet.run.config import RunConfig
from quartet.run.vf_rl import is_vf_rl, translate
from quartet.run.vf_rl.keys import DEFAULTS, INHERITED, WITHOUT_EFFECT

RL_CONFIG = json.loads(Path(__file__).with_name("rl_config.json").read_text())

# From the documents of verifiers 0.1.9, "Training with vf.RLTrainer"; only the model is another.
WIKI_SEARCH = """
model = "models/tiny"

[env]
id = "primeintellect/wiki-search"

[env.args]
max_turns = 10

[inference]
gpus = 1

[inference.args]
enable_auto_tool_choice = true
tool_call_parser = "hermes"

[trainer]
gpus = 1

[trainer.args]
run_name = "wiki-search"
micro_batch_size = 4
rollouts_per_example = 16
batch_size = 1024
max_steps = 500
max_tokens = 512
max_seq_len = 4096
"""

UNREAD = object()
SCALAR = st.booleans() | st.integers(-3, 2**40) | st.floats() | st.text(max_size=5)
ANY = SCALAR | st.lists(SCALAR, max_size=2) | st.dictionaries(st.text(max_size=3), SCALAR, max_size=2)
KEYS = sorted({*DEFAULTS, *INHERITED, *WITHOUT_EFFECT, "no_such_key"})
VLLM = ["tensor_parallel_size", "max_model_len", "dtype", "chat_template", "host", "enforce_eager"]


def refused(sentence: str) -> Any:
    """What a value is refused with."""
    return ConfigError(sentence)


#: For each key of RLConfig a value that is not the default, and what becomes of it: values of the run by
#: their dotted keys, UNREAD, or a refusal.
BECOMES: dict[str, tuple[Any, Any]] = {
    "use_liger": (False, {"trainer.liger": "off"}),
    "use_lora": (False, {"lora.enabled": False}),
    "lora_rank": (4, {"lora.r": 4}),
    "lora_alpha": (64, {"lora.alpha": 64.0}),
    "lora_dropout": (0.1, {"lora.dropout": 0.1}),
    "lora_target_modules": (["q_proj"], {"lora.target_modules": ("q_proj",)}),
    "lora_modules_to_save": (["lm_head"], {"lora.modules_to_save": ("lm_head",)}),
    "lora_use_rslora": (True, {"lora.use_rslora": True}),
    "lora_config": ({"r": 4}, refused("give lora_rank")),
    "rollouts_per_example": (8, {"rollouts_per_example": 8}),
    "batch_size": (64, {"batch_size": 64}),
    "micro_batch_size": (2, {"microbatch_tokens": 2 * 2048}),
    "max_seq_len": (1024, {"microbatch_tokens": 8 * 1024, "sampling.max_tokens": 1024}),
    "max_prompt_len": (256, UNREAD),
    "max_steps": (7, {"max_steps": 7}),
    "max_concurrent": (64, {"max_concurrent": 64}),
    "learning_rate": (3e-6, {"learning_rate": 3e-6}),
    "adam_beta1": (0.8, {"adam_beta1": 0.8}),
    "adam_beta2": (0.99, {"adam_beta2": 0.99}),
    "weight_decay": (0.1, {"weight_decay": 0.1}),
    "mask_ratio_low": (0.25, {"algorithm.correction.floor": 0.25}),
    "mask_ratio_high": (4.0, {"algorithm.correction.cap": 4.0}),
    "mask_env_responses": (False, refused("tokens of environments are never learned here")),
    "mask_truncated_completions": (True, {"algorithm.overlong_filtering": True}),
    "zero_truncated_completions": (True, refused("let the environment reward it so")),
    "max_tokens": (100, {"sampling.max_tokens": 100}),
    "temperature": (0.7, {"sampling.temperature": 0.7}),
    "top_p": (0.9, {"sampling.top_p": 0.9}),
    "top_k": (20, {"sampling.top_k": 20}),
    "min_p": (0.05, {"sampling.min_p": 0.05}),
    "repetition_penalty": (1.1, {"sampling.repetition_penalty": 1.1}),
    "presence_penalty": (0.5, {"sampling.presence_penalty": 0.5}),
    "frequency_penalty": (0.5, {"sampling.frequency_penalty": 0.5}),
    "generation_timeout": (60.0, {"env.0.timeout_seconds": 60.0}),
    "vllm_server_host": ("10.0.0.1", UNREAD),
    "vllm_server_port": (9000, UNREAD),
    "vllm_server_timeout": (10.0, UNREAD),
    "output_dir": ("outputs/mine", {}),
    "run_name": ("mine", {}),
    "lr_scheduler_type": ("cosine", {"lr_scheduler": "cosine"}),
    "bf16": (False, {"compute_dtype": "float32"}),
    "max_grad_norm": (0.1, {"max_grad_norm": 0.1}),
    "gradient_checkpointing": (True, {"trainer.gradient_checkpointing": True}),
    "save_strategy": ("no", {"ckpt.interval": 500}),
    "save_steps": (20, {"ckpt.interval": 20}),
    "eval_strategy": ("steps", {"eval.interval": 50, "eval.before": False, "eval.after": True}),
    "eval_steps": (20, UNREAD),
    "save_only_model": (False, UNREAD),
    "logging_steps": (10, UNREAD),
    "log_on_each_node": (True, UNREAD),
    "report_to": ("tensorboard", UNREAD),
    "remove_unused_columns": (True, UNREAD),
    "shuffle_dataset": (False, refused("tasks come in a new order in each epoch")),
}

#: The run of a file that says nothing: RLTrainer's algorithm with its defaults.
DEFAULT_RUN = {
    "max_steps": 500,
    "batch_size": 512,
    "rollouts_per_example": 16,
    "max_concurrent": 1024,
    "max_off_policy_steps": 1,
    "microbatch_tokens": 8 * 2048,
    "seed": 42,
    "learning_rate": 1e-5,
    "lr_scheduler": "constant",
    "warmup_steps": 0,
    "optimizer": "adamw",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "compute_dtype": None,
    "sampling.max_tokens": 2048,
    "sampling.temperature": 1.0,
    "sampling.top_p": 1.0,
    "sampling.top_k": None,
    "sampling.min_p": 0.0,
    "sampling.repetition_penalty": 1.0,
    "sampling.presence_penalty": 0.0,
    "sampling.frequency_penalty": 0.0,
    "algorithm.advantage": "dr_grpo",
    "algorithm.loss": "ppo",
    "algorithm.aggregation": "token",
    "algorithm.proximal": True,
    "algorithm.correction.mode": "mask",
    "algorithm.correction.level": "token",
    "algorithm.correction.floor": 0.125,
    "algorithm.correction.cap": 8.0,
    "algorithm.overlong_filtering": False,
    "algorithm.kl_coef": 0.0,
    "algorithm.num_iterations": 1,
    "algorithm.num_minibatches": 1,
    "lora.enabled": True,
    "lora.r": 8,
    "lora.alpha": 32.0,
    "lora.dropout": 0.0,
    "lora.use_rslora": False,
    "lora.modules_to_save": (),
    "lora.target_modules": ("q_proj", "v_proj", "k_proj", "o_proj", "gate_proj", "down_proj", "up_proj"),
    "lora.publish": "merged",
    "env.0.timeout_seconds": 600.0,
    "ckpt.interval": 50,
    "eval.num_examples": 0,
    "trainer.liger": "auto",
    "trainer.gradient_checkpointing": False,
    "inference.engine": "embedded",
}


def tables(**args: Any) -> dict[str, Any]:
    """A file that says as little as it may."""
    return {
        "model": "m",
        "env": {"id": "reverse-text"},
        "inference": {"gpus": 1},
        "trainer": {"gpus": 1, "args": args},
    }


def run_of(given: dict[str, Any], **how: Any) -> RunConfig:
    return validate(RunConfig, translate(given, **how).tables)


def value_at(config: RunConfig, path: str) -> Any:
    node: Any = config
    for part in path.split("."):
        if isinstance(node, tuple):
            node = node[int(part)]
        else:
            node = node.get(part) if isinstance(node, dict) else getattr(node, part)
    return node


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "wiki-search.toml"
    path.write_text(WIKI_SEARCH)
    return path


def test_the_keys_and_defaults_are_those_of_rl_config() -> None:
    assert dict(DEFAULTS) == RL_CONFIG
    assert set(BECOMES) == set(RL_CONFIG), "each has its case below"
    assert not set(DEFAULTS) & set(INHERITED)


def test_what_a_file_leaves_out_is_as_it_is_there() -> None:
    config = run_of(tables())
    assert {path: value_at(config, path) for path in DEFAULT_RUN} == DEFAULT_RUN


@pytest.mark.parametrize("key", BECOMES)
def test_every_key_becomes_something(key: str) -> None:
    value, expected = BECOMES[key]
    given = tables(**{key: value})
    assert value != RL_CONFIG[key], "a value that could be told from the default"
    if isinstance(expected, ConfigError):
        with pytest.raises(ConfigError, match=str(expected)) as caught:
            translate(given)
        assert str(caught.value).startswith(f"trainer.args.{key} = ")
        return
    run = translate(given)
    config = validate(RunConfig, run.tables)
    told = [line for line in run.without_effect if line.startswith(f"trainer.args.{key} = ")]
    if expected is UNREAD:
        assert told and told[0].endswith(")")
        assert config == run_of(tables()), "and has none"
        return
    assert told == []
    assert {path: value_at(config, path) for path in expected} == expected
    assert (run.run_name, run.output_dir) == (
        value if key == "run_name" else None,
        value if key == "output_dir" else None,
    )


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"top_k": -1}, {"sampling.top_k": 0}),
        ({"lora_target_modules": "all-linear"}, {"lora.target_modules": ()}),
        ({"lr_scheduler_type": "linear", "warmup_steps": 10}, {"lr_scheduler": "linear", "warmup_steps": 10}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.1}, {"warmup_steps": 50}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 1.0}, {"warmup_steps": 500}),
        ({"lr_scheduler_type": "constant", "warmup_steps": 10}, {"warmup_steps": 0}),
        ({"max_steps": 130, "save_steps": 0.1}, {"ckpt.interval": 13}),
        ({"eval_strategy": "steps", "eval_steps": 30}, {"eval.interval": 30, "eval.after": False}),
        ({"eval_strategy": "steps", "eval_on_start": True}, {"eval.before": True}),
        ({"optim": "sgd"}, {"optimizer": "sgd", "momentum": 0.0}),
        ({"save_total_limit": 5}, {"ckpt.keep_last": 5}),
        ({"seed": 7}, {"seed": 7}),
        ({"max-steps": 3}, {"max_steps": 3}),
    ],
)
def test_what_transformers_means_by_it(args: dict[str, Any], expected: dict[str, Any]) -> None:
    config = run_of(tables(**args))
    assert {path: value_at(config, path) for path in expected} == expected


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"mask_ratio_hihg": 4.0}, "mask_ratio_hihg = 4.0 is refused: did you mean 'mask_ratio_high'?"),
        ({"torch_compile": True}, "torch_compile = true is refused: Quartet has no such setting"),
        ({"num_generations": 8}, "num_generations = 8 is refused: write rollouts_per_example"),
        ({"beta": 0.1}, "beta = 0.1 is refused: write kl_coef in a table [algorithm]"),
        ({"lr_scheduler_type": "polynomial"}, "choose constant, constant_with_warmup, linear, cosine"),
        ({"save_strategy": "epoch"}, 'trainer.args.save_strategy = "epoch" is refused: choose "steps"'),
        ({"eval_strategy": "epoch"}, 'trainer.args.eval_strategy = "epoch" is refused: choose "steps"'),
        ({"lora_target_modules": ".*proj"}, 'write a list of names, or "all-linear"'),
        ({"optim": "lion_8bit"}, 'choose "adamw_torch" or "sgd"'),
        ({"fp16": True}, "trainer.args.fp16 = true is refused"),
        ({"lr_scheduler_type": ["a"]}, "lr_scheduler_type"),
        ({"max_steps": 10**400, "save_steps": 0.5}, "should be a whole number from 1 on"),
        ({"deepspeed": "zero3.json"}, "set gpus of"),
        ({"micro_batch_size": 2.5}, "micro_batch_size = 2.5 is refused: should be a whole number"),
        ({"use_lora": "no"}, 'trainer.args.use_lora = "no" is refused: should be true or false'),
        ({"report_to": 3}, 'trainer.args.report_to = 3 is refused: should be "wandb"'),
        ({"run_name": 3}, "trainer.args.run_name = 3 is refused: should be text"),
        ({"lr_scheduler_type": "linear", "warmup_ratio": 20}, "should be a part of max_steps, from 0 to 1"),
        ({"save_steps": 0}, "trainer.args.save_steps = 0 is refused: should be a number of steps"),
    ],
)  # fmt: skip
def test_refusals(args: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(tables(**args))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@drawn(
    st.dictionaries(st.sampled_from(KEYS), ANY, max_size=3),
    st.dictionaries(st.sampled_from(VLLM), ANY, max_size=3),
    st.sampled_from(["env", "inference", "trainer", None]),
    ANY,
    st.sampled_from(["vllm", "embedded"]),
)
def test_whatever_a_file_says_is_read_or_refused_in_a_sentence(
    args: dict[str, Any], of_vllm: dict[str, Any], instead: str | None, other: Any, engine: Any
) -> None:
    given = tables(**args)
    given["inference"]["args"] = of_vllm
    if instead is not None:
        given[instead] = other
    before = repr(given)
    try:
        run = translate(given, engine)
        validate(RunConfig, run.tables)
        told = "; ".join(run.without_effect)
    except ConfigError as error:
        told = str(error)
        assert "is refused" in told or "is not set" in told or "unknown key" in told
    assert all(line.startswith("  ") for line in told.split("\n")[1:]), "a line for each thing"
    assert repr(given) == before, "a file's tables are not changed"


def test_a_refusal_of_the_run_names_the_key_of_the_file(file: Path) -> None:
    file.write_text(WIKI_SEARCH + "top_p = 3.0\n")
    with pytest.raises(ConfigError, match=rf"top_p = 3.0 \(in trainer.args.top_p of {file}\) is refused"):
        load_run(["@", str(file)])


def test_the_file_of_the_documents_runs_as_it_is(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = load_run(["@", str(file)])
    assert (found.name, found.output_dir) == ("wiki-search", None)
    (env,) = found.config.env
    assert (env.id, env.args) == ("primeintellect/wiki-search", {"max_turns": 10})
    expected = {
        "model": "models/tiny",
        "batch_size": 1024,
        "rollouts_per_example": 16,
        "max_steps": 500,
        "microbatch_tokens": 4 * 4096,
        "sampling.max_tokens": 512,
        "inference.chat": {"tool_parser": "hermes"},
    }
    assert {path: value_at(found.config, path) for path in expected} == expected
    read_as, without = capsys.readouterr().err.splitlines()
    assert read_as == f"{file}: read as vf-rl; --dry-run shows the run that it is here"
    assert "inference.args.enable_auto_tool_choice = true (tool calls are read" in without
    assert "trainer.args.max_prompt_len = 512 (longer prompts are not left out" in without


def loaded(file: Path, *options: str) -> RunFile:
    return load_run(["@", str(file), *options])


def test_options_are_of_either_dialect(file: Path) -> None:
    found = loaded(file, "--trainer.args.max_steps", "3", "--micro_batch_size=2", "--env.args.max_turns", "4")
    assert (found.config.max_steps, found.config.microbatch_tokens) == (3, 2 * 4096)
    assert found.config.env[0].args == {"max_turns": 4}
    assert found.options == []
    ours = ["--sampling.temperature", "0.5", "--env.0.args.max_turns", "5", "--eval.num-examples", "8"]
    found = loaded(file, *ours, "--max-steps", "2")
    assert (found.config.max_steps, found.config.sampling.temperature) == (2, 0.5)
    assert found.config.env[0].args == {"max_turns": 5}
    assert found.config.eval.num_examples == 8 and found.config.eval.before
    assert found.options == ours


def test_files_of_both_dialects_compose(file: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "less.toml"
    theirs.write_text("[trainer.args]\nbatch_size = 64\n")
    ours = tmp_path / "ours.toml"
    ours.write_text("max_off_policy_steps = 0\n[eval]\nnum_examples = 4\n[trainer]\nthreads = 2\n")
    config = load_run(["@", str(file), "@", str(theirs), f"@{ours}"]).config
    assert (config.batch_size, config.microbatch_tokens) == (64, 4 * 4096)
    assert (config.max_off_policy_steps, config.eval.num_examples) == (0, 4)
    assert (config.trainer["threads"], config.trainer["liger"]) == (2, "auto")
    of_trainer = tmp_path / "trainer.toml"
    of_trainer.write_text("threads = 3\n")
    config = load_run(["--trainer", "@", str(of_trainer), "@", str(file), "--trainer.gpus", "2"]).config
    assert (config.trainer["threads"], config.trainer["gpus"], config.trainer["liger"]) == (3, 2, "auto")
    file.write_text(WIKI_SEARCH + "[eval]\nnum_examples = 6\n")
    assert load_run(["@", str(file)]).config.eval.num_examples == 6, "keys of Quartet in their file are read"


@pytest.mark.parametrize(
    ("text", "is_theirs"),
    [
        (WIKI_SEARCH, True),
        ("[trainer.args]\nmax_steps = 3\n", True),
        ('model = "m"\n[[env]]\nid = "e"\n[trainer]\nthreads = 1\n', False),
        ('model = "m"\n[env]\nid = "e"\n', False),
        ('model = "m"\n[[env]]\nid = "e"\n[trainer]\ngpus = 1\n', False),
        ('model = "m"\n[env]\nid = "e"\n[trainer]\ngpus = 1\n', True),
        # Mistakes in files of Quartet's own, which must not become another training.
        ('model = "m"\nbatch_size = 8\n[env]\nid = "e"\n[trainer]\ngpus = 1\n', False),
        ("[inference]\nargs = { seed = 1 }\n", False),
        ("[trainer]\ngpus = 1\n", False),
    ],
)
def test_a_file_is_known_by_its_form(text: str, is_theirs: bool) -> None:
    assert is_vf_rl(parse_toml(text, "it")) is is_theirs


def test_a_file_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for text, steps in ((WIKI_SEARCH, 500), ('model = "m"\nmax_steps = 7\n[[env]]\nid = "e"\n', 7)):
        writer = threading.Thread(target=pipe.write_text, args=(text,))
        writer.start()
        assert load_run(["@", str(pipe)]).config.max_steps == steps
        writer.join()


def test_a_run_of_quartet_is_read_as_before(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "m"\n[[env]]\nid = "e"\n')
    found = load_run(["@", str(file), "--max-steps", "3"])
    assert (found.config.max_steps, found.config.learning_rate) == (3, 1e-6)
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError, match="write the path of a TOML file after it"):
        load_run(["@"])


def test_arguments_of_vllm_reach_the_engine() -> None:
    given = tables()
    given["inference"] = {
        "gpus": 4,
        "args": {
            "tensor-parallel-size": 2,
            "max_model_len": 4096,
            "max_num_seqs": 64,
            "dtype": "bfloat16",
            "enforce_eager": True,
            "disable_log_requests": True,
        },
    }
    given["trainer"]["gpus"] = 2
    run = translate(given, "vllm")
    assert run.tables["inference"] == {
        "engine": "vllm",
        "max_model_len": 4096,
        "gpus": 4,
        "vllm": {
            "max_num_seqs": 64,
            "dtype": "bfloat16",
            "args": {"tensor_parallel_size": 2, "enforce_eager": True},
        },
    }
    assert not any("enforce_eager" in line for line in run.without_effect)
    assert any("disable_log_requests" in line for line in run.without_effect)
    # As vf-rl numbers devices, and as many engines as its data_parallel_size would be.
    placed = shared_out(run.tables, None)
    assert (placed["inference"]["gpus"], placed["inference"]["replicas"]) == (["0", "1", "2", "3"], 2)
    assert (placed["trainer"]["gpus"], placed["trainer"]["ranks"]) == (["4", "5"], 2)
    embedded = translate(given)
    assert embedded.tables["inference"] == {
        "engine": "embedded",
        "gpus": 0,
        "max_model_len": 4096,
        "embedded": {"max_num_seqs": 64, "dtype": "bfloat16"},
    }
    assert shared_out(embedded.tables, None)["trainer"]["gpus"] == ["0", "1"], "the engine needs none"
    assert any("inference.args.enforce_eager = true (of vLLM" in line for line in embedded.without_effect)
    given["inference"]["args"]["tensor-parallel-size"] = 3
    with pytest.raises(ConfigError, match=r"inference\.gpus are 4, but 1 replicas of 3 devices"):
        shared_out(translate(given, "vllm").tables, None)


def test_an_algorithm_of_ones_own_beside_it() -> None:
    """What the refusals of older names say to write is read."""
    given = tables()
    given["algorithm"] = {"kl_coef": 0.1, "num_iterations": 2, "reference": {"sync_steps": 5}}
    algorithm = run_of(given).algorithm
    assert (algorithm.kl_coef, algorithm.num_iterations, algorithm.loss) == (0.1, 2, "ppo")
    assert algorithm.correction is not None and algorithm.correction.floor == 0.125


def test_without_lora_its_keys_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    run = translate(tables(use_lora=False, lora_rank=4))
    assert "trainer.args.lora_rank = 4 (use_lora = false)" in run.without_effect
    assert run.tables["lora"] == {"enabled": False}


def test_weights_and_biases_where_a_run_has_such_a_table() -> None:
    given = tables(report_to=["wandb"], run_name="mine")
    assert "wandb" not in translate(given).tables
    with_table = translate(given, wandb_project="theirs")
    assert with_table.tables["wandb"] == {"project": "theirs", "name": "mine"}
    assert not any("report_to" in line for line in with_table.without_effect)
    silent = translate(tables(), wandb_project="theirs")
    assert "wandb" not in silent.tables, "who says nothing may have no account"
    assert any("write it in the file to report there" in line for line in silent.without_effect)


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    """In keys of vf-rl and of Quartet, in the file and in options."""
    file = tmp_path / "job.toml"
    file.write_text(
        'model = "m"\n[env]\nid = "e"\n[eval]\nnum_example = 3\n[trainer.args]\nfp16 = true\nmax_stepz = 3\n'
        'optim = "lion"\nsave_strategy = "epoch"\nrun_name = 3\nbatch_size = 0\n'
    )
    with pytest.raises(ConfigError) as caught:
        load_run(["@", str(file), "--max-concurrent", "--trainer.args.optim.kind=3"], starts_services=False)
    first, *keys = [one.key or str(one) for one in caught.value.each]
    assert first.startswith("--trainer.args.optim.kind cannot be set")
    theirs = [f"trainer.args.{key}" for key in ("fp16", "max_stepz", "optim", "save_strategy", "run_name")]
    unset = (
        "option '--max-concurrent' has no value; write '--max-concurrent VALUE' or '--max-concurrent=VALUE'"
    )
    assert keys == [*theirs, unset, "eval.num_example", "batch_size"]
