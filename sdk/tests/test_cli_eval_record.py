"""The folder of an evaluation (quartet.cli.eval.record): results, failures, and what goes on from them."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from quartet.cli.eval import command
from quartet.cli.eval.board import Tally
from quartet.cli.eval.command import Plan, report
from quartet.cli.eval.config import EvalFileConfig, Trial
from quartet.cli.eval.record import Record
from quartet.cli.eval.rows import result_row
from quartet.cli.eval.source import Source
from quartet.config import ConfigError, validate
from quartet.errors import QuartetError
from quartet.v1.common_pb2 import Message, ToolCall
from quartet.v1.envhost_service_pb2 import EnvironmentInfo
from quartet.v1.rollout_pb2 import FAILURE_KIND_TIMEOUT, Rollout, RolloutFailure, Task

SOURCE = Source("models/tiny", folder="/models/tiny")


def trial(**changes: Any) -> Trial:
    """One of a file, with the keys that are changed."""
    tables = {
        "num_examples": 2,
        "rollouts_per_example": 3,
        "eval": [{"id": "e", "args": {"k": 1}}],
        **changes,
    }
    (one,) = validate(EvalFileConfig, tables).trials
    return one


TASKS = [Task(index=index, key=f"k{index}", data_json='{"answer": "42"}') for index in range(2)]


def rollout(member: int, reward: float) -> Rollout:
    said = [
        Message(role="system", content="s"),
        Message(role="user", content="q"),
        Message(role="assistant", tool_calls=[ToolCall(id="1", name="t", arguments_json="{}")]),
        Message(role="tool", content="42", tool_call_id="1"),
        Message(role="assistant", content="42"),
    ]
    return Rollout(member=member, reward=reward, rewards={"r": reward}, metrics={"m": 2.0}, messages=said)


def failure(member: int) -> Rollout:
    return Rollout(member=member, failure=RolloutFailure(kind=FAILURE_KIND_TIMEOUT, message="late"))


def fill(record: Record, *rollouts: tuple[int, Rollout]) -> None:
    with record.held(EnvironmentInfo(verifiers_version="0.4.0"), TASKS):
        for index, one in rollouts:
            record.note(TASKS[index], one)


def test_a_metric_that_is_not_finite_has_no_mean(tmp_path: Path) -> None:
    record, (one, other) = Record(tmp_path / "r", trial(), SOURCE), (rollout(0, 1.0), rollout(1, 1.0))
    one.metrics["m"], other.metrics["m"] = math.inf, -math.inf
    fill(record, (0, one), (0, other))
    assert json.loads((tmp_path / "r" / "metadata.json").read_text())["avg_metrics"] == {"m": None, "r": 1.0}


def test_invariant_5_a_failure_is_in_a_file_of_its_own_and_in_no_mean(tmp_path: Path) -> None:
    record = Record(tmp_path / "r", trial(), SOURCE)
    fill(record, (0, rollout(0, 1.0)), (0, failure(1)), (1, rollout(2, 0.5)))
    metadata = json.loads((tmp_path / "r" / "metadata.json").read_text())
    assert (tmp_path / "r" / "metadata.json").stat().st_mode & 0o077 == 0, "outputs.py 3"
    assert (metadata["avg_reward"], metadata["failures"], metadata["results"]) == (0.75, {"TIMEOUT": 1}, 2)
    assert metadata["avg_error"] == pytest.approx(1 / 3) and metadata["avg_metrics"] == {"m": 2.0, "r": 0.75}
    (failed,) = (tmp_path / "r" / "failures.jsonl").read_text().splitlines()
    assert "reward" not in json.loads(failed)


def test_where_all_failed_the_reason_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be one that no further try mends."""
    broken = Rollout(
        failure=RolloutFailure(kind=FAILURE_KIND_TIMEOUT, message="no tools\n  are shown\x1b" + "!" * 999)
    )
    some, all_of_it = (Record(tmp_path / name, trial(), SOURCE) for name in ("some", "all"))
    fill(some, (0, rollout(0, 1.0)), (0, failure(1)))
    fill(all_of_it, (0, broken), (0, failure(1)), (1, broken))
    assert report(Plan(SOURCE, [some, all_of_it], tmp_path, "r")) == 1
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "which all failed" in line]
    assert told.startswith("  2 of 3 rollouts, which all failed, ended as TIMEOUT: no tools are shown\\x1b!")
    assert len(told) < 600


def test_a_line_has_the_form_that_verifiers_reads(tmp_path: Path) -> None:
    fill(Record(tmp_path / "r", trial(), SOURCE), (1, rollout(2, 0.5)))
    (line,) = (tmp_path / "r" / "results.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert [one["role"] for one in row["prompt"]] == ["system", "user"]
    assert [one["role"] for one in row["completion"]] == ["assistant", "tool", "assistant"]
    assert json.loads(row["completion"][0]["tool_calls"][0]) == {"id": "1", "name": "t", "arguments": "{}"}
    assert (row["example_id"], row["rollout"], row["answer"], row["r"]) == (1, 2, "42", 0.5)
    for answer, is_told in (("0", True), ("false", True), ("null", False), ('""', False)):
        row = result_row(Task(data_json=f'{{"answer": {answer}, "info": {{}}}}'), rollout(0, 1.0))
        assert {"answer", "info"} & row.keys() == ({"answer"} if is_told else set()), "0 is an answer"


def test_what_agents_earned_apart_is_told_apart(tmp_path: Path) -> None:
    made = rollout(0, 0.5)
    for reward in (0.0, 1.0):
        made.parts.add(agent="agent", reward=reward)
    fill(Record(tmp_path / "r", trial(), SOURCE), (0, made))
    (line,) = (tmp_path / "r" / "results.jsonl").read_text().splitlines()
    assert json.loads(line)["parts"] == [{"agent": "agent", "reward": 0.0}, {"agent": "agent", "reward": 1.0}]
    again = Record(tmp_path / "r", trial(), SOURCE)
    with again.held(EnvironmentInfo(), TASKS):
        summary = again.summary()
    assert summary is not None and summary.alike == 0.0 and summary.mean == 0.5


def test_what_has_a_result_is_not_wanted_again_and_what_failed_is(tmp_path: Path) -> None:
    fill(Record(tmp_path / "r", trial(), SOURCE), (0, rollout(0, 1.0)), (0, failure(1)), (1, rollout(2, 0.5)))
    for name in ("results.jsonl", "failures.jsonl"):
        with (tmp_path / "r" / name).open("a") as file:
            file.write('{"example_id": 1, "rol')  # torn by a kill
    again = Record(tmp_path / "r", trial(num_examples=3), SOURCE)
    with again.held(EnvironmentInfo(), [*TASKS, Task(index=2)]):
        assert again.wanted() == {0: [1, 2], 1: [0, 1], 2: [0, 1, 2]}
    assert again.failed == {}, "failures are of this attempt"
    fill(again, (0, rollout(1, 0.0)), (0, failure(2)))
    assert len((tmp_path / "r" / "results.jsonl").read_text().splitlines()) == 3
    failed = (tmp_path / "r" / "failures.jsonl").read_text().splitlines()
    assert [json.loads(line)["rollout"] for line in failed] == [1, 2]


class Shown:
    """Takes what a person would see."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []

    def say(self, line: str) -> None:
        """Nothing is looked for there."""

    def update(self, tally: Tally) -> None:
        self.rows.append(tally.cells)

    def close(self) -> None:
        """Nothing is held."""


async def test_rewards_that_are_shown_while_it_goes_on_are_those_of_earlier_attempts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(Record(tmp_path / "r", trial(), SOURCE), (0, rollout(0, 1.0)), (0, rollout(1, 1.0)), (0, failure(2)))

    async def play(host: Any, one: Trial, wanted: Any, tasks: Any, note: Any, *_: Any, **__: Any) -> None:
        note(TASKS[0], rollout(2, 0.25))
        note(TASKS[1], failure(0))

    async def described(*_: Any) -> Any:
        return EnvironmentInfo()

    async def tasks_of(*_: Any) -> Any:
        return TASKS

    for name, fake in (("play", play), ("describe", described), ("tasks_of", tasks_of)):
        monkeypatch.setattr(command, name, fake)
    shown = Shown()
    await command.evaluate(None, None, [Record(tmp_path / "r", trial(), SOURCE)], [Tally("e")], shown)
    assert [row[1:4] for row in shown.rows] == [["3/6", "0.750", ""], ["4/6", "0.750", "1 TIMEOUT"]]


async def test_what_one_of_several_is_refused_for_is_told_before_any_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def described(host: Any, ref: Any) -> Any:
        if ref.id == "last":
            raise QuartetError("INVALID_CONFIG", "environment 'last' takes no argument 'k'")
        return EnvironmentInfo()

    async def played(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is asked of the others")

    for name, fake in (("play", played), ("describe", described), ("tasks_of", played)):
        monkeypatch.setattr(command, name, fake)
    records = [
        Record(tmp_path / name, trial(eval=[{"id": name}]), SOURCE) for name in ("first", "second", "last")
    ]
    with pytest.raises(QuartetError, match="takes no argument 'k'"):
        await command.evaluate(None, None, records, [Tally(one.trial.name) for one in records], Shown())
    assert not any(one.results for one in records)


@pytest.mark.parametrize("found", [0, 2])
def test_an_endpoint_that_refuses_on_the_way_ends_it_in_a_sentence_that_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: int
) -> None:
    record = Record(tmp_path / "r", trial(), SOURCE)

    def revoked(*_: Any) -> None:
        fill(record, *((0, rollout(member, 1.0)) for member in range(found)))
        raise ConfigError("the endpoint refuses: 401")

    monkeypatch.setattr(command, "with_host", revoked)
    with pytest.raises(ConfigError):
        command._play(Plan(SOURCE, [record], tmp_path, "one"), [], plain=True)
    assert ("go on with quartet eval --resume one" in capsys.readouterr().err) is (found > 0)


def test_where_members_are_compared_an_example_with_one_missing_is_played_again_whole(
    tmp_path: Path,
) -> None:
    ended = [(0, rollout(0, 1.0)), (0, rollout(1, 1.0)), (0, rollout(2, 1.0)), (1, rollout(1, 1.0))]
    fill(Record(tmp_path / "r", trial(), SOURCE), *ended)
    again = Record(tmp_path / "r", trial(), SOURCE)
    with again.held(EnvironmentInfo(group_scoring=True), TASKS):
        assert again.wanted() == {0: [], 1: [0, 1, 2]}
    lines = (tmp_path / "r" / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["example_id"] for line in lines] == [0, 0, 0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_examples": 1}, "num_examples = 1 is refused: .* begun with 2; it may grow"),
        ({"rollouts_per_example": 4}, "rollouts_per_example = 4 is refused: .* rollouts_per_example = 3"),
        ({"sampling": {"top_k": 5}}, 'sampling = {"top_k": 5} is refused: .* begun with sampling = {}'),
        ({"split": "train"}, 'split = "train" is refused'),
        ({"eval": [{"id": "e", "args": {"k": 2}}]}, 'args = {"k": 2} is refused: .* args = {"k": 1}'),
    ],
)
def test_a_changed_setting_is_refused_with_its_key(tmp_path: Path, change: Any, said: str) -> None:
    fill(Record(tmp_path / "r", trial(), SOURCE))
    Record(tmp_path / "r", trial(pass_threshold=0.9), SOURCE)
    with pytest.raises(ConfigError, match=said):
        Record(tmp_path / "r", trial(**change), SOURCE)
    with pytest.raises(ConfigError, match='model = "other" is refused'):
        Record(tmp_path / "r", trial(), Source("other"))


def test_a_replica_that_moved_is_told_by_the_key_that_names_it(tmp_path: Path) -> None:
    fill(Record(tmp_path / "r", trial(), Source("m", addresses=["a:1", "b:1"])))
    moved = 'inference_addresses = ["a:2"] is refused: .* begun with inference_addresses = ["a:1", "b:1"];'
    with pytest.raises(ConfigError, match=moved.replace("[", r"\[")):
        Record(tmp_path / "r", trial(), Source("m", addresses=["a:2"]))


def test_promise_2_what_another_evaluation_began_meanwhile_is_not_taken(tmp_path: Path) -> None:
    """record.py: a file of several comes late to its last folder."""
    late = Record(tmp_path / "r", trial(), SOURCE)
    fill(Record(tmp_path / "r", trial(sampling={"top_k": 5}), SOURCE), (0, rollout(0, 1.0)))
    with pytest.raises(ConfigError, match=r"sampling = \{\} is refused: .* begun with sampling = "):
        fill(late)
    assert not late.results


def test_two_evaluations_do_not_fill_one_folder(tmp_path: Path) -> None:
    first, second = (Record(tmp_path / "r", trial(), SOURCE) for _ in range(2))
    with (
        first.held(EnvironmentInfo(), TASKS),
        pytest.raises(ConfigError, match="is being filled by another"),
        second.held(EnvironmentInfo(), TASKS),
    ):
        pass


def test_the_time_of_an_evaluation_is_that_of_its_own_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    record = Record(tmp_path / "r", trial(), SOURCE)
    now += 60.0  # the services load, and an evaluation before it in the file is played
    with record.held(EnvironmentInfo(), TASKS):
        now += 5.0
    assert json.loads((tmp_path / "r" / "metadata.json").read_text())["time"] == 5.0
