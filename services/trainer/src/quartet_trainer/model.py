"""Base models: found, loaded or initialised in float32, and exported as Hugging Face folders.

1. A model that loads is whole: a missing weight is refused, never silently initialised.
2. Random initialisation depends on config.json and seed only, and leaves the process's random state alone.
3. An exported folder loads with `from_pretrained` and nothing else.
4. A folder's own Python is never run, and weights are read from safetensors alone.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from quartet import quantized
from quartet.errors import QuartetError
from quartet.kit.folder import unreadable_part
from safetensors import SafetensorError

from quartet_trainer import attention, experts, norms, products
from quartet_trainer.disk import failed

#: What a folder needs besides weights so that tokenizer and sampling defaults travel with the model.
COMPANION_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "generation_config.json",
)
#: What is fetched of a hub id.
PATTERNS = ("config.json", "*.safetensors", "*.safetensors.index.json", *COMPANION_PATTERNS)
#: Answers of a hub that may be others soon: it is overloaded, or out of order.
PASSING = frozenset({429, *range(500, 600)})
#: In an exported folder, of a run with LoRA.
ADAPTER_FOLDER = "adapter"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
#: Where transformers has the length from which a longrope takes its other frequencies.
LONGROPE_FROM = "original_max_position_embeddings"


def resolve_folder(
    base_model: str,
    allow_hub: bool,
    patterns: Sequence[str] = PATTERNS,
    progress: Callable[[], None] = lambda: None,
) -> Path:
    """The folder of a base model, fetched from the hub where the name is a hub id.

    `progress` is called for each piece that comes: a large one takes many minutes. Errors: INVALID_CONFIG;
    NOT_READY where the hub breaks off.
    """
    try:
        folder = Path(base_model).expanduser()
        is_here = folder.is_dir()
    except (OSError, RuntimeError) as error:  # too long for a name, or of a user who is not there
        why = getattr(error, "strerror", None) or str(error)
        raise refused(base_model, f"it cannot be a folder: {why}", "name another") from error
    if is_here:
        if not (folder / "config.json").is_file():
            raise refused(
                base_model, f"the folder {folder} has no config.json", "name a Hugging Face model folder"
            )
        if (part := unreadable_part(folder)) is not None:
            raise refused(base_model, f"this user cannot read {part}", "let it (chmod -R a+rX)")
        return folder
    looks_local = not _HUB_ID.fullmatch(base_model) or Path(folder.parts[0]).exists()
    if looks_local or not allow_hub:
        raise refused(base_model, f"there is no folder {folder.absolute()}", "create it, or name another")
    return _fetched(base_model, patterns, progress)


def _fetched(base_model: str, patterns: Sequence[str], progress: Callable[[], None]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HfHubHTTPError,
        HTTPError,  # of the HTTP client that it chose
        IncompleteSnapshotError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )
    from huggingface_hub.utils.tqdm import tqdm

    class Telling(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            progress()
            return super().update(n)  # type: ignore[no-any-return]

    fetching, later = f"{base_model} cannot be fetched from the hub", "mend that; what has come is kept"
    try:
        return Path(snapshot_download(base_model, allow_patterns=list(patterns), tqdm_class=Telling))
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        cause = error.__cause__
        if (status := max(_status(error), _status(cause))) in PASSING:
            raise failed(fetching, f"it answers with status {status}", None, later) from error
        # It gave a part, and is away now; else it may be none that the hub has.
        if isinstance(error, IncompleteSnapshotError) and not isinstance(cause, OfflineModeIsEnabled):
            raise failed(fetching, f"it cannot be reached ({cause})", None, later) from error
        raise refused(
            base_model,
            f"{base_model} is neither a folder here nor a model that the hub gave ({type(error).__name__})",
            "name a local folder, or check the id, the network and the hub's access rules",
        ) from error
    # It tried again and again (Xet, where most weights are, raises RuntimeError); or the disk refuses it.
    except (HTTPError, RuntimeError, OSError) as error:
        raise failed(fetching, str(error), getattr(error, "errno", None), later) from error


def _status(error: BaseException | None) -> int:
    """Of the hub's answer; 0 where it gave none."""
    return getattr(getattr(error, "response", None), "status_code", 0)


def tell_loading(progress: Callable[[], None]) -> None:
    """Call `progress` for each tensor loaded from now on: from a slow disk a model takes many minutes."""

    def each(values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            yield value
            progress()

    def bar(make: Callable[..., Any], values: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        # The first is what it goes over; a bar that is moved by hand has none.
        return make(*map(each, values[:1]), *values[1:], **settings)

    transformers.utils.logging.set_tqdm_hook(bar)


def load_model(folder: Path, base_model: str, *, device: torch.device, seed: int | None = None) -> Any:
    """A float32 model in eval mode on the device; with a seed of random weights. Errors: INVALID_CONFIG."""
    try:
        config = _config(folder)
        model = _load_weights(folder, config, base_model) if seed is None else _initialise(config, seed)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        remedy = "name a folder with config.json and model.safetensors, or set from_scratch"
        raise refused(base_model, f"{folder} cannot be loaded: {text}", remedy) from error
    _check_output(model, base_model)
    return _prepared(model.to(device))


def _config(folder: Path) -> Any:
    # Left out, transformers would ask at the terminal whether to run what the folder brings along.
    return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def without_memory(folder: Path, tied: bool) -> Any:
    """A model whose tensors have shapes and no contents (device "meta"); others loaded its folder, and found
    embedding and head `tied` or not."""
    config = quantized.plain(_config(folder))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        head = model.get_output_embeddings()
        if is_tied(model) and not tied:
            head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
    return _prepared(model)


def is_tied(model: Any) -> bool:
    """Whether embedding and head are one matrix; a checkpoint may have two where its config says so."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def exported_as(loaded: Any, model: Any) -> None:
    """Let a model be exported as a loaded one is: under the names of the checkpoint, with its settings."""
    model.generation_config = loaded.generation_config
    # What from_pretrained made of the checkpoint's names; a model of random weights has none.
    model._weight_conversions = vars(loaded).get("_weight_conversions")


def _prepared(model: Any) -> Any:
    # eval: no dropout, so that trainer and sampler compute the same function.
    model = model.eval()
    model.config.use_cache = False
    for name in _silent_names(model):
        model.get_parameter(name).requires_grad_(False)
    attention.use(model)
    experts.use(model)
    products.use(model)
    norms.use(model)
    return model


def _initialise(config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(quantized.plain(config), dtype=torch.float32)  # type: ignore[no-untyped-call]


def _load_weights(folder: Path, config: Any, base_model: str) -> Any:
    if found := quantized.refusal(config, folder):
        raise refused(base_model, f"{folder} cannot be trained: {found[0]}", found[1])
    # Annotated as a model; with output_loading_info it is a pair.
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        config=quantized.widening(config),
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # or it would not say which
        output_loading_info=True,
    )
    model, report = loaded
    wrong = sorted(report["missing_keys"])
    for name, there, needed in sorted(report["mismatched_keys"]):
        wrong.append(f"{name} of {list(needed)}, which is of {list(there)}")
    if wrong:
        raise refused(
            base_model,
            f"the weights in {folder} lack {len(wrong)} tensors, the first is {wrong[0]}",
            "use a complete checkpoint, or from_scratch",
        )
    if why := quantized.unread(config, report["unexpected_keys"]):
        raise refused(base_model, f"{folder} cannot be trained: {why}", quantized.REMEDY)
    quantized.plain(model.config)
    # transformers lets everything learn that it loads, also what its own code holds still (biases by which
    # tokens choose experts, waves of positions).
    with torch.device("meta"):
        made = type(model)._from_config(model.config, dtype=torch.float32)
    for name, parameter in made.named_parameters():
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    return model


def _check_output(model: Any, base_model: str) -> None:
    if model.base_model is model:
        raise refused(
            base_model,
            f"transformers does not say which part of {type(model).__name__} comes before its output layer",
            "use another architecture",
        )


def parameter_counts(model: Any) -> tuple[int, int]:
    """(trainable, all), tied ones once."""
    sizes = [(parameter.requires_grad, parameter.numel()) for parameter in model.parameters()]
    return sum(size for trainable, size in sizes if trainable), sum(size for _, size in sizes)


def vocab_size(model: Any) -> int:
    """Tokens that the model embeds."""
    return int(model.get_input_embeddings().num_embeddings)


def max_positions(model: Any) -> int:
    """Longest sequence that the model's positions allow, and that turns no other row of its micro-batch."""
    text = model.config.get_text_config()
    # Where there is no end XLNet says -1.
    most = max(0, getattr(text, "max_position_embeddings", None) or 0) or int(np.iinfo(np.int64).max)
    given = getattr(text, "rope_parameters", None) or {}
    # One for all layers, or one for each kind of layer.
    ropes = [given, *(one for one in given.values() if isinstance(one, dict))]
    # Beyond it a longrope turns otherwise, and so do the shorter rows beside it.
    short = [int(one[LONGROPE_FROM]) for one in ropes if one.get("rope_type") == "longrope"]
    return min([most, *short])


def end_names(model: Any) -> frozenset[str]:
    """The parameters that embed tokens or read them out; a tied one has one name."""
    return _names_in(model, (model.get_input_embeddings(), model.get_output_embeddings()))


def embedding_names(model: Any) -> frozenset[str]:
    """Those, and what else a model looks up: positions, or of tokens what each layer adds (Gemma 3n)."""
    others = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    return end_names(model) | _names_in(model, others)


def _silent_names(model: Any) -> frozenset[str]:
    """What no token goes through: of a model that sees or hears (Gemma 3), too, its towers and projectors."""
    reached = _names_in(model, (model.get_decoder(), model.get_output_embeddings()))
    return frozenset(name for name, _ in model.named_parameters()) - reached


def _names_in(model: Any, modules: Iterable[Any]) -> frozenset[str]:
    inside = {id(parameter) for module in modules if module is not None for parameter in module.parameters()}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in inside)


def export_folder(
    model: Any, tensors: Mapping[str, torch.Tensor], source: Path, target: Path, served_dtype: str
) -> None:
    """Write tensors of the served dtype as a Hugging Face folder into `target`, which must not exist.

    Not atomic: the caller renames.
    """
    # Buffers as they are: models keep some in float32 whatever else is narrow (biases of a router's choice).
    buffers = {name: one.cpu() for name, one in model.named_buffers() if name in tensors}
    target.mkdir(parents=True)
    held_cache, model.config.use_cache = model.config.use_cache, True
    try:
        model.save_pretrained(target, state_dict={**tensors, **buffers})
    finally:
        model.config.use_cache = held_cache
    # Behind it: of a model that was not read from the folder it writes sampling defaults of its own.
    for companion in (file for pattern in COMPANION_PATTERNS for file in source.glob(pattern)):
        if companion.is_file():
            shutil.copyfile(companion, target / companion.name)
    # save_pretrained writes the dtype of the live model there; it is the exported one that readers go by.
    file = target / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | {"dtype": served_dtype}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for weights in target.glob("*.safetensors"):
        as_readable_as(file, weights)


def as_readable_as(plain: Path, weights: Path) -> None:
    """Give weights the mode of a file beside them: safetensors keeps what it writes for the owner alone."""
    shutil.copymode(plain, weights)


def untied(model: Any) -> dict[str, torch.Tensor]:
    """What a checkpoint holds: tied weights once. Their copies would no longer be recognised as tied."""
    first: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    return {name: tensors[name] for name in first.values()}


def refused(base_model: str, what: str, remedy: str) -> QuartetError:
    """What refuses a base model."""
    return QuartetError(
        "INVALID_CONFIG", f"base_model: {what}; {remedy}", key="base_model", value=base_model, remedy=remedy
    )


@contextmanager
def named_by(key: str) -> Iterator[None]:
    """What refuses a base model inside says this key, which names the model."""
    try:
        yield
    except QuartetError as error:
        if error.metadata.get("key") != "base_model":
            raise
        told, said = error.message.replace("base_model", key, 1), error.metadata
        raise QuartetError(error.reason, told, key=key, value=said["value"], remedy=said["remedy"]) from error
