"""Callbacks of scripts: what they hear of a training that is done elsewhere, and what they can ask for."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quartet.scripts.callbacks import EVENTS, Callbacks, Control
from quartet.scripts.following import Following
from quartet.scripts.loop import Length, Moment
from quartet.sft import ConfigError, SFTConfig

logger = logging.getLogger("quartet.test")


class Heard:
    """Writes down what it hears: of each event its name and its step."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.then: dict[tuple[str, int], Callable[[Any, Any], Any]] = {}

    def __getattr__(self, event: str) -> Any:
        if event not in EVENTS:
            raise AttributeError(event)

        def called(args: Any, state: Any, control: Any, **told: Any) -> Any:
            self.events.append((event, state.global_step))
            self.told.append((event, told))
            then = self.then.get((event, state.global_step))
            return None if then is None else then(state, control)

        return called

    def of(self, *names: str) -> list[tuple[str, int]]:
        return [one for one in self.events if one[0] in names]


class Training:
    """A folder that somebody else trains in, and the callbacks that follow it."""

    def __init__(self, folder: Path, *callbacks: Any, **args: Any) -> None:
        self.folder = folder
        self.args = SFTConfig(str(folder), **args)
        self.heard = Heard()
        self.callbacks = Callbacks([*callbacks, self.heard], self.args, logger, model="m", optimizer=None)
        self.following = Following(self.callbacks, self.args, folder)
        self.stops = 0
        self.errors: list[BaseException] = []

    def write(self, *rows: dict[str, Any]) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def open(
        self, steps: int, of_epoch: int | None = None, measured: tuple[int, ...] = (), **more: Any
    ) -> None:
        self.following.open(Length(steps, of_epoch, lambda step: step in measured), moment_of, **more)

    def look(self) -> None:
        def stop() -> None:
            self.stops += 1

        self.following.look(stop, self.errors.append)


def moment_of(row: dict[str, Any]) -> Moment:
    is_evaluation = any(name.startswith("eval_") for name in row)
    return Moment(row["step"], None if row.get("silent") else dict(row), is_evaluation=is_evaluation)


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


def step(number: int) -> dict[str, Any]:
    return {"step": number, "loss": 1 / number}


def evaluation(after: int, value: float = 0.5) -> dict[str, Any]:
    return {"step": after, "eval_reward": value}


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


@pytest.mark.parametrize("how", ["stop", "raise"])
def test_it_is_told_in_the_thread_that_waits_and_ends_what_it_waits_for(training: Training, how: str) -> None:
    """As a run is followed, on lines that somebody else writes."""
    from quartet.cli.asked import Interrupts
    from quartet.cli.display import Plain
    from quartet.grpo.background import Background, wait_in_slices

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


def asked(**flags: bool) -> Callable[[Any, Any], None]:
    def ask(_state: Any, control: Any) -> None:
        for name, value in flags.items():
            setattr(control, name, value)

    return ask


def test_a_callback_stops_a_training_behind_its_first_step(training: Training) -> None:
    training.heard.then["on_train_begin", 0] = asked(should_training_stop=True)
    training.callbacks.control.should_training_stop = True  # of an earlier one
    training.open(3)
    training.look()
    assert training.stops == 0 and training.heard.events[-1] == ("on_step_begin", 0)
    training.write(step(1))
    training.look()
    assert training.stops > 0 and training.heard.events[-1] == ("on_log", 1), "no other step begins"
    with training.following.to_its_end():
        training.write(step(2))
    assert training.heard.of("on_step_begin", "on_step_end", "on_train_end") == [
        *[("on_step_begin", 0), ("on_step_end", 1), ("on_step_begin", 1), ("on_step_end", 2)],
        ("on_train_end", 2),
    ]


def test_what_an_earlier_training_was_asked_is_over(training: Training) -> None:
    training.callbacks.control.should_training_stop = True
    training.open(3)
    training.write(step(1))
    training.look()
    assert training.stops == 0 and training.heard.events[-1] == ("on_step_begin", 1)


def test_what_ends_by_itself_is_not_stopped(training: Training) -> None:
    training.heard.then["on_step_end", 3] = asked(should_training_stop=True)
    training.open(3)
    training.write(step(1), step(2), step(3))
    training.look()
    assert training.stops == 0 and training.callbacks.control.should_training_stop


def test_only_the_last_pass_can_be_broken_off(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    training.heard.then["on_step_end", 1] = asked(should_epoch_stop=True)
    training.heard.then["on_step_end", 3] = asked(should_epoch_stop=True)
    training.open(4, 2)
    training.write(step(1))
    training.look()
    assert training.stops == 0 and "set should_training_stop" in caplog.text
    training.write(step(2))
    training.look()
    assert not training.callbacks.control.should_epoch_stop, "of the pass before"
    training.write(step(3))
    training.look()
    assert training.stops > 0 and training.heard.events[-1] == ("on_log", 3), "no other step begins"


def test_callbacks_3_what_is_not_to_be_had_is_said_once(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Control(should_save=True, should_log=True)
    training.heard.then["on_step_end", 1] = lambda state, control: mine
    training.heard.then["on_step_end", 2] = asked(should_save=True, should_evaluate=True)
    training.open(3)
    training.write(step(1))
    training.look()
    assert training.callbacks.control is mine
    assert not mine.should_save and not mine.should_log, "reset where the next step begins"
    training.write(step(2))
    training.look()
    assert caplog.messages == [
        "control.should_save = True of a callback is without effect: args.save_steps says when states are "
        "saved",
        "control.should_log = True of a callback is without effect: args.logging_steps says which steps are "
        "logged",
        "control.should_evaluate = True of a callback is without effect: args.eval_steps says when it is "
        "measured",
    ]


class Few:
    """Lacks all but one."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        assert more == {"model": "m", "optimizer": None}
        self.steps.append(state.global_step)


class Saving(Few):
    def on_save(self, *given: Any, **more: Any) -> None:
        raise AssertionError("nobody calls it")


def test_callbacks_1_what_one_lacks_is_not_called(tmp_path: Path) -> None:
    few = Few()
    training = Training(tmp_path, few, Few)
    training.open(2)
    training.write(step(1), step(2))
    with training.following.to_its_end():
        pass
    assert few.steps == training.callbacks.callbacks[1].steps == [1, 2]


def test_callbacks_are_added_and_taken_away_as_by_transformers(caplog: pytest.LogCaptureFixture) -> None:
    few = Few()
    made = Callbacks((few,), SFTConfig(), logger)
    made.add_callback(Few)
    assert "add_callback: there is a Few already, and both are called" in caplog.text
    assert made.callback_list == "Few\nFew"
    other = made.callbacks[1]
    assert made.pop_callback(Few) is few and made.pop_callback(few) is None
    assert made.pop_callback(other) is other and made.callbacks == []
    made.remove_callback(Few)
    with pytest.raises(ValueError):
        made.remove_callback(few)
    made.add_callback(few)
    made.remove_callback(few)
    assert made.callbacks == [] and made.pop_callback(Few) is None
    caplog.clear()
    made.add_callback(Saving())
    assert caplog.messages == [
        "add_callback: on_save of Saving is never called: the training loop is in another process"
    ]


def test_callbacks_2_what_cannot_work_is_refused() -> None:
    def of_trl() -> Any:
        return type("Of", (Few,), {"__module__": "trl.trainer.callbacks"})()

    class NeedsMore(Few):
        def __init__(self, threshold: float) -> None:
            super().__init__()

    for given, why in (
        ([NeedsMore], r"callbacks\[0\] = NeedsMore is refused: the class is made without arguments"),
        ([Few, of_trl()], r"callbacks\[1\] = Of is refused: it works on the model and its trainer, which"),
        ([Few, 3], r"callbacks\[1\] = 3 is refused: give an object with methods of transformers' TrainerC"),
        (Few(), "callbacks = .* is refused: give a list of them"),
    ):
        with pytest.raises(ConfigError, match=why):
            Callbacks(given, SFTConfig(), logger)
    transformers = pytest.importorskip("transformers", reason="the services' installation brings it")

    class Mine(transformers.integrations.WandbCallback):  # type: ignore[name-defined, misc]
        pass

    for kind in (transformers.integrations.TensorBoardCallback, Mine):
        with pytest.raises(ConfigError, match=r'leave it out: args\.report_to = "wandb", "mlflow" or "tens'):
            Callbacks([kind], SFTConfig(), logger)
    quiet = [transformers.PrinterCallback, transformers.ProgressCallback, transformers.EarlyStoppingCallback]
    assert len(Callbacks(quiet, SFTConfig(), logger).callbacks) == 3


def test_the_callbacks_of_transformers_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers", reason="the services' installation brings it")
    early = transformers.EarlyStoppingCallback(early_stopping_patience=2)
    training = Training(
        tmp_path,
        *(early, transformers.PrinterCallback, transformers.ProgressCallback),
        metric_for_best_model="eval_reward",
        eval_strategy="steps",
        eval_steps=1,
    )
    assert caplog.messages == [], "no method of theirs is missed"
    training.open(9, None, tuple(range(1, 10)))
    training.look()
    assert training.args.greater_is_better, "as transformers has it of what is no loss"
    for number, value in enumerate((0.1, 0.3, 0.2, 0.25), start=1):
        assert training.stops == 0
        training.write(step(number), evaluation(number, value))
        training.look()
    assert training.stops > 0 and early.early_stopping_patience_counter == 2
    assert training.callbacks.state.best_metric == 0.3 and training.errors == []
    with training.following.to_its_end():
        training.write(step(5))
    said, drawn = capsys.readouterr()
    assert "{'loss': '0.5'}" in said and "{'eval_reward': '0.25'}" in said
    assert "| 5/9 [" in drawn


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
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="a development dependency, of TRL")

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


def test_it_is_told_when_the_trainer_is_made(chat_model: Path, tmp_path: Path) -> None:
    """And what callbacks alone read is without effect where there are none."""
    from quartet.sft import SFTTrainer

    heard, said = Heard(), []
    args = SFTConfig(str(tmp_path / "out"), max_steps=2, metric_for_best_model="eval_loss")
    for callbacks in ([heard], None):
        made = SFTTrainer(str(chat_model), args, [{"prompt": "a", "completion": "b"}], callbacks=callbacks)
        made.logger = SimpleNamespace(warning=lambda _format, note: said.append(note))  # type: ignore[misc]
        made.warn_of(["first"])
    assert heard.events == [("on_init_end", 0)]
    ((_, told),) = heard.told
    assert told["model"].folder == told["processing_class"].folder == str(chat_model)
    assert told["optimizer"] is None
    assert said == [
        *("first", "first"),
        "args.metric_for_best_model = 'eval_loss' is without effect: callbacks such as EarlyStoppingCallback "
        "read it, and there are none",
    ]
    few = Few()
    made.add_callback(few)
    assert made.pop_callback(few) is few and made.remove_callback(Few) is None
