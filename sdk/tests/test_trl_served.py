"""GRPOTrainer of quartet.trl without services: where it serves, who calls its functions, what it tells of its
run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from planned_runs import accepted
from quartet.cli.rl import prepared
from quartet.grpo.background import Background
from quartet.grpo.lines import Lines
from quartet.rewards.functions import Failed, Group
from quartet.rewards.serving import served
from quartet.trl import ConfigError, GRPOConfig, GRPOTrainer, address
from quartet.v1 import reward_service_pb2 as pb
from quartet.v1 import reward_service_pb2_grpc as rpc
from trl_trainers import CHATS, ROWS, arguments, length, maker, other

SECONDS = 60.0


@pytest.fixture
def args(tmp_path: Path) -> GRPOConfig:
    return arguments(tmp_path)


@pytest.fixture
def make(chat_model: Path, args: GRPOConfig) -> Any:
    return maker(chat_model, args)


def test_an_address_is_short_and_nobody_elses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """address.py 1, 2: whatever TMPDIR is, where there is the folder that every Unix has."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 30)))
    found = {address.fresh() for _ in range(100)}
    assert len(found) == 100
    assert all(one.startswith("unix:/tmp/quartet-rewards-") and len(one) < 100 for one in found)
    monkeypatch.setattr(address, "EVERYWHERE", str(tmp_path / "missing"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert address.fresh().startswith(f"unix:{tmp_path}/quartet-rewards-")


def test_a_run_that_goes_on_is_served_where_it_began(make: Any, args: GRPOConfig, tmp_path: Path) -> None:
    """address.py 1: also from another process, and where its folder was moved."""
    first = make()
    at = first.translated().config.env[0].args["address"]
    assert at != make().translated().config.env[0].args["address"], "there is no run yet"
    with accepted(prepared(first.translated().config, first.folder, None, resume=False, overwrite=False)):
        pass
    assert make().translated().config.env[0].args["address"] == at
    (tmp_path / "run").rename(tmp_path / "moved")
    assert make().translated().config.env[0].args["address"] != at
    args.output_dir = str(tmp_path / "moved")
    moved = make().translated().config
    assert moved.env[0].args["address"] == at
    assert prepared(moved, tmp_path / "moved", None, resume=True, overwrite=False).resumed


@pytest.mark.parametrize(
    "env",
    [
        '[[env]]\nid = "reverse-text"',
        '[[env]]\nid = "reward-service"\nargs = { address = "127.0.0.1:50060" }',
        "",
        "[",
    ],
)
def test_a_run_of_something_else_lends_no_address(tmp_path: Path, env: str) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "r", "config_toml": f'model = "m"\n{env}\n'}))
    assert address.of_run(tmp_path) is None
    (tmp_path / "run.json").write_text("{")
    assert address.of_run(tmp_path) is None and address.of_run(tmp_path / "none") is None


def test_what_is_served_is_there_while_the_services_are_and_gone_after(make: Any) -> None:
    made = make(eval_dataset=CHATS)
    run = made.translated()
    at = run.config.env[0].args["address"]
    folder = Path(at.removeprefix("unix:")).parent
    with made.beside(run, lambda _: None), grpc.insecure_channel(at) as channel:
        stub: Any = rpc.RewardServiceStub(channel)  # type: ignore[no-untyped-call]
        said = stub.DescribeRewards(pb.DescribeRewardsRequest(), timeout=60)
        assert (said.train_size, said.eval_size) == (20, 3)
        assert [(one.name, one.weight) for one in said.functions] == [("length", 1.0)]
        # A folder in which somebody serves stays.
        address.remove(at)
        assert folder.is_dir()
    assert not folder.exists()


@pytest.mark.parametrize("is_async", [False, True])
def test_an_evaluation_inside_a_function_is_refused(make: Any, is_async: bool) -> None:
    """It would wait for the function, which waits for it."""
    found: list[str] = []

    def measures(completions: list[str], **_: Any) -> list[float]:
        with pytest.raises(ConfigError) as refused:
            made.evaluate()
        found.append(str(refused.value))
        return length(completions)

    async def measures_beside(completions: list[str], **_: Any) -> list[float]:
        return measures(completions)

    made = make(reward_funcs=measures_beside if is_async else measures, eval_dataset=CHATS)
    group = Group(["p"], ["c"], [[1]], {"answer": ["a"]})
    assert not isinstance(asyncio.run(made._functions.score(group)), Failed), "it is called well"
    assert len(found) == 1 and "inside a reward function or a tool" in found[0]


@pytest.mark.parametrize("held_s", [0.0, SECONDS])
def test_a_function_that_does_not_return_is_told_of(
    make: Any, monkeypatch: pytest.MonkeyPatch, held_s: float
) -> None:
    """While the run waits for it, and behind the end of that."""
    monkeypatch.setattr("quartet.trl.trainer.LATE_SECONDS", 0.05)
    began, release, told = threading.Event(), threading.Event(), list[str]()

    class Told(logging.Handler):
        """The function goes on until it is told of."""

        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())
            release.set()

    def slow(completions: list[str], **_: Any) -> list[float]:
        began.set()
        assert release.wait(60)
        return length(completions)

    monkeypatch.setattr("quartet.trl.trainer.HELD_SECONDS", held_s)
    made, handler = make(reward_funcs=slow), Told(logging.WARNING)
    run = made.translated()
    background: Background[bool] = Background()
    at = run.config.env[0].args["address"]
    made.logger.addHandler(handler)
    try:
        with made.beside(run, background.end), grpc.insecure_channel(at) as channel:
            stub: Any = rpc.RewardServiceStub(channel)  # type: ignore[no-untyped-call]
            asked = pb.ScoreGroupRequest(run_id="r", completions=[pb.RewardedCompletion(token_ids=[97])])
            calls: list[Any] = []

            def call() -> None:
                """Once this thread is lent, so that it is the one that goes on."""
                if not calls:
                    calls.append(stub.ScoreGroup.future(asked, timeout=60))

            def work() -> None:
                assert began.wait(SECONDS) and (held_s or release.wait(SECONDS))

            background.run(work, lambda ended: made.wait(ended, call))
    finally:
        made.logger.removeHandler(handler)
    told_of = f"reward function 'slow' (test_trl_served.py:{slow.__code__.co_firstlineno}) has not returned"
    assert told[0].startswith(f"the run has ended, and {told_of} for" if held_s else f"{told_of} for"), told


def test_each_function_that_does_not_return_is_told_of(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs later, too, and each less often the longer it does."""
    monkeypatch.setattr("quartet.trl.trainer.LATE_SECONDS", 0.001)
    ended, left = threading.Event(), threading.Event()
    left.set()
    looks = iter([("a", 61.0), ("a", 80.0), ("a", 123.0), ("b", 1.0), ("b", 61.0)])

    class Turns:
        @property
        def held_by(self) -> tuple[str, float]:
            if (look := next(looks, None)) is None:
                ended.set()
            return look or ("", 0.0)

    made, told = make(reward_funcs=length), list[Any]()
    monkeypatch.setattr(made, "_functions", SimpleNamespace(turns=Turns()))
    monkeypatch.setattr(made.logger, "warning", lambda _, *what: told.append(what))
    made._tell_late(ended, left)
    assert told == [("a", 61.0), ("a", 123.0), ("b", 61.0)]


def test_the_thread_that_waits_calls_the_functions(make: Any) -> None:
    threads: list[int] = []

    def noted(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        threads.append(threading.get_ident())
        assert (trainer_state.global_step, trainer_state.max_steps) == (0, 10)
        return length(completions)

    made = make(reward_funcs=noted)
    run = made.translated()
    background: Background[list[float]] = Background()

    def work() -> list[float]:
        with grpc.insecure_channel(run.config.env[0].args["address"]) as channel:
            stub: Any = rpc.RewardServiceStub(channel)  # type: ignore[no-untyped-call]
            asked = [pb.RewardedCompletion(member=at, token_ids=[97] * at) for at in range(3)]
            said = stub.ScoreGroup(pb.ScoreGroupRequest(run_id="r", completions=asked), timeout=60)
            return [one.scores[0].value for one in said.rewards]

    with made.beside(run, background.end):
        found = background.run(work, lambda ended: made.wait(ended, lambda: None))
    assert len(found) == 3 and threads == [threading.get_ident()]


def test_what_a_function_raises_ends_what_waits_for_it(make: Any) -> None:
    """trainer.py 3, without the services."""
    wrong = LookupError("mine")

    def raising(**_: Any) -> list[float]:
        raise wrong

    made = make(reward_funcs=raising)
    run = made.translated()
    background: Background[Any] = Background()

    def work() -> Any:
        with grpc.insecure_channel(run.config.env[0].args["address"]) as channel:
            stub: Any = rpc.RewardServiceStub(channel)  # type: ignore[no-untyped-call]
            asked = [pb.RewardedCompletion(token_ids=[97])]
            stub.ScoreGroup(pb.ScoreGroupRequest(run_id="r", completions=asked), timeout=60)

    with pytest.raises(LookupError) as caught, made.beside(run, background.end):
        background.run(work, lambda ended: made.wait(ended, lambda: None))
    assert caught.value is wrong


def row(step: int, **more: float) -> str:
    usual = {"train/reward": 1.0 * step, "train/loss": 0.5, "train/learning_rate": 0.1 * step}
    return json.dumps({"step": step, **usual, **{key.replace("__", "/"): one for key, one in more.items()}})


def test_its_history_is_by_trls_names(make: Any, args: GRPOConfig, tmp_path: Path) -> None:
    args.reward_weights = [1.0, 0.0]
    made = make(reward_funcs=[length, other])
    (tmp_path / "run").mkdir()
    measured = {"eval/reward": 0.25, "eval/reward-service/reward": 0.25, "eval/reward-service/pass@1": 0.5}
    measured |= {"eval/mean_length": 4.0, "eval/reward-service/rewards/length": 2.0}
    measured |= {"eval/reward-service/metrics/other": 6.0, "eval/reward-service/metrics/exact": 0.75}
    measured |= {"eval/reward-service/metrics/reward": 9.0}
    tools = {"metrics/tools/call_frequency": 4.0, "metrics/tools/failures": 3.0}
    measured |= {f"eval/reward-service/{name}": value for name, value in tools.items()}
    lines = [
        row(
            1,
            rewards__length=1.0,
            metrics__other=3.0,
            metrics__exact=0.5,
            metrics__reward=8.0,
            metrics__tools__call_frequency=2.0,
            metrics__tools__failures=0.5,
            rollout__mean_length=7.0,
        ),
        row(
            2,
            rewards__length=3.0,
            metrics__other=5.0,
            metrics__tools__call_frequency=0.0,
            metrics__tools__failures=0.0,
            train__clipped_fraction=0.5,
        ),
        json.dumps({"step": 2, **measured}),
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    state = made.state
    # 20 prompts are 20 batches of a group.
    assert (state.global_step, state.max_steps, state.epoch) == (2, 10, 0.1)
    assert state.log_history == [
        {
            "step": 2,
            "epoch": 0.1,
            "reward": 1.5,
            "loss": 0.5,
            "learning_rate": 0.2,
            "rewards/length/mean": 2.0,
            "rewards/other/mean": 4.0,
            "exact": 0.5,
            "metrics/reward": 8.0,
            "tools/call_frequency": 1.0,
            "tools/failure_frequency": 0.125,
            "completions/mean_length": 7.0,
            "clip_ratio/region_mean": 0.5,
        },
        {
            "step": 2,
            "epoch": 0.1,
            "eval_reward": 0.25,
            "eval_pass@1": 0.5,
            "eval_completions/mean_length": 4.0,
            "eval_rewards/length/mean": 2.0,
            "eval_rewards/other/mean": 6.0,
            "eval_exact": 0.75,
            "eval_metrics/reward": 9.0,
            "eval_tools/call_frequency": 4.0,
            "eval_tools/failure_frequency": 0.75,
        },
    ]
    args.loss_type = "cispo"
    assert "cispo_clip_ratio" in made.state.log_history[0]
    args.loss_type = "sapo"
    assert not any("clip_ratio" in name for name in made.state.log_history[0])


def test_what_functions_are_told_of_the_run_is_read_again_where_there_is_more(
    make: Any, tmp_path: Path
) -> None:
    made = make()
    tell = made._functions._state
    before = tell()
    assert (before.global_step, before.max_steps) == (0, 10) and tell() is before
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text(row(1) + "\n")
    assert tell().global_step == 1 and tell().log_history == []
    with file.open("a") as more:
        more.write(row(2) + "\n")
    assert tell() == made.state and before.log_history == []
    # Of many groups that are scored at once, of a long run: each line once, by one of them.
    read, said, lock = list[int](), made._so_far._moment_of, made._so_far._lock

    def noted(one: Any) -> Any:
        assert lock.locked()
        read.append(one["step"])
        return said(one)

    made._so_far._moment_of = noted
    with file.open("a") as more:
        more.write("".join(row(step) + "\n" for step in range(3, 9)))
    with ThreadPoolExecutor(8) as pool:
        found = [asked.result() for asked in [pool.submit(tell) for _ in range(32)]]
    assert all(one is found[0] for one in found) and read == list(range(3, 9))
    assert found[0] == made.state


def test_a_line_of_the_run_is_in_the_words_of_the_script(
    make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "environment 'reward-service' at the host h:1 is not what the run began with: its examples, "
    for made, what in (
        (make(), "train_dataset"),
        (make(eval_dataset=ROWS[:2]), "train_dataset or eval_dataset"),
    ):
        Lines(made.translated().logging, made.in_words).say(f"{line}digest a -> b; the run goes on")
        assert capsys.readouterr().out.endswith(f" s  changed since the run began: {what}; the run goes on\n")
    unlike = make().in_words(line.replace("its examples, ", "") + "digest a -> b")
    assert unlike == "changed since the run began: train_dataset or reward_funcs"


def test_an_evaluation_is_served_elsewhere_and_called_as_trl_does(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seen = make(eval_dataset=ROWS[:5]), []

    def measured(config: Any, model: str, outputs: Path, play: Any) -> dict[str, float]:
        seen.append(config.env[0].args["address"])
        assert config.eval.rollouts_per_example == 8
        own = {
            "eval_rewards/tools/call_frequency": 3.0,
            "eval_rewards/reward": 4.0,
            "eval_rewards/tools/failures": 0.75,
        }
        return {"eval_reward": 1.0, "eval_rewards/length": 2.0, "eval_failed": 0.0, **own}

    monkeypatch.setattr("quartet.grpo.measuring.measured", measured)
    found = made.evaluate()
    assert found == {
        "eval_reward": 1.0,
        "eval_rewards/length/mean": 2.0,
        "eval_failed": 0.0,
        "eval_tools/call_frequency": 3.0,
        "eval_tools/failure_frequency": 0.25,
        "eval_rewards/reward": 4.0,
    }
    assert seen and seen[0] != made.translated().config.env[0].args["address"]
    assert not Path(seen[0].removeprefix("unix:")).parent.exists()


def test_a_folder_that_holds_a_run_is_refused_in_the_words_of_a_script(
    make: Any, args: GRPOConfig, caplog: pytest.LogCaptureFixture
) -> None:
    made = make()
    with pytest.raises(ConfigError, match=r"^train\(resume_from_checkpoint=True\): .* holds no run"):
        made.train(resume_from_checkpoint=True)
    with accepted(prepared(made.translated().config, made.folder, None, resume=False, overwrite=False)):
        pass
    with pytest.raises(ConfigError, match=r"is not empty; add train\(resume_from_checkpoint=True\) to go on"):
        make().train()
    args.temperature = 0.5
    with (
        pytest.raises(ConfigError, match=r"sampling\.temperature was 1\.0 and is 0\.5") as caught,
        caplog.at_level(logging.WARNING, "quartet.trl"),
    ):
        make().train(resume_from_checkpoint=True)
    assert "quartet rl" not in str(caught.value)


def test_a_run_whose_epochs_are_over_other_rows_is_told_how_it_goes_on(
    make: Any, args: GRPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """changed.py 2: a row on which a function raised was taken away."""
    args.max_steps, args.num_iterations = -1, 2
    made = make()
    with accepted(prepared(made.translated().config, made.folder, None, resume=False, overwrite=False)):
        pass
    for rows, steps in ((ROWS[1:], 114), ([*ROWS, ROWS[0]], 126)):
        with pytest.raises(ConfigError) as caught:
            make(train_dataset=rows).train(resume_from_checkpoint=True)
        assert str(caught.value) == (
            f"train(resume_from_checkpoint=True): args.num_train_epochs = 3 over the {len(rows)} rows of "
            f"train_dataset comes to {steps} steps, and the run was begun with 120; set args.max_steps = 120 "
            "to go on with it, or give epochs and rows as they were"
        )
    args.overrides = {"max_steps": 50}
    with pytest.raises(ConfigError, match="max_steps was 60 and is 50"):
        make().train(resume_from_checkpoint=True)
    args.overrides, args.temperature, args.max_steps = {}, 0.5, 120
    with pytest.raises(
        ConfigError, match=r"with another configuration: sampling\.temperature was 1\.0 and is"
    ):
        make(train_dataset=ROWS[1:]).train(resume_from_checkpoint=True)


@contextmanager
def serving(made: GRPOTrainer, at: str) -> Iterator[None]:
    with served(made._functions, made._train, None, at, lambda _: None):
        yield
    address.remove(at)


def test_two_trainers_of_one_run_do_not_serve_at_once(make: Any) -> None:
    made = make()
    run = made.translated()
    with (
        serving(made, run.config.env[0].args["address"]),
        pytest.raises(
            ConfigError, match="this run is trained already: somebody serves its reward functions at"
        ),
        made.beside(run, lambda _: None),
    ):
        pass
