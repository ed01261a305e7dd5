"""Whether an adapter fits the run that is to begin with it, as far as files say: its adapter_config.json, and
the headers of its weights and of the model's, which need no torch.

1. All that does not fit is told, each by the run's key or with what the folder has.
2. Nothing is refused that the trainer would take. In memory a model may have other names than in its files:
   modules are compared where both have names of one form ("model.layers.*.mlp.up_proj"), and that there is no
   such module at all is said of ALIKE alone; the trainer sees the rest. A model whose files are not read
   (another's, of a quantised type) is not compared, nor are matrices of stacked experts.
3. Of files of weights only the headers are read.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from quartet.adapter_config import WEIGHTS, AdapterConfig, adapter_config_of, some_of
from quartet.config import ConfigError
from quartet.run.lora import LoraConfig
from quartet.weights.layout import Extent, parse_header

#: What defines an adapter: as its configuration and the trainer call it, and as [lora] does.
KEYS: Final = {
    "rank": "r",
    "alpha": "alpha",
    "rslora": "use_rslora",
    "target_modules": "target_modules",
    "target_parameters": "target_parameters",
    "modules_to_save": "modules_to_save",
}
#: Models (model_type) whose linear modules end alike in files and in memory. Elsewhere some do, and others do
#: not: exaone's mlp.c_fc_0 is a gate_proj, and bailing_hybrid's attention.dense an o_proj.
ALIKE: Final = frozenset(
    {
        *("gemma", "gemma2", "gemma3_text", "granite", "llama", "ministral", "mistral", "olmo2", "olmo3"),
        *("phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2"),
    }
)
#: What peft puts before the names of the model.
_PREFIX: Final = "base_model.model."
_HALF = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])\.weight")

#: Of a module's weight: rows and columns.
Shape = tuple[int, ...]


def misfits(lora: LoraConfig, model: Path | None) -> list[ConfigError]:
    """A refusal for each thing that does not fit. `model`: its folder; None where that is not known."""
    if not lora.enabled or lora.initial_adapter is None:
        return []
    folder = Path(lora.initial_adapter)
    found = adapter_config_of(folder)
    told = list(_settings(lora, found))
    if not found.beyond:
        try:
            header = _header(folder / WEIGHTS)
        except (OSError, ValueError, RecursionError) as error:
            why = f"{folder / WEIGHTS} cannot be read: {error}; save the adapter again"
            return [*told, _refused(lora, why)]
        told += [_refused(lora, why) for why in _Adapter(found, header).misfits(lora, model)]
    return told


def _settings(lora: LoraConfig, found: AdapterConfig) -> Iterator[ConfigError]:
    for why in found.refusals():
        yield _refused(lora, why)
    if "peft_type" in found.beyond:
        return  # its rank is none
    unlike = found.unlike(lora.r, lora.alpha, lora.use_rslora, lora.modules_to_save, lora.target_parameters)
    for name, (ours, theirs) in unlike.items():
        yield other_than(KEYS[name], ours, theirs, str(lora.initial_adapter))


def other_than(key: str, ours: Any, theirs: Any, where: str) -> ConfigError:
    """A refusal of what [lora] says at a key, where the adapter that it begins with has something else."""
    said = json.dumps(ours)
    remedy = f"the adapter in {where} has {json.dumps(theirs)}; set that, or leave lora.{key} out"
    text = f"lora.{key} = {said} is refused: {remedy}"
    return ConfigError(text, key=f"lora.{key}", value=said, remedy=remedy)


class _Adapter:
    """What the header of an adapter's weights says of it."""

    def __init__(self, found: AdapterConfig, header: Mapping[str, Extent]) -> None:
        self._rank = found.rank
        self._odd = sorted(name for name, one in header.items() if not _is_float(one.dtype))
        self._dtypes = {name: header[name].dtype for name in self._odd}
        self._halves: dict[str, dict[str, Shape]] = {}
        self._whole: dict[str, Shape] = {}
        for name, extent in header.items():
            plain = name.removeprefix(_PREFIX)
            if (half := _HALF.fullmatch(plain)) and len(extent.shape) > 1:
                self._halves.setdefault(half["module"], {})[half["half"]] = extent.shape
            else:
                self._whole[plain] = extent.shape
        if found.target_parameters:
            for name in [one for one in self._modules if self._is_of_stack(one)]:
                del self._halves[name]

    def misfits(self, lora: LoraConfig, model: Path | None) -> Iterator[str]:
        """A sentence for each thing that does not fit."""
        if self._odd:
            kind = self._dtypes[self._odd[0]]
            yield f"{self._odd[0]} is of {kind}, where floating point is wanted; save the adapter again"
        if torn := sorted(name for name, halves in self._halves.items() if len(halves) < 2):
            yield f"one of lora_A and lora_B is missing of {some_of(torn)}; save the adapter again"
        if wrong := sorted(name for name in self._modules if self._ranks(name) != {self._rank}):
            ranks = sorted(self._ranks(wrong[0]))
            yield (
                f"its adapter_config.json says r = {self._rank}, and {some_of(wrong)} has rank "
                f"{' and '.join(map(str, ranks))}; save the adapter again"
            )
        theirs = {_ending(name) for name in self._halves}
        wanted = {_ending(name) for name in lora.target_modules}
        if wanted and not lora.modules_to_save and theirs != wanted:
            yield (
                f"it has matrices of {some_of(sorted(theirs))}, and lora.target_modules names "
                f"{some_of(sorted(wanted))}; name those, or leave lora.target_modules out"
            )
        if model is not None and (base := _weights_of(model)):
            yield from self._against(base, _config_of(model), lora)

    def _against(
        self, base: Mapping[str, Shape], config: Mapping[str, Any], lora: LoraConfig
    ) -> Iterator[str]:
        another = "name the base model that it was made for as model, or another adapter"
        named, known = ({_ending(name) for name in names} for names in (self._halves, base))
        if named and not named & known and config.get("model_type") in ALIKE:
            others = some_of(sorted(known))
            yield f"model has no {some_of(sorted(named))}, of which it has matrices, but {others}; {another}"
            return
        forms = {_form(name) for name in base}
        if unknown := sorted(one for one in self._halves if one not in base and _form(one) in forms):
            yield f"it has matrices of {some_of(unknown)}, which model has not; {another}"
        layers = _layers_of(config)
        if missing := sorted(self._missing(base, layers, lora.target_modules, lora.modules_to_save)):
            yield f"it has no matrices of {some_of(missing)}, which model has; {another}"
        shapes = {name: self._shape(name) for name in self._modules}
        shapes |= {name.removesuffix(".weight"): shape for name, shape in self._whole.items()}
        other = sorted(name for name, shape in shapes.items() if name in base and base[name] != shape)
        if other:
            ours, theirs = (list(one[other[0]]) for one in (base, shapes))
            yield (
                f"{some_of(other)} {'is' if len(other) == 1 else 'are'} of other shapes in model (the first: "
                f"{ours} there, {theirs} here); {another}"
            )

    def _missing(
        self, base: Mapping[str, Shape], layers: int | None, targets: Collection[str], saved: Collection[str]
    ) -> Iterator[str]:
        """Modules of the model that the run would give matrices, of layers that it is known to have: files
        may have more than is loaded."""
        forms = {_form(name) for name in self._halves}
        for name in base:
            number = re.search(r"\.(\d+)\.", name)
            if layers is None or number is None or int(number[1]) >= layers or _form(name) not in forms:
                continue
            is_saved = any(f".{one}." in f".{name}." for one in saved)
            is_target = not targets or any(f".{name}".endswith(f".{one}") for one in targets)
            if is_target and not is_saved and name not in self._halves:
                yield name

    @property
    def _modules(self) -> list[str]:
        """Those that have both matrices."""
        return [name for name, halves in self._halves.items() if len(halves) == 2]

    def _is_of_stack(self, module: str) -> bool:
        """Whether its matrices are those of several experts, one behind the other."""
        ranks = self._ranks(module)
        return len(ranks) == 1 and ranks != {self._rank} and max(ranks) % self._rank == 0

    def _ranks(self, module: str) -> set[int]:
        halves = self._halves[module]
        return {halves["A"][0], halves["B"][-1]}

    def _shape(self, module: str) -> Shape:
        """Of the product, which is added to the module's weight."""
        halves = self._halves[module]
        return (*halves["B"][:-1], *halves["A"][1:])


def _refused(lora: LoraConfig, why: str) -> ConfigError:
    key, value = "lora.initial_adapter", str(lora.initial_adapter)
    return ConfigError(f"{key} = {value!r} is refused: {why}", key=key, value=value, remedy=why)


def _header(file: Path) -> dict[str, Extent]:
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
    ):
        return parse_header(view)


def _weights_of(model: Path) -> dict[str, Shape]:
    """The matrices of a model's files by their modules; none where a file is not understood."""
    found: dict[str, Shape] = {}
    try:
        for file in model.glob("*.safetensors"):
            found |= {
                name.removesuffix(".weight"): extent.shape
                for name, extent in _header(file).items()
                if name.endswith(".weight") and len(extent.shape) == 2 and _is_float(extent.dtype)
            }
    except (OSError, ValueError, RecursionError):
        return {}  # the trainer, which loads it, says what is wrong
    return found


def _config_of(model: Path) -> Mapping[str, Any]:
    """Empty where it is not understood."""
    try:
        found = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _layers_of(config: Mapping[str, Any]) -> int | None:
    """How many the model has, where its configuration says so at its top."""
    layers = config.get("num_hidden_layers")
    return layers if isinstance(layers, int) else None


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("F", "BF"))


def _ending(module: str) -> str:
    return module.rpartition(".")[2]


def _form(module: str) -> str:
    """A module's name without its numbers: equal in all layers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", module)
