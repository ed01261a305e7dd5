"""Packages that Verifiers imports for a class or two, imported once somebody asks for more of them.

Verifiers has two classes of Anthropic's package, for programs that speak its API. The package around them is
3000 modules, which nobody else asks for: a third of the CPU time that importing Verifiers takes, which is at
the start of every host, and of every worker that is no fork (template.py). A fifth of the rest is MCP's,
which Verifiers imports where it is used, but for the tasksets that it ships; all of these come with their
package, which is asked for every environment whether it has one of that name.

1. What is named of a package is imported from its own module, without the package around it.
2. Whatever else is asked of a package imports it, in the same module object; each name is the same then.
3. Where what is named cannot be imported alone, or the package is not installed, it is as if this was not
   there.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

#: What Verifiers imports of Anthropic's package.
ANTHROPIC: Final = {"anthropic": {}, "anthropic.types": {"Message": "message", "Usage": "usage"}}
#: To be asked whether there is a module in it, which needs nothing of its own. Finding it imports Verifiers.
TASKSETS: Final[dict[str, dict[str, str]]] = {"verifiers.v1.tasksets": {}}

_executing = threading.RLock()


class _Deferred(ModuleType):
    """A package that was found, and is executed when something is asked of it that it does not have."""

    _begun = False

    def __getattr__(self, name: str) -> Any:
        self._execute()
        return ModuleType.__getattribute__(self, name)

    def _execute(self) -> None:
        with _executing:
            # As ever, a package before those in it; and this one may be executed by that.
            above = sys.modules.get(self.__name__.rpartition(".")[0])
            if isinstance(above, _Deferred):
                above._execute()
            if self._begun:  # also by what it imports itself
                return
            self._begun = True
            spec = self.__spec__
            assert spec is not None and spec.loader is not None
            spec.loader.exec_module(self)
            self.__class__ = ModuleType  # type: ignore[assignment]


def defer(packages: Mapping[str, Mapping[str, str]]) -> None:
    """Stand in for packages, each before those in it: {its name: {a name in it: the module that has it}}.

    Nothing where the first is imported already.
    """
    first = next(iter(packages))
    if first in sys.modules or importlib.util.find_spec(first) is None:
        return
    try:
        for package in packages:
            _stand_in(package)
        for package, named in packages.items():
            for name, module in named.items():
                found = getattr(importlib.import_module(f"{package}.{module}"), name)
                setattr(sys.modules[package], name, found)
    except (ImportError, AttributeError):  # of another release of it
        for module in [one for one in sys.modules if f"{one}.".startswith(f"{first}.")]:
            del sys.modules[module]


def _stand_in(package: str) -> None:
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(package)
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _Deferred
    sys.modules[package] = module
    above, _, name = package.rpartition(".")
    if above:
        setattr(sys.modules[above], name, module)
