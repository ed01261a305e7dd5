"""Callbacks of scripts: what is one, what they can ask for, and those of transformers (callbacks.py)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from followed_training import Heard, Training, evaluation, step
from quartet.scripts.callbacks import Callbacks, Control
from quartet.sft import ConfigError, SFTConfig

logger = logging.getLogger("quartet.test")


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


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


@pytest.mark.parametrize("answer", [True, "stop", SimpleNamespace(should_training_stop=True)])
def test_callbacks_3_what_is_no_control_is_the_error_of_who_returned_it(
    training: Training, answer: Any
) -> None:
    training.heard.then["on_step_end", 2] = lambda state, control: answer
    training.open(3)
    training.write(step(1), step(2), step(3))
    with (
        pytest.raises(ValueError, match=r"^on_step_end of Heard returned .*; it may return the control that"),
        training.following.to_its_end(),
    ):
        training.look()
    assert len(training.errors) == 1 and training.heard.events[-1] == ("on_step_end", 2)


def test_callbacks_3_the_control_of_transformers_is_one(training: Training) -> None:
    transformers = pytest.importorskip("transformers", reason="the services' installation brings it")
    theirs = transformers.TrainerControl(should_training_stop=True)
    training.heard.then["on_step_end", 1] = lambda state, control: theirs
    training.open(3)
    training.write(step(1))
    training.look()
    assert training.stops > 0 and training.errors == [] and training.callbacks.control is theirs


def test_callbacks_4_where_it_stands_is_not_theirs_to_write(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    def write(state: Any, control: Any) -> None:
        state.global_step, state.max_steps, state.best_metric = 2, 1, 0.5

    for number in (1, 2):
        training.heard.then["on_step_begin", number - 1] = write
        training.heard.then["on_step_end", number] = write
    training.open(3)
    training.write(step(1), step(2), step(3))
    with training.following.to_its_end():
        training.look()
    assert training.heard.of("on_step_end") == [("on_step_end", 1), ("on_step_end", 2), ("on_step_end", 3)]
    assert training.callbacks.state.max_steps == 3 and training.callbacks.state.best_metric == 0.5
    assert caplog.messages == [
        "state.global_step = 2 by on_step_begin of Heard is without effect: it counts the steps of a "
        "training in another process",
        "state.max_steps = 1 by on_step_begin of Heard is without effect: args.max_steps says beforehand "
        "how long it is; control.should_training_stop = True ends it earlier",
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
        "read it, and none is given",
    ]
    few = Few()
    made.add_callback(few)
    assert made.pop_callback(few) is few and made.remove_callback(Few) is None
