"""What a script holds of a model and a tokenizer: names of folders.

The services load them, each in its own process: nothing here imports torch or transformers.

1. What is not there is refused when the handle is made, with what to do.
2. A model that the script has loaded itself is taken for the folder it came from, where it is what that holds
   (loaded.py).
3. What a script looks for in the object itself is refused as an attribute, with where that is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from quartet.config.model import ConfigError
from quartet.config.text import read_text
from quartet.scripts.loaded import check_unchanged, name_of_loaded

#: Of get_model's model_kwargs: how the original put the model on a device. The trainer decides that itself.
PLACEMENT = ("torch_dtype", "dtype", "attn_implementation", "use_cache", "device_map", "low_cpu_mem_usage")


@dataclass(frozen=True)
class Model:
    """A model folder, or a hub id of which the Hugging Face cache has the files."""

    name: str
    #: Where it is.
    folder: str
    use_liger: bool = True
    #: Settings of the original's get_model that have no effect here.
    unread: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a model is a name here, which the services load, and has no {name!r}; the trained one is in "
            "the folder of trainer.save_model(FOLDER), and model.folder is what training begins with: load "
            "either with transformers' AutoModelForCausalLM.from_pretrained"
        )

    @property
    def context(self) -> int | None:
        """The longest sequence that it was made for, where its config.json says. Raises ConfigError."""
        what = f"model = {self.name!r}: config.json"
        text = read_text(Path(self.folder) / "config.json", what)
        try:
            config = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{what} is not JSON ({error}); fetch the model's files again") from None
        if not isinstance(config, dict):
            raise ConfigError(f"{what} is no JSON object; fetch the model's files again")
        length = config.get("max_position_embeddings")
        return length if isinstance(length, int) else None


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a model folder, with its chat template."""

    name: str
    folder: str

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a tokenizer is a name here, which the services load, and has no {name!r}; transformers' "
            "AutoTokenizer.from_pretrained(tokenizer.folder) is the tokenizer itself. Leave out what sets a "
            "pad token: the services need none"
        )


def name_given(model_name: Any) -> str:
    """The folder or the hub id that somebody names, perhaps by a path. Raises ConfigError."""
    if isinstance(model_name, str | PathLike) and (name := os.fsdecode(model_name)):
        return name
    raise ConfigError(f"model = {model_name!r} is refused: give a folder, or a hub id that the cache holds")


def get_model(
    model_name: str | PathLike[str], use_liger: bool = True, model_kwargs: Mapping[str, Any] | None = None
) -> Model:
    """A model by its folder or hub id. Raises ConfigError."""
    from quartet.cli.job import model_path

    given = dict(model_kwargs or {})
    for name in given:
        if name not in PLACEMENT:
            raise ConfigError(
                f"model_kwargs: {name} = {given[name]!r} is refused: the services load the model as its "
                "folder says; make a folder of that model, and name it"
            )
    name = name_given(model_name)
    return Model(name, model_path(name), use_liger, tuple(given))


def get_tokenizer(model_name: str | PathLike[str]) -> Tokenizer:
    """The tokenizer of a model. Raises ConfigError."""
    from quartet.cli.job import model_path

    name = name_given(model_name)
    return Tokenizer(name, model_path(name))


def get_model_and_tokenizer(
    model_name: str | PathLike[str], use_liger: bool = True, model_kwargs: Mapping[str, Any] | None = None
) -> tuple[Model, Tokenizer]:
    """Both. Raises ConfigError."""
    return get_model(model_name, use_liger, model_kwargs), get_tokenizer(model_name)


def model_of(model: Any) -> Model:
    """Of a name, or of a model that is what its folder holds, the handle. Raises ConfigError."""
    if isinstance(model, str | PathLike):
        return get_model(model)
    if not isinstance(model, Model):
        if (named := name_of_loaded(model)) is not None:
            known = get_model(named)
            check_unchanged(model, named, known.folder)
            return known
        raise ConfigError(
            f"model = {type(model).__name__} is refused: the services load the model themselves; give its "
            "folder, its hub id, what get_model_and_tokenizer returns, or the model as transformers loads it"
        )
    return model


def check_tokenizer(tokenizer: Any, model: Model) -> None:
    """Whether it is the model's own. Raises ConfigError."""
    if tokenizer is None:
        return
    if not isinstance(tokenizer, Tokenizer):
        named = getattr(tokenizer, "name_or_path", "")
        folders = (model.name, str(Path(model.folder).absolute()))
        if isinstance(named, str) and named and (named in folders or str(Path(named).absolute()) in folders):
            _check_in_memory(tokenizer, model.folder)
            return  # as AutoTokenizer loads it from there, or by the hub id
        raise ConfigError(
            f"processing_class = {type(tokenizer).__name__} is refused: the services load the tokenizer of "
            f"the model's folder, {model.folder}; leave it out, or load it from there"
        )
    if tokenizer.folder != model.folder:
        raise ConfigError(
            f"processing_class = {tokenizer.name!r} is the tokenizer of another model than {model.name!r}; "
            "copy its files into a folder with that model, and name it"
        )


def _check_in_memory(tokenizer: Any, folder: str) -> None:
    """Whether its chat template and its end token are the folder's, by which it is sampled and learned.
    Raises ConfigError."""
    from quartet.chat_identity import template_of

    given = getattr(tokenizer, "chat_template", None)
    try:
        own = template_of(Path(folder))
    except (OSError, ValueError, AttributeError):
        own = ""
    if isinstance(given, str) and given.removesuffix("\n") != own.removesuffix("\n"):
        raise _changed("another chat template", "the template", folder)
    loads = getattr(type(tokenizer), "from_pretrained", None)
    if loads is not None and loads(folder).eos_token != tokenizer.eos_token:
        raise _changed(f"another end token, {tokenizer.eos_token!r},", "it", folder)


def _changed(what: str, it: str, folder: str) -> ConfigError:
    return ConfigError(
        f"processing_class has {what} than its folder, {folder}, from which the services load it; copy the "
        f"model's folder, put {it} there (tokenizer.save_pretrained), and name that as model"
    )
