"""Which modules of a model an adapter stands beside, and which stacked experts, by the names that peft takes.

1. Where no module is named these are all linear ones but the head. Left out are names that peft takes for the
   stacked experts of a mixture, which have to be asked for by theirs (target_parameters), and modules that
   have one matrix together (Zamba): what several adapters make of it could not be merged.
2. A name of target_modules that means anything else than linear modules is refused, and one of
   target_parameters that means anything else than stacks of matrices: one of them, or a module that has some.
   So is a name of modules that have a matrix together with others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import peft
import torch
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from quartet.errors import QuartetError
from torch import Tensor, nn

from quartet_trainer.model import end_names
from quartet_trainer.spec import LoraSpec


class Targets:
    """The modules of a model without adapters."""

    def __init__(self, model: Any, is_spread: bool) -> None:
        """`is_spread`: each rank has a part of it."""
        self._model, self._is_spread = model, is_spread
        self._tied = bool(getattr(model.config, "tie_word_embeddings", False))
        self._ends = end_names(model)
        self._head = model.get_output_embeddings()
        self._modules = {name for name, _ in model.named_modules() if name}
        self._linear = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and _is_linear(module)
        }
        uses = Counter(id(module.weight) for module in self._linear.values())
        self._shared = {name for name, module in self._linear.items() if uses[id(module.weight)] > 1}
        self._stacks = {
            f"{name}.{own}"
            for name, module in model.named_modules()
            if not isinstance(module, nn.Conv1d)
            for own, parameter in module.named_parameters(recurse=False)
            if parameter.ndim == 3 and len(parameter) > 1
        }

    def of(self, spec: LoraSpec) -> tuple[list[str], list[str]]:
        """Names of modules with low-rank matrices, and of those trained whole. Errors: INVALID_CONFIG."""
        targets = self._named(spec) if spec.target_modules else self._every()
        saved = self._saved(spec)
        self._refuse_if_all_saved(targets, saved)
        return targets, saved

    def stacks(self, spec: LoraSpec) -> list[str]:
        """Names of stacks of matrices of which each gets low-rank ones. Errors: INVALID_CONFIG."""
        if spec.target_parameters and spec.dropout:
            why = "what goes into stacked experts (target_parameters) cannot be dropped out; set dropout = 0"
            raise _refused("dropout", f"{spec.dropout:g}", why)
        named: set[str] = set()
        for wanted in spec.target_parameters:
            found = _ending(wanted, self._stacks)
            of_module = {one for one in self._stacks if _ending(wanted, [one.rpartition(".")[0]])}
            self._refuse_if_saved(wanted, found | of_module, spec.modules_to_save)
            named |= {wanted} if found else {f"{wanted}.{one.rpartition('.')[2]}" for one in of_module}
        return sorted(named)

    def _refuse_if_saved(self, wanted: str, stacks: Iterable[str], saved: Sequence[str]) -> None:
        if not stacks:
            raise _refused("target_parameters", wanted, self._no_stack())
        for module in saved:
            if any(f".{module}." in f".{stack}" for stack in stacks):
                why = f"{module} is trained whole (modules_to_save); name it in one of the two"
                raise _refused("target_parameters", wanted, why)

    def _no_stack(self) -> str:
        if not self._stacks:
            return "the model has no stacked experts; leave target_parameters out"
        known = {".".join(one.split(".")[-2:]) for one in self._stacks}
        return f"the model has no such stack of experts; it has {', '.join(sorted(known))}"

    def refused_by_peft(self, targets: Sequence[str], error: ValueError) -> QuartetError:
        """What peft says of targets, with its own rules for some architectures."""
        why = f"peft says: {str(error).strip().splitlines()[0]} The linear modules are {self._known()}"
        return _refused("target_modules", ", ".join(targets), why)

    def _named(self, spec: LoraSpec) -> list[str]:
        for target in spec.target_modules:
            found = self._found("target_modules", target)
            odd = sorted(found - self._linear.keys())
            if odd:
                raise _refused("target_modules", target, f"{odd[0]} is no linear module; name linear ones")
            if not self._names_modules(target):
                why = "peft takes it for the stacked experts of this mixture"
                raise _refused(
                    "target_modules",
                    target,
                    f"{why}; leave it out, and name these in target_parameters, if they are to learn",
                )
        return sorted(set(spec.target_modules))

    def _every(self) -> list[str]:
        rest = {name for name, module in self._linear.items() if module is not self._head} - self._shared
        short = sorted({name.rpartition(".")[2] for name in rest})
        targets = []
        for target in filter(self._names_modules, short):
            meant = {name for name in rest if name.rpartition(".")[2] == target}
            # Whole names where other modules end so, too.
            targets += [target] if self._ending(target) == meant else sorted(meant)
        if not targets:
            why = "the model has no linear modules (torch.nn.Linear) besides its head; leave [lora] out"
            raise _refused("target_modules", "", why)
        return targets

    def _names_modules(self, target: str) -> bool:
        """Whether peft takes a name for modules.

        In some mixtures it takes what older checkpoints called a module of each expert for a part of all.
        """
        trial = peft.LoraConfig(target_modules=[target])
        try:
            convert_peft_config_for_transformers(trial, self._model, None)
        except ValueError:  # one of two that are stacked together
            return False
        return target in (trial.target_modules or ())

    def _saved(self, spec: LoraSpec) -> list[str]:
        for module in spec.modules_to_save:
            if self._is_spread:
                why = "it would be whole in every rank; leave it out, or train in one process (ranks = 1)"
                raise _refused("modules_to_save", module, why)
            self._found("modules_to_save", module)
        return sorted(set(spec.modules_to_save))

    def _refuse_if_all_saved(self, targets: Sequence[str], saved: Sequence[str]) -> None:
        """What is trained whole gets no low-rank matrices; something has to."""
        for name in self._linear:
            is_target = any(f".{name}".endswith(f".{target}") for target in targets)
            if is_target and not any(f".{module}." in f".{name}." for module in saved):
                return
        why = f"nothing is left for low-rank matrices ({', '.join(targets)}); name other targets"
        raise _refused("modules_to_save", ", ".join(saved), why)

    def _found(self, key: str, wanted: str) -> set[str]:
        found = self._ending(wanted)
        if not found:
            raise _refused(key, wanted, f"the model has no such module; its linear ones are {self._known()}")
        ends = {name.rpartition(".")[0] for name in self._ends} | {"lm_head"}
        if self._tied and found & ends:
            raise _refused(key, wanted, "embedding and head are one matrix in this model; leave it out")
        shared = sorted(
            one for one in self._shared if any(f"{one}.".startswith(f"{name}.") for name in found)
        )
        if shared:
            why = f"{shared[0]} and others are one matrix in this model, which cannot become several"
            raise _refused(key, wanted, f"{why}; leave it out")
        return found

    def _ending(self, wanted: str) -> set[str]:
        """The modules that peft finds by a name."""
        return _ending(wanted, self._modules)

    def _known(self) -> str:
        return ", ".join(sorted({name.rpartition(".")[2] for name in self._linear}))


def _ending(wanted: str, names: Iterable[str]) -> set[str]:
    return {name for name in names if name == wanted or name.endswith(f".{wanted}")}


def _is_linear(module: nn.Linear) -> bool:
    """Whether it computes what its class says: some subclasses, routers for one, do more than that."""
    if type(module).forward is nn.Linear.forward:
        return True
    x = torch.ones(1, module.in_features, device=module.weight.device, dtype=module.weight.dtype)
    with torch.no_grad():
        try:
            found, plain = module(x), nn.functional.linear(x, module.weight, module.bias)
        except RuntimeError:  # it takes another shape
            return False
    return (
        isinstance(found, Tensor) and found.shape == plain.shape and torch.allclose(found, plain, atol=1e-4)
    )


def _refused(key: str, value: str, why: str) -> QuartetError:
    return QuartetError(
        "INVALID_CONFIG",
        f"lora.{key} = {value!r} is refused: {why}",
        key=f"lora.{key}",
        value=value,
        remedy=why,
    )
