"""Files of prime-rl: how they are known, composed with options and files of Quartet, and kept."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from prime_rl_files import CLASSIC, LATER, OF_INFERENCE, OF_ORCHESTRATOR, OF_TRAINER, SOURCES, TASKSETS
from quartet.cli import their_engine
from quartet.cli.run_file import RunFile, load_run
from quartet.config import ConfigError
from quartet.config.load import validate
from quartet.run.config import RunConfig
from quartet.run.prime_rl import Form, form_of
from vf_rl_tables import value_at

OURS = 'model = "m"\n[[env]]\nid = "e"\n'


@pytest.fixture(autouse=True)
def _no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has."""
    monkeypatch.setattr(their_engine, "_DEVICE_FILES", (tmp_path, "nvidia[0-9]*"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "theirs.toml"
    path.write_text(SOURCES)
    return path


def written(folder: Path, **texts: str) -> list[str]:
    """The paths of files of these texts."""
    for name, text in texts.items():
        (folder / f"{name}.toml").write_text(text)
    return [str(folder / f"{name}.toml") for name in texts]


def loaded(file: Path, *options: str) -> RunFile:
    return load_run(["@", str(file), *options], starts_services=False)


def test_a_file_is_read_as_it_is(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = load_run(["@", str(file)])
    assert (found.name, found.output_dir, found.dialect) == ("wiki", None, "prime-rl")
    assert found.config.env[0].args == {
        "split": "train",
        "agent": {"max_turns": 8, "timeout": {"rollout": 900}},
    }
    read_as, sampled, without = capsys.readouterr().err.splitlines()
    assert read_as == (
        f"{file}: read as prime-rl, what it leaves out as in prime-rl 0.8.0; 'quartet rl --dry-run' shows "
        "the run that it is"
    )
    assert sampled.startswith("sampled by the embedded engine; for vLLM --inference.engine vllm --inf")
    assert without.startswith("without effect here: inference.vllm.enforce_eager = true (of vLLM, and the")
    assert "orchestrator.concurrency.initial_inflight = 128 (as many as" in without


def test_whoever_counts_on_later_defaults_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_run(["@", *written(tmp_path, later=LATER)])
    assert "0.8.0 (orchestrator.train.group_size came later, with another" in capsys.readouterr().err


def test_a_refusal_of_the_run_names_the_key_of_the_file(file: Path) -> None:
    file.write_text(SOURCES.replace("max_completion_tokens = 512", "max_completion_tokens = 0"))
    place = r"in orchestrator\.train\.sampling\.max_completion_tokens of"
    with pytest.raises(ConfigError, match=rf"sampling\.max_tokens = 0 \({place} {file}\) is refused"):
        loaded(file)


def test_options_are_of_either_dialect(file: Path) -> None:
    found = loaded(file, "--trainer.optim.lr", "2e-5", "--orchestrator.batch-size=32", "--max-steps", "3")
    assert (found.config.learning_rate, found.config.batch_size, found.config.max_steps) == (2e-5, 32, 3)
    assert found.options == []
    option = "--orchestrator.train.source.0.env.taskset.split"
    assert loaded(file, option, "test").config.env[0].args["split"] == "test"
    assert loaded(file, "--model.name", "other").config.model == "other"
    ours = [
        "--model",
        "mine",
        "--max-off-policy-steps",
        "4",
        "--sampling.temperature",
        "0.5",
        "--wandb.project",
        "p",
    ]
    found = loaded(file, *ours)
    expected = {"model": "mine", "max_off_policy_steps": 4, "sampling.temperature": 0.5, "wandb.project": "p"}
    assert {path: value_at(found.config, path) for path in expected} == expected
    assert found.options == ours


def test_an_option_without_a_value_is_a_table_or_true_there(file: Path) -> None:
    config = loaded(file, "--trainer.model.lora", "--ckpt").config
    assert (config.lora.enabled, config.lora.r) == (True, 16)
    options = ["--no-trainer.model.compile", "--trainer.model.no-ac", "--trainer.model.freeze-moe-router"]
    config = loaded(file, *options, "--wandb").config
    assert (config.trainer["gradient_checkpointing"], config.freeze_routers) == (False, True)
    assert config.wandb.project == "wiki-search", "its default is laid over nothing"
    with pytest.raises(ConfigError, match="option '--max-steps' has no value"):
        loaded(file, "--max-steps")
    with pytest.raises(ConfigError, match="bench = true is refused: there are benchmarks/; remove it"):
        loaded(file, "--bench")
    assert loaded(file, "--no-bench", "--hf-hub-offline").options == []
    with pytest.raises(ConfigError, match="learning_rate = true"):
        loaded(file, "--trainer.optim.lr")


def test_files_of_both_dialects_compose(file: Path, tmp_path: Path) -> None:
    less = "[orchestrator]\nbatch_size = 32\n[trainer.optim]\nlr = 4e-6\n"
    ours = 'max_off_policy_steps = 0\n[eval]\nnum_examples = 4\n[algorithm]\npreset = "grpo"\n'
    paths = written(tmp_path, less=less, ours=ours)
    config = loaded(file, "@", paths[0], f"@{paths[1]}").config
    assert (config.batch_size, config.rollouts_per_example, config.learning_rate) == (32, 16, 4e-6)
    assert (config.max_off_policy_steps, config.eval.num_examples) == (0, 4)
    assert (config.algorithm.loss, config.algorithm.custom) == ("ppo", None)


def test_an_option_wins_over_files_of_both(file: Path, tmp_path: Path) -> None:
    ours, kebab = written(tmp_path, ours="max_steps = 20\n", kebab="max-steps = 30\n")
    assert loaded(file, "@", ours).config.max_steps == 20
    assert loaded(file, "@", ours, "--max-steps", "5").config.max_steps == 5
    assert loaded(file, "--max-steps=5", "@", ours).config.max_steps == 20, "from left to right"
    file.write_text("\n".join(line for line in SOURCES.splitlines() if not line.startswith("max_steps")))
    assert loaded(file, "@", kebab).config.max_steps == 30, "its end is said, if not in this file"


def test_the_last_step_is_evaluated_by_the_length_that_the_run_has(file: Path, tmp_path: Path) -> None:
    evaluated = '[orchestrator.eval]\ninterval = 20\n[[orchestrator.eval.env]]\nid = "e"\n'
    paths = written(tmp_path, evaluated=evaluated, long="max_steps = 40\n", odd="max_steps = 50\n")
    after = {path: loaded(file, "@", paths[0], "@", path).config.eval.after for path in (paths[1], paths[2])}
    assert after == {paths[1]: True, paths[2]: False}


def test_a_refusal_of_an_option_names_it(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"learning_rate = 'fast' \(in --trainer\.optim\.lr\) is refused"):
        loaded(file, "--trainer.optim.lr", "fast")
    with pytest.raises(ConfigError, match=r"learning_rate = 'fast' is refused"):
        loaded(file, "--learning-rate", "fast")


def test_a_filter_of_quartets_own_chooses_the_groups(file: Path, tmp_path: Path) -> None:
    theirs, ours = written(
        tmp_path,
        more="[orchestrator.buffer]\nonline_difficulty_filtering = true\n",
        ours="[difficulty_filter]\nenabled = true\nmin_reward = 0.1\n",
    )
    both = loaded(file, "@", theirs, "@", ours).config
    assert (both.difficulty_filter.enabled, both.algorithm.dynamic_sampling) == (True, False)
    assert both.algorithm.zero_advantage_filtering, "that is no choice of groups"
    nothing = loaded(file, "@", theirs, "--algorithm.advantage", "none").config.algorithm
    assert (nothing.dynamic_sampling, nothing.zero_advantage_filtering) == (False, False)
    imitated = loaded(file, "@", theirs, "--algorithm.preset", "sft").config.algorithm
    assert (imitated.advantage, imitated.dynamic_sampling) == ("none", False)


def test_a_file_of_each_service(tmp_path: Path) -> None:
    t, o, i = written(tmp_path, t=OF_TRAINER, o=OF_ORCHESTRATOR, i=OF_INFERENCE)
    argv = ["--trainer", "@", t, "--orchestrator", "@", o, "--inference", f"@{i}"]
    config = load_run(argv).config
    expected = {
        "model": "models/tiny",
        "max_steps": 100,
        "learning_rate": 3e-6,
        "batch_size": 32,
        "rollouts_per_example": 4,
        "env.0.args": {"max_chars": 6},
        "sampling.max_tokens": 128,
        "inference.max_model_len": 1024,
    }
    assert {path: value_at(config, path) for path in expected} == expected
    assert load_run([*argv, "--max-steps", "7"]).config.max_steps == 7, "which each of them says"
    (threads,) = written(tmp_path, threads="threads = 2\n")
    assert load_run([*argv, "--trainer", "@", threads]).config.trainer["threads"] == 2, "of Quartet's trainer"
    (other,) = written(tmp_path, other=OF_TRAINER.replace("tiny", "other"))
    with pytest.raises(
        ConfigError, match=r'model\.name = "models/tiny" is refused: trainer\.model\.name says'
    ):
        load_run([*argv[3:], "--trainer", "@", other], starts_services=False)


@pytest.mark.parametrize("text", [CLASSIC, TASKSETS, SOURCES, LATER])
def test_what_dry_run_shows_is_a_file_of_ones_own(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = load_run(["@", *written(tmp_path, theirs=text)], starts_services=False)
    kept = load_run(["@", *written(tmp_path, kept=found.toml)], starts_services=False)
    assert kept.config == found.config and kept.dialect == ""
    assert "read as" not in capsys.readouterr().err.partition("kept.toml")[2]
    assert validate(RunConfig, tomllib.loads(found.toml)) == found.config


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (OURS, Form.OURS),
        (
            OURS + "[trainer]\nthreads = 1\n[inference.vllm]\nmax_num_seqs = 3\nargs = { seed = 1 }\n",
            Form.OURS,
        ),
        ("[inference]\nengine = 'vllm'\n[inference.vllm]\nmax_num_seqs = 3\n", Form.OURS),
        # Overlays that say the same in both are Quartet's, and win.
        ("max_steps = 3\n[ckpt]\ninterval = 3\n[wandb]\nproject = 'p'\n", Form.OURS),
        ("[orchestrator]\nbatch_size = 3\n", Form.THEIRS),
        ("[model]\nname = 'm'\n", Form.THEIRS),
        ("[trainer.optim]\nlr = 1e-5\n", Form.THEIRS),
        ("seq_len = 3\n", Form.THEIRS),
        ("[inference.vllm]\nmax_num_seqs = 3\nmax_model_len = 9\n", Form.THEIRS),
        ("[inference.vllm]\nmax_num_seqs = 3\n", Form.OURS),
        (OURS + "[inference.vllm]\nmax_num_seqs = 3\ndtype = 'bfloat16'\n", Form.OURS),
        (OURS + "[inference.vllm]\nmax_num_seqs = 3\nmax_model_len = 9\n", Form.MIXED),
        ("learning-rate = 1e-5\n[model]\nname = 'm'\n", Form.MIXED),
        (OURS + "[ckpt]\nkeep_last = 3\nkeep_interval = 20\n", Form.OURS),
        (OURS + "[orchestrator]\nbatch_size = 3\n", Form.MIXED),
        (CLASSIC + "[algorithm]\npreset = 'grpo'\n", Form.MIXED),
        (LATER + "[trainer]\nthreads = 2\n", Form.MIXED),
        ("batch_size = 8\n[model]\nname = 'm'\n[[env]]\nid = 'e'\n", Form.MIXED),
    ],
)
def test_a_file_is_known_by_its_form(text: str, form: Form) -> None:
    assert form_of(tomllib.loads(text))[0] is form


def test_a_file_of_both_forms_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (both,) = written(tmp_path, both=CLASSIC + "[algorithm]\npreset = 'grpo'\n")
    with pytest.raises(ConfigError) as caught:
        load_run(["@", both], starts_services=False)
    [first] = str(caught.value).splitlines()  # and of its keys nothing: by the other's they would be right
    assert first.startswith(f"{both} mixes keys of prime-rl (inference.gpu_memory_utilization, ")
    assert "with Quartet's own (algorithm); write one of the two in a file and the other in a second" in first
    with pytest.raises(ConfigError, match=r"mixes keys of prime-rl .*\n.*unknown key 'max_stesp'"):
        load_run(["@", both, "--max-stesp", "3"], starts_services=False)


def test_files_of_two_other_trainers_do_not_go_together(file: Path, tmp_path: Path) -> None:
    (of_vf_rl,) = written(tmp_path, vf="[trainer.args]\nmax_steps = 3\n")
    with pytest.raises(ConfigError, match=r"do not go together: .*vf\.toml of vf-rl"):
        loaded(file, "@", of_vf_rl)


def test_where_services_run_already_a_file_of_many_machines_is_read(file: Path) -> None:
    file.write_text(SOURCES.replace("[deployment]", '[deployment]\ntype = "multi_node"\nnum_train_nodes = 2'))
    assert not {"gpus", "nodes"} & loaded(file).config.trainer.keys()
    assert load_run(["@", str(file)]).config.trainer["nodes"] == 2


def test_all_that_is_wrong_is_told_at_once(file: Path) -> None:
    """In keys of prime-rl and of Quartet, in the file and in options."""
    file.write_text(
        'max_steps = 3\n[model]\nname = "m"\n[trainer]\nno_such = 3\n[trainer.loss]\nkl_tau = -1\n'
        '[trainer.optim]\nlr = "x"\ntype = "lion"\n[[orchestrator.env]]\nid = "e"\nidd = 3\n'
    )
    with pytest.raises(ConfigError) as caught:
        loaded(file, "--weight-decay", "y", "--trainer.optim.betas1", "z")
    keys = [one.key for one in caught.value.each]
    theirs = ["orchestrator.env.0.idd", "trainer.loss.kl_tau", "trainer.optim.type", "trainer.no_such"]
    assert keys == [*theirs, "weight_decay", "adam_beta1", "learning_rate"]


def test_keys_of_a_run_that_do_not_agree_are_told_by_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """run_file.py 1: and how the file was read."""
    (name,) = written(
        tmp_path,
        run='max_steps = 4\n[model]\nname = "m"\n[[orchestrator.env]]\nid = "e"\n[orchestrator]\n'
        'group_size = 8\n[trainer.scheduler]\ntype = "linear"\nwarmup_steps = 1\n[log]\nlevel = "debug"\n',
    )
    with pytest.raises(ConfigError) as caught:
        loaded(Path(name))
    assert str(caught.value) == (
        'lr_scheduler = "warmup_stable_decay" needs decay_steps from 1 to 3, the steps after the warm-up, '
        f"not 10 (here lr_scheduler is trainer.scheduler.type of {name}, decay_steps is prime-rl's default "
        "of trainer.scheduler.decay_steps)"
    )
    read_as, without = capsys.readouterr().err.splitlines()
    assert read_as.startswith(f"{name}: read as prime-rl") and without.startswith(
        "without effect here: log = "
    )
    keeps = "keep_interval = 25 is no multiple of that; set it to 20 or 30, or interval to a divisor"
    with pytest.raises(ConfigError, match=keeps):
        loaded(Path(name), "--trainer.scheduler.decay-steps=3", "--trainer.ckpt.keep-interval", "25")
    with pytest.raises(ConfigError, match=r"not 9 \(here lr_scheduler is trainer.scheduler.type of [^,]*\)$"):
        loaded(Path(name), "--decay-steps", "9")
