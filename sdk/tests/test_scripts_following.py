"""What callbacks hear of a training that is done elsewhere: which events, in which order, with which state
(quartet.scripts.following, loop)."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from followed_training import Heard, Training, evaluation, moment_of, step
from quartet.kit.imports import uncollected
from quartet.scripts.callbacks import EVENTS
from quartet.scripts.loop import Length
from quartet.sft import ConfigError


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


def test_loop_1_each_step_has_its_events_once_with_the_state_as_it_stood(training: Training) -> None:
    histories: list[list[int]] = []

    def noted(state: Any, _control: Any) -> None:
        histories.append([row["step"] for row in state.log_history])
        assert state.max_steps == 4 and state.epoch == state.global_step / 4
        assert state.is_world_process_zero and not state.is_hyper_param_search

    for number in range(1, 5):
        training.heard.then["on_step_end", number] = noted
    with training.following.to_its_end():
        training.look()
        assert training.heard.events == [], "nobody has begun"
        training.open(4)
        training.look()
        training.write(step(1))
        training.look()
        training.look()
        training.write(step(2), step(3))
        training.look()
        training.write(step(4))
    assert training.heard.of("on_step_begin", "on_step_end", "on_log") == [
        event
        for number in range(1, 5)
        for event in (("on_step_begin", number - 1), ("on_step_end", number), ("on_log", number))
    ]
    assert histories == [[], [1], [1, 2], [1, 2, 3]], "a row comes behind its step"
    assert training.heard.events[:2] == [("on_train_begin", 0), ("on_epoch_begin", 0)]
    assert training.heard.events[-2:] == [("on_epoch_end", 4), ("on_train_end", 4)], (
        "one epoch, as all is one"
    )
    assert [told["logs"] for name, told in training.heard.told if name == "on_log"] == [
        {"loss": 1 / number} for number in range(1, 5)
    ]


def test_loop_1_a_line_of_several_steps_is_several(training: Training) -> None:
    training.open(6, 3)
    training.write({"step": 2, "silent": True}, {"step": 4, "loss": 1.0})
    training.look()
    names = ("on_step_begin", "on_step_end", "on_log", "on_epoch_begin", "on_epoch_end")
    assert training.heard.of(*names) == [
        *[("on_epoch_begin", 0), ("on_step_begin", 0), ("on_step_end", 1)],
        *[("on_step_begin", 1), ("on_step_end", 2), ("on_step_begin", 2), ("on_step_end", 3)],
        *[("on_epoch_end", 3), ("on_epoch_begin", 3), ("on_step_begin", 3), ("on_step_end", 4)],
        *[("on_log", 4), ("on_step_begin", 4)],
    ]


def test_following_4_however_often_somebody_looks_it_is_the_same(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    drawn = random.Random(seed)
    measured = tuple(number for number in range(41) if drawn.random() < 0.3)
    rows = [evaluation(0)] if 0 in measured else []
    for number in range(1, 41):
        rows += [step(number), evaluation(number)] if number in measured else [step(number)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    found = []
    for name in ("often", "once"):
        (tmp_path / name).mkdir()
        training = Training(tmp_path / name)
        training.open(40, drawn.choice((None, 1, 7)) if not found else found[0][0], measured)
        at = 0
        with training.following.to_its_end(), (tmp_path / name / "metrics.jsonl").open("w") as file:
            while at < len(text):
                size = drawn.randrange(1, 200) if name == "often" else len(text)
                file.write(text[at : at + size])
                file.flush()
                at += size
                training.look()
        assert training.errors == []
        of_epoch = training.following._loop._length.steps_of_epoch  # type: ignore[union-attr]
        found.append((of_epoch, training.heard.events, training.heard.told))
    assert found[0] == found[1]
    assert len([one for one in found[0][1] if one[0] == "on_step_end"]) == 40


def test_loop_1_what_was_known_when_it_began_has_no_events(training: Training) -> None:
    training.write(evaluation(0), step(1), step(2), evaluation(2, 0.9))
    training.args.metric_for_best_model = "reward"
    training.open(5, 2, (0, 2))
    training.write(step(3))
    training.look()
    assert training.heard.events == [
        *[("on_train_begin", 2), ("on_epoch_begin", 2), ("on_step_begin", 2)],
        *[("on_step_end", 3), ("on_log", 3), ("on_step_begin", 3)],
    ]
    state = training.callbacks.state
    assert [row["step"] for row in state.log_history] == [0, 1, 2, 2, 3]
    assert (state.best_metric, state.best_global_step) == (0.9, 2), "as a saved state has it there"


def test_following_2_of_a_file_that_is_written_anew_what_is_as_it_was_is_known(training: Training) -> None:
    file = training.folder / "metrics.jsonl"
    before = [{**step(number), "time": 1.0} for number in range(1, 8)]
    training.write(*before)
    anew = training.folder / "new"
    again = [{**step(number), "time": 2.0} for number in range(6, 9)]
    anew.write_text("".join(json.dumps(row) + "\n" for row in (*before[:5], *again[:2])))
    anew.replace(file)
    training.open(9, before=before)
    training.look()
    training.write(again[2])
    training.look()
    assert training.heard.of("on_train_begin", "on_step_end") == [
        *[("on_train_begin", 5), ("on_step_end", 6), ("on_step_end", 7), ("on_step_end", 8)],
    ]


def test_a_step_begins_when_what_belongs_before_it_has_come(training: Training) -> None:
    """loop.py 2."""
    training.open(4, 2, (0, 2, 4))
    training.look()
    training.write(evaluation(0))
    training.look()
    training.write(step(1))
    training.look()
    training.write(step(2))
    training.look()
    assert training.heard.events[-2:] == [("on_step_end", 2), ("on_log", 2)], "it is being measured"
    training.write(evaluation(2))
    training.look()
    assert training.heard.events == [
        *[("on_train_begin", 0), ("on_log", 0), ("on_evaluate", 0), ("on_epoch_begin", 0)],
        *[("on_step_begin", 0), ("on_step_end", 1), ("on_log", 1), ("on_step_begin", 1)],
        *[("on_step_end", 2), ("on_log", 2), ("on_log", 2), ("on_evaluate", 2), ("on_epoch_end", 2)],
        *[("on_epoch_begin", 2), ("on_step_begin", 2)],
    ]
    training.write(step(3), step(4))
    training.look()
    assert ("on_step_begin", 4) not in training.heard.events, "there is no fifth"
    # An evaluation that never comes holds nothing up.
    training.open(6, None, (2,))
    assert training.heard.of("on_step_end")[-2:] == [("on_step_end", 3), ("on_step_end", 4)]


def test_following_1_what_is_left_is_told_behind_the_end_however_it_came(training: Training) -> None:
    training.open(4)
    with pytest.raises(RuntimeError, match="failed"), training.following.to_its_end():
        training.look()
        training.write(step(1), step(2))
        raise RuntimeError("failed")
    assert training.heard.events[-2:] == [("on_log", 2), ("on_step_begin", 2)], "it has not ended in order"
    never = Training(training.folder)
    with pytest.raises(ConfigError), never.following.to_its_end():
        raise ConfigError("refused")
    assert never.heard.events == []


@pytest.mark.parametrize("error", [RuntimeError("refused"), None])
def test_following_5_what_never_began_has_no_events(training: Training, error: Exception | None) -> None:
    """A run that was to overwrite another one: what that left is in the folder again."""
    old, following = training.folder / "metrics.jsonl", training.following
    following.open(Length(9, None, lambda _: False), moment_of)
    with suppress(RuntimeError), following.to_its_end():
        training.look()
        training.write(step(1), step(2))
        if error is not None:
            raise error
    assert training.heard.events == [] and old.exists() and not following.has_begun


@pytest.mark.parametrize("how", ["stop", "raise"])
def test_it_is_told_in_the_thread_that_waits_and_ends_what_it_waits_for(training: Training, how: str) -> None:
    """As a run is followed, on lines that somebody else writes."""
    from quartet.cli.asked import Interrupts
    from quartet.cli.display import Plain
    from quartet.grpo.background import Background
    from quartet.scripts.waiting import wait_in_slices

    background, wrong, threads = Background[str](), LookupError("mine"), set[int]()

    def heard(_state: Any, control: Any) -> None:
        threads.add(threading.get_ident())
        control.should_training_stop = True
        if how == "raise":
            raise wrong

    training.heard.then["on_step_end", 2] = heard

    async def driven() -> str:
        interrupts = Interrupts(lambda: None, Plain())
        with background.listen(interrupts):
            training.open(9)
            training.write(step(1), step(2))
            await interrupts.asked.wait()
            training.write(step(3))
        return "in order"

    def look() -> None:
        training.following.look(background.stop, background.end)

    def run() -> str:
        with training.following.to_its_end():
            return background.run(lambda: asyncio.run(driven()), lambda ended: wait_in_slices(ended, look))

    if how == "raise":
        with pytest.raises(LookupError) as caught:
            run()
        assert caught.value is wrong and training.heard.events[-1] == ("on_step_end", 2)
    else:
        assert run() == "in order"
        assert training.heard.events[-3:] == [("on_log", 3), ("on_epoch_end", 3), ("on_train_end", 3)]
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("error", [LookupError("mine"), SystemExit(3)])
def test_following_3_what_one_raises_ends_it_and_is_raised(training: Training, error: BaseException) -> None:
    def raising(_state: Any, _control: Any) -> None:
        raise error

    training.heard.then["on_step_end", 2] = raising
    training.open(5)
    with pytest.raises(type(error)) as caught, training.following.to_its_end():
        training.write(step(1), step(2), step(3))
        training.look()
        training.look()
        training.write(step(4))
    assert caught.value is error and training.errors == [error]
    assert training.heard.events[-1] == ("on_step_end", 2)
    # Behind the end, too.
    late = Training(training.folder)
    late.heard.then["on_step_end", 2] = raising
    with pytest.raises(type(error)) as caught, late.following.to_its_end():
        late.open(5, before=[])
    assert caught.value is error and late.errors == []


def test_following_4_without_callbacks_nothing_is_read(training: Training) -> None:
    training.callbacks.callbacks.clear()
    training.open(3)
    (training.folder / "metrics.jsonl").write_text("no row\n")
    with training.following.to_its_end():
        training.look()
    assert training.errors == [] and not training.following.is_open


def test_what_ctrl_c_breaks_off_is_gone_on_with(training: Training) -> None:
    def pressed(_state: Any, _control: Any) -> None:
        raise KeyboardInterrupt

    training.heard.then["on_step_end", 1] = pressed
    training.open(3)
    training.write(step(1), step(2))
    with pytest.raises(KeyboardInterrupt):
        training.look()
    training.look()
    assert training.errors == [] and training.heard.of("on_step_end", "on_log") == [
        *[("on_step_end", 1), ("on_log", 1), ("on_step_end", 2), ("on_log", 2)],
    ]


@pytest.mark.parametrize(("metric", "best"), [("eval_loss", 0.3), ("val", 0.7)])
def test_the_best_is_that_of_evaluations_behind_a_step(training: Training, metric: str, best: float) -> None:
    """loop.py 4: of a loss the least, of what else there is the most."""
    training.args.metric_for_best_model = metric
    training.open(4, None, (0, 1, 2, 3))
    for after, value in enumerate((0.1 if best < 0.5 else 0.9, 0.5, best, float("nan"))):
        name = metric if metric.startswith("eval_") else f"eval_{metric}"
        training.write(*([step(after)] if after else []), {"step": after, name: value})
    training.look()
    state = training.callbacks.state
    assert (state.best_metric, state.best_global_step, training.errors) == (best, 2, [])


def test_a_metric_that_nobody_measures_is_said_once(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    training.args.metric_for_best_model = "loss"
    training.open(3, None, (1, 2))
    training.write(step(1), evaluation(1), step(2), evaluation(2))
    training.look()
    assert caplog.messages == [
        "args.metric_for_best_model = 'loss' is not measured, and nothing is the best by it; there is "
        "eval_reward"
    ]
    assert training.callbacks.state.best_metric is None and training.args.greater_is_better is False


@pytest.fixture
def trained_there() -> Iterator[Callable[..., Heard]]:
    """By transformers' own Trainer, on a model of one weight."""
    torch = pytest.importorskip("torch", reason="the services' installation brings it")
    # It runs the garbage collector at each training, over all that was imported.
    with uncollected():
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("accelerate", reason="a development dependency, of TRL")
        assert transformers.Trainer, "imported when it is asked for"

    class One(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: Any) -> Any:
            return {"loss": ((x * self.weight - 1) ** 2).mean()}

    class Recording(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
        def __init__(self, heard: Heard) -> None:
            for event in EVENTS:
                setattr(self, event, getattr(heard, event))

    def train(folder: Path, **args: Any) -> Heard:
        heard = Heard()
        usual = {"use_cpu": True, "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": "none"}
        quiet = {"disable_tqdm": True, "save_strategy": "no", "remove_unused_columns": False}
        rows = [{"x": torch.ones(1)} for _ in range(6)]
        trainer = transformers.Trainer(
            One(),
            transformers.TrainingArguments(str(folder), **usual, **quiet, **args),
            train_dataset=rows,
            eval_dataset=rows[:2],
            callbacks=[Recording(heard)],
        )
        trainer.train()
        return heard

    yield train


@pytest.mark.parametrize(
    "args",
    [
        {"max_steps": 7},
        {"num_train_epochs": 2, "eval_strategy": "epoch"},
        {"max_steps": 7, "eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True},
        {"num_train_epochs": 2, "eval_strategy": "steps", "eval_steps": 2},
    ],
)
def test_loop_2_the_order_is_that_of_transformers(
    trained_there: Callable[..., Heard], tmp_path: Path, args: dict[str, Any]
) -> None:
    theirs = trained_there(tmp_path / "theirs", **args)
    # What it logs last is what train() returns.
    there = [one for one in theirs.events if one[0] != "on_init_end"]
    assert there[-2][0] == "on_log"
    del there[-2]
    steps, strategy = args.get("max_steps", 6), args.get("eval_strategy")
    every = {"steps": args.get("eval_steps"), "epoch": 3, None: 100}[strategy]
    measured = [number for number in range(1, steps + 1) if number % every == 0]
    measured = sorted(
        {*measured, *([0] if args.get("eval_on_start") else ()), *([steps] if strategy else ())}
    )
    training = Training(tmp_path, **args)
    training.open(steps, 3, tuple(measured))
    with training.following.to_its_end():
        for number in range(steps + 1):
            training.write(
                *([step(number)] if number else []), *([evaluation(number)] * (number in measured))
            )
            training.look()
    assert training.heard.events == there
