"""What whoever wrote a wrong file or command line is told: everything, at once, by every command."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from quartet.cli.__main__ import main
from quartet.cli.job import Job
from quartet.cli.run_file import load_run
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

FILE = """
model = "{model}"
policy_lr = 1e-5
[[env]]
id = "reverse-text"
[trainer]
lr = 1
threads = "many"
[inference]
max_modle_len = 3
[inference.server]
adress = "localhost"
"""
INIT = "'quartet init FOLDER' writes some to begin with"


def _lines(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    return shown.removeprefix("error: ").rstrip("\n").split("\n  also: ")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(FILE.format(model=tmp_path / "none"))
    return str(path)


def test_how_ranks_share_sequences_is_not_judged_without_the_devices_that_they_are_counted_by(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _lines(["rl", "@", file, "--trainer.gpus", "8", "--trainer.context-parallel", "4"], capsys)
    assert any("trainer.gpus = 8 leaves open which devices inference" in line for line in lines)
    assert not any("context_parallel" in line for line in lines)


def test_services_look_at_their_tables_of_a_run_that_is_refused(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _lines(["rl", "@", file, "--overwrit", "--sampling.max-tokens=x"], capsys)
    starts = [
        "option '--overwrit' has no value; did you mean '--overwrite'?",
        "sampling.max_tokens = 'x'",
        "unknown key 'policy_lr'",
        "'lr' is no key of [trainer]",
        "model = ",
        "[trainer] threads = 'many' is refused: should be a whole number",
        "[inference] unknown key 'max_modle_len'; did you mean 'max_model_len'?",
        "[inference] unknown key 'server.adress'; did you mean 'server.address'?",
    ]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts


def test_a_model_of_another_type_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text('model = 3\n[[env]]\nid = "reverse-text"\n[trainer]\nthreads = 2\n')
    lines = _lines(["rl", "@", str(path), "--dry-run"], capsys)
    assert [line for line in lines if "model" in line] == lines[:1]


def test_of_what_only_services_refuse_each_says_its_own(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where there is no model, so that none of them could be started."""
    text = Path(file).read_text().replace("policy_lr", "learning_rate").replace("lr = 1\n", "")
    (good := tmp_path / "good.toml").write_text(text)
    first, *others = _lines(["rl", "@", str(good), "--dry-run"], capsys)
    assert "is neither a folder here" in first
    assert [line.split(" ")[0] for line in others] == ["[trainer]", "[inference]", "[inference]"]


@pytest.mark.parametrize("of_the_run", ["", "policy_lr = 1\n"])
def test_what_the_launcher_refuses_of_a_table_hides_no_other(
    of_the_run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")
    (file := tmp_path / "run.toml").write_text(
        f'model = "{model}"\n{of_the_run}[[env]]\nid = "reverse-text"\n'
        '[trainer]\nserver = 0.5\nthreads = "many"\n[inference]\nmax_modle_len = 3\n'
    )
    lines = _lines(["rl", "@", str(file), "--dry-run"], capsys)
    starts = [
        *(["unknown key 'policy_lr'"] if of_the_run else []),
        "trainer.server = 0.5 is refused: should be a table",
        "[trainer] threads = 'many'",
        "[inference] unknown key 'max_modle_len'",
    ]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts


def test_a_teacher_is_not_shown_the_token_between_machines(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (work / "run.toml").write_text(
        'model = "m"\n[[env]]\nid = "reverse-text"\n[inference]\nnodes = 1\n'
        '[algorithm]\npreset = "opd"\n[algorithm.reference]\naddress = "127.0.0.1:9"\n'
    )
    (line,) = _lines(["rl", "@", "run.toml", "--dry-run"], capsys)
    assert line.startswith(
        "algorithm.reference.address = '127.0.0.1:9' is called as the run's own services are"
    )


def test_what_another_machine_is_refused_hides_nothing_of_this_one(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (work / "run.toml").write_text(
        'model = "m"\n[[env]]\nid = "reverse-text"\n[trainer]\nthreads = "many"\n'
        "[inference]\nnodes = 1\nmax_modle_len = 3\n"
    )
    placed = ["--hosts", "127.0.8.2,127.0.8.3", "--first-port", "5000"]
    lines = _lines(["rl", "@", "run.toml", *placed, "--dry-run"], capsys)
    starts = ["[trainer] threads = 'many'", "[inference] unknown key 'max_modle_len'"]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        (["-o", "out"], "--output-dir out"),
        (["-o"], "--output-dir VALUE"),
        (["-m", "folder"], "--model folder"),
        (["-c", "run.toml"], "@ run.toml"),
        (["-q", "3"], "--key value"),
    ],
)
@pytest.mark.parametrize("command", ["rl", "slurm", "sft"])
def test_an_option_of_one_letter_is_told_by_its_whole_name(
    command: str, option: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _lines([command, *option], capsys) == [f"there is no option {option[0]!r} here; write {meant!r}"]


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["rl", "--resum"], "'--resume'"),
        (["rl", "--output-dri", "x"], "'--output-dir'"),
        (["rl", "--max-step", "3"], "'max_steps'"),
        (["submit", "--orchestrator", "127.0.0.1:1", "--run-idd", "x"], "'--run-id'"),
        (["evaluate", "RUN", "--orchestrator", "127.0.0.1:1", "--token-fiel", "x"], "'--token-file'"),
        (["sft", "--output-dri", "x"], "'--output-dir'"),
        (["eval", "e", "-m", "m", "--env-arg", "{}"], "'--env-args'"),
        (["eval", "e", "-m", "m", "--num-exmaples", "3"], "'num_examples'"),
        (["baseline", "e", "-m", "m", "--full-rewrad", "1"], "'--full-reward'"),
        (["env", "check", "e", "--full-rewrad", "1"], "'--full-reward'"),
    ],
)
def test_a_misspelt_flag_is_told_from_a_key(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert any(f"did you mean {meant}?" in line for line in _lines(arguments, capsys))


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model, an environment, and files that are not what they are taken for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("quartet.cli.env.installed.find", lambda module, python: (True, ""))
    _make_model(Path("m"))
    Path("bytes").write_bytes(b"a = \xff")
    Path("other.toml").write_text("max_steps = 1")
    Path("eval.toml").write_text('model = "m"\n[[eval]]\nid = "e"\n')
    for name, text in (("a", "x ="), ("b", "project = 3")):
        Path(name).mkdir()
        Path(name, "pyproject.toml").write_text(text)
    Path("run").mkdir()
    Path("run", "run.json").write_text('{"run_id": 3, "config_toml": 4}')
    return tmp_path


def _make_model(folder: Path) -> None:
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).touch()
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    Tokenizer(WordLevel({"x": 0}, "x")).save(str(folder / "tokenizer.json"))


RUN = ["rl", "--model", "m", "--env", '[{id = "e"}]']
SFT = ["sft", "--model", "m", "--data"]
SUBMIT = ["submit", "--orchestrator", "127.0.0.1:1"]
GEPA = ["gepa", "e", "-m", "m"]


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["rl", "@", "bytes"], "config file 'bytes' is not UTF-8 at byte 4; save it as that"),
        (["rl", "other.toml"], "argument 'other.toml' is not understood; write '@ other.toml'"),
        ([*RUN, "--model="], "model = '' is refused: should not be empty"),
        ([*RUN, "--env.-1.id=x"],
         "--env.-1.id cannot be set: '-1' is not an index of a list of 1; for the first write --env.0.id"),
        ([*RUN, "--trainer.node=2"],
         "there is no option '--trainer.node'; set 'nodes' in this table to how many machines"),
        ([*RUN, "--trainer.logger=wandb"], "there is no option '--trainer.logger'; set 'wandb.project' to"),
        ([*RUN, "--trainer.policy.optimizer_config.lr=1"], "'model' at the top of the file to the model's f"),
        ([*RUN, "--trainer.max_prompt_length=1"], "write '--max-prompt-tokens VALUE'"),
        ([*RUN, "--inference.replica=2"], "no option '--inference.replica'; set 'replicas' in"),
        ([*RUN, "--trainer.optim.lr", "1e-4"],
         "there is no option '--trainer.optim.lr'; set 'learning_rate' at the top of the file, or write "
         "'--learning-rate VALUE'"),
        ([*RUN, "--orchestrator.sampling.temperature", "1"], "or write '--sampling.temperature VALUE'"),
        ([*RUN, "--trainer.batch-size", "1"], "of an option leave out the name of the table"),
        ([*RUN, "--clean-output-dir"], "unknown key 'clean_output_dir'; write --overwrite on"),
        ([*RUN, "--env.0.args.bug", "nan"],
         "env.0.args.bug = nan is refused: should be a finite number; the text is \"nan\" in a file, "
         "'\"nan\"' on the command line"),
        ([*RUN, "--env.0.args.since", "2026-01-02"],
         "should be text in quotes; the text is \"2026-01-02\" in a file, '\"2026-01-02\"' on the command"),
        ([*RUN, "--env.0.args", '{"a": [null]}'], "env.0.args.a.0 = None is refused: files have no null"),
        ([*RUN, "--trainer.x=[null]"], "trainer.x.0 = None is refused: files have no null; leave it out"),
        ([*RUN, "--trainer.x=[2026-01-02]"], "trainer.x.0 = datetime.date(2026, 1, 2) is refused: should be"),
        ([*RUN, "--model=~nobody-here/m"], "model = '~nobody-here/m' is neither a folder here nor a model"),
        ([*RUN, "--initial-state=~nobody-here/s"], "~nobody-here/s"),
        ([*RUN, "--lora.enabled", "--lora.initial-adapter=~nobody-here/a"], "~nobody-here/a"),
        *(([*RUN, f"--{one}.gpus=1"], f"{one}.gpus is refused: it computes on no device; leave it out")
          for one in ("orchestrator", "envhost")),
        (["eval", "e", "-m", "m", "-a", '{"a": NaN}'], "args.a = nan is refused: should be a finite number"),
        (["baseline", "e", "-m", "m", "-a", '{"a": NaN}'], "env.0.args.a = nan is refused: should be"),
        (["env", "check", "e", "-a", '{"a": NaN}'], "args.a = nan is refused: should be a finite number"),
        ([*GEPA, "-a", '{"a": [{"b": null}]}'], "--env-args: a.0.b = null is refused: files have no null;"),
        (["baseline", "e", "-m", "m", "-a", '{"a": null}'], "--env-args: a = null is refused: files have"),
        ([*GEPA, "-a", '{"a": Infinity}'], "env.args.a = inf is refused: should be a finite number"),
        (["eval", "e", "other", "-m", "m"],
         "'other' is a second environment, and one is named here; write several as [[eval]] in a file"),
        (["baseline", "e", "other", "-m", "m"], "'other' is a second environment, and one is named here"),
        (["eval", "e", "other.toml", "-m", "m"], "write '@ other.toml'"),
        *(([name, "other.toml", "-m", "m"], "argument 'other.toml' is not understood; write '@ other.toml'")
          for name in ("eval", "baseline", "gepa")),
        (["eval", "e", "-m", "m", "-a", "a=1"], """write an object, such as '{"key": 1}'"""),
        ([*SFT, "nofile", "--trainer.devcie", "cpu"], "[trainer] unknown key 'devcie'; did you mean"),
        (["slurm", *RUN[1:], "--hosts", "a,b"],
         '--hosts is refused: SLURM chooses machines, as many as trainer.nodes and inference.nodes say; '
         'to have these: slurm.options = ["--nodelist=a,b"]'),
        ([*RUN, "--resume", "--overwrite"], "--resume goes on with what --overwrite would delete"),
        ([*RUN, "--envhost.environments", "3"], "[envhost] environments = 3 is refused: should be a table"),
        ([*RUN, "--envhost.environments.e", "3"], "[envhost] environments.e = 3 is refused: write a table"),
        ([*RUN, "--trainer.server.tls.cert_file=x"], "or with '--trainer.server.tls.key_file VALUE'"),
        ([*RUN, "--orchestrator.trainer_address=x"], "trainer_address: address 'x' has no port"),
        ([*SFT, "nofile"], "data = 'nofile' cannot be read: No such file or directory"),
        ([*SFT, "bytes"], "data = 'bytes' is not UTF-8 at byte 4"),
        ([*SFT, ""], "data = '' is refused: should name a file or a folder"),
        ([*SFT, "x", "--roles", '["me"]'], "roles.0 = 'me' is refused: should be 'system'"),
        ([*SFT, "x", "--roles", "[]"], "roles = [] is refused: should have at least 1 item"),
        ([*SFT, "x", "--output-dir", "bytes/x"], "bytes/x' cannot be used: "),
        (["eval", "e", "-m", "x", "-b", "nourl"], "base_url = 'nourl' is refused: should be a URL"),
        (["eval", "e", "-m", "x", "-e", "other.toml"], "unknown key 'max_steps' (in other.toml)"),
        (["eval", "e", "-m", "m", "-R", "x", "--run-id", "y"], "--resume x and --run-id y name two runs"),
        ([*GEPA, "--initial-prompt", "bytes"], "initial_prompt = 'bytes' is not UTF-8 at byte 4"),
        ([*GEPA, "--initial-prompt", "no"], "initial_prompt = 'no' cannot be read: No such file"),
        ([*GEPA, "--resume", "x", "--run-id", "y"], "--resume x and --run-id y name two runs"),
        (["baseline", "e", "-m", "m", "--full-reward", "nan"], "--full-reward nan is refused"),
        (["env", "check", "e", "--full-reward", "inf"], "--full-reward inf is refused"),
        *((["env", one, "e", "--args", "{}"], "arguments of the environment are -a, --env-args JSON; write")
          for one in ("check", "show")),
        *(([one, "e", "-m", "m", '--args={"a": 1}'], "are -a, --env-args JSON; write that for --args")
          for one in ("eval", "baseline", "gepa")),
        (["evaluate", "r", "--orchestrator", "127.0.0.1:1", "@", "other.toml"],
         "config file 'other.toml' is a run's, and an evaluation is of a run that is there: leave the file"),
        (["evaluate", "r", "--orchestrator", "127.0.0.1:1", "@", "eval.toml"],
         "config file 'eval.toml' is one of 'quartet eval'; write [[env]] for [[eval]], and leave out who"),
        (["env", "list", "x"], "argument 'x' is not understood; see 'quartet env list --help'"),
        (["env", "install", "a"], "config file 'a/pyproject.toml' is not valid TOML"),
        (["env", "install", "b"], "b/pyproject.toml gives no name of a package"),
        (["runs", "--orchestrator", "127.0.0.1:99999"], "ports end at 65535"),
        (["runs", "--orchestrator", "h:1"], "off loopback and the channel is plaintext; give --ca-file, or"),
        ([*SUBMIT, "--resume"], "--resume is an option of quartet rl, for a run on this machine;"),
        ([*SUBMIT, "--output_dir=x"], "--output-dir is an option of quartet rl, for a run on this machine"),
        ([*SUBMIT, "--run-id", "a/b"], "--run-id 'a/b' is refused: use 1 to 64 of A-Z a-z 0-9"),
        (["watch", "r", *SUBMIT[1:], "--after-event", "-1"], "--after-event -1 is refused; give the number"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_every_command(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = _lines(arguments, capsys)
    assert sentence in line


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_damaged_model_folder_is_refused(name: str, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("m", name).write_text("{% if")
    Path("chat.jsonl").write_text('{"messages": [{"role": "assistant", "content": "yes"}]}\n')
    (line,) = _lines([*SFT, "chat.jsonl"], capsys)
    assert f"of the model in {work / 'm'} cannot be read: " in line


@pytest.mark.parametrize("arguments", [["rl", "--output-dir", ""], ["init", ""], ["export", "", "x"]])
def test_an_empty_path_is_that_of_no_folder(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "it is empty; name a file or a folder" in capsys.readouterr().err


def test_a_path_of_bytes_that_are_no_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """What is written down of a run is UTF-8. So are its arguments, but for a folder of another age."""
    with pytest.raises(SystemExit) as ended:
        main(["rl", "--output-dir", os.fsdecode(b"caf\xe9")])
    assert ended.value.code == 2
    assert "'caf\\udce9' is no text in UTF-8; name another" in capsys.readouterr().err


def test_a_run_that_is_gone_on_with_has_its_own_name(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    going_on = [*RUN, "--resume", "--output-dir", "run"]
    (line,) = _lines(going_on, capsys)
    assert "run was begun by another release, or changed since" in line
    assert "refuses what it wrote (the run is not valid TOML" in line
    (work / "run" / "run.json").write_text("torn")
    (line,) = _lines(going_on, capsys)
    assert "run.json cannot be read (Expecting value" in line
    job = Job(load_run([*RUN[1:], "--model", str(work / "m")]).config, "mine", work / "run")
    (work / "run" / "run.json").write_text(json.dumps({"run_id": "mine", "config_toml": job.config_toml}))
    (line,) = _lines([*going_on, "--run-id", "other"], capsys)
    assert line.startswith("--run-id 'other': ") and "holds the run 'mine'; leave it out" in line


def test_a_folder_without_a_run_is_told_as_that(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resumed = ["rl", "--resume", "--output-dir"]
    holds = "--resume: {} holds no run; name the folder of one, or leave --resume out"
    for folder in (work / "nothere", work / "run.toml", work / "m"):
        assert _lines([*resumed, str(folder)], capsys) == [holds.format(folder)]
    (work / "run" / "run.toml").touch()
    assert _lines([*resumed, str(work)], capsys) == [f"--resume: {work} holds no run; name {work / 'run'}"]
    assert _lines(["export", str(work), "x"], capsys) == [
        f"{str(work)!r} is no run's folder; did you mean {str(work / 'run')!r}?"
    ]


def test_who_says_nothing_of_a_run_is_told_where_its_file_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in ("rl", "slurm"):
        assert _lines([command], capsys)[-1].endswith("\nname the run's file, as '@ run.toml'; " + INIT)
        assert not _lines([command, "--max-steps", "3"], capsys)[-1].endswith(INIT)


def test_a_misspelt_flag_of_a_command_without_keys_is_told_by_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments, said in (
        (["model", "tiny", "x", "--sedd", "3"], "'--sedd' is not understood; did you mean '--seed'?"),
        (["runs", "--servces=1"], "'--servces=1' is not understood; did you mean '--services'?"),
        (["model", "tiny", "x", "y"], "'y' is not understood; see 'quartet model tiny --help'"),
        (["keys", "-o", "x"], "'-o' is not understood; see 'quartet keys --help'"),
    ):
        assert _lines(arguments, capsys) == [f"argument {said}"]


def test_a_misspelt_command_is_told_by_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, meant in ((["ini"], "init"), (["env", "chek"], "check"), (["submitt"], "submit")):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        said = capsys.readouterr().err.splitlines()[-1]
        assert ended.value.code == 2 and said.endswith(f"; did you mean {meant!r}?")
    with pytest.raises(SystemExit):
        main(["xyzzy"])
    assert "did you mean" not in capsys.readouterr().err
