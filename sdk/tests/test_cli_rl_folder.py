"""How `quartet rl` takes its output folder: new, gone on with, made longer, or not at all."""

from __future__ import annotations

import argparse
import errno
import json
import resource
import shlex
from pathlib import Path

import pytest
from planned_runs import CONFIG, accepted, ended, planned, steps_of, with_steps
from quartet.cli import rl
from quartet.cli.__main__ import build_parser, main
from quartet.cli.attempt import taken
from quartet.cli.checked import wired
from quartet.cli.job import MARK, RECORD, RUN_FILE, Job, as_it_was, plan
from quartet.cli.job_arguments import own_tables, run_and_folder
from quartet.cli.run_file import load_run
from quartet.config import ConfigError
from quartet.local.deployment import write
from quartet.local.hosts import Hosts, hosts_of
from quartet.local.plan import Plan, write_plan
from quartet.run.config import RunConfig


def test_a_used_output_folder_is_refused_with_the_remedy(tmp_path: Path, config: RunConfig) -> None:
    folder = tmp_path / "run one"
    job = planned(config, folder)
    assert job.run_id == "run-one"
    assert not folder.exists(), "planning changes nothing"
    with accepted(job), pytest.raises(ConfigError, match="belongs to a run that is going on"), taken(job):
        pass
    with pytest.raises(ConfigError, match="add --resume"):
        planned(config, folder)
    resumed = planned(config, folder, resume=True)
    assert resumed.resumed and resumed.config_toml == job.config_toml
    told = [wired(one, folder)[0]["orchestrator"].get("goes_on_with") for one in (job, resumed)]
    assert told == [None, "run-one"], "so that followers of a resumed one know that it does not rest"
    started = {spec.name: spec for spec in write(wired(resumed, tmp_path / "x")[0], tmp_path / "x")}
    assert started["orchestrator"].command[-1] == "--goes_on_with=run-one"
    by_hand = (tmp_path / "x" / "config" / "orchestrator.toml").read_text()
    assert "goes_on_with" not in by_hand, "whoever starts it by hand later goes on with nothing"
    changed = config.model_copy(update={"max_steps": 7})
    shorter = (
        f"max_steps was {config.max_steps} and is 7, and a run is made longer, never shorter; start a new"
    )
    with pytest.raises(ConfigError, match=shorter) as caught:
        planned(changed, folder, resume=True)
    _, at, file, *where = shlex.split(str(caught.value).rpartition("say it as it was: quartet ")[2])
    assert (at, where) == ("@", ["--output-dir", str(folder), "--resume"])
    again = planned(load_run(["@", file]).config, folder, resume=True)
    assert again.config == config, "its services, too"
    record = json.loads((folder / "run.json").read_text())
    older = "\n".join(line for line in record["config_toml"].splitlines() if "gradient_accum" not in line)
    assert older != record["config_toml"].rstrip()
    (folder / "run.json").write_text(json.dumps(record | {"config_toml": older}))
    assert planned(config, folder, resume=True).resumed, "begun by a release that did not know the key"
    (folder / "metrics.jsonl").write_text("old")
    (folder / "logs").mkdir()
    with accepted(resumed):
        assert (folder / "metrics.jsonl").exists(), "a resumed run keeps what it has"
    with accepted(planned(changed, folder, overwrite=True)):
        assert sorted(entry.name for entry in folder.iterdir()) == [".lock", "run.json", "run.toml"]
        for file in ("run.toml", "run.json"):
            assert (folder / file).stat().st_mode & 0o077 == 0, "it may have keys of judges: outputs.py 3"
    assert planned(changed, folder, resume=True).config.max_steps == 7


@pytest.mark.parametrize("hosts", [Hosts(("a", "b"), 1, 5000), Hosts(("a", "b", "c"), 3, 5000)])
def test_the_command_that_goes_on_with_a_run_names_its_machines_whatever_it_began_with(
    hosts: Hosts, tmp_path: Path, config: RunConfig
) -> None:
    folder = tmp_path / "run"
    with accepted(planned(config, folder)):  # on one machine
        pass
    write_plan(folder, Plan.of(hosts, [{"some": {}} for _ in hosts.names]))
    options, rest = build_parser().parse_known_args(shlex.split(as_it_was(folder)[len(": quartet ") :]))
    tables = own_tables(load_run(rest).config)
    assert hosts_of(tables, options.hosts.split(","), options.first_port) == hosts


def test_a_completed_run_is_planned_with_more_steps_and_no_other(tmp_path: Path, config: RunConfig) -> None:
    folder = tmp_path / "run"
    short, longer = with_steps(config, 30), with_steps(config, 60)
    with accepted(planned(short, folder)):
        pass
    for phase, steps in ((None, 0), ("stopped", 12), ("failed", 30), ("completed", 20)):
        if phase is not None:
            ended(folder, phase, steps)
        early = "max_steps was 30 and is 60, and a run is made longer once it is completed; let the run 'run'"
        with pytest.raises(ConfigError, match=rf"{early} go on as it was: quartet rl @ .*run.toml"):
            planned(longer, folder, resume=True)
    ended(folder, "completed", 30)
    assert rl.completed_before(planned(short, folder, resume=True))
    with pytest.raises(ConfigError, match="another configuration: seed was 0 and is 3; start a new run"):
        planned(longer.model_copy(update={"seed": 3}), folder, resume=True)
    job = planned(longer, folder, resume=True)
    assert job.extended and rl.completed_before(job) is None
    # Until the orchestrator has it the folder is the shorter run's.
    with taken(job) as attempt:
        assert steps_of(folder) == (30, 30)
        attempt.accepted()
    assert steps_of(folder) == (60, 60)
    # The summary is that of the shorter one until the longer one ends, for now or for good.
    again = planned(longer, folder, resume=True)
    assert not again.extended and rl.completed_before(again) is None
    ended(folder, "completed", 60)
    assert rl.completed_before(planned(longer, folder, resume=True))
    with pytest.raises(
        ConfigError, match="max_steps was 60 and is 30, and a run is made longer, never shorter"
    ):
        planned(short, folder, resume=True)


def test_a_run_goes_on_with_other_settings_that_decide_nothing_of_what_it_computes(
    tmp_path: Path, config: RunConfig
) -> None:
    """job.py 3"""
    folder = tmp_path / "run"
    with accepted(planned(config, folder)):
        pass
    env = tuple(one.model_copy(update={"timeout_seconds": 1200.0}) for one in config.env)
    ckpt = config.ckpt.model_copy(update={"interval": 5})
    others = config.model_copy(update={"env": env, "ckpt": ckpt, "max_concurrent": 512})
    job = planned(others, folder, resume=True)
    assert job.carried_out_otherwise and not job.extended
    # Until the orchestrator has it the folder is the run's as it was.
    with taken(job) as attempt:
        assert not planned(config, folder, resume=True).carried_out_otherwise
        attempt.accepted()
    assert not planned(others, folder, resume=True).carried_out_otherwise
    assert "timeout_seconds = 1200.0" in (folder / "run.toml").read_text()
    refused = "microbatch_tokens was 0 and is 64, and sums that are cut otherwise have other last bits; start"
    with pytest.raises(ConfigError, match=f"another configuration: {refused}"):
        planned(others.model_copy(update={"microbatch_tokens": 64}), folder, resume=True)


def test_a_run_without_a_state_is_begun_again_and_lends_none(tmp_path: Path, config: RunConfig) -> None:
    """Whether it came to an end that left a summary or was killed, and however far it had come."""
    folder, other = tmp_path / "run", config.model_copy(update={"seed": 3})
    job = planned(config, folder)
    with accepted(job):
        pass
    state = folder / "data" / "trainer" / job.run_id / "after-1@9"
    state.mkdir(parents=True)
    for is_saved, remedy in (
        (False, "start a new run in another --output-dir, or with --overwrite in place of this one"),
        (True, r"start a new run in another --output-dir \(initial_state = "),
    ):
        if is_saved:
            (state / MARK).touch()
        for end in (None, 1):
            if end is not None:
                ended(folder, "failed", end)
            with pytest.raises(ConfigError, match=f"seed was 0 and is 3; {remedy}"):
                planned(other, folder, resume=True)
        (folder / "summary.json").unlink()


def test_who_goes_on_with_a_completed_run_is_told_how(
    tmp_path: Path, config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    with accepted(planned(config, tmp_path / "run")):
        pass
    summary = {"phase": "completed", "steps": 50, "wall_seconds": 1.0, "reward_before": 0.1}
    assert (
        rl._completed_again(planned(config, tmp_path / "run", resume=True), summary | {"reward_after": 0.2})
        == 0
    )
    assert "nothing is left to do; with max_steps above 50 it goes on from here\n" in capsys.readouterr().out


def test_what_another_launcher_wrote_since_the_look_is_kept(tmp_path: Path, config: RunConfig) -> None:
    first, second = planned(config, tmp_path / "run"), planned(config, tmp_path / "run")
    with accepted(first):
        (tmp_path / "run" / "metrics.jsonl").write_text("hours of work")
    with pytest.raises(ConfigError, match="is not empty; add --resume"), taken(second):
        pass
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "hours of work"


def test_what_is_gone_on_with_is_what_the_folder_holds_once_it_is_locked(
    tmp_path: Path, config: RunConfig
) -> None:
    folder = tmp_path / "run"
    with accepted(planned(config, folder)):
        pass
    resumed = planned(config, folder, resume=True)
    with accepted(planned(config, folder, "other", overwrite=True)):
        pass
    with pytest.raises(ConfigError, match="was given to another run, 'other'"), taken(resumed):
        pass
    with accepted(planned(config.model_copy(update={"max_steps": 7}), folder, "run", overwrite=True)):
        pass
    with pytest.raises(ConfigError, match="max_steps was 7"), taken(resumed):
        pass


def test_a_launcher_that_was_killed_before_it_began_is_not_in_the_way(
    tmp_path: Path, config: RunConfig
) -> None:
    (tmp_path / ".lock").touch()
    with accepted(planned(config, tmp_path, "r")):
        assert (tmp_path / RECORD).exists()


def test_who_resumes_without_the_run_is_told_how(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["rl", "--resume"]) == 2
    assert capsys.readouterr().err.endswith("\n--resume: name the folder of the run with --output-dir\n")
    with accepted(planned(config, Path("outputs/one"))):
        command = "quartet rl @ outputs/one/run.toml --output-dir outputs/one --resume\n"
    for arguments in ([], ["@", str(CONFIG)]):
        assert main(["rl", *arguments, "--resume"]) == 2
        assert capsys.readouterr().err.endswith(f"--output-dir; the newest of outputs/ goes on: {command}")
    wrong = ["@", str(CONFIG), "--max-stepz", "3"]
    assert main(["rl", *wrong, "--resume", "--output-dir", "outputs/one"]) == 2
    assert capsys.readouterr().err.endswith(f"\n--resume wants the keys that the run began with: {command}")


def test_a_run_is_gone_on_with_by_its_folder_alone(tmp_path: Path, config: RunConfig) -> None:
    with accepted(planned(config, tmp_path)):
        options = argparse.Namespace(resume=True, output_dir=tmp_path, flags=())
    found, folder = run_and_folder(options, [])
    assert (found.config, folder) == (config, tmp_path)
    longer, _ = run_and_folder(options, ["--max-steps", "60"])
    assert longer.config == with_steps(config, 60)
    named, _ = run_and_folder(options, ["@", str(CONFIG), "--seed", "9"])
    assert named.config.seed == 9, "a file that is named is the run"
    (least := tmp_path / "least.toml").write_text('model = "models/tiny"\n[[env]]\nid = "reverse-text"\n')
    joined, _ = run_and_folder(options, [f"@{least}"])
    assert joined.config.max_steps == 100, "without a space, too"
    options.resume = False
    with pytest.raises(ConfigError, match="required key 'model' is not set"):
        run_and_folder(options, [])


def test_overwrite_deletes_only_what_a_run_wrote(tmp_path: Path, config: RunConfig) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="was not written by quartet rl"):
        planned(config, tmp_path, overwrite=True)
    with pytest.raises(ConfigError, match="holds no run"):
        planned(config, tmp_path / "nothing", resume=True)
    assert (tmp_path / "thesis.tex").exists()


def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path: Path, config: RunConfig) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below"):
        with pytest.raises(ConfigError, match="is a file; name another --output-dir"):
            plan(config, folder, None, resume=False, overwrite=False)


def test_an_output_folder_that_takes_no_files_is_refused(tmp_path: Path, config: RunConfig) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(ConfigError, match="cannot be written: File too large; name another --output-dir"):
            taken(Job(config, "r", tmp_path / "run")).__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(ConfigError, match="cannot be written"):  # as root, too, whom no permission stops
        taken(Job(config, "r", Path("/proc/quartet/run"))).__enter__()
    with taken(Job(config, "r", tmp_path / "run")):
        assert (tmp_path / "run" / RECORD).exists()


@pytest.mark.parametrize("second", [RECORD, RUN_FILE])
def test_a_folder_in_which_one_record_found_no_room_is_free(
    second: str, tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """job.py 2, also where the launcher was killed between the two."""
    plain = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if target.name == second:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(self, target)

    with monkeypatch.context() as full:
        full.setattr(Path, "replace", replace)
        with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
            taken(planned(config, tmp_path / "run")).__enter__()
    with accepted(planned(config, tmp_path / "run")):
        assert (tmp_path / "run" / RUN_FILE).exists()


def test_a_damaged_record_is_refused_on_resume(tmp_path: Path, config: RunConfig) -> None:
    for damaged in ('{"run_id": "a"', '{"run_id": "a"}', "[]"):
        (tmp_path / RECORD).write_text(damaged)
        with pytest.raises(ConfigError, match="cannot be read"):
            plan(config, tmp_path, None, resume=True, overwrite=False)


def test_how_to_go_on_is_told_with_the_keys_that_were_said(tmp_path: Path) -> None:
    words = rl._words(["@", "my file.toml", "--env", '[{id = "x"}]'])
    told = words.going_on(tmp_path / "a b")
    assert rl._words([]).going_on(tmp_path) == f"quartet rl --output-dir {tmp_path} --resume"
    assert shlex.split(told) == [
        *("quartet", "rl", "@", "my file.toml", "--env", '[{id = "x"}]'),
        *("--output-dir", str(tmp_path / "a b"), "--resume"),
    ]
