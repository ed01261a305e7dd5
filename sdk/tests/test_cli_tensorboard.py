"""A run's event files: what TensorBoard itself reads of them, gone on with, torn, and where none can be
written."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from quartet.cli.elsewhere.child import Ending
from quartet.cli.reporting import Reporters, check, is_shown, reporting
from quartet.cli.tensorboard.events import NAMES, EventFile
from quartet.cli.tensorboard.reporter import FOLDER, MAX_POINTS, WRITTEN, TensorBoard
from quartet.config import ConfigError
from quartet.run import tensorboard
from quartet.run.config import parse_run
from quartet.run.operation import differences
from quartet.run.tensorboard import TensorboardConfig
from quartet.run.written_out import is_same_run
from quartet.v1.orchestrator_service_pb2 import Run
from tensorboard.backend.event_processing import event_accumulator

ON = TensorboardConfig(enabled=True)
RUN = 'model = "m"\n[[env]]\nid = "e"\n'

#: Of each chart its (wall time, step, value).
Charts = dict[str, list[tuple[float, int, float]]]


def read(folder: Path) -> Charts:
    """As TensorBoard's own reader has it."""
    reader = event_accumulator.EventAccumulator(str(folder), size_guidance={event_accumulator.SCALARS: 0})
    reader.Reload()
    return {
        tag: [(one.wall_time, one.step, one.value) for one in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


def row(event: int, step: int, **values: Any) -> dict[str, Any]:
    return {"event": event, "time": 1000.0 + event, "step": step, **values}


def add(folder: Path, *rows: Any) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.writelines(json.dumps(one) + "\n" for one in rows)


def steps(first: int, last: int) -> list[dict[str, Any]]:
    return [row(7 * step, step, reward=step / 8) for step in range(first, last + 1)]


@pytest.mark.parametrize("other", [None, "host.7.0"])
def test_a_file_is_behind_the_others_also_where_the_clock_went_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str | None
) -> None:
    """events.py 2: a reader that is open goes on with it, as well."""
    clock = [2_000_000_000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    first = EventFile(tmp_path)
    first.add(1.0, 1, {"loss": 0.5})
    first.close()
    if other is not None:
        newest = next(tmp_path.iterdir())
        newest.rename(tmp_path / f"{NAMES[:-1]}2000000000.{other}")
    reader = event_accumulator.EventAccumulator(str(tmp_path))
    reader.Reload()
    for step, now in ((2, 2_000_000_000.0), (3, 1_600_000_000.0)):
        clock[0] = now
        file = EventFile(tmp_path)
        file.add(step, step, {"loss": 0.5})
        file.close()
    reader.Reload()
    assert len(reader.Scalars("loss")) == 3
    assert [step for _, step, _ in read(tmp_path)["loss"]] == [1, 2, 3]


def test_values_are_read_by_tensorboard_as_they_were_written(tmp_path: Path) -> None:
    """events.py 1: names of any letters, numbers of any size."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    file, wanted = EventFile(tmp_path), Charts()
    for step in [0, 1, 127, 128, 2**31, 2**53, *(rng.randrange(2**40) for _ in range(50))]:
        at = rng.uniform(1e9, 2e9)
        names = {f"{rng.choice(['train', 'ä/€', 'x' * 300])}/{rng.randrange(40)}" for _ in range(20)}
        values = {
            name: rng.choice([0.0, -1.5, 1e-42, rng.gauss(0, 1e6), math.inf, -math.inf]) for name in names
        }
        file.add(at, step, values)
        for name, value in values.items():
            rounded = struct.unpack("<f", struct.pack("<f", value))[0]
            wanted.setdefault(name, []).append((at, step, rounded))
    file.add(1.0, 1, {"beyond": 1e300, "none": math.nan})
    file.close()
    found = read(tmp_path)
    assert found.pop("beyond") == [(1.0, 1, math.inf)]
    ((_, _, value),) = found.pop("none")
    assert math.isnan(value) and found == wanted


def test_everything_of_metrics_is_there_under_the_step(tmp_path: Path) -> None:
    add(tmp_path, row(3, 0, policy_version=0, **{"eval/reward": 0.25}), {"no": "line of a launcher's"})
    add(tmp_path, row(9, 1, **{"train/reward": 0.5, "ledger/discarded": {"no_spread": 4}, "gone": None}))
    with reporting(parse_run(RUN + "[tensorboard]\nenabled = true"), tmp_path, print) as reporters:
        reporters.begin(Run(run_id="r"))
        reporters.tick()
        assert read(tmp_path / FOLDER)["train/reward"] == [(1009.0, 1, 0.5)], "while the run goes on"
        add(tmp_path, row(12, 1, policy_version=1, **{"eval/reward": 0.75}))
        shown = reporters.finish(Ending(0, {}))
    assert shown == f"TensorBoard: tensorboard --logdir {tmp_path / FOLDER}"
    assert read(tmp_path / FOLDER) == {
        "policy_version": [(1003.0, 0, 0.0), (1012.0, 1, 1.0)],
        "eval/reward": [(1003.0, 0, 0.25), (1012.0, 1, 0.75)],
        "train/reward": [(1009.0, 1, 0.5)],
        "ledger/discarded/no_spread": [(1009.0, 1, 4.0)],
    }


@pytest.mark.parametrize("kill", ["ended", "died", "torn"])
def test_a_run_that_goes_on_has_no_point_twice_and_misses_none(tmp_path: Path, kill: str) -> None:
    """reporter.py 1; events.py 1 and 2."""
    for part in range(3):
        board = TensorBoard(ON, tmp_path, print)
        board.begin()
        add(tmp_path, *steps(4 * part + 1, 4 * part + 4))
        if kill == "ended":
            board.finish()
            continue
        board.tick()
        file = max((tmp_path / FOLDER).glob(NAMES))
        if kill == "torn":  # what was to be written next
            file.write_bytes(file.read_bytes() + b"\x07\x00\x00")
    assert len(list((tmp_path / FOLDER).glob(NAMES))) == 3
    assert read(tmp_path / FOLDER)["reward"] == [(1000.0 + 7 * step, step, step / 8) for step in range(1, 13)]
    assert json.loads((tmp_path / WRITTEN).read_text()) == {"event": 84}


def test_steps_that_are_done_again_are_not_written_again(tmp_path: Path) -> None:
    """As of a fine-tuning whose lines were cut off: its events have the numbers that they had."""
    add(tmp_path, *steps(1, 6))
    assert "tensorboard --logdir" in TensorBoard(ON, tmp_path, print).catch_up()
    (tmp_path / "metrics.jsonl").unlink()
    add(tmp_path, *steps(1, 3))
    board = TensorBoard(ON, tmp_path, print)
    board.begin()
    board.tick()
    add(tmp_path, *steps(4, 8))
    board.finish()
    assert [step for _, step, _ in read(tmp_path / FOLDER)["reward"]] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_look_takes_no_longer_than_it_may_and_the_end_has_all(tmp_path: Path) -> None:
    """reporter.py 2"""
    add(tmp_path, *steps(1, 2 * MAX_POINTS + 5))
    board = TensorBoard(ON, tmp_path, print)
    board.begin()
    for look in (1, 2):
        board.tick()
        assert len(read(tmp_path / FOLDER)["reward"]) == look * MAX_POINTS
    board.finish()
    assert len(read(tmp_path / FOLDER)["reward"]) == 2 * MAX_POINTS + 5


def test_a_full_disk_is_said_once_and_what_is_missing_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """reporter.py 2"""

    def full(self: EventFile) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    said: list[str] = []
    board = TensorBoard(ON, tmp_path, said.append)
    board.begin()
    add(tmp_path, *steps(1, 2))
    board.tick()
    with monkeypatch.context() as patch:
        patch.setattr(EventFile, "flush", full)
        add(tmp_path, *steps(3, 4))
        for _ in range(3):
            board.tick()
    why = "they cannot be written (No space left on device)"
    assert said == [f"TensorBoard's files: {why}; the run goes on without"]
    last = board.finish()
    assert last.startswith(f"TensorBoard's files have not everything: {why}; metrics.jsonl has")
    assert last.endswith("by the same command with --resume") and board.finish() == ""
    TensorBoard(ON, tmp_path, print).catch_up()
    charts = read(tmp_path / FOLDER)["reward"]
    assert sorted({step for _, step, _ in charts}) == [1, 2, 3, 4]


def test_who_watched_a_run_is_sent_to_no_flag_that_watch_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = TensorBoard(ON, tmp_path, print, here=False)
    monkeypatch.setattr(EventFile, "flush", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    board.begin()
    add(tmp_path, *steps(1, 2))
    assert board.finish().endswith("comes when the run is reported again, by the same command")


def test_a_fault_of_closing_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """reporter.py 2: all of it is on the disk before."""

    def fails(self: EventFile) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(EventFile, "close", fails)
    add(tmp_path, *steps(1, 2))
    assert TensorBoard(ON, tmp_path, print).catch_up().startswith("TensorBoard: tensorboard --logdir")
    assert [step for _, step, _ in read(tmp_path / FOLDER)["reward"]] == [1, 2]


def test_a_folder_that_cannot_be_made_ends_nothing(tmp_path: Path) -> None:
    add(tmp_path, *steps(1, 2))
    (tmp_path / FOLDER).write_text("a file")
    said: list[str] = []
    board = TensorBoard(ON, tmp_path, said.append)
    board.begin()
    board.tick()
    assert said == ["TensorBoard's files: they cannot be written (Not a directory); the run goes on without"]
    assert "have not everything" in board.finish()


def test_it_is_off_unless_asked_for_and_no_part_of_the_run(tmp_path: Path) -> None:
    plain, shown = parse_run(RUN), parse_run(RUN + "[tensorboard]\nenabled = true")
    assert not is_shown(plain) and is_shown(shown)
    assert is_same_run(shown, plain) and not differences(plain, shown)
    add(tmp_path, *steps(1, 2))
    with reporting(plain, tmp_path, print) as reporters:
        assert isinstance(reporters, Reporters)
        reporters.begin(Run(run_id="r"))
        reporters.tick()
        assert reporters.finish(Ending(0, {})) == ""
        assert reporters.catch_up("r", "", Ending(0, {})) == ""
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.jsonl"]
    with pytest.raises(ConfigError, match=r"tensorboard\.enabled = 'yes please' is refused"):
        parse_run(RUN + '[tensorboard]\nenabled = "yes please"')
    with pytest.raises(ConfigError, match=r"unknown key 'tensorboard\.logdir'"):
        parse_run(RUN + '[tensorboard]\nlogdir = "x"')


def test_nothing_of_it_is_loaded_before_it_is_asked_for() -> None:
    script = "import sys, quartet.cli.reporting; print({'torch', 'tensorboard', 'wandb'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_where_it_is_not_installed_that_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asking = parse_run(RUN + "[tensorboard]\nenabled = true")
    check(asking)
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    check(parse_run(RUN))
    with pytest.raises(ConfigError, match=r"tensorboard is not installed; .*sdk\[tensorboard\].* or remove"):
        check(asking)
