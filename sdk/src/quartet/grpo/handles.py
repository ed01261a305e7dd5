"""What a script holds of a model, a tokenizer, an environment and an adapter: names and settings.

The services load them, each in its own process: nothing here imports torch, transformers or verifiers.

1. What is not there is refused when the handle is made, with what to do.
2. What a script looks for in the object itself is refused as an attribute, with where that is.
3. `peft_config` may be peft's own LoraConfig: a dataclass of the same field names, read as such. What it says
   beyond the keys of [lora] must be its default.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quartet.config.model import ConfigError
from quartet.config.text import read_text
from quartet.run.lora import ALL_LINEAR

#: Of get_model's model_kwargs: how the original put the model on a device. The trainer decides that itself.
PLACEMENT = ("torch_dtype", "dtype", "attn_implementation", "use_cache", "device_map", "low_cpu_mem_usage")
#: Of peft's LoraConfig, what a run's [lora] table says.
LORA_KEYS = {
    "r": "r",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "target_modules",
    "use_rslora": "use_rslora",
    "modules_to_save": "modules_to_save",
}
#: Fields of peft that say what the adapter is for and where it is from, not what it computes.
OF_PEFT_ITSELF = (
    "task_type",
    "peft_type",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "peft_version",
    "runtime_config",
)


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
            f"a model is a name here, which the services load, and has no {name!r}; transformers' "
            "AutoModelForCausalLM.from_pretrained(model.folder) is the model itself"
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


@dataclass(frozen=True)
class Environment:
    """An environment and its arguments. `python` is the interpreter that has it, where none of those that
    are looked at has; `weight` its share of the rollouts, `name` what it is called, among several."""

    id: str
    args: Mapping[str, Any] = field(default_factory=dict)
    python: str | None = None
    weight: float = 1.0
    name: str | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        _check_sendable(f"Environment({self.id!r})", self.args)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"an environment is a name here, which the environment host loads, and has no {name!r}; 'quartet "
            "eval' measures a model on it, 'quartet env show' prints its rewards and an example"
        )


def load_environment(env_id: str, **env_args: Any) -> Environment:
    """An installed environment with these arguments. Raises ConfigError."""
    from quartet.cli.env.installed import interpreter_of

    _check_sendable(f"load_environment({env_id!r})", env_args)
    interpreter_of(env_id)
    return Environment(env_id, dict(env_args))


def _check_sendable(what: str, env_args: Mapping[str, Any]) -> None:
    """Raises ConfigError."""
    for name, value in env_args.items():
        if (wrong := _unsendable(value)) is not None:
            raise ConfigError(
                f"{what}: {name} = {wrong!r} cannot be handed to the environment's process; give text, "
                "numbers, booleans, and lists and dicts of them, or leave it out"
            )


def _unsendable(value: Any) -> Any | None:
    """What of a value is no TOML; None is the answer for a value that is, and never inside one."""
    if isinstance(value, str | bool | int | float):
        return None
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = list(value)
    else:
        return "None" if value is None else value
    return next((wrong for one in inner if (wrong := _unsendable(one)) is not None), None)


def get_model(
    model_name: str, use_liger: bool = True, model_kwargs: Mapping[str, Any] | None = None
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
    return Model(model_name, model_path(model_name), use_liger, tuple(given))


def get_tokenizer(model_name: str) -> Tokenizer:
    """The tokenizer of a model. Raises ConfigError."""
    from quartet.cli.job import model_path

    return Tokenizer(model_name, model_path(model_name))


def get_model_and_tokenizer(
    model_name: str, use_liger: bool = True, model_kwargs: Mapping[str, Any] | None = None
) -> tuple[Model, Tokenizer]:
    """Both. Raises ConfigError."""
    return get_model(model_name, use_liger, model_kwargs), get_tokenizer(model_name)


@dataclass
class LoraConfig:
    """LoRA, by the names of peft."""

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    target_modules: Sequence[str] | str | None = None
    use_rslora: bool = False
    modules_to_save: Sequence[str] | None = None
    task_type: str | None = None
    inference_mode: bool = False
    # And what scripts say of peft's at its defaults; anything else is refused (lora_table).
    bias: str = "none"
    fan_in_fan_out: bool = False
    init_lora_weights: bool | str = True
    use_dora: bool = False
    layers_to_transform: Sequence[int] | int | None = None
    exclude_modules: Sequence[str] | str | None = None


def lora_defaults(r: int = 8, alpha: float = 16) -> LoraConfig:
    """An adapter of the attention's projections, as verifiers' lora_defaults."""
    projections = ["q_proj", "v_proj", "k_proj", "o_proj"]
    return LoraConfig(r=r, lora_alpha=alpha, target_modules=projections, task_type="CAUSAL_LM")


def lora_table(peft_config: Any) -> dict[str, Any]:
    """The [lora] table of an adapter. Raises ConfigError."""
    if not dataclasses.is_dataclass(peft_config) or isinstance(peft_config, type):
        raise ConfigError(
            f"peft_config = {peft_config!r} is no LoraConfig; give vf.lora_defaults(r=8, alpha=16), or peft's"
        )
    values = {one.name: getattr(peft_config, one.name) for one in dataclasses.fields(peft_config)}
    if missing := [name for name in ("r", "lora_alpha") if values.get(name) is None]:
        raise ConfigError(
            f"peft_config = {type(peft_config).__name__} has no {missing[0]}; only LoRA is trained here"
        )
    for one in dataclasses.fields(peft_config):
        made = one.default_factory() if callable(one.default_factory) else one.default
        # peft makes some that are given as None into what they mean by themselves.
        if one.name in (*LORA_KEYS, *OF_PEFT_ITSELF) or values[one.name] in (None, made):
            continue
        raise ConfigError(
            f"peft_config: {one.name} = {values[one.name]!r} is refused: [lora] has no such key; leave it out"
        )
    table = {key: values[name] for name, key in LORA_KEYS.items() if values.get(name) is not None}
    for key in ("target_modules", "modules_to_save"):
        if key in table:
            table[key] = _modules(key, table[key])
    publish = {"publish": "merged"} if table.get("modules_to_save") else {}
    return {"enabled": True, **table, **publish}


def unnamed_modules(lora: Mapping[str, Any]) -> list[str]:
    """What a script is told where it leaves to peft which modules its adapter is of."""
    if "target_modules" in lora:
        return []
    return [
        "peft_config: target_modules = None is every linear module but the head here, and of peft those that "
        "it knows for the model's type, such as q_proj and v_proj; name them, as vf.lora_defaults does"
    ]


def _modules(key: str, value: Any) -> list[str] | str:
    """Names of modules, or peft's word for all. Raises ConfigError."""
    if key == "target_modules" and value == ALL_LINEAR:
        return ALL_LINEAR
    if isinstance(value, str):
        raise ConfigError(f"peft_config: {key} = {value!r} is a pattern; list the names of modules")
    if not isinstance(value, Collection) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"peft_config: {key} = {value!r} is refused: list the names of modules")
    return sorted(value)
