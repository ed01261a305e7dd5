"""The output folder from a stream of events, cut off and resumed anywhere."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from quartet.cli.outputs import (
    Outputs,
    append_line,
    recover_lines,
    rollout_row,
    take_model,
    write_lines,
)
from quartet.config import ConfigError
from quartet.v1.orchestrator_service_pb2 import (
    EvalEvent,
    GroupFate,
    StepEvent,
    WatchRunResponse,
)
from run_history import GROUP, STEPS, history, rollout


def contents(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): file.read_text()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_files_of_a_run(tmp_path: Path) -> None:
    outputs = Outputs(tmp_path)
    for event in history():
        assert outputs.record(event)
    rows = recover_lines(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
    assert [row["eval/reward"] for row in rows if "eval/reward" in row] == [0.4, 0.9]
    assert rows[1]["ledger/trained"] == GROUP
    first = recover_lines(tmp_path / "rollouts" / "step_0001.jsonl")
    assert [row["reward"] for row in first] == [0.0, 0.25, None], "a failure has no reward"
    assert first[2]["failure"] == {"kind": "TIMEOUT", "message": "late"}
    assert first[0]["policy_versions"] == [0] and first[0]["replicas"] == ["10.0.0.3:50051"]
    assert first[0]["messages"][-1] == {"role": "assistant", "content": "cba"}
    assert outputs.progress.ended


def test_each_rollout_of_an_applied_step_says_whether_it_was_trained_on_or_why_not(tmp_path: Path) -> None:
    """trained_on.py 1"""
    outputs = Outputs(tmp_path)
    fates = [
        # Of member 2 a later attempt was trained on, which is another rollout.
        GroupFate(
            group=1, members=[1, 2, 4], advantages=[0.5, 9, -0.25], overlong=[3], without_advantage=[0]
        ),
        GroupFate(group=2, discarded="no_spread"),
    ]
    events = [{"rollout": rollout(1, member)} for member in range(5)]
    other, stray, evaluated = rollout(1, 1), rollout(1, 1), rollout(1, 1)
    other.group, stray.group = 2, 3
    evaluated.ClearField("step")
    events += [{"rollout": one} for one in (other, stray, evaluated)]

    def told() -> list[tuple[object, object, object]]:
        rows = recover_lines(tmp_path / "rollouts" / "step_0001.jsonl")
        assert [row["event"] for row in rows] == list(range(1, 8)), "none is lost, all in their order"
        return [(row["trained"], row["advantage"], row["discarded"]) for row in rows]

    for number, kind in enumerate(events, start=1):
        outputs.record(WatchRunResponse(event=number, **kind))  # type: ignore[arg-type]
    failed, unknown = (False, None, "failed:TIMEOUT"), (None, None, None)
    assert told() == [unknown, unknown, failed, unknown, unknown, unknown, unknown]
    outputs.record(WatchRunResponse(event=9, step=StepEvent(step=1, groups=fates)))
    assert told() == [
        (False, None, "zero_advantage_filtering"),
        (True, 0.5, None),
        failed,
        (False, None, "overlong_filtering"),
        (True, -0.25, None),
        (False, None, "no_spread"),
        unknown,
    ]
    (row,) = recover_lines(tmp_path / "rollouts" / "eval_0000.jsonl")
    assert not {"trained", "advantage", "discarded"} & row.keys(), "an evaluation trains nothing"


def test_a_conversation_is_told_with_what_its_turns_thought_called_and_were_answered() -> None:
    event = rollout(1, 0)
    del event.rollout.messages[1:]
    calling = event.rollout.messages.add(role="assistant", reasoning_content="a tool knows")
    calling.tool_calls.add(id="c1", name="search", arguments_json='{"query": "abc"}')
    event.rollout.messages.add(role="tool", tool_call_id="c1", name="search", content="cba")
    _, asked, answered = rollout_row(event)["messages"]
    assert (asked["role"], asked["content"], asked["reasoning_content"]) == ("assistant", "", "a tool knows")
    call = {"id": "c1", "name": "search", "arguments": '{"query": "abc"}'}
    assert [json.loads(one) for one in asked["tool_calls"]] == [call]
    assert answered == {"role": "tool", "content": "cba", "tool_call_id": "c1", "name": "search"}


def test_a_rollout_tells_what_each_of_several_agents_earned() -> None:
    event = rollout(1, 0)
    assert "parts" not in rollout_row(event)
    event.rollout.parts.add(agent="blue", reward=1.0)
    event.rollout.parts.add(agent="red", reward=-1.0)
    told = [{"agent": "blue", "reward": 1.0}, {"agent": "red", "reward": -1.0}]
    assert rollout_row(event)["parts"] == told
    event.rollout.failure.message = "it broke"
    assert "parts" not in rollout_row(event)


def test_what_answers_a_task_is_told_by_verifiers_names_and_whatever_else_there_is_apart() -> None:
    event = rollout(1, 0)
    assert not {"answer", "info", "task_data"} & rollout_row(event).keys()
    event.rollout.task_json = '{"answer":"cba","info":null,"ground_truths":[["a"]],"reward":2}'
    row = rollout_row(event)
    assert (row["answer"], row["info"]) == ("cba", None)
    assert (
        row["task_data"] == {"ground_truths": [["a"]], "reward": 2} and row["reward"] == event.rollout.reward
    )


@pytest.mark.parametrize("torn", [b"", b'{"event": 9', b'{"event": 99, "step"'])
@pytest.mark.parametrize("cut", range(len(history()) + 1))
def test_resuming_anywhere_loses_and_doubles_nothing(tmp_path: Path, cut: int, torn: bytes) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    outputs = Outputs(whole)
    for event in history():
        outputs.record(event)
    outputs = Outputs(broken)
    for event in history()[:cut]:
        outputs.record(event)
    if torn:
        with (broken / "metrics.jsonl").open("ab") as file:
            file.write(torn)
    resumed = Outputs(broken)
    for event in history():
        if event.event > resumed.progress.last_event:
            resumed.record(event)
    assert contents(broken) == contents(whole)
    assert resumed.progress.rewards == outputs.progress.rewards if cut == len(history()) else True
    assert [step for step, _ in resumed.progress.rewards] == [1, 2, 3, 4]
    assert [value for _, value in resumed.progress.evals] == [0.4, 0.9]


def test_an_evaluation_without_a_result_is_no_step(tmp_path: Path) -> None:
    outputs = Outputs(tmp_path)
    measured = EvalEvent(step=1, policy_version=1, metrics={"eval/coverage": 0.0})
    for event in (*history()[: 3 + GROUP], WatchRunResponse(event=99, eval=measured)):
        outputs.record(event)
    again = Outputs(tmp_path).progress
    assert again.metrics == outputs.progress.metrics and "train/reward" in again.metrics
    assert again.evals == outputs.progress.evals


def test_a_line_that_finds_no_room_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    append_line(file, {"event": 1})
    size = file.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, hard))
    try:
        with pytest.raises(OSError, match=r"lines\.jsonl"):
            append_line(file, {"event": 2})
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        with pytest.raises(OSError, match=r"lines\.jsonl"):
            append_line(file, {"event": 2})
        with pytest.raises(OSError, match=r"lines\.jsonl"):
            write_lines(file, [{"event": 1}, {"event": 2}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.stat().st_size == size and list(tmp_path.iterdir()) == [file]
    append_line(file, {"event": 2})
    assert [row["event"] for row in recover_lines(file)] == [1, 2]


def test_a_long_run_is_gone_on_with_in_little_memory(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    write_lines(
        file, [{"event": step, "step": step} | {f"a/{n}": 0.5 for n in range(90)} for step in range(2000)]
    )
    with file.open("ab") as torn:
        torn.write(b'{"event": 2000')
    size = file.stat().st_size
    tracemalloc.start()
    outputs = Outputs(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert outputs.progress.last_event == 1999 and file.stat().st_size == size - 14
    assert peak < size / 2


@pytest.mark.parametrize("torn", [b"", b'{"event": 9', b'{"event": 9}'])
def test_of_rollouts_the_last_line_alone_is_read(
    tmp_path: Path, torn: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the newest event of its file; to read those of a long run takes minutes."""
    (tmp_path / "rollouts").mkdir()
    lines = [b'{"event": 7}\n', b"\n".join([b"what nobody reads", b'{"event": 8}', torn]), torn, b""]
    files = [tmp_path / "rollouts" / f"step_{number:04d}.jsonl" for number in range(len(lines))]
    for file, content in zip(files, lines, strict=True):
        file.write_bytes(content)
    read: list[bytes] = []
    monkeypatch.setattr(json, "loads", lambda line, loads=json.loads: (read.append(line), loads(line))[1])
    assert Outputs(tmp_path).progress.last_event == 8
    assert read == [b'{"event": 7}\n', b'{"event": 8}\n']
    assert [file.stat().st_size for file in files] == [13, 31, 0, 0]
    files[0].write_bytes(before := b'{"event": 7}\n[2]\n')
    with pytest.raises(ConfigError, match=r"step_0000\.jsonl:2 is no JSON object"):
        Outputs(tmp_path)
    assert files[0].read_bytes() == before


@pytest.mark.parametrize("damaged", ['{"event": 2', "[2]", "[" * 100_000])
def test_a_damaged_line_is_named_and_nothing_is_lost(tmp_path: Path, damaged: str) -> None:
    """Only the last one may be torn."""
    file = tmp_path / "metrics.jsonl"
    file.write_text(before := f'{{"event": 1, "step": 1}}\n{damaged}\n{{"event": 3}}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2 is no JSON object"):
        Outputs(tmp_path)
    assert file.read_text() == before


def step_files(folder: Path, kind: str = "step") -> list[str]:
    return sorted(file.name for file in (folder / "rollouts").glob(f"{kind}_*"))


@pytest.mark.parametrize("cut", range(len(history()) + 1))
def test_rollouts_of_the_newest_steps_are_kept_wherever_it_was_killed(tmp_path: Path, cut: int) -> None:
    """outputs.py 4: the metrics and where to go on are those of a folder that keeps all."""
    whole, events = Outputs(tmp_path / "whole"), history()
    kept = Outputs(tmp_path / "kept", keep_rollouts=2)
    for event in events:
        whole.record(event)
    for event in events[:cut]:
        kept.record(event)
        assert len(step_files(kept.folder)) <= 3, "those of two steps, and of the one under way"
    again = Outputs(tmp_path / "kept", keep_rollouts=2)
    for event in events[again.progress.last_event :]:
        again.record(event)
    assert step_files(again.folder) == ["step_0003.jsonl", "step_0004.jsonl"]
    assert again.metrics_file.read_text() == whole.metrics_file.read_text()
    late = rollout(1, 0)
    again.record(WatchRunResponse(event=len(events) + 1, at_ms=1, rollout=late))
    assert step_files(again.folder) == ["step_0003.jsonl", "step_0004.jsonl"], "it came after its step"
    assert Outputs(tmp_path / "kept").progress.last_event == whole.progress.last_event - 1


def test_a_folder_that_kept_all_is_cut_down_when_it_is_opened(tmp_path: Path) -> None:
    """outputs.py 4: a process that was killed before it removed them, or a setting that is new."""
    outputs = Outputs(tmp_path)
    for event in history():
        outputs.record(event)
    for other in ("eval_0000.jsonl", "eval_9000.jsonl", "eval_10000.jsonl", "eval_mine.jsonl"):
        (tmp_path / "rollouts" / other).write_text("")
    assert len(step_files(tmp_path)) == STEPS
    Outputs(tmp_path, keep_rollouts=2)
    assert step_files(tmp_path) == ["step_0003.jsonl", "step_0004.jsonl"]
    assert step_files(tmp_path, "eval") == ["eval_10000.jsonl", "eval_9000.jsonl", "eval_mine.jsonl"]


EVALUATIONS = 4


def evaluated() -> list[WatchRunResponse]:
    """Steps, after each of which there is an evaluation with rollouts."""
    kinds: list[dict[str, object]] = []
    for step in range(EVALUATIONS):
        if step:
            kinds.append({"step": StepEvent(step=step, metrics={"train/reward": 0.5})})
        for member in range(GROUP):
            event = rollout(1, member)
            event.ClearField("step")
            kinds.append({"rollout": event})
        kinds.append({"eval": EvalEvent(step=step, metrics={"eval/reward": 0.1 * step})})
    return [WatchRunResponse(event=n, at_ms=n, **kind) for n, kind in enumerate(kinds, 1)]  # type: ignore[arg-type]


@pytest.mark.parametrize("cut", range(len(evaluated()) + 1))
def test_rollouts_of_the_newest_evaluations_are_kept_wherever_it_was_killed(tmp_path: Path, cut: int) -> None:
    """outputs.py 1 and 4: nothing is written twice, though the files with the older events are gone."""
    whole, events = Outputs(tmp_path / "whole"), evaluated()
    kept = Outputs(tmp_path / "kept", keep_rollouts=2)
    for event in events:
        whole.record(event)
    for event in events[:cut]:
        kept.record(event)
        assert len(step_files(kept.folder, "eval")) <= 3, "those of two evaluations, and of the one under way"
    again = Outputs(tmp_path / "kept", keep_rollouts=2)
    assert again.progress.last_event == cut
    for event in events[cut:]:
        again.record(event)
    assert step_files(again.folder, "eval") == ["eval_0002.jsonl", "eval_0003.jsonl"]
    assert len(step_files(whole.folder, "eval")) == EVALUATIONS
    every = contents(whole.folder)
    assert {name: every[name] for name in contents(again.folder)} == contents(again.folder)
    assert again.metrics_file.read_text() == whole.metrics_file.read_text()


def test_a_replayed_stream_changes_nothing(tmp_path: Path) -> None:
    outputs = Outputs(tmp_path)
    for event in history():
        outputs.record(event)
    before = contents(tmp_path)
    assert not any(outputs.record(event) for event in history())
    assert not outputs.record(WatchRunResponse(event=0))
    assert contents(tmp_path) == before


def test_checkpoint_is_whole_and_replaces_the_old_one(tmp_path: Path) -> None:
    outputs = Outputs(tmp_path / "run")
    model = tmp_path / "export"
    model.mkdir()
    (model / "config.json").write_text("{}")
    outputs.take_checkpoint(model)
    (model / "model.safetensors").write_bytes(b"weights")
    target = outputs.take_checkpoint(model)
    assert sorted(file.name for file in target.iterdir()) == ["config.json", "model.safetensors"]
    assert not list((tmp_path / "run").glob("*.partial"))


def test_what_is_written_into_the_checkpoint_does_not_reach_the_saved_state(tmp_path: Path) -> None:
    model, names = tmp_path / "state", ("config.json", "tokenizer.json", "model.safetensors")
    model.mkdir()
    for name in names:
        (model / name).write_text("as it was saved")
    target = take_model(model, tmp_path / "checkpoint")
    for name in names[:2]:
        (target / name).write_text("changed in place")
    assert all((model / name).read_text() == "as it was saved" for name in names)
    assert (target / names[2]).samefile(model / names[2]), "what is large takes no room"


@pytest.mark.parametrize(
    ("written", "killed_in"),
    [
        ("Outputs(folder).take_checkpoint(Path({model!r}))", "os.link"),
        ("write_json(folder / 'run.json', dict(a=1))", "Path.replace"),
    ],
)
def test_what_a_killed_process_left_half_written_is_replaced(
    tmp_path: Path, written: str, killed_in: str
) -> None:
    model, folder = tmp_path / "export", tmp_path / "run"
    model.mkdir()
    folder.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    begin = f"from quartet.cli.outputs import *; folder = Path({str(folder)!r})"
    write = written.format(model=str(model))
    killed = f"{begin}; {killed_in} = lambda *_, **__: os._exit(9); {write}"
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == 9
    assert list(folder.glob("*.partial"))
    subprocess.run([sys.executable, "-c", f"{begin}; {write}"], check=True)
    assert not list(folder.glob("*.partial"))


def test_what_a_person_keeps_beside_the_rollouts_is_left_alone(tmp_path: Path) -> None:
    """Some of them, picked for a fine-tuning, say: without the numbers of their events, or a last newline."""
    outputs = Outputs(tmp_path)
    for event in history()[:-1]:
        outputs.record(event)
    picked = tmp_path / "rollouts" / "picked.jsonl"
    picked.write_text('{"messages": []}')
    again = Outputs(tmp_path)
    assert again.progress.last_event == outputs.progress.last_event
    assert picked.read_text() == '{"messages": []}'


def test_metrics_are_json_lines(tmp_path: Path) -> None:
    outputs = Outputs(tmp_path)
    for event in history():
        outputs.record(event)
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        assert isinstance(json.loads(line), dict)
