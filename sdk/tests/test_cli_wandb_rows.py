"""What is logged of a run, from the lines of its folder; and the table [wandb] of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from quartet.cli.follow import WatchConfig, shown_as
from quartet.cli.job import Job
from quartet.cli.points import Lines, point_of
from quartet.cli.wandb.place import WeightsAndBiases
from quartet.cli.wandb.rows import MAX_TEXT, table_is_due, table_of
from quartet.config import ConfigError, load
from quartet.run.config import RunConfig, parse_run
from quartet.run.wandb import WandbConfig
from quartet.run.written_out import is_same_run
from quartet.v1.orchestrator_service_pb2 import Run

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "reverse-text.toml"
RUN = 'model = "m"\n[[env]]\nid = "e"\n'


def lines(file: Path, *rows: object) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_line_is_a_point() -> None:
    step = {"event": 9, "time": 2.5, "step": 3, "train/reward": 0.5, "ledger/discarded": {"no_spread": 4}}
    point = point_of(step)
    assert (point.number, point.at_seconds, point.step, point.is_eval) == (9, 2.5, 3, False)
    assert point.values == {"step": 3, "train/reward": 0.5, "ledger/discarded/no_spread": 4}
    assert point.conversations == "rollouts/step_0003.jsonl"
    evaluation = point_of({"event": 10, "time": 3.0, "step": 3, "policy_version": 6, "eval/coverage": 0.0})
    assert evaluation.is_eval and evaluation.conversations == "rollouts/eval_0003.jsonl"


def test_lines_are_taken_when_they_are_whole(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    growing = Lines(file)
    assert list(growing.new()) == []
    file.write_bytes(b'{"event": 1}\n{"event": 2}\n{"eve')
    assert list(growing.new()) == [{"event": 1}, {"event": 2}]
    assert list(growing.new()) == []
    with file.open("ab") as more:
        more.write(b'nt": 3}\n')
    assert list(growing.new()) == [{"event": 3}]


def test_a_table_has_whole_conversations_cut_where_they_are_long(tmp_path: Path) -> None:
    turns = [
        {"role": role, "content": role * 2} for role in ("system", "user", "assistant", "user", "assistant")
    ]
    long = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x" * (MAX_TEXT + 7)}]
    head = {"env": "e", "task": 1, "reward": 0.5}
    silent = head | {"messages": [{"role": "user", "content": "q"}]}
    failed = head | {"messages": long, "failure": {"kind": "TIMEOUT"}, "reward": None}
    calls = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": ["{}"]}]
    rows = [head, silent, failed, *(head | {"messages": one} for one in (turns, long, calls))]
    lines(tmp_path / "rollouts" / "step_0002.jsonl", *rows)
    point = point_of({"event": 1, "time": 0.0, "step": 2})
    talk, cut, called = table_of(point, tmp_path, 5)
    assert talk[:4] == [2, "e", 1, 0.5]
    assert talk[4] == "system: systemsystem\n\nuser: useruser"
    assert talk[5] == ("assistant: assistantassistant\n\nuser: useruser\n\nassistant: assistantassistant")
    assert cut[4] == "q" and cut[5].endswith("x… (7 more characters)")
    assert called[5] == "{}", "a turn that only calls tools is no empty one"
    assert len(table_of(point, tmp_path, 1)) == 1
    assert table_of(point_of({"event": 1, "time": 0.0, "step": 7}), tmp_path, 1) == [], "no file, no table"


def test_tables_are_due_at_the_first_step_every_so_many_and_every_evaluation() -> None:
    due = [step for step in range(1, 9) if table_is_due(point_of({"event": 1, "time": 0, "step": step}), 4)]
    assert due == [1, 4, 8]
    assert table_is_due(point_of({"event": 1, "time": 0, "step": 3, "policy_version": 3}), 4)


def test_the_table_as_it_is_written_elsewhere() -> None:
    toml = RUN + '[wandb]\nproject = "my-training-runs"\nname = "qwen3-4b-math-rl"\nentity = "my-team"\n'
    config = parse_run(toml).wandb
    assert (config.project, config.name, config.entity) == ("my-training-runs", "qwen3-4b-math-rl", "my-team")
    given = ["@", str(CONFIG), "--wandb.project", "p", "--wandb.name", "7", "--wandb.tags", '["a"]']
    config = load(RunConfig, given).config.wandb
    assert (config.project, config.name, config.tags, config.mode) == ("p", "7", ("a",), None)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ('name = "n"', "wandb.name is set, and wandb.project is not; set it, or remove \\[wandb\\]"),
        ('project = "team/p"', "a project's name has no /; the user or team before it is wandb.entity"),
        ('project = ""', "wandb.project"),
        (
            'project = "p"\nmode = "shared"',
            "wandb.mode = 'shared' is refused: should be 'online', 'offline' or 'disabled'",
        ),
        ('project = "p"\ncompletions = 1000', "wandb.completions = 1000"),
        ('project = "p"\ncompletions_interval = 0', "wandb.completions_interval = 0"),
        ('project = "p"\ntags = [""]', "wandb.tags"),
        ('projekt = "p"', "unknown key 'wandb.projekt'; did you mean 'wandb.project'"),
    ],
)
def test_refusals(table: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_run(f"{RUN}[wandb]\n{table}\n")


def test_the_mode_is_the_keys_then_the_environments() -> None:
    config = WandbConfig(project="p")
    assert config.mode_in({}) == "online"
    assert config.mode_in({"WANDB_MODE": "offline"}) == "offline"
    assert config.mode_in({"WANDB_MODE": "disabled"}) == "disabled"
    assert WandbConfig(project="p", mode="online").mode_in({"WANDB_MODE": "offline"}) == "online"
    for project in ("p", None):  # also of a file that names none
        config = WandbConfig(project=project, mode="disabled")
        assert config.mode_in({"WANDB_MODE": "online"}) == "disabled"
    assert WandbConfig().mode_in({}) == "disabled"


def test_another_table_is_the_same_run() -> None:
    plain, shown = parse_run(RUN), parse_run(RUN + '[wandb]\nproject = "p"\n')
    assert plain != shown and is_same_run(plain, shown) and is_same_run(shown, plain)
    assert not is_same_run(plain, parse_run("seed = 3\n" + RUN))
    assert Job(plain, "r", Path()).config_toml == Job(shown, "r", Path()).config_toml


def test_who_watches_may_take_the_runs_own_table_or_lay_another_over_it(tmp_path: Path) -> None:
    run = Run(run_id="r", config_toml=RUN + '[wandb]\nproject = "theirs"\nname = "a \\"b\\""\ntags = ["t"]\n')
    assert shown_as(run, []) == WatchConfig(), "only where somebody asks"
    assert shown_as(run, [], tensorboard=True).wandb == WandbConfig(), "and for that"
    assert shown_as(run, ["--tensorboard.enabled", "true"]) == shown_as(run, [], tensorboard=True)
    assert shown_as(run, [], tensorboard=True).tensorboard.enabled
    own = WandbConfig(project="theirs", name='a "b"', tags=("t",))
    assert shown_as(run, [], wandb=True).wandb == own
    mine = shown_as(run, ["--wandb.project", "mine", "--wandb.mode=offline"]).wandb
    assert mine == own.model_copy(update={"project": "mine", "mode": "offline"})
    (file := tmp_path / "watch.toml").write_text('[wandb]\nmode = "offline"\n')
    laid = own.model_copy(update={"mode": "offline"})
    assert shown_as(run, ["@", str(file)]).wandb == laid, "a file asks for it, too"
    reader, writer = os.pipe()
    os.write(writer, file.read_bytes())
    os.close(writer)
    assert shown_as(run, ["@", f"/dev/fd/{reader}"]).wandb == laid, "a shell's <(...) is read once"
    os.close(reader)
    file.write_text("[tensorboard]\nenabled = true\n")
    assert shown_as(run, ["@", str(file)]) == shown_as(run, [], tensorboard=True)
    with pytest.raises(ConfigError, match=r"names no project of Weights & Biases; add --wandb\.project NAME"):
        shown_as(Run(run_id="r", config_toml=RUN), [], wandb=True)
    with pytest.raises(ConfigError, match="unknown key 'max_steps'"):
        shown_as(run, ["--max-steps", "3"])


def test_what_is_told_of_a_run() -> None:
    run = Run(run_id="r", submitted_at_ms=36**3, config_toml=RUN + '[wandb]\nproject = "theirs"\n')
    plan = WeightsAndBiases(WandbConfig(project="p", group="g")).plan(Path("/out"), run, here=False)
    assert (plan.run_id, plan.name, plan.project, plan.group, plan.here) == ("r-1000", "r", "p", "g", False)
    assert plan.config == {"run_id": "r", "model": "m", "env": [{"id": "e"}]}


def test_a_line_that_is_no_row_is_passed_over(tmp_path: Path) -> None:
    """points.py 2: a torn disk must not keep what comes after it from being reported."""
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"event": 1}\n\x00\xffgarbage\n[1]\n{"event": 2}\n')
    assert [row["event"] for row in Lines(file).new()] == [1, 2]
