"""LoRA by peft: adapters of several runs in one base model that is in memory once.

1. An adapter's parameters have peft's names (`base_model.model.....q_proj.lora_A.weight`), and are published
   under them with peft's adapter_config.json; or merged, W + scale * B A, as a whole model. Stacked experts
   have a pair of matrices each (stacked.py).
2. Only the adapter of the run that computes is switched on: runs on one base do not see each other, and each
   computes what it would compute alone.
3. Initial weights depend on spec and seed alone. Dropout is drawn from the seed, the number of batches so
   far, which is saved, and the rank: a restored run continues bit-equally on as many ranks.
4. Scoring never drops anything out.
5. The base is no part of a state; its digest is, so that an adapter never goes on upon another base.
6. An exported folder holds the merged model, and the adapter as peft writes it in `base.ADAPTER_FOLDER`.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
import xxhash
from peft.tuners.lora import LoraLayer
from quartet.errors import QuartetError
from safetensors.torch import save_file
from torch import Tensor, nn

from quartet_trainer import model as base
from quartet_trainer import products
from quartet_trainer.frozen import as_float32, digest_of, narrow, plain_name
from quartet_trainer.publish import TORCH_DTYPES, Snapshot, cast, gathered
from quartet_trainer.ranks.layout import host_mesh, is_whole, like
from quartet_trainer.spec import LoraSpec
from quartet_trainer.stacked import stacks_of
from quartet_trainer.targets import Targets
from quartet_trainer.trained import Masters

#: What peft puts before the names of the model.
PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"


class Base:
    """A frozen model and the adapters in it. For one thread, but for `leave`."""

    def __init__(self, model: Any, autocast: torch.dtype | None = None) -> None:
        """`autocast` is what its products are computed in, where that is not float32."""
        self.model = model
        self._autocast = autocast
        self.size = base.parameter_counts(model)[1]
        self._peft: Any = None
        self._joined = 0
        self._used: set[str] = set()
        self._active = ""
        self._left: list[str] = []
        self._digest = ""
        self._is_spread = not all(is_whole(parameter) for parameter in model.parameters())
        #: Of this rank in what is random: each has other samples, and drops other values.
        self.place = f"/{host_mesh().get_local_rank()}" if self._is_spread else ""
        self._targets = Targets(model, self._is_spread)
        if self._is_spread:
            # While all ranks are here: later the first one alone asks for it.
            self.digest()

    def join(self, spec: LoraSpec, base_model: str, seed: int) -> Adapter:
        """Put another adapter into the model. Errors: INVALID_CONFIG."""
        targets, saved = self._targets.of(spec)
        stacks = self._targets.stacks(spec)
        config = peft.LoraConfig(
            r=spec.rank,
            lora_alpha=int(spec.alpha) if spec.alpha == int(spec.alpha) else spec.alpha,  # type: ignore[arg-type]
            lora_dropout=spec.dropout,
            target_modules=targets,
            target_parameters=stacks or None,
            use_rslora=spec.rslora,
            modules_to_save=saved or None,
            task_type="CAUSAL_LM",
            base_model_name_or_path=base_model,
        )
        # No run_id: module names have no dots, and a run may come back while it is still being removed.
        name = f"adapter{self._joined}"
        self._joined += 1
        # peft gives an adapter the type of the weights beside it.
        wide = as_float32(self.model, config.modules_to_save or ())
        with wide, torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            torch.manual_seed(seed)
            try:
                if self._peft is None:
                    self._peft = peft.PeftModel(self.model, config, adapter_name=name)
                else:
                    self._peft.add_adapter(name, config)
            except ValueError as error:
                raise self._targets.refused_by_peft(targets, error) from error
        products.use(self.model)
        narrow(self.model, self._own(), self._autocast)
        self._used.add(name)
        return Adapter(self, name, spec, _config_json(config), seed)

    @property
    def in_use(self) -> bool:
        """Whether any run has an adapter in it."""
        return bool(self._used)

    def use(self, adapter: str) -> None:
        """Switch on this adapter and no other."""
        if adapter != self._active:
            self._peft.set_adapter(adapter)
            self._active = adapter
        while self._left:
            self._peft.delete_adapter(self._left.pop())

    @contextmanager
    def bare(self) -> Iterator[None]:
        """The model without any adapter."""
        with self._peft.disable_adapter():
            yield

    def leave(self, adapter: str) -> None:
        """Nobody uses this adapter any more; it is removed when another one is used."""
        self._left.append(adapter)
        self._used.discard(adapter)

    def digest(self) -> str:
        """Of the frozen weights."""
        if not self._digest:
            self._digest = digest_of(self.frozen())
        return self._digest

    def frozen(self) -> dict[str, nn.Parameter]:
        """The parameters of the model by their own names, tied ones once."""
        return {plain_name(name): one for name, one in self._own().items()}

    def _own(self) -> dict[str, nn.Parameter]:
        return {name: one for name, one in self.model.named_parameters() if _is_frozen(name)}


class Adapter:
    """One run's adapter. Implements `quartet_trainer.trained.Trained`."""

    def __init__(self, shared: Base, name: str, spec: LoraSpec, config: str, seed: int) -> None:
        self.model = shared.model
        self.exact = not (spec.publish_merged or spec.dropout)
        self.adapter_config = "" if spec.publish_merged else config
        self._shared, self._name, self._spec, self._config, self._seed = shared, name, spec, config, seed
        self._scale = spec.alpha / (math.sqrt(spec.rank) if spec.rslora else spec.rank)
        self._batches = 0
        #: Saved name -> name in the model.
        self._inner = {
            _saved_name(inner, name): inner
            for inner, _ in shared.model.named_parameters()
            if f".{name}." in inner
        }
        named = dict(shared.model.named_parameters())
        self.parameters: Mapping[str, nn.Parameter] = {
            saved: named[inner] for saved, inner in self._inner.items()
        }
        # Beside another adapter they ask for no gradients before this one is used.
        self.moved: Mapping[str, nn.Parameter] = self.parameters
        ends = base.embedding_names(shared.model)
        self._stacks = stacks_of(shared.model)
        of_stacks = {PREFIX + stack.module + half for stack in self._stacks.values() for half in (_A, _B)}
        self.apart = frozenset(of_stacks) | {saved for saved, inner in self._inner.items() if inner in ends}
        self._dropouts = [
            layer.lora_dropout[name]
            for layer in shared.model.modules()
            if isinstance(layer, LoraLayer) and name in layer.lora_dropout
        ]
        # peft makes them in training mode.
        for dropout in self._dropouts:
            dropout.eval()

    def counts(self) -> tuple[int, int]:
        """The adapter, and with the base."""
        own = sum(one.numel() for one in self.parameters.values())
        return own, own + self._shared.size

    def frozen(self) -> Masters:
        """The base."""
        named = self.model.named_parameters(remove_duplicate=False)
        return {PREFIX + plain_name(name): one for name, one in named if _is_frozen(name)}

    def published(self, masters: Masters, served_dtype: str) -> Snapshot:
        """The adapter, or the merged model."""
        merges = self._spec.publish_merged
        named = self._merged(masters, self._shared.frozen()) if merges else masters.items()
        return cast(named, served_dtype)

    def _merged(self, masters: Masters, plain: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """One by one: beside the model there is no room for another in float32."""
        for name, weight in plain.items():
            one = masters.get(PREFIX + name, weight.detach())
            stack = self._stacks.get(name)
            module = PREFIX + (stack.module if stack else name.removesuffix(".weight"))
            if module + _A in masters:
                low, high = (masters[module + half].detach().to(one.device) for half in (_A, _B))
                product = stack.product(low, high) if stack else high @ low
                one = one + like(product * self._scale, one)
            yield name, one

    @contextmanager
    def standing(self, weights: Snapshot | None) -> Iterator[Mapping[str, Tensor]]:
        """The adapter's parameters are replaced; or, with the adapter off, the base's by merged ones."""
        self._shared.use(self._name)
        if weights is None:
            yield {}
        elif not weights.keys() <= self._inner.keys():
            frozen = {plain_name(name): name for name, _ in self.model.named_parameters() if _is_frozen(name)}
            with self._shared.bare():
                yield {frozen[name]: tensor for name, tensor in weights.items()}
        else:
            replaced = {self._inner[name]: tensor for name, tensor in weights.items()}
            yield self._served_base(weights) | replaced

    def _served_base(self, weights: Snapshot) -> dict[str, Tensor]:
        """The base in the dtype that the adapter was published in, where that rounds it."""
        (dtype,) = {tensor.dtype for tensor in weights.values()}
        if dtype == torch.float32:  # wider for nothing: what is narrow lost nothing (frozen.py)
            return {}
        named = [(name, one) for name, one in self.model.named_parameters() if _is_frozen(name)]
        return {name: one.detach().to(dtype) for name, one in named if one.dtype != dtype}

    @contextmanager
    def bare(self, weights: Snapshot | None = None) -> Iterator[Mapping[str, Tensor]]:
        """The base alone, in the place of `standing`: a reference model without a second copy."""
        assert weights is None, "the base has no versions"
        self._shared.use(self._name)
        with self._shared.bare():
            yield {}

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Switched on, with dropout."""
        self._shared.use(self._name)
        if not self._spec.dropout:
            yield
            return
        device = self.model.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            drawn = f"{self._seed}/{self._batches}{self._shared.place}"
            torch.manual_seed(xxhash.xxh3_64_intdigest(drawn.encode()) >> 1)
            try:
                for dropout in self._dropouts:
                    dropout.train()
                yield
            finally:
                for dropout in self._dropouts:
                    dropout.eval()

    def learned(self) -> None:
        """The next batch drops other values."""
        self._batches += 1

    def export(self, source: Path, target: Path, served_dtype: str, writes: bool = True) -> None:
        """Write the merged model, and the adapter beside it."""
        plain = {
            plain_name(name): tensor for name, tensor in base.untied(self.model).items() if _is_frozen(name)
        }
        merged = gathered(self._merged(self.parameters, plain), served_dtype, writes)
        if not writes:
            return
        base.export_folder(self.model, merged, source, target, served_dtype)
        folder = target / base.ADAPTER_FOLDER
        folder.mkdir()
        settings, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
        settings.write_text(self._config + "\n", encoding="utf-8")
        dtype = TORCH_DTYPES[served_dtype]
        own = {name: one.detach().to("cpu", dtype).contiguous() for name, one in self.parameters.items()}
        save_file(own, weights, metadata={"format": "pt"})
        base.as_readable_as(settings, weights)

    def meta(self) -> dict[str, Any]:
        """The base that it belongs to, and how much randomness it has used."""
        return {"base_digest": self._shared.digest(), "batches": self._batches}

    def check(self, meta: Mapping[str, Any]) -> None:
        """Refuse a state of another base."""
        if meta["base_digest"] != self._shared.digest():
            raise QuartetError(
                "CHECKSUM_MISMATCH",
                "the adapter was trained upon other base weights than those that base_model has now; nothing "
                "was loaded",
                what="base_model",
            )

    def restore(self, meta: Mapping[str, Any]) -> None:
        """Go on where a state was taken."""
        self._batches = int(meta["batches"])

    def close(self) -> None:
        """Leave the base."""
        self._shared.leave(self._name)


def _is_frozen(name: str) -> bool:
    """Whether a parameter of the model with adapters in it is the model's own."""
    return ".lora_" not in name and ".modules_to_save." not in name


def _saved_name(inner: str, adapter: str) -> str:
    return PREFIX + inner.replace(".modules_to_save.", ".").replace(f".{adapter}.", ".")


def _config_json(config: peft.LoraConfig) -> str:
    values: dict[str, Any] = {**config.to_dict(), "inference_mode": True}  # type: ignore[no-untyped-call]
    # Equal adapters are equal, whichever release wrote them and in whatever order sets came.
    values.pop("peft_version", None)
    return json.dumps(values, indent=2, sort_keys=True, default=sorted)
