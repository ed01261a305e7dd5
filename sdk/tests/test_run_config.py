"""RunConfig: what files and options mean. What they may not say: test_run_config_refused.py."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from quartet.config import ConfigError, load
from quartet.config.keys import known_keys
from quartet.local.toml_text import dumps
from quartet.run import left_out
from quartet.run.config import RunConfig, parse_run
from quartet.run.lora import lora_spec
from quartet.run.other_meanings import OTHERWISE
from quartet.run.other_names import AS_TABLES, REMEDIES, SAME
from quartet.run.presets import PRESETS
from quartet.run.service_tables import IN_TABLES
from quartet.run.sft import SftConfig
from quartet.run.written_out import is_same_run

ENV = '[[env]]\nid = "reverse-text"\n'


def test_the_smallest_run_has_the_documented_defaults() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = parse_run('model = "m"\n' + ENV)
    assert (run.rollouts_per_example, run.seed, run.learning_rate, run.max_grad_norm) == (8, 0, 1e-6, 1.0)
    assert (run.lr_scheduler, run.warmup_steps, run.weight_decay) == ("constant", 0, 0.0)
    assert (run.adam_beta1, run.adam_beta2, run.max_off_policy_steps) == (0.9, 0.999, 1)
    assert (run.at_once, run.microbatch_tokens, run.sampling.temperature) == (1024, 0, 1.0)
    assert (run.env[0].weight, run.env[0].timeout_seconds, run.env[0].max_retries) == (1.0, 600.0, 2)
    assert (run.algorithm.advantage, run.algorithm.loss) == ("grpo", "cispo")
    assert (run.eval.num_examples, run.eval.before, run.eval.after, run.eval.interval) == (64, True, True, 0)
    assert (run.ckpt.interval, run.ckpt.keep_last, run.checks.verify_logprobs) == (10, 2, False)
    assert run.groups_per_batch * run.rollouts_per_example == run.batch_size


def test_by_default_all_batches_that_staleness_admits_are_under_way_at_once() -> None:
    """A bound below that would have less staleness, and idle replicas, than was asked for."""
    text = 'model = "m"\nbatch_size = 2048\nmax_off_policy_steps = {}\n' + ENV
    assert [parse_run(text.format(ahead)).at_once for ahead in (0, 1, 3)] == [2048, 4096, 8192]
    run, said = parse_run(text.format(1)), parse_run("max_concurrent = 4096\n" + text.format(1))
    assert not is_same_run(run, said) and "max_concurrent" not in left_out.of_a_run(run), "hosts decide, too"
    assert parse_run("max_concurrent = 64\n" + text.format(1)).at_once == 64


def test_a_whole_run_in_the_dialect_of_the_design() -> None:
    run = parse_run(
        """
        model = "Qwen/Qwen3-4B-Instruct-2507"
        max-steps = 500
        batch_size = 256
        learning_rate = 1e-5
        [sampling]
        max_tokens = 512
        stop = ["</answer>"]
        [[env]]
        id = "primeintellect/wiki-search"
        args = { max_turns = 5 }
        weight = 0.5
        [[env]]
        id = "reverse-text"
        [algorithm]
        loss = "ppo"
        clip_low = 0.2
        clip_high = 0.28
        [trainer]
        device = "cpu"
        server.address = "127.0.0.1:0"
        """
    )
    assert (run.max_steps, run.groups_per_batch, run.sampling.stop) == (500, 32, ("</answer>",))
    assert run.env[0].args == {"max_turns": 5} and run.env[1].weight == 1
    assert run.trainer == {"device": "cpu", "server": {"address": "127.0.0.1:0"}}
    assert RunConfig.model_validate(run.model_dump()) == run


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "opd"])
def test_a_preset_wins_over_a_file_before_it_that_says_everything(preset: str, tmp_path: Path) -> None:
    text = 'model = "m"\n[[env]]\nid = "e"\n[sampling]\nmax_tokens = 9\n[algorithm]\n'
    of_another = 'loss = "ppo"\nclip_low = 0.1\nclip_high = 0.3\ndelta = 2.0\nadvantage = "grpo"\n'
    (file := tmp_path / "run.toml").write_text(f'{text}{of_another}num_iterations = 2\naggregation = "token"')
    (named := tmp_path / "named.toml").write_text(f'{text}num_iterations = 2\npreset = "{preset}"')
    option = ["--algorithm.preset", preset]
    assert load(RunConfig, ["@", str(file), *option]) == load(RunConfig, ["@", str(named)])
    (later := tmp_path / "later.toml").write_text(f'[algorithm]\npreset = "{preset}"')
    assert load(RunConfig, ["@", str(file), "@", str(later)]) == load(RunConfig, ["@", str(named)])
    beside = load(RunConfig, ["@", str(file), "--algorithm.entropy-coef", "0.1", *option]).config
    assert beside.algorithm.entropy_coef == 0.1, "what options say stays"


def test_a_preset_that_a_later_file_names_once_more_changes_nothing(tmp_path: Path) -> None:
    own = 'preset = "dapo"\nclip_high = 0.3\n'
    text = f'model = "m"\n{ENV}[sampling]\nmax_tokens = 9\n[algorithm]\n{own}'
    (base := tmp_path / "base.toml").write_text(text)
    (site := tmp_path / "site.toml").write_text('[algorithm]\npreset = "dapo"\nnum_iterations = 2\n')
    asked = load(RunConfig, ["@", str(base), "@", str(site)]).config
    assert asked == parse_run(f"{text}num_iterations = 2\n")


@pytest.mark.parametrize("before", ["dapo", "luspo", "gspo", "max_rl"])
def test_a_preset_wins_over_a_run_of_another_that_was_written_down(before: str, tmp_path: Path) -> None:
    """By its values: those of "dapo" that "grpo" says nothing of (dynamic_sampling, ...) are its, too."""
    text = f'model = "m"\n{ENV}[sampling]\nmax_tokens = 9\n[algorithm]\nnum_iterations = 2\npreset = '
    down = parse_run(f'{text}"{before}"').model_dump(mode="json", exclude_none=True)
    (run := tmp_path / "run.toml").write_text(dumps(down))
    for preset in ("grpo", "cispo"):
        (later := tmp_path / "later.toml").write_text(f'[algorithm]\npreset = "{preset}"')
        (table := tmp_path / "table.toml").write_text(f'preset = "{preset}"')
        for said in (["--algorithm.preset", preset], ["@", str(later)], ["--algorithm", "@", str(table)]):
            assert load(RunConfig, ["@", str(run), *said]).config == parse_run(f'{text}"{preset}"')
    hyphens = dumps({key: value for key, value in down.items() if key != "algorithm"})
    hyphens += dumps({"algorithm": {key.replace("_", "-"): one for key, one in down["algorithm"].items()}})
    run.write_text(hyphens)
    asked = load(RunConfig, ["@", str(run), "--algorithm", '{preset = "grpo", clip-high = 0.5}']).config
    assert asked == parse_run(f'{text}"grpo"\nclip_high = 0.5')
    later.write_text('[algorithm]\nclip-high = 0.5\npreset = "grpo"')
    beside = ["@", str(run), "--algorithm.delta", "3", "@", str(later)]
    means = parse_run(f'{text}"grpo"\nclip_high = 0.5\ndelta = 3.0')
    assert load(RunConfig, beside).config == means, "what options say before it stays, as does its own"


@pytest.mark.parametrize(
    ("file", "option", "means"),
    [
        ("kl_coef = 0.1\n", "--algorithm.beta=0.2", "kl_coef = 0.2\n"),
        ("beta = 0.1\n", "--algorithm.kl-coef=0.2", "kl_coef = 0.2\n"),
        ("clip_high = 3.0\n", "--algorithm.epsilon-high=5.0", "clip_high = 5.0\n"),
        ("epsilon_high = 3.0\n", "--algorithm.clip-high=5.0", "clip_high = 5.0\n"),
        # Alone it sets both clips, as it does over a preset's that was written down.
        (
            'loss = "ppo"\nclip_low = 0.2\nclip_high = 0.28\n',
            "--algorithm.epsilon=0.3",
            'loss = "ppo"\nclip_low = 0.3\nclip_high = 0.28\n',
        ),
        (
            'loss = "ppo"\nclip_low = 0.2\nclip_high = 0.2\n',
            "--algorithm.epsilon=0.3",
            'loss = "ppo"\nclip_low = 0.3\nclip_high = 0.3\n',
        ),
        (
            'preset = "dapo"\nclip_low = 0.2\nclip_high = 0.28\n',
            "--algorithm.epsilon=0.3",
            'preset = "dapo"\nclip_low = 0.3\nclip_high = 0.3\n',
        ),
        # As a run is written down that says [kl_penalty].
        (
            "kl_coef = 0.1\ntarget_kl = 0.3\n[kl_penalty]\nenabled = true\nbeta = 0.1\ntarget_kl = 0.3\n",
            "--kl-penalty.beta=0.2",
            "target_kl = 0.3\n[kl_penalty]\nenabled = true\nbeta = 0.2\ntarget_kl = 0.3\n",
        ),
        (
            "kl_coef = 0.1\ntarget_kl = 0.3\n[kl_penalty]\nenabled = true\ntarget_kl = 0.3\n",
            "--kl-penalty.target-kl=0.4",
            "kl_coef = 0.1\n[kl_penalty]\nenabled = true\ntarget_kl = 0.4\n",
        ),
        (
            "kl_coef = 0.1\n[kl-penalty]\nenabled = true\nbeta = 0.1\n",
            "--kl-penalty={beta = 0.2}",
            "[kl_penalty]\nenabled = true\nbeta = 0.2\n",
        ),
        (
            "kl_coef = 0.1\ntarget_kl = 0.3\n[kl_penalty]\nenabled = true\nbeta = 0.1\ntarget_kl = 0.3\n",
            "--no-kl-penalty.enabled",
            "[kl_penalty]\nenabled = false\nbeta = 0.1\ntarget_kl = 0.3\n",
        ),
        (
            "kl_coef = 0.1\ntarget_kl = 0.3\n[kl_penalty]\nenabled = false\n",
            "--no-kl-penalty.enabled",
            "kl_coef = 0.1\ntarget_kl = 0.3\n[kl_penalty]\nenabled = false\n",
        ),
    ],
)
def test_a_setting_of_two_names_is_what_an_option_says_by_either(
    file: str, option: str, means: str, tmp_path: Path
) -> None:
    text = f'model = "m"\n{ENV}[algorithm]\n'
    (run := tmp_path / "run.toml").write_text(text + file)
    assert load(RunConfig, ["@", str(run), option]).config == parse_run(text + means)


def test_two_files_that_say_a_setting_by_its_two_names_are_refused(tmp_path: Path) -> None:
    (run := tmp_path / "run.toml").write_text(f'model = "m"\n{ENV}[algorithm]\nkl_coef = 0.1\n')
    (later := tmp_path / "later.toml").write_text("[algorithm]\nbeta = 0.2\n")
    with pytest.raises(ConfigError, match="beta is another name of kl_coef; give one of the two"):
        load(RunConfig, ["@", str(run), "@", str(later)])


@pytest.mark.parametrize("table", ["lora.r", "difficulty_filter.min_reward", "kl_penalty.beta"])
def test_an_option_of_a_table_that_files_switch_off_is_not_silent(table: str, tmp_path: Path) -> None:
    """switched.py 2: as what was written down of a run does with all of them."""
    said = parse_run(f'model = "m"\n{ENV}').model_dump(mode="json", exclude_none=True)
    (run := tmp_path / "run.toml").write_text(dumps(said))
    option, (name, _, key) = [f"--{table}", "2"], table.partition(".")
    (later := tmp_path / "later.toml").write_text(f"[{name}]\n{key} = 2\n")
    for argv in (option, ["@", str(later)]):
        with pytest.raises(ConfigError, match=rf" {key} is set, and the table is off; write enabled = true"):
            load(RunConfig, ["@", str(run), *argv])
    for argv in ([f"--{name}.enabled", *option], [*option, f"--{name}.enabled"]):
        assert getattr(load(RunConfig, ["@", str(run), *argv]).config, name).enabled
    assert load(RunConfig, ["@", str(run), f"--{name}.no-enabled", *option]), "it is said"
    run.write_text(f'model = "m"\n{ENV}[{name.replace("_", "-")}]\nenabled = false\n')
    for argv in (option, [f"--{name}", f"{{{key} = 2}}"]):
        with pytest.raises(ConfigError, match=r"set, and the table is off; write enabled = true beside"):
            load(RunConfig, ["@", str(run), *argv])


def test_a_table_that_is_switched_on_by_an_option_keeps_what_files_say_of_it(tmp_path: Path) -> None:
    (run := tmp_path / "sft.toml").write_text('model = "m"\ndata = "d"\n[lora]\nenabled = false\nr = 8\n')
    lora = load(SftConfig, ["@", str(run), "--lora.alpha", "4", "--lora.enabled"]).config.lora
    assert (lora.enabled, lora.r, lora.alpha) == (True, 8, 4)
    with pytest.raises(ConfigError, match="r, alpha are set, and the table is off"):
        load(SftConfig, ["@", str(run), "--lora.alpha", "4"])


CUSTOM = 'loss = "custom"\ncustom = "f"\ncustom_args = { a = 1 }\n'
PPO = 'loss = "ppo"\nepsilon = 0.3\ndelta = 2.0\nratio_level = "sequence"\n'
RATIO = 'proximal = true\ncorrection = { mode = "mask" }\n'


@pytest.mark.parametrize(
    ("file", "options", "means"),
    [
        ("clip_high = 4.0\n", "--algorithm.loss ppo", 'loss = "ppo"\n'),
        (f"{PPO}{RATIO}", "--algorithm.loss cispo", f'loss = "cispo"\n{RATIO}'),
        (f"{PPO}{RATIO}", "--algorithm.loss none", 'loss = "none"\n'),
        ('preset = "gspo"\nclip_low = 0.1\n', "--algorithm.loss dppo", 'preset = "gspo"\nloss = "dppo"\n'),
        ('preset = "sapo"\ntau_positive = 2.0\n', "--algorithm.loss ppo", 'preset = "sapo"\nloss = "ppo"\n'),
        (
            'preset = "vespo"\nkernel = { k_positive = 1.0 }\n',
            "--algorithm.loss cispo",
            'preset = "vespo"\nloss = "cispo"\n',
        ),
        ("off_policy_mask = 0.1\n", "--algorithm.loss vespo", 'loss = "vespo"\noff_policy_mask = 0.1\n'),
        ("off_policy_mask = 0.1\n", "--algorithm.loss none", 'loss = "none"\n'),
        (
            "top_entropy_quantile = 0.1\n",
            "--algorithm.loss none",
            'loss = "none"\ntop_entropy_quantile = 0.1\n',
        ),
        ("top_entropy_quantile = 0.1\n", "--algorithm.loss cross_entropy", 'loss = "cross_entropy"\n'),
        (CUSTOM, "--algorithm.loss ppo", 'loss = "ppo"\n'),
        ('custom = "f"\nclip_high = 3.0\n', "--algorithm.loss custom", 'loss = "custom"\ncustom = "f"\n'),
        # What options say stays, on either side of the loss, ...
        (PPO, "--algorithm.loss cispo --algorithm.epsilon-high 5", 'loss = "cispo"\nclip_high = 5\n'),
        (PPO, "--algorithm.clip-high 5 --algorithm.loss cispo", 'loss = "cispo"\nclip_high = 5\n'),
        # ... and what files say of the loss that they have.
        (PPO, "--algorithm.loss ppo", PPO),
        ('preset = "grpo"\nclip_low = 0.1\n', "--algorithm.loss ppo", 'preset = "grpo"\nclip_low = 0.1\n'),
        ("clip_high = 3.0\n", "--algorithm.loss cispo", "clip_high = 3.0\n"),
    ],
)
def test_another_loss_as_an_option_has_its_own_defaults(
    file: str, options: str, means: str, tmp_path: Path
) -> None:
    text = f'model = "m"\n{ENV}[algorithm]\nentropy_coef = 0.1\n'
    (run := tmp_path / "run.toml").write_text(text + file)
    asked = load(RunConfig, ["@", str(run), *options.split()]).config
    assert asked == parse_run(text + means)


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ('preset = "cispo"\n', "--algorithm.preset sapo --algorithm.delta 2"),
        ('preset = "cispo"\n', "--algorithm.tau-positive 2"),
        ('preset = "sapo"\n', "--algorithm.epsilon 0.2"),
    ],
)
def test_no_file_is_blamed_for_what_an_option_says(file: str, options: str, tmp_path: Path) -> None:
    """Of a table that both are about, and of a key that was typed by another name."""
    (run := tmp_path / "run.toml").write_text(f'model = "m"\n{ENV}[algorithm]\n{file}')
    with pytest.raises(ConfigError) as typed:
        load(RunConfig, ["@", str(run), *options.split()])
    assert "is refused" in str(typed.value) and str(run) not in str(typed.value)
    *_, name, value = options.split()
    key = name.removeprefix("--algorithm.").replace("-", "_")
    run.write_text(f'model = "m"\n{ENV}[algorithm]\n{file}{key} = {value}')
    with pytest.raises(ConfigError, match=f"in {run}"):
        load(RunConfig, ["@", str(run)])


@pytest.mark.parametrize("more", ["", 'loss = "cispo"', "beta = 0.1\nreference = { sync_steps = 2 }"])
@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "opd"])
def test_a_preset_means_the_same_once_it_was_written_out(preset: str, more: str) -> None:
    """As the launcher hands a run to the orchestrator, and a journal keeps it."""
    table = f'[sampling]\nmax_tokens = 9\n[algorithm]\npreset = "{preset}"\n{more}'
    run = parse_run(f'model = "m"\n{ENV}{table}')
    assert parse_run(dumps(run.model_dump(mode="json", exclude_none=True))) == run


@pytest.mark.parametrize("table", ["kl_penalty", "kl-penalty"])
def test_a_kl_penalty_by_the_names_of_other_trainers_is_the_algorithms_own(table: str) -> None:
    said = parse_run(
        f'model = "m"\n{ENV}[{table}]\nenabled = true\ntarget_kl = 0.01\n[algorithm]\nloss = "ppo"'
    )
    assert (said.algorithm.kl_coef, said.algorithm.target_kl, said.algorithm.loss) == (0.1, 0.01, "ppo")
    # As the orchestrator and a resumed run read it: both are there, and agree.
    assert parse_run(dumps(said.model_dump(mode="json", exclude_none=True))) == said
    off = parse_run(f'model = "m"\n{ENV}[{table}]\nenabled = false\nbeta = 0.3')
    assert off.algorithm.kl_coef == 0


def test_a_kl_penalty_lets_a_reference_be_read() -> None:
    text = (
        f'model = "m"\n{ENV}[kl_penalty]\nenabled = true\nbeta = 0.5\n[algorithm.reference]\nsync_steps = 4'
    )
    assert parse_run(text).algorithm.needs_reference


def test_a_place_is_sampled_again_as_often_as_what_is_switched_on_says() -> None:
    table = "[difficulty_filter]\nenabled = {}\nmax_resample = 7\n[algorithm]\ndynamic_sampling = {}\n"
    found = {
        (chosen, dynamic): parse_run(f'model = "m"\n{ENV}{table.format(chosen, dynamic)}').resamples
        for chosen in ("true", "false")
        for dynamic in ("true", "false")
    }
    assert found == {("true", "true"): 7, ("true", "false"): 7, ("false", "true"): 10, ("false", "false"): 0}


def test_names_of_other_trainers_are_no_keys_and_stand_for_keys() -> None:
    known = known_keys(RunConfig)
    assert set(SAME.values()) <= known.keys()
    # What is quoted in a sentence is a key, or the last part of one, or another name of one (ALSO_KEYS).
    quoted = {key for sentence in OTHERWISE.values() for key in re.findall(r"'([\w.]+)'", sentence)}
    quoted |= {
        key for told in IN_TABLES.values() for one in told.values() for key in re.findall(r"'([\w.]+)'", one)
    }
    of_services = {"max_model_len", "gradient_checkpointing", "optimizer_offload", "log_level", "device"}
    of_the_launcher = {"gpus", "nodes", "replicas"}
    elsewhere = {"algorithm.epsilon", "algorithm.epsilon_high"} | of_services | of_the_launcher
    assert quoted - elsewhere <= known.keys() | {key.rpartition(".")[2] for key in known}
    assert not SAME.keys() & OTHERWISE.keys() and not REMEDIES.keys() & known.keys()
    assert AS_TABLES.keys() <= known.keys()


def test_defaults_are_not_shared_between_runs() -> None:
    one, other = parse_run('model = "m"\n' + ENV), parse_run('model = "m"\n' + ENV)
    one.trainer["device"] = "cpu"
    assert other.trainer == {}


@pytest.mark.parametrize("word", ['"all-linear"', '["all-linear"]', "[]"])
def test_all_linear_is_every_linear_module(word: str) -> None:
    run = parse_run(f'model = "m"\n{ENV}[lora]\nenabled = true\ntarget_modules = {word}')
    assert run.lora.target_modules == ()


def test_experts_with_matrices_of_their_own_are_published_merged() -> None:
    table = f'model = "m"\n{ENV}[lora]\nenabled = true\ntarget_parameters = ["experts"]\n'
    run = parse_run(table + 'publish = "merged"')
    assert list(lora_spec(run.lora).target_parameters) == ["experts"]  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"target_parameters are no part of a served adapter; set publish"):
        parse_run(table)
    with pytest.raises(ConfigError, match=r"dropout = 0\.1 is not for stacked experts; set dropout = 0"):
        parse_run(table + 'publish = "merged"\ndropout = 0.1')


def test_a_run_is_frozen() -> None:
    run = parse_run('model = "m"\n' + ENV)
    with pytest.raises(ValueError, match="frozen"):
        run.max_steps = 3  # type: ignore[misc]


def test_a_constant_normaliser_need_not_be_the_longest_answer() -> None:
    table = '[sampling]\nmax_tokens = 9\n[algorithm]\naggregation = "constant"\n'
    parse = 'model = "m"\n[[env]]\nid = "e"\n'
    assert parse_run(parse + table).constant_tokens == 9
    assert parse_run(parse + table + "constant_tokens = 64").constant_tokens == 64
    alone = '[algorithm]\naggregation = "constant"\nconstant_tokens = 64'
    assert parse_run(parse + alone).sampling.max_tokens is None
