"""`quartet compare`: folders as `quartet rl` writes them, of runs that ended, go on, are torn or shorter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from quartet.cli import follow
from quartet.cli.__main__ import main
from quartet.cli.compare.folders import recorded
from quartet.cli.compare.rows import MAX_EVALUATIONS, lines, remarks
from quartet.cli.job import plan, write_down
from quartet.cli.outputs import Outputs, write_json
from quartet.cli.sft.place import taken
from quartet.cli.summary import SUMMARY, summed_up
from quartet.config import ConfigError
from quartet.run.config import parse_run
from quartet.run.sft import SftConfig
from quartet.v1 import orchestrator_service_pb2 as pb

TOML = """
model = "m"
learning_rate = 1e-3
max_steps = 8
batch_size = 8
[[env]]
id = "toy"
[env.args]
judge = { api_key = "sk-secret" }
"""


def a_run(folder: Path, *, steps: int = 8, better: float = 0.0, end: bool = True, **changed: str) -> Path:
    """The folder of a run of so many steps, whose rewards rise by 0.1 with each, written as events come."""
    toml = TOML
    for was, now in changed.items():
        toml, count = re.subn(rf"(?m)^{was} = .*$", f"{was} = {now}", toml)
        assert count == 1
    config = parse_run(toml)
    job = plan(config, folder, "run", resume=False, overwrite=False)
    folder.mkdir()
    write_down(job, accepted=True)
    outputs = Outputs(folder)
    ledger = pb.Ledger(dispatched=8 * steps + 8, trained=8 * steps, discarded={"stale": 8})
    number = 1
    for step in range(steps + 1):
        if step:
            metrics = {
                "train/reward": 0.1 * step + better,
                "time/step_s": float(step),
                "tokens_per_second": 100.0 * step,
                "staleness/max": 1.0,
            }
            event = pb.StepEvent(step=step, metrics=metrics, ledger=ledger)
            outputs.record(pb.WatchRunResponse(event=number, step=event))
            number += 1
        if step % 4 == 0:
            measured = pb.EvalEvent(step=step, metrics={"eval/reward": step / 10, "eval/coverage": 1.0})
            outputs.record(pb.WatchRunResponse(event=number, eval=measured))
            number += 1
    if end:
        run = pb.Run(run_id="run", phase=pb.RUN_PHASE_COMPLETED, step=steps, reward_before=0.0, ledger=ledger)
        run.reward_after = steps / 10
        run.environments.add(id="toy", version="0.1.0", digest="aaaa", later_digests=["bbbb"])
        summary = summed_up("run", config, run, step=steps, wall_seconds=9.5, restarts={})
        write_json(folder / SUMMARY, summary)
    return folder


def rows(*folders: Path) -> dict[str, list[Any]]:
    return {
        f"{row.section}: {row.name}": list(row.values) for row in lines([recorded(one) for one in folders])
    }


def test_runs_stand_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """rows.py 2, and every section; folders.py 3."""
    first = a_run(tmp_path / "first")
    second = a_run(tmp_path / "second", better=0.05, learning_rate="2e-3", judge='{ api_key = "sk-other" }')
    file, figure = tmp_path / "c.json", tmp_path / "c.png"
    options = ["--json", str(file), "--plot", str(figure)]
    assert main(["compare", str(first), str(second), *options]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"learning_rate +0\.001 +0\.002", shown) and "batch_size" not in shown
    assert re.search(r"toy, digest +aaaa -> bbbb +aaaa -> bbbb", shown)
    assert re.search(r"best step +0\.800 \(step 8\) +0\.850 \(step 8\)", shown)
    assert "sk-" not in shown + file.read_text()
    assert figure.read_bytes().startswith(b"\x89PNG")
    content = json.loads(file.read_text())
    assert [one["name"] for one in content["runs"]] == ["first", "second"]
    found = {row["name"]: row["values"] for row in content["rows"]}
    assert found["training, step 4 (mean of 4)"] == pytest.approx([0.25, 0.3])
    assert found["reward after"] == [0.8, 0.8] and found["seconds, all of it"] == [9.5, 9.5]
    # Of steps of 1, 2, ..., 8 s with 100, 200, ..., 800 tokens a second.
    assert found["tokens per second"] == pytest.approx([100 * 204 / 36] * 2)
    assert found["discarded"] == [{"stale": 8}] * 2


def test_a_run_that_is_shorter_and_goes_on_is_compared_as_far_as_it_is(tmp_path: Path) -> None:
    """rows.py 1-3"""
    long, short = a_run(tmp_path / "long"), a_run(tmp_path / "short", steps=4, end=False)
    found = rows(long, short)
    assert found["rewards: stands"] == ["completed", "no end yet"] and found["rewards: steps"] == [8, 4]
    assert [name for name in found if "training, step" in name][-1] == "rewards: training, step 4 (mean of 4)"
    assert found["rewards: reward after"] == [0.8, None] and found["rewards: reward before"] == [0.0, 0.0]
    evaluations = {name: values for name, values in found.items() if name.startswith("evaluations")}
    assert evaluations == {"evaluations: after step 0": [0.0, 0.0], "evaluations: after step 4": [0.4, 0.4]}
    assert found["environments: toy, digest"] == ["aaaa -> bbbb", None]
    again = json.loads((long / SUMMARY).read_text()) | {"steps": 6, "phase": "stopped"}
    write_json(long / SUMMARY, again)
    found = rows(long, short)
    assert found["rewards: stands"] == ["goes on", "no end yet"]
    assert found["what it took: seconds, all of it"] == [None, None], "it is that of 6 steps"
    assert found["rewards: reward after"] == [None, None] and "environments: toy, digest" not in found


def test_evaluations_of_every_step_are_a_few_rows(tmp_path: Path) -> None:
    """rows.py 3: the first and the last that both have among them."""
    folders = [a_run(tmp_path / name, steps=160) for name in ("a", "b")]
    steps = [int(name.split()[-1]) for name in rows(*folders) if name.startswith("evaluations")]
    assert len(steps) == MAX_EVALUATIONS and (steps[0], steps[-1]) == (0, 160)


def test_an_evaluation_whose_rollouts_failed_is_not_compared_as_if_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """rows.py 6"""
    whole, partial = a_run(tmp_path / "whole"), a_run(tmp_path / "partial")
    metrics = partial / "metrics.jsonl"
    told = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in told:
        if row["step"] == 8 and "eval/reward" in row:
            row["eval/coverage"] = 0.25
    metrics.write_text("".join(json.dumps(row) + "\n" for row in told))
    found = rows(whole, partial)
    assert found["evaluations: after step 8"] == [0.8, 0.8]
    assert found["evaluations: after step 8, coverage"] == [1.0, 0.25]
    assert found["rewards: reward after, coverage"] == [1.0, 0.25]
    assert [name for name in found if "coverage" in name and ("before" in name or "step 4" in name)] == []
    best = [{"reward": 0.8, "step": 8}, {"reward": 0.4, "step": 4}]
    assert found["rewards: best evaluation"] == best
    for row in told:
        if "eval/reward" in row:
            row["eval/coverage"] = 0.25
    metrics.write_text("".join(json.dumps(row) + "\n" for row in told))
    assert rows(whole, partial)["rewards: best evaluation"][1] == best[0] | {"coverage": 0.25}
    assert main(["compare", str(whole), str(partial)]) == 0
    assert "0.800 (step 8, from 25% of its rollouts)" in capsys.readouterr().out


def test_what_each_side_of_a_game_earned_is_compared(tmp_path: Path) -> None:
    """rows.py 4: together they earn nothing, whoever wins."""
    first, second = a_run(tmp_path / "first"), a_run(tmp_path / "second")
    assert not [name for name in rows(first, second) if "agent" in name]
    for folder, edge in ((first, 0.25), (second, 0.5)):
        metrics = folder / "metrics.jsonl"
        told = [json.loads(line) for line in metrics.read_text().splitlines()]
        for row in told:
            kind = "eval" if "eval/reward" in row else "env"
            sides = {"blue": edge + row["step"], "red": -edge - row["step"]}
            row[f"{kind}/toy/reward"] = 0.0
            row |= {f"{kind}/toy/agents/{side}/reward": reward for side, reward in sides.items()}
        metrics.write_text("".join(json.dumps(row) + "\n" for row in told))
    found = rows(first, second)
    assert {name: values for name, values in found.items() if "red" in name} == {
        "rewards of each agent: red, reward before": [-0.25, -0.5],
        "rewards of each agent: red, reward after": [-8.25, -8.5],
        "rewards of each agent: red, step 8 (mean of 8)": [-4.75, -5.0],
        "rewards of each agent: red, last steps (mean of up to 10)": [-4.75, -5.0],
        **{f"evaluations: after step {at}, red": [-0.25 - at, -0.5 - at] for at in (0, 4, 8)},
    }
    (second / SUMMARY).unlink()
    assert rows(first, second)["rewards of each agent: blue, reward after"] == [8.25, None]


def test_a_torn_last_line_is_left_out_and_stays_as_it_is(tmp_path: Path) -> None:
    """folders.py 1 and 2"""
    one, other = a_run(tmp_path / "one"), a_run(tmp_path / "other", end=False)
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"event": 99, "time": 1.0, "step": 9, "train/rew')
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    assert rows(one, other)["rewards: steps"] == [8, 8]
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before
    damaged = (other / "metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "metrics.jsonl").write_text("".join([damaged[0], damaged[1][:30] + "\n", *damaged[2:]]))
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2 is no line of metrics, and not the last one"):
        recorded(other)


@pytest.mark.parametrize("step", ["1e400", "[" * 100_000, "null", '"x"', '"9"', "true", "{}"])
def test_a_line_whose_step_is_no_number_is_refused(tmp_path: Path, step: str) -> None:
    """folders.py 2"""
    run = a_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'{{"event": 99, "step": {step}}}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:12 is no line of metrics"):
        recorded(run)


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-1e400", "1e300", "1" + "0" * 400, '"high"', "true", "[1]"]
)
def test_what_is_no_number_of_a_run_is_as_if_it_was_not_there(tmp_path: Path, value: str) -> None:
    """measured_lines.py 3: and the file is JSON."""
    one, other = a_run(tmp_path / "one"), a_run(tmp_path / "other")
    names = ["train/reward", "time/step_s", "tokens_per_second", "staleness/max"]
    with (other / "metrics.jsonl").open("a") as file:
        file.write(
            f'{{"event": 99, "step": 9, {", ".join(f"{json.dumps(name)}: {value}" for name in names)}}}\n'
        )
    assert main(["compare", str(one), str(other), "--json", str(tmp_path / "c.json")]) == 0

    def no(constant: str) -> None:
        raise AssertionError(constant)

    told = json.loads((tmp_path / "c.json").read_text(), parse_constant=no)["rows"]
    found = {row["name"]: row["values"] for row in told}
    assert found["best step"] == [{"reward": 0.8, "step": 8}] * 2
    assert found["tokens per second"] == pytest.approx([100 * 204 / 36] * 2)


def test_a_whole_number_is_a_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As other programs write 1.0."""
    one, other = a_run(tmp_path / "one"), a_run(tmp_path / "other")
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"event": 99, "step": 9, "train/reward": 1}\n')
    assert main(["compare", str(one), str(other)]) == 0
    assert re.search(r"best step +0\.800 \(step 8\) +1\.000 \(step 9\)", capsys.readouterr().out)


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        '{"steps": "six"}',
        '{"environments": 5}',
        '{"environments": [null]}',
        '{"environments": [{"name": "a", "later_digests": 1}]}',
    ],
)
def test_a_summary_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    run = a_run(tmp_path / "run")
    (run / SUMMARY).write_text(text)
    with pytest.raises(ConfigError, match=r"summary\.json has no summary of a run"):
        recorded(run)


def test_a_run_that_has_measured_nothing_has_empty_places(tmp_path: Path) -> None:
    """rows.py 1"""
    one, begun = a_run(tmp_path / "one"), a_run(tmp_path / "begun", end=False)
    (begun / "metrics.jsonl").unlink()
    found = rows(one, begun)
    assert found["rewards: stands"] == ["completed", "nothing yet"] and found["rewards: steps"] == [8, 0]
    assert found["what it took: staleness, most"] == [1.0, None]
    assert not [name for name in found if "training, step" in name]
    assert main(["compare", str(one), str(begun)]) == 0


def test_a_watched_run_is_compared_without_settings(tmp_path: Path) -> None:
    """folders.py 3"""
    one, watched = a_run(tmp_path / "one"), a_run(tmp_path / "watched", end=False)
    for name in ("run.json", "run.toml"):
        (watched / name).unlink()
    write_json(watched / follow.RECORD, {"run_id": "far", "submitted_at_ms": 1})
    found = rows(one, watched)
    assert found["rewards: steps"] == [8, 8] and not [name for name in found if name.startswith("settings")]
    assert found["rewards: stands"] == ["completed", "no end yet"]


def test_a_watched_run_ends_as_far_as_it_was_followed(tmp_path: Path) -> None:
    """folders.py 2"""
    watched, later = a_run(tmp_path / "watched", end=False), a_run(tmp_path / "later", end=False)
    for folder, steps in ((watched, 8), (later, 6)):
        for name in ("run.json", "run.toml"):
            (folder / name).unlink()
        run = pb.Run(run_id="far", phase=pb.RUN_PHASE_COMPLETED, step=steps, reward_before=0.0)
        run.reward_after = 0.8
        write_json(
            folder / follow.RECORD,
            {"run_id": "far", "submitted_at_ms": 1, follow.END: follow.ending_of(run).summary},
        )
    found = rows(watched, later)
    assert found["rewards: stands"] == ["completed", "goes on"], "it was followed further"
    assert found["rewards: reward before"] == [0.0, 0.0] and found["rewards: reward after"] == [0.8, None]
    assert found["what it took: seconds, all of it"] == [None, None]
    write_json(later / follow.RECORD, {"run_id": "far", follow.END: {"steps": "six"}})
    with pytest.raises(ConfigError, match=r"watched\.json has no summary of a run"):
        recorded(later)


@pytest.mark.parametrize(
    ("changed", "differ"),
    [
        ({"learning_rate": "2e-3"}, False),
        ({"judge": '{ api_key = "sk-other" }'}, False),
        ({"id": '"toy"\nname = "other"\nweight = 2.0\nmax_retries = 1'}, False),
        ({"id": '"other"'}, True),
        ({"judge": '{ model = "m" }'}, True),
        # As those of training are measured where there is none: the same one, and another.
        ({"batch_size": '8\neval.env = [{ id = "toy", args.judge.api_key = "sk-secret" }]'}, False),
        ({"batch_size": '8\neval.env = [{ id = "toy" }]'}, True),
    ],
)
def test_runs_that_are_evaluated_on_different_environments_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, str], differ: bool
) -> None:
    """rows.py 7"""
    one, other, file = a_run(tmp_path / "one"), a_run(tmp_path / "other", **changed), tmp_path / "c.json"
    assert main(["compare", str(one), str(other), "--json", str(file)]) == 0
    said = "the runs are evaluated on different environments (eval.env, or env where there is none)"
    assert [line.startswith(said) for line in json.loads(file.read_text())["remarks"]] == [True] * differ
    assert (said in capsys.readouterr().out) is differ


def test_what_was_not_evaluated_is_not_said_to_differ(tmp_path: Path) -> None:
    """rows.py 7: nor what is not known."""
    one, other = a_run(tmp_path / "one"), a_run(tmp_path / "other", id='"other"')
    assert len(remarks([recorded(one), recorded(other)])) == 1
    off = a_run(tmp_path / "off", id='"other"', batch_size="8\neval.num_examples = 0")
    assert remarks([recorded(one), recorded(off)]) == []
    file = other / "run.toml"
    file.write_text(f"of_later = 1\n{file.read_text()}")
    assert remarks([recorded(one), recorded(other)]) == [], "of another release"
    file.write_text(file.read_text().removeprefix("of_later = 1\n"))
    metrics = other / "metrics.jsonl"
    told = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in told if "eval/reward" not in line))
    assert remarks([recorded(one), recorded(other)]) == []


@pytest.mark.parametrize(
    ("more", "differ"),
    [
        ("algorithm.num_iterations = 2", False),
        ("difficulty_filter.enabled = false", False),
        ("difficulty_filter = { enabled = true, max_reward = 0.9 }", True),
        ('algorithm.preset = "dapo"', True),
    ],
)
def test_training_rewards_of_other_groups_are_no_measure_of_each_other(
    tmp_path: Path, more: str, differ: bool
) -> None:
    """rows.py 7"""
    one, other = a_run(tmp_path / "one"), a_run(tmp_path / "other", batch_size=f"8\n{more}")
    found = remarks([recorded(one), recorded(other)])
    assert [line.startswith("the runs do not replace the same groups") for line in found] == [True] * differ
    assert all(line.endswith("metrics.jsonl, where a run has it, is of all") for line in found)


def test_settings_of_another_release_are_compared_as_they_are_written(tmp_path: Path) -> None:
    one, later = a_run(tmp_path / "one"), a_run(tmp_path / "later")
    file = later / "run.toml"
    file.write_text(f"of_later = [1, 2]\nsince = 2026-01-01\n{file.read_text()}")
    found = rows(one, later)
    assert found["settings that differ: of_later"] == [None, [1, 2]]
    assert found["settings that differ: since"] == [None, "2026-01-01"]
    assert len([name for name in found if name.startswith("settings")]) == 2
    for damaged in (b"a = [", b"\xff"):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"run\.toml cannot be read"):
            recorded(later)


def test_what_is_no_run_is_refused_with_what_to_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "run")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    (tmp_path / "sft").mkdir()
    config = SftConfig(model="m", data=tmp_path / "broken" / "run.json")
    with taken(tmp_path / "sft", config, resume=False):
        pass
    for arguments, told in (
        ([run], "name 2 to 16 output folders of runs, not 1"),
        ([run, run / ".." / "run"], "is named twice"),
        ([run, tmp_path / "gone", run / "rollouts"], "gone' is no folder"),
        (
            [run, tmp_path / "gone", run / "rollouts"],
            "rollouts' is no run's output folder (it has no run.json)",
        ),
        ([run, tmp_path], f"it holds those of runs, such as {str(tmp_path / 'broken')!r}"),
        ([run, tmp_path / "broken"], "run.json cannot be read"),
        ([run, tmp_path / "sft"], "sft' is the folder of a fine-tuning; name one of 'quartet rl'"),
        ([run, a_run(tmp_path / "fine"), "--plot", "curve.jpg"], "is no name of a figure; end it in .png"),
    ):
        assert main(["compare", *map(str, arguments)]) == 2, arguments
        assert told in capsys.readouterr().err
    assert not Path("curve.jpg").exists()


def test_settings_are_read_as_they_were_written_in_whatever_locale(tmp_path: Path) -> None:
    folders = [str(a_run(tmp_path / name, model=f'"{name}é"')) for name in "ab"]
    script = f"""
from pathlib import Path
from quartet.cli.compare.folders import recorded
assert [recorded(Path(one)).settings["model"] for one in {folders}] == ["a\\xe9", "b\\xe9"]
"""
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", script], env={**os.environ, **locale}, check=True)


def test_folders_of_one_name_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        a_run(tmp_path / name / "run")
    assert (
        main(["compare", str(tmp_path / "a/run"), str(tmp_path / "b/run"), "--json", str(tmp_path / "c")])
        == 0
    )
    names = [one["name"] for one in json.loads((tmp_path / "c").read_text())["runs"]]
    assert names == [str(tmp_path / "a/run"), str(tmp_path / "b/run")]


def test_of_a_table_that_is_off_only_that_is_compared(tmp_path: Path) -> None:
    """rows.py 5"""
    adapter = "1e-3\nlora = { enabled = true, r = 4, alpha = 8.0 }"
    folders = [
        a_run(tmp_path / name, steps=4, learning_rate=rate)
        for name, rate in (("whole", "1e-3"), ("one", adapter), ("other", adapter.replace("r = 4", "r = 8")))
    ]
    told = {name: values for name, values in rows(*folders).items() if name.startswith("settings")}
    assert told == {
        "settings that differ: lora.enabled": [False, True, True],
        "settings that differ: lora.r": [None, 4, 8],
    }
    assert [name for name in rows(*folders[:2]) if name.startswith("settings")] == [
        "settings that differ: lora.enabled"
    ]


def test_the_environments_of_a_mixture_are_compared_apart(tmp_path: Path) -> None:
    """rows.py 4: a mixture beside a run on one of its environments, which has none of the other."""
    mixed, alone = a_run(tmp_path / "mixed", steps=4), a_run(tmp_path / "alone", steps=4)
    for folder, names in ((mixed, ("toy", "hard/er")), (alone, ("toy",))):
        told = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for row in told:
            kind = "eval" if "eval/reward" in row else "env"
            row |= {f"{kind}/{name}/reward": row["step"] / 10 + len(name) for name in names}
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in told))
    found = rows(mixed, alone)
    apart = {name: values for name, values in found.items() if name.startswith("rewards of each environment")}
    assert {name.partition(": ")[2]: values for name, values in apart.items()} == {
        "hard/er, step 4 (mean of 4)": [pytest.approx(7.25), None],
        "hard/er, last steps (mean of up to 10)": [pytest.approx(7.25), None],
        "toy, step 4 (mean of 4)": pytest.approx([3.25, 3.25]),
        "toy, last steps (mean of up to 10)": pytest.approx([3.25, 3.25]),
    }
    assert found["evaluations: after step 4, hard/er"] == [pytest.approx(7.4), None]
    assert found["evaluations: after step 4, toy"] == pytest.approx([3.4, 3.4])
    assert not any(
        "toy, " in name and "digest" not in name and "version" not in name for name in rows(alone, alone)
    )


def test_a_default_that_is_written_out_is_no_setting_that_differs(tmp_path: Path) -> None:
    """rows.py 5"""

    def told(name: str, more: str) -> dict[str, list[Any]]:
        other = a_run(tmp_path / name, steps=4, learning_rate=f"1e-3\n{more}")
        return {key: values for key, values in rows(plain, other).items() if key.startswith("settings")}

    plain = a_run(tmp_path / "plain", steps=4)
    assert not told("cispo", 'algorithm = { preset = "cispo" }')
    assert not told("cap", "algorithm = { clip_high = 4.0 }\nsampling = { top_k = 0 }")
    assert not told("kept", 'inference = { embedded = { kv_on_update = "recompute" } }')
    other = told("other", 'algorithm = { preset = "dr_grpo" }\nsampling = { max_tokens = 64 }')
    assert other["settings that differ: algorithm.preset"] == [None, "dr_grpo"]
    assert other["settings that differ: algorithm.clip_high"] == [4.0, 0.2]
    assert other["settings that differ: algorithm.constant_tokens"] == [None, 64]
    assert told("keep", 'inference = { embedded = { kv_on_update = "keep" } }') == {
        "settings that differ: inference.embedded.kv_on_update": ["recompute", "keep"]
    }
