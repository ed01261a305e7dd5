"""Files of vf-rl: how they are known, read once, and composed with options and files of Quartet."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from quartet.cli import their_engine
from quartet.cli.run_file import RunFile, load_run
from quartet.config import ConfigError
from quartet.config.load import parse_toml
from quartet.run.vf_rl import is_vf_rl
from vf_rl_tables import value_at

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


@pytest.fixture(autouse=True)
def _no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has."""
    monkeypatch.setattr(their_engine, "_DEVICE_FILES", (tmp_path, "nvidia[0-9]*"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "wiki-search.toml"
    path.write_text(WIKI_SEARCH)
    return path


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
        "max_prompt_tokens": 512,
        "sampling.max_tokens": 512,
        "inference.chat": {"tool_parser": "hermes"},
    }
    assert {path: value_at(found.config, path) for path in expected} == expected
    read_as, sampled, without = capsys.readouterr().err.splitlines()
    assert sampled.startswith("sampled by the embedded engine; ")
    assert read_as == f"{file}: read as vf-rl; 'quartet rl --dry-run' shows the run that it is"
    assert "inference.args.enable_auto_tool_choice = true (tool calls are read" in without


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


def test_an_option_wins_over_files_of_both(file: Path, tmp_path: Path) -> None:
    ours = tmp_path / "ours.toml"
    ours.write_text("max-steps = 40\nlearning_rate = 1e-4\n")
    theirs = '[trainer.args]\nsave_strategy = "no"\neval_strategy = "steps"\neval_steps = 20\n'
    (tmp_path / "theirs.toml").write_text(theirs)
    argv = ["@", str(file), "@", str(tmp_path / "theirs.toml"), "@", str(ours)]
    config = load_run(argv).config
    assert (config.max_steps, config.ckpt.interval, config.eval.after) == (40, 40, True)
    found = load_run([*argv, "--max-steps", "30", "--learning-rate=2e-4"])
    assert (found.config.max_steps, found.config.learning_rate) == (30, 2e-4)
    assert (found.config.ckpt.interval, found.config.eval.after, found.options) == (30, False, argv[4:])
    file.write_text("max-off-policy-steps = 0\nmax-steps = 7\n" + WIKI_SEARCH)
    in_one = load_run(["@", str(file)]).config
    assert (in_one.max_off_policy_steps, in_one.max_steps) == (0, 7), "however Quartet's keys are spelt"
    assert load_run(["@", str(file), "--max-steps", "3"]).config.max_steps == 3


def test_a_preset_of_quartets_own_is_that_alone(file: Path) -> None:
    asked = load_run(["@", str(file), "--algorithm.preset", "dapo"]).config.algorithm
    assert (asked.advantage, asked.loss, asked.clip_high, asked.proximal) == ("grpo", "ppo", 0.28, False)
    assert (asked.correction, asked.overlong_filtering) == (None, True)
    file.write_text(WIKI_SEARCH + 'mask_truncated_completions = true\n[algorithm]\npreset = "grpo"\n')
    written = load_run(["@", str(file)]).config.algorithm
    assert (written.aggregation, written.correction, written.overlong_filtering) == ("sequence", None, True)


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


def test_a_file_that_is_refused_is_read_once_too(tmp_path: Path) -> None:
    """A shell's <(...) has nothing for a second reader, to whom it would say nothing, and be right."""
    (run := tmp_path / "run.toml").write_text('model = "m"\n[[env]]\nid = "e"\n')
    reader, writer = os.pipe()
    os.write(writer, b"max_steps = many\n")
    os.close(writer)
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_run(["@", str(run), "@", f"/dev/fd/{reader}"])
    os.close(reader)


def test_a_run_of_quartet_is_read_as_before(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "m"\n[[env]]\nid = "e"\n')
    found = load_run(["@", str(file), "--max-steps", "3"])
    assert (found.config.max_steps, found.config.learning_rate) == (3, 1e-6)
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError, match="write the path of a TOML file after it"):
        load_run(["@"])


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
    assert keys == [*theirs, unset, "batch_size", "eval.num_example"]
