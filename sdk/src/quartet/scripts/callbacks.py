"""The callbacks of a script: objects with methods of transformers' TrainerCallback.

1. They are called as transformers calls them: all of them at each event, in their order, with the arguments,
   the state and the control, and by name what there is else. A method that one lacks is not called.
2. What reports a run elsewhere, or works on the model, is refused when it is given; methods that are never
   called are said then.
3. A control that one returns takes the place of the one before; what is none is an error that names it. What
   it asks for that is not to be had is said once, with the argument that does it.
4. Where the training stands, and how long it is, is told by the state. What one writes there is undone, and
   said once: nobody trains by it.
"""

from __future__ import annotations

import inspect
import logging
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from quartet.config.model import ConfigError
from quartet.scripts.argument_list import ArgumentList
from quartet.scripts.outcome import Row

#: Events of transformers, in the order of a training.
EVENTS: Final = (
    *("on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin", "on_step_end", "on_log"),
    *("on_evaluate", "on_epoch_end", "on_train_end"),
)
#: Those that nobody here hears of: they are of the model, of its states, and of what is not done.
UNHEARD: Final = (
    *("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end", "on_prediction_step", "on_predict"),
    *("on_save", "on_push_begin"),
)
#: What a control may ask for, and what does it instead.
UNSERVED: Mapping[str, str] = {
    "should_save": "args.save_steps says when states are saved",
    "should_evaluate": "args.eval_steps says when it is measured",
    "should_log": "args.logging_steps says which steps are logged",
    "should_epoch_stop": "a pass is not broken off, unless it is the last one; set should_training_stop",
}
#: What has to be in a control.
ASKED: Final = ("should_training_stop", *UNSERVED)
#: What of the state is the training's alone, and what to write instead.
TOLD: Mapping[str, str] = {
    "global_step": "it counts the steps of a training in another process",
    "max_steps": (
        "args.max_steps says beforehand how long it is; control.should_training_stop = True ends it earlier"
    ),
}
#: Packages whose callbacks are refused, and why.
ELSEWHERE: Mapping[str, str] = {
    "transformers.integrations": (
        'it reports a model of this process; leave it out: args.report_to = "wandb", "mlflow" or '
        '"tensorboard" reports there, and metrics.jsonl in args.output_dir has every step'
    ),
    "trl": (
        "it works on the model and its trainer, which are in another process; leave it out, and read "
        "trainer.state, or metrics.jsonl and rollouts/ in args.output_dir"
    ),
}


@dataclass
class Control:
    """What callbacks ask for, by the names of transformers."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


@dataclass
class State:
    """Where a training stands, as callbacks read it: what transformers' TrainerState has."""

    epoch: float = 0.0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: float | None = None
    eval_steps: float | None = None
    save_steps: float | None = None
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0.0
    log_history: list[Row] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, args: ArgumentList, max_steps: int, steps_of_epoch: int) -> State:
        """Before the first step."""
        asked = {name: getattr(args, name) for name in ("logging_steps", "eval_steps", "save_steps")}
        return cls(
            max_steps=max_steps,
            num_train_epochs=math.ceil(max_steps / steps_of_epoch),
            train_batch_size=args.per_device_train_batch_size,
            **{
                name: math.ceil(max_steps * every) if every is not None and every < 1 else every
                for name, every in asked.items()
            },
        )


class Callbacks:
    """All of a trainer: what is its callback_handler there."""

    def __init__(self, given: Any, args: ArgumentList, told: logging.Logger, **common: Any) -> None:
        """`common`: what each event has by name. Raises ConfigError."""
        if given is not None and not isinstance(given, list | tuple):
            raise ConfigError(f"callbacks = {given!r} is refused: give a list of them")
        self.callbacks: list[Any] = []
        self.control, self.state = Control(), State()
        self._args, self._told, self._common = args, told, common
        self._said: set[str] = set()
        for number, one in enumerate(given or ()):
            self._add(one, f"callbacks[{number}]")

    @property
    def callback_list(self) -> str:
        """Their names, a line each."""
        return "\n".join(type(one).__name__ for one in self.callbacks)

    def add_callback(self, callback: Any) -> None:
        """One more; a class is made. Raises ConfigError."""
        self._add(callback, "add_callback")

    def pop_callback(self, callback: Any) -> Any:
        """Takes away the first that it is, or is of that class; None where there is none."""
        found = next((one for one in self.callbacks if _is(one, callback)), None)
        if found is not None:
            self.callbacks.remove(found)
        return found

    def remove_callback(self, callback: Any) -> None:
        """Takes it away. Raises ValueError where it is not there; of a class there may be none."""
        if isinstance(callback, type):
            self.pop_callback(callback)
        else:
            self.callbacks.remove(callback)

    def call(self, event: str, **told: Any) -> None:
        """All of them. Raises what one raises, and ValueError where one returns what is no control."""
        assert event in EVENTS, event
        for one in tuple(self.callbacks):
            if (method := getattr(one, event, None)) is not None:
                stands = {name: getattr(self.state, name) for name in TOLD}
                answer = method(self._args, self.state, self.control, **self._common, **told)
                self._put_back(f"{event} of {type(one).__name__}", stands)
                if answer is not None:
                    self.control = _control(answer, f"{event} of {type(one).__name__}")
        for name in UNSERVED:
            if name != "should_epoch_stop" and getattr(self.control, name):
                self.unserved(name)

    def unserved(self, name: str) -> None:
        """Says, once, that what the control asks for is not to be had."""
        if name not in self._said:
            self._said.add(name)
            self._told.warning("control.%s = True of a callback is without effect: %s", name, UNSERVED[name])

    def warn(self, sentence: str, what: str = "") -> None:
        """Says that once, or of what it is about the first sentence alone."""
        if (what or sentence) not in self._said:
            self._said.add(what or sentence)
            self._told.warning("%s", sentence)

    def _put_back(self, who: str, stands: Mapping[str, int]) -> None:
        """What the state says alone (4)."""
        for name, value in stands.items():
            if (written := getattr(self.state, name)) != value:
                setattr(self.state, name, value)
                self.warn(f"state.{name} = {written!r} by {who} is without effect: {TOLD[name]}", name)

    def _add(self, callback: Any, key: str) -> None:
        _check(callback, key)
        made = callback() if isinstance(callback, type) else callback
        kind = type(made).__name__
        if any(type(one) is type(made) for one in self.callbacks):
            self._told.warning("%s: there is a %s already, and both are called", key, kind)
        if unheard := [name for name in UNHEARD if _is_own(made, name)]:
            self._told.warning(
                "%s: %s of %s is never called: the training loop is in another process",
                key,
                ", ".join(unheard),
                kind,
            )
        self.callbacks.append(made)


def _control(answer: Any, who: str) -> Any:
    """Raises ValueError."""
    if not all(hasattr(answer, name) for name in ASKED):
        raise ValueError(
            f"{who} returned {reprlib.repr(answer)}; it may return the control that it was given, another of "
            "that kind, or None, which leaves it as it is"
        )
    return answer


def _check(callback: Any, key: str) -> None:
    """Raises ConfigError."""
    is_class = isinstance(callback, type)
    kind = callback if is_class else type(callback)
    for one in kind.__mro__:
        for package, why in ELSEWHERE.items():
            if f"{one.__module__}.".startswith(f"{package}."):
                raise ConfigError(f"{key} = {kind.__name__} is refused: {why}")
    if not any(hasattr(callback, event) for event in (*EVENTS, *UNHEARD)):
        raise ConfigError(
            f"{key} = {callback!r} is refused: give an object with methods of transformers' TrainerCallback: "
            f"{', '.join(EVENTS)}"
        )
    if is_class:
        try:
            inspect.signature(callback).bind()
        except TypeError as error:
            raise ConfigError(
                f"{key} = {kind.__name__} is refused: the class is made without arguments ({error}); give "
                "an object of it"
            ) from None
        except ValueError:
            pass  # of one that says nothing of its arguments


def _is(callback: Any, asked: Any) -> bool:
    """Whether it is what is asked for, or of that class."""
    return isinstance(callback, asked) if isinstance(asked, type) else bool(callback == asked)


def _is_own(callback: Any, event: str) -> bool:
    """Whether a script wrote that method: those of transformers itself do nothing without being called."""
    return hasattr(callback, event) and not getattr(callback, event).__module__.startswith("transformers.")
