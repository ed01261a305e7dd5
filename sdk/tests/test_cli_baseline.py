"""`quartet baseline`: the word for a baseline, and what it says to change."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from quartet.cli.__main__ import build_parser, main
from quartet.cli.baseline import command
from quartet.cli.baseline.command import read, trials
from quartet.cli.baseline.verdict import (
    FIT,
    NO_DIVERSITY,
    TOO_EASY,
    TOO_HARD,
    UNCLEAR,
    Setting,
    Verdict,
    judge,
)
from quartet.cli.eval.record import Record
from quartet.cli.eval.source import Source
from quartet.errors import QuartetError
from quartet.run.statistics import summarise
from quartet.v1.envhost_service_pb2 import EnvironmentInfo
from quartet.v1.rollout_pb2 import Task

RUN = Path(__file__).resolve().parents[2] / "configs" / "reverse-text.toml"
SETTING = Setting("my-env", 4, 0.7, 32, full_reward=1.0)


def verdict(*groups: list[float], cut: float = 0.0, setting: Setting = SETTING) -> Verdict:
    return judge(summarise(dict(enumerate(groups)), 0.5, 4), cut, setting)


def test_no_reward_in_ten_attempts_is_too_hard_and_in_fewer_says_nothing() -> None:
    found = verdict([0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], cut=0.5)
    assert found.word == TOO_HARD and "0 % of the full reward after 12 attempts" in found.why
    assert found.advice[0] == "sampling.max_tokens (now 32): 50% of the answers were cut; raise it"
    assert any("quartet sft" in line for line in found.advice)
    assert verdict([0, 0, 0, 0], [0, 0, 0, 0]).word == UNCLEAR


def test_penalties_that_differ_are_a_signal() -> None:
    """verdict.py 1"""
    found = verdict(*[[-1, -3, -2, -1]] * 4, cut=0.5)
    assert found.word == FIT and "a mean reward of -1.75, and 100% of the groups" in found.why
    assert found.advice == ["sampling.max_tokens (now 32): 50% of the answers were cut; raise it"]
    assert verdict(*[[-1, -1, -1, -1]] * 4).word == TOO_HARD
    assert verdict([-1, -2, -1, -1], *[[-1, -1, -1, -1]] * 3).word == TOO_HARD, "three quarters are alike"
    assert verdict(*[[-1], [-2]] * 6).word == UNCLEAR, "one rollout each"


def test_attempts_of_one_episode_are_compared_with_each_other() -> None:
    """Ranks have the same mean in every rollout, which would be no diversity."""
    means = {example: [0.5] * 4 for example in range(5)}
    ranks = {example: [[0.0, 1.0] * 4] for example in range(5)}
    sides = {example: [[0.2] * 4, [0.8] * 4] for example in range(5)}
    assert judge(summarise(means, 0.5, 4), 0.0, SETTING).word == NO_DIVERSITY
    assert judge(summarise(means, 0.5, 4, ranks), 0.0, SETTING).word == FIT
    assert judge(summarise(means, 0.5, 4, sides), 0.0, SETTING).word == NO_DIVERSITY


def test_eighty_percent_of_the_full_reward_is_too_easy() -> None:
    easy = [[1.0, 1.0, 1.0, 0.2]] * 5
    assert verdict(*easy).word == TOO_EASY
    assert verdict(*easy, setting=Setting("my-env", 4, 1.0, None, full_reward=1.7)).word == FIT
    assert verdict(*[[1.0, 1.0, 1.0, 0.1]] * 5).word == FIT, "77.5 %"
    double = Setting("my-env", 4, 1.0, None, full_reward=2.0)
    assert "94% of the full reward of 2 already" in verdict(*[[1.9, 1.85, 1.9, 1.87]] * 5, setting=double).why


def test_groups_whose_rewards_are_all_equal_have_no_diversity() -> None:
    found = verdict([1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0])
    assert found.word == NO_DIVERSITY and "in 75% of the groups" in found.why
    assert found.advice[0] == "sampling.temperature (now 0.7): raise it"
    assert "rollouts_per_example (now 4)" in found.advice[1]
    assert verdict([1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]).word == FIT
    assert verdict(*[[0.5]] * 12).word == UNCLEAR, "one rollout each"


def test_every_baseline_has_one_word_and_what_is_not_fit_has_advice() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    for _ in range(300):
        groups = [[float(draw.random() < draw.random()) for _ in range(4)] for _ in range(draw.randint(3, 9))]
        found = verdict(*groups, cut=draw.random())
        mean = sum(map(sum, groups)) / (4 * len(groups))
        assert (found.word == TOO_HARD) == (mean == 0)
        assert (found.word == TOO_EASY) == (mean >= 0.8)
        assert found.word == FIT or found.advice


def test_a_baseline_reads_a_file_of_vf_rl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "theirs.toml"
    file.write_text(
        'model = "m"\n[env]\nid = "owner/e"\nargs = { k = 1 }\n[trainer.args]\nmax_tokens = 30\ntop_k = 5\n'
    )
    options, rest = build_parser().parse_known_args(["baseline", "@", str(file), "-m", "other", "-T", "0.5"])
    config = read(options, rest)
    (trial,) = trials(options, config)
    assert config.model == "other" and "read as vf-rl" in capsys.readouterr().err
    assert (trial.hosted.id, trial.hosted.args, trial.rollouts_per_example) == ("owner/e", {"k": 1}, 16)
    assert (trial.sampling.max_tokens, trial.sampling.top_k, trial.sampling.temperature) == (30, 5, 0.5)


def test_two_baselines_of_one_second_do_not_share_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m").mkdir()
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "m" / file).touch()
    deployed = []

    def deploy(source: object, services: Path, env_ids: Sequence[str], *_: object) -> list[object]:
        deployed.append((*env_ids, services.name))
        if len(deployed) == 1:
            main(["baseline", "other", *arguments])  # before this one has begun
        return []

    arguments = ["-m", str(tmp_path / "m"), "-o", str(tmp_path / "out"), "--full-reward", "1"]
    monkeypatch.setattr(time, "strftime", lambda form: "20260102-030405")
    monkeypatch.setattr(command, "deploy", deploy)
    monkeypatch.setattr(command, "with_host", lambda *_: None)
    main(["baseline", "e", *arguments])
    assert deployed == [("e", "20260102-030405"), ("other", "20260102-030405-2")]
    assert "refused" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ends", "code"), [(KeyboardInterrupt(), 130), (QuartetError("NOT_READY", "the host is away"), 1)]
)
def test_a_baseline_that_is_ended_says_what_it_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ends: BaseException,
    code: int,
) -> None:
    (tmp_path / "m").mkdir()
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "m" / file).touch()
    (file := tmp_path / "run.toml").write_text('model = "m"\n[[env]]\nid = "one"\n[[env]]\nid = "two"\n')
    kept = []

    class Kept(Record):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            kept.append(self)

    def ended(*_: object) -> None:
        kept[1].results.append({"reward": 1.0})
        raise ends

    monkeypatch.setattr(command, "Record", Kept)
    monkeypatch.setattr(command, "deploy", lambda *_: [])
    monkeypatch.setattr(command, "with_host", ended)
    out = tmp_path / "out"
    arguments = ["@", str(file), "-m", str(tmp_path / "m"), "-o", str(out), "--full-reward", "1"]
    assert main(["baseline", *arguments]) == code
    said = capsys.readouterr().err.splitlines()
    assert [one for one in said if "kept" in one] == [f"two: 1 result kept in {kept[1].folder}"]


def test_a_baseline_samples_an_environment_as_the_run_would(tmp_path: Path) -> None:
    (file := tmp_path / "run.toml").write_text(
        'model = "m"\n[sampling]\nmax_tokens = 9\n[eval.sampling]\nmax_tokens = 99\n'
        '[[env]]\nid = "a"\n[[env]]\nid = "b"\nsampling = { max_tokens = 7 }\n'
    )
    options, rest = build_parser().parse_known_args(["baseline", "@", str(file), "-T", "0.5"])
    found = [one.sampling for one in trials(options, read(options, rest))]
    assert [(one.max_tokens, one.temperature) for one in found] == [(9, 0.5), (7, 0.5)]


def test_a_baseline_is_played_as_the_run_would(capsys: pytest.CaptureFixture[str]) -> None:
    options, rest = build_parser().parse_known_args(
        ["baseline", "@", str(RUN), "-n", "7", "-r", "3", "-T", "0.5"]
    )
    (trial,) = trials(options, read(options, rest))
    assert (trial.num_examples, trial.rollouts_per_example, trial.split) == (7, 3, "train")
    assert (trial.sampling.temperature, trial.sampling.max_tokens) == (0.5, 13)
    options, rest = build_parser().parse_known_args(["baseline", "e", "-m", "m", "-a", '{"k": [1, "x"]}'])
    (trial,) = trials(options, read(options, rest))
    assert (trial.hosted.id, trial.hosted.args) == ("e", {"k": [1, "x"]})
    for arguments, said in (
        (["baseline"], "required key 'model'"),
        (["baseline", "e", "-m", "m", "-n", "0"], "--num-examples 0 is refused"),
        (["baseline", "e", "-m", "m", "-r", "0"], "--rollouts-per-example 0 is refused"),
        (["baseline", "e", "-m", "m", "--max-stpes", "3"], "did you mean 'max_steps'?"),
        (["baseline", "e", "-m", "nowhere"], "model = 'nowhere' is neither a folder"),
    ):
        assert main(arguments) == 2
        assert said in capsys.readouterr().err


def test_replicas_need_no_model_and_a_file_names_one_for_the_folder() -> None:
    def model(*asked: str) -> str:
        options, rest = build_parser().parse_known_args(["baseline", *asked])
        return read(options, rest).model

    served = ("--inference-address", "127.0.0.1:1", "--inference-address", "127.0.0.1:2")
    assert model("reverse-text", *served) == "127.0.0.1:1"
    assert model("@", str(RUN), *served) == model("@", str(RUN))


def test_a_verdict_is_written_down_also_where_nobody_reads_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, rest = build_parser().parse_known_args(["baseline", "e", "-m", "m", "-r", "2"])
    (trial,) = trials(options, read(options, rest))
    record = Record(tmp_path / "e", trial, Source("m"))

    def unread(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(command, "print_table", unread)
    with (
        record.held(EnvironmentInfo(), [Task(index=0)]),
        pytest.raises(BrokenPipeError),
    ):
        command.report([record], {"e": 1.0})
    assert json.loads((tmp_path / "e" / "baseline.json").read_text())["verdict"] == "unclear"
