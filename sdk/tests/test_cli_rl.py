"""What `quartet rl` reads, and refuses before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from planned_runs import CONFIG, planned
from quartet.cli.__main__ import build_parser, main
from quartet.cli.checked import doubts, wired
from quartet.cli.job import RECORD, Job, default_folder, model_path
from quartet.cli.run_file import load_run
from quartet.config import ConfigError
from quartet.local.wiring import SERVICES
from quartet.run.config import RunConfig, parse_run
from quartet.run.written_out import is_same_run


def test_the_demo_config_is_the_recipe(config: RunConfig) -> None:
    assert (config.batch_size, config.rollouts_per_example, config.groups_per_batch) == (128, 8, 16)
    assert config.checks.verify_logprobs
    assert config.inference["embedded"]["kv_on_update"] == "recompute"


def test_the_submitted_toml_is_the_same_run(config: RunConfig) -> None:
    config = config.model_copy(update={"keep_rollouts": 5})
    job = Job(config, "r", Path("."))
    again = parse_run(job.config_toml)
    assert "keep_rollouts" not in job.config_toml, "it is about the folder of whoever follows the run"
    assert again == config.model_copy(
        update={"trainer": {}, "orchestrator": {}, "inference": {}, "envhost": {}, "keep_rollouts": None}
    )
    assert is_same_run(again, config.model_copy(update={name: {} for name in SERVICES}))


def test_the_teacher_of_ones_own_file_is_known_to_the_orchestrator(tmp_path: Path) -> None:
    """It is shown the token that [orchestrator.security] names: whoever launches a run says whom."""
    reference = '[algorithm]\npreset = "opd"\n[algorithm.reference]\naddress = "teacher:1"\n'
    text = 'model = "m"\n[[env]]\nid = "e"\n'
    for more, known in (("", None), (reference, ["teacher:1"])):
        (machine,) = wired(Job(parse_run(text + more), "r", Path(".")), tmp_path)
        assert machine["orchestrator"].get("teacher_addresses") == known


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--max-stepz", "3"], "did you mean 'max_steps'"),
        (["--batch-size", "100"], "rollouts_per_example = 8 does not divide it; set it to 96 or 104"),
        (["--model", "no/such/model"], "'no/such/model' is neither a folder here nor a model in the"),
        (["--sampling.temperature", "hot"], "sampling.temperature"),
        (["stray"], "argument 'stray' is not understood"),
    ],
)
def test_refusals(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, model = tmp_path / "out", tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")
    command = ["rl", "@", str(CONFIG), "--model", str(model), *arguments, "--output-dir", str(output)]
    code = main(command)
    shown = capsys.readouterr().err
    assert code == 2
    assert sentence in shown
    assert shown.count("\n") == 1, "one sentence"
    assert not output.exists(), "nothing was begun"


def test_a_model_and_an_environment_that_are_not_there_are_told_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["rl", "@", str(CONFIG), "--model", "no/such/model", "--env", '[{id = "no-such-env"}]']
    assert main([*command, "--envhost.python", sys.executable, "--output-dir", str(tmp_path / "out")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: model = 'no/such/model' is neither a folder here")
    assert second.startswith("  also: env.id = 'no-such-env': no package 'no_such_env' in ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([], []),
        (["--lora.enabled", "true", "--learning-rate", "1e-5"], []),
        (["--lora.enabled", "true", "--learning-rate", "1e-6"],
         ["learning_rate = 1e-06 hardly moves an adapter; 1e-5 to 1e-4 are usual"]),
        (["--lora.enabled", "true"],
         ["learning_rate is left out, and 1e-06 hardly moves an adapter; 1e-5 to 1e-4 are usual"]),
    ],
)  # fmt: skip
def test_a_rate_that_moves_no_adapter_is_told(keys: list[str], said: list[str]) -> None:
    run = ["--model", "m", "--env", '[{id = "reverse-text"}]', *keys]
    assert list(doubts(load_run(run, starts_services=False).config)) == said


@pytest.mark.parametrize(
    ("keys", "is_told"),
    [
        (["--algorithm.epsilon-high", "0.28"], True),
        (["--algorithm.clip-high", "1"], False),
        (["--algorithm.loss", "ppo", "--algorithm.epsilon-high", "0.28"], False),
    ],
)
def test_a_cap_of_the_ratio_below_where_ratios_begin_is_told(keys: list[str], is_told: bool) -> None:
    run = ["--model", "m", "--env", '[{id = "reverse-text"}]', *keys]
    said = list(doubts(load_run(run, starts_services=False).config))
    assert [one.startswith("algorithm.clip_high = 0.28") for one in said] == [True] * is_told


@pytest.mark.parametrize(
    ("max_tokens", "own", "said"),
    [
        ("511", None, ["algorithm.overlong_penalty.from_tokens = 512 is not below sampling.max_tokens = 511: "
         "only rollouts of several turns get there, any other loses nothing"]),
        ("512", None, ["algorithm.overlong_penalty.from_tokens = 512 is not below sampling.max_tokens = 512: "
         "only rollouts of several turns get there, any other loses nothing"]),
        ("513", None, []),
        ("512", 600, []),
        (None, None, []),
    ],
)  # fmt: skip
def test_a_penalty_that_no_answer_can_reach_is_told(
    max_tokens: str | None, own: int | None, said: list[str]
) -> None:
    envs = '[{id = "a"}, {id = "b"%s}]' % (f", sampling = {{ max_tokens = {own} }}" if own else "")
    run = [
        "--model",
        "m",
        "--env",
        envs,
        "--algorithm.overlong-penalty",
        "{from_tokens = 512, to_tokens = 600}",
    ]
    run += ["--sampling.max-tokens", max_tokens] if max_tokens else []
    assert list(doubts(load_run(run, starts_services=False).config)) == said


def test_a_model_folder_is_taken_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "m").mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.json; name a Hugging Face model folder"):
        model_path("m")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RECORD).touch()
    with pytest.raises(ConfigError, match=r"wrote no model: 'quartet export run MODEL_FOLDER'"):
        model_path("run")
    for name in ("checkpoint", "checkpoint.partial"):
        (tmp_path / "run" / name).mkdir()
        (tmp_path / "run" / name / "config.json").touch()
    with pytest.raises(ConfigError, match=r"has no config\.json; did you mean 'run/checkpoint'\?"):
        model_path("run")
    (tmp_path / "outputs").mkdir()
    (tmp_path / "run").rename(tmp_path / "outputs" / "run")
    with pytest.raises(ConfigError, match=r"did you mean 'outputs/run/checkpoint'\?"):
        model_path("outputs")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"model = 'file' is a file; name the folder of"):
        model_path("file")
    (tmp_path / "m" / "config.json").touch()
    with pytest.raises(ConfigError, match=r"no weights \(\*\.safetensors\) and no tokenizer"):
        model_path("m")
    (tmp_path / "m" / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(ConfigError, match=r"has no tokenizer \(tokenizer\.json\) in"):
        model_path("m")
    (tmp_path / "m" / "tokenizer.json").touch()
    assert model_path("m") == str(tmp_path / "m")
    (tmp_path / "toys" / "tiny").mkdir(parents=True)
    (tmp_path / "toys" / "tiny" / "config.json").touch()
    with pytest.raises(ConfigError, match="did you mean 'toys/tiny'"):
        model_path("toys/tinny")
    with pytest.raises(ConfigError, match=r"fetch it with 'hf download owner/other'\Z"):
        model_path("owner/other")
    with pytest.raises(ConfigError, match=r"\(here is .*\); name a Hugging Face model folder\Z"):
        model_path("outputs/none/checkpoint")
    (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"model folder, or make a toy in that folder with 'quartet model ti"
    ):
        model_path("a/b/c")
    (tmp_path / "outputs" / "other").mkdir()
    (tmp_path / "outputs" / "other" / RECORD).touch()
    with pytest.raises(ConfigError, match=r"its run wrote no model: 'quartet export outputs/other MODEL_FO"):
        model_path("outputs/other/checkpoint")
    cached = tmp_path / "hub" / "models--owner--name"
    (cached / "snapshots" / "abc").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (cached / "snapshots" / "abc" / name).touch()
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    assert model_path("owner/name") == str(cached / "snapshots" / "abc")


def test_run_ids_are_checked(tmp_path: Path, config: RunConfig) -> None:
    for run_id in ("a/b", "..", "x" * 65):
        with pytest.raises(ConfigError, match=f"--run-id '{run_id}' is refused"):
            planned(config, tmp_path / "x", run_id)


def test_default_folder_is_named_after_the_last_config() -> None:
    assert str(default_folder(["@", "a.toml", "@", "dir/b.toml"])).startswith("outputs/b-")
    assert str(default_folder(["@dir/a.toml", "--trainer", "@t.toml"])).startswith("outputs/a-")
    assert str(default_folder([], "../of/some team")).startswith("outputs/..-of-some team-"), "no other place"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    ours = ("rl", "eval", "env", "baseline", "gepa", "model")
    for command in (*ours, "submit", "watch", "runs", "stop", "resume"):
        assert f"\n    {command} " in shown


def test_the_command_alone_says_what_is_usual(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr()
    assert not said.out
    usual = [line.split("    ")[0].split() for line in said.err.splitlines() if line.startswith("  quartet ")]
    assert {"init", "rl", "eval"} <= {command for _, command, *_ in usual} and "quartet --help" in said.err
    for _, *words in usual:
        options, rest = build_parser().parse_known_args(words)
        assert options.command == words[0] and not [one for one in rest if one.startswith("-")], words


def test_the_command_needs_no_torch() -> None:
    code = "import sys, quartet.cli.__main__ as m; m.build_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
