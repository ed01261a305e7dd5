"""`quartet eval`: what it reads, what it refuses, and what it calls its folders."""

from __future__ import annotations

import errno
import io
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from quartet.cli.__main__ import build_parser, main
from quartet.cli.eval import command
from quartet.cli.eval.board import print_table, result_table
from quartet.cli.eval.command import folder_name, plan_of, read
from quartet.cli.eval.config import EvalFileConfig
from quartet.cli.eval.endpoints import endpoint_at, read_endpoints
from quartet.cli.eval.source import Source
from quartet.cli.gepa.config import GepaConfig
from quartet.config import ConfigError, load, validate
from quartet.run.statistics import summarise
from quartet.v1.envhost_service_pb2 import EnvironmentInfo
from quartet.v1.rollout_pb2 import Task
from rich.console import Console

SOURCE = Source("models/tiny", folder="/models/tiny")
TASKS = [Task(index=index) for index in range(2)]


def test_what_a_table_says_wins_over_the_file() -> None:
    tables = {
        "num_examples": 7,
        "sampling": {"max_tokens": 9, "temperature": 0.5},
        "eval": [
            {"id": "a"},
            {"id": "b", "num_examples": -1, "pass_threshold": 0.0, "sampling": {"temperature": 0.0}},
        ],
    }
    a, b = validate(EvalFileConfig, tables).trials
    assert (a.num_examples, a.sampling.temperature, a.pass_threshold) == (7, 0.5, 0.5)
    assert (b.num_examples, b.sampling.temperature, b.pass_threshold) == (-1, 0.0, 0.0)
    assert b.sampling.max_tokens == 9


def test_bad_input_is_refused_in_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    twice = tmp_path / "twice.toml"
    twice.write_text('model = "m"\n[[eval]]\nid = "a"\n[[eval]]\nid = "a"\n')
    once = tmp_path / "once.toml"
    once.write_text('model = "m"\n[[eval]]\nid = "a"\n')
    table = tmp_path / "table.toml"
    table.write_text('[eval]\nid = "a"\n')
    (folder := tmp_path / "mine").joinpath("checkpoint").mkdir(parents=True)
    (folder / "checkpoint" / "config.json").write_text("{}")
    for arguments, said in (
        (["eval"], "no environment is named; write quartet eval ENVIRONMENT"),
        (["eval", "e"], "no model is named; give --model"),
        (["eval", "e", "-m", "nowhere"], "; or name an endpoint (there is no file"),
        (["eval", "e", "-m", str(folder)], f"did you mean '{folder}/checkpoint'? Or name an endpoint (there"),
        (["eval", "e", "-m", "m", "-n", "0"], "nothing would be evaluated"),
        (["eval", "-m", "m", "--eval", "[{id = 'e', num_examples = 0}]"], "nothing would be evaluated"),
        (
            ["eval", "e", "-m", "m", "-n", "many"],
            "num_examples = 'many' is refused: should be a whole number",
        ),
        (["eval", "e", "-m", "m", "--num-exmaples", "3"], "did you mean 'num_examples'?"),
        (["eval", "e", "-m", "m", "-a", "{"], "--env-args '{' is not JSON"),
        (["eval", "e", "@", str(once)], "is named beside [[eval]] of a file"),
        (["eval", "@", str(twice)], "two evaluations are called 'a'; give each a name"),
        (["eval", "@", str(table)], "write [[eval]] with two brackets"),
        (["eval", "@", str(tmp_path / "none.toml")], "does not exist; check the path after '@'"),
        (["eval", "e", "-m", "m", "-b", "localhost:80"], 'such as "http://127.0.0.1:8000/v1"'),
        (["eval", "e", "-b", "http://x/v1"], "base_url needs the name of a model there"),
    ):
        command = [*arguments, "-e", str(tmp_path / "no-endpoints.toml")]
        assert main(command) == 2
        assert said in capsys.readouterr().err, arguments


def test_an_option_says_who_answers_in_place_of_the_file(tmp_path: Path) -> None:
    (file := tmp_path / "e.toml").write_text('inference_addresses = ["127.0.0.1:9"]\n[[eval]]\nid = "a"\n')
    config = load(EvalFileConfig, ["@", str(file), "--base-url", "http://x/v1", "--model", "m"]).config
    assert (config.base_url, config.inference_addresses) == ("http://x/v1", ())
    file.write_text(f'base_url = "http://x/v1"\n{file.read_text()}')
    with pytest.raises(ConfigError, match="both say who answers"):
        load(EvalFileConfig, ["@", str(file), "--model", "m"])


def test_an_endpoint_has_replicas_a_key_by_name_and_verifiers_longer_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "endpoints.toml"
    file.write_text(
        """
        [[endpoint]]
        endpoint_id = "mini"
        model = "m1"
        url = "https://a/v1/"
        key = "SOME_KEY"
        [[endpoint]]
        id = "mini"
        model = "m2"
        base_url = "https://b/v1"
        api_key_var = "SOME_KEY"
        api_client_type = "openai_chat_completions"
        """
    )
    mini = read_endpoints(file)["mini"]
    assert mini.url == "https://a/v1,https://b/v1" and [one.model for one in mini.replicas] == ["m1", "m2"]
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"environment variable SOME_KEY, which is not set; export"):
        mini.key_of(mini.replicas[0])
    monkeypatch.setenv("SOME_KEY", "secret")
    assert mini.key_of(mini.replicas[0]) == "secret"
    local = endpoint_at("http://127.0.0.1:8000/v1", "m", "NO_SUCH_VARIABLE")
    assert local.key_of(local.replicas[0]) == "none", "a server on this machine needs none"
    file.write_text(
        '[[endpoint]]\nendpoint_id = "x"\nmodel = "m"\nurl = "http://x"\ntype = "anthropic_messages"\n'
    )
    with pytest.raises(ConfigError, match="openai_chat_completions"):
        read_endpoints(file)
    with pytest.raises(
        ConfigError, match=r"endpoints\.py' is Python; write .* \[\[endpoint\]\] with endpoint_id"
    ):
        read_endpoints(tmp_path / "endpoints.py")


def test_a_resumed_evaluation_is_the_last_one_or_the_one_that_is_named(tmp_path: Path) -> None:
    def planned(*more: str) -> Any:
        options, rest = build_parser().parse_known_args(["eval", "e", "-m", "m", "-o", str(tmp_path), *more])
        return plan_of(read(options, rest), Source("m", folder="/m"), options)

    with pytest.raises(ConfigError, match="nothing to go on with"):
        planned("--resume")
    plan = planned("--run-id", "first")
    fill_default = plan.records[0]
    with fill_default.held(EnvironmentInfo(), TASKS):
        pass
    with pytest.raises(ConfigError, match="is taken; add --resume first"):
        planned("--run-id", "first")
    assert planned("--resume", "-n", "7").run_id == planned("--resume", "first").run_id == "first"
    with pytest.raises(ConfigError, match="no evaluation second of this environment"):
        planned("--resume", "second")
    with pytest.raises(ConfigError, match=r"--run-id '\.\./x' is refused"):
        planned("--run-id", "../x")


def test_a_full_disk_ends_it_in_a_sentence_that_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m").mkdir()
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "m" / file).touch()

    def full(specs: object, source: object, work: object) -> None:
        folder = tmp_path / "out" / "evals" / folder_name("e", Source(str(tmp_path / "m"))) / "one"
        folder.mkdir(parents=True)
        (folder / "metadata.json").write_text("{}")
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "results.jsonl"))

    monkeypatch.setattr(command, "deploy", lambda *given: [])
    monkeypatch.setattr(command, "with_host", full)
    arguments = ["e", "-m", str(tmp_path / "m"), "-o", str(tmp_path / "out"), "--run-id", "one"]
    assert main(["eval", *arguments]) == 1
    said = capsys.readouterr().err
    assert f"go on with quartet eval --resume one -o {tmp_path / 'out'}" in said
    assert "results.jsonl: No space left on device" in said and "Traceback" not in said


def test_two_evaluations_of_one_name_do_not_share_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m").mkdir()
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "m" / file).touch()
    deployed, second = [], "20260102-030405"

    def deploy(source: object, services: Path, env_ids: Sequence[str], *_: object) -> list[object]:
        deployed.append((*env_ids, services.relative_to(tmp_path / "out" / "evals" / "services").parts[0]))
        return []

    def during(specs: object, source: object, work: object) -> None:
        if len(deployed) == 1:
            main(["eval", "other", *arguments])  # goes on beside it
            main(["eval", "e", *arguments])
            assert main(["eval", "e", *arguments, "--run-id", second]) == 2

    arguments = ["-m", str(tmp_path / "m"), "-o", str(tmp_path / "out")]
    monkeypatch.setattr(time, "strftime", lambda form: "20260102-030405")
    monkeypatch.setattr(command, "deploy", deploy)
    monkeypatch.setattr(command, "with_host", during)
    main(["eval", "e", *arguments])
    assert "belongs to an evaluation that is going on; wait for it, or choose" in capsys.readouterr().err
    names = [("e", second), ("other", f"{second}-2"), ("e", f"{second}-3")]
    assert deployed == names, "kept.py 1: the last would have written over the first's"


def test_names_that_make_one_folder_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "two.toml"
    file.write_text('model = "m"\n[[eval]]\nid = "owner/e"\n[[eval]]\nid = "owner--e"\n')
    options, rest = build_parser().parse_known_args(["eval", "@", str(file), "-o", str(tmp_path)])
    with pytest.raises(ConfigError, match="two evaluations would fill"):
        plan_of(read(options, rest), SOURCE, options)


def test_a_name_that_is_too_long_for_a_folder_is_cut_and_stays_its_own(tmp_path: Path) -> None:
    source = Source(f"/models/{'m' * 150}")
    one, other = (folder_name(f"e {'x' * 150}{end}", source) for end in "ab")
    assert one != other and one.startswith("e--xxx")
    (tmp_path / one / ".partial").mkdir(parents=True)
    assert folder_name("e" * 250, Source("m")) == f"{'e' * 250}--m", "as an earlier release called it"


def test_the_files_of_the_repository_are_accepted() -> None:
    configs = Path(__file__).resolve().parents[2] / "configs"
    files = list((configs / "eval").glob("*.toml"))
    assert files and all(load(EvalFileConfig, ["@", str(file)]).config.trials for file in files)
    endpoints = read_endpoints(configs / "endpoints.toml")
    for file in (configs / "gepa").glob("*.toml"):
        config = load(GepaConfig, ["@", str(file)]).config
        assert config.env is not None and {config.model, config.reflection_model} <= endpoints.keys()


def test_the_table_says_from_which_reward_on_a_result_passes() -> None:
    groups = {0: [0.0, 0.7], 1: [0.7, 0.7 + 0.2 + 0.1]}  # 0.9999999999999999
    easy, hard = (summarise(groups, threshold, 2) for threshold in (0.5, 1.0))
    text = io.StringIO()
    rows = [("easy", easy, Counter()), ("hard", hard, Counter()), ("none", None, Counter())]
    Console(file=text, width=200).print(result_table(rows))
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.getvalue().splitlines()]
    where = lines[0].index("passes from")
    assert lines[0][where:] == ["passes from", "pass@1", "pass@2", "failed"]
    assert [line[where:] for line in lines[1:]] == [
        ["0.5", "0.750", "1.000", "0"], ["1", "0.250", "0.500", "0"], ["-", "-", "-", "0"]
    ]  # fmt: skip


def test_a_narrow_terminal_cuts_no_figure_and_no_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    groups = {0: [0.0, 0.123], 1: [0.7, 0.5]}
    name = "reverse-text temperature=0.7 max_chars=8"
    print_table(result_table([(name, summarise(groups, 0.5, 2), Counter(TIMEOUT=3))]))
    said = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert "…" not in said and max(map(len, said.splitlines())) <= 80
    assert {"results", "reward", "pass@2", "4", "0.331", "0.500", "TIMEOUT"} <= set(said.split())
    heads, below = said.partition("results")[::2]
    width = len(heads.splitlines()[-1])
    told = "".join(line[:width].strip() for line in below.splitlines()[1:])
    assert told == name.replace(" ", "")
