"""What the trainer objects of all scripts have in common: how they are asked, and for what they cannot be.

1. An argument that is not there, and an attribute of the original's training loop, are refused with where to
   find instead what was looked for.
2. A script goes on from the newest state of its own output folder, and from no other.
3. Its callbacks are kept by the trainer, which has whoever trains call them (following.py).
4. What a script does when it is trained is afterwards.py's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from quartet.config.model import ConfigError
from quartet.config.refusals import together
from quartet.scripts.afterwards import Afterwards
from quartet.scripts.argument_list import ArgumentList, nearest
from quartet.scripts.callbacks import Callbacks
from quartet.scripts.following import Following
from quartet.scripts.models import Model, Tokenizer, check_tokenizer, model_of
from quartet.scripts.process import refuse_launcher

#: Why what is done inside a training loop is not here.
INSIDE = "the training loop is in another process; leave it out, and read trainer.state or metrics.jsonl"
#: Arguments and attributes of transformers' Trainer: why they are not here.
OF_TRANSFORMERS: Mapping[str, str] = {
    **dict.fromkeys(
        ("optimizers", "optimizer_cls_and_kwargs"),
        "the trainer makes its own; set args.optim and its settings",
    ),
    "tokenizer": "it is called processing_class now; leave it out, for the model's folder has one",
    "push_to_hub": "nothing is uploaded; 'hf upload' sends the folder of trainer.save_model",
    "log": "metrics.jsonl in args.output_dir has every step",
}
#: Of a model that a script has loaded.
NOT_IN_PLACE: Final = (
    "the model that the script has loaded is not trained in place, and stays as it was loaded: load the "
    "trained one from the folder of trainer.save_model(FOLDER)"
)


class ScriptTrainer(Afterwards):
    """One training of a model, by a script."""

    #: Arguments and attributes of the original: what to do instead.
    ELSEWHERE: ClassVar[Mapping[str, str]] = {}
    #: Says what is without effect, and how it goes on.
    logger: ClassVar[logging.Logger]
    args: ArgumentList
    model: Model

    def __init__(
        self, model: Model | str | os.PathLike[str], processing_class: Tokenizer | None, peft_config: Any
    ) -> None:
        """Raises ConfigError."""
        refuse_launcher(os.environ)
        self._made_in = Path.cwd()
        self.model = model_of(model)
        self._is_loaded = not isinstance(model, str | os.PathLike | Model)
        check_tokenizer(processing_class, self.model)
        self.processing_class, self.peft_config = processing_class, peft_config

    def take_callbacks(self, callbacks: Any) -> None:
        """Keeps those that are given, and tells them that the trainer is made: the last thing that is done
        for that. Raises ConfigError, and what one of them raises."""
        of_model = Tokenizer(self.model.name, self.model.folder)
        #: As in transformers.
        self.callback_handler = Callbacks(
            callbacks,
            self.args,
            self.logger,
            model=self.model,
            processing_class=self.processing_class or of_model,
            **dict.fromkeys(("optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")),
        )
        self.callback_handler.call("on_init_end")

    def add_callback(self, callback: Any) -> None:
        """One more callback, or a class of which one is made. Raises ConfigError."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Takes away a callback, or the first of a class, and returns it; None where there is none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Takes away a callback, or the first of a class. Raises ValueError where that callback is not
        there."""
        self.callback_handler.remove_callback(callback)

    def end(self) -> None:
        """Nothing is left to end: who trains ends with train(), and reports until then."""

    def following(self) -> Following:
        """What its callbacks follow a training with."""
        return Following(self.callback_handler, self.args, self.folder)

    def warn_of(self, notes: Iterable[str]) -> None:
        """Says what the arguments ask for in vain."""
        unread = () if self.callback_handler.callbacks else self.args.without_callbacks()
        # Scripts save, or sample from, what the original has trained in place.
        stays = (NOT_IN_PLACE,) if self._is_loaded else ()
        for note in (*notes, *unread, *stays):
            self.logger.warning("%s", note)

    def __getattr__(self, name: str) -> Any:
        why = self.ELSEWHERE.get(
            name, "the training loop is in another process; docs/python.md has what there is"
        )
        raise AttributeError(f"{type(self).__name__} has no {name!r} here: {why}")

    @classmethod
    def refuse_arguments(cls, unknown: Mapping[str, Any], known: Sequence[str]) -> None:
        """Arguments that are not there, and are no defaults of the original. Raises ConfigError, for all at
        once."""
        if refusals := [
            ConfigError(
                f"{cls.__name__}({name}=...): there is no such argument; "
                f"{cls.ELSEWHERE.get(name) or nearest(name, known)}"
            )
            for name, value in unknown.items()
            if value not in (None, (None, None))
        ]:
            raise together(refusals)

    @property
    def folder(self) -> Path:
        """Where it is trained."""
        # By where the script was when it made this: what it runs may go elsewhere.
        return self._made_in / str(self.args.output_dir)

    def resumes(self, asked: bool | str | Path | None) -> bool:
        """Whether resume_from_checkpoint asks to go on. Raises ConfigError."""
        if isinstance(asked, str | Path) and Path(asked).absolute() != self.folder:
            raise ConfigError(
                f"resume_from_checkpoint = {str(asked)!r} is refused: it goes on from its own newest state; "
                "set args.output_dir to its folder, and give True"
            )
        return bool(asked)
