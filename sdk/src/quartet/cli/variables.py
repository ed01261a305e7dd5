"""Environment variables that say where the orchestrator is and how it is spoken to, where no option does.

1. An option wins; an empty variable says nothing.
2. They are about one orchestrator: where `--orchestrator` names another one than QUARTET_ORCHESTRATOR, none
   of the others is read. A token is shown to nobody whom it is not for.
3. Whatever is refused of them is told by their names.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from quartet.config import ConfigError

ADDRESS: Final = "orchestrator"
#: By the option that each stands for.
VARIABLES: Final[Mapping[str, str]] = {
    name: f"QUARTET_{name.upper()}" for name in (ADDRESS, "ca_file", "cert_file", "key_file", "token_file")
}


@dataclass(frozen=True)
class Whereabouts:
    """An orchestrator's address, and of its security what is said."""

    address: str
    files: Mapping[str, str]
    #: The variables that were read, by the options that they stand for.
    read: Mapping[str, str]

    @property
    def said_by(self) -> str:
        """What names the address."""
        return self.read.get(ADDRESS, f"--{ADDRESS}")

    @property
    def told(self) -> str:
        """Behind what an orchestrator answers, or does not: which variables were read."""
        return f" ({', '.join(self.read.values())} of the environment)" if self.read else ""

    def named(self, sentence: str) -> str:
        """A refusal, by the variables where they say it."""
        for name, variable in self.read.items():
            # As a key, and not within the value, which is somebody's path.
            sentence = re.sub(rf"(?<![\w'/.-]){name}(?![\w'/.-])", variable, sentence)
        return sentence


def whereabouts(options: argparse.Namespace) -> Whereabouts:
    """By the options, and by the variables. Raises ConfigError where neither names an orchestrator."""
    given = {name: value for name in VARIABLES if (value := getattr(options, name))}
    of_environment = {name: value for name, one in VARIABLES.items() if (value := os.environ.get(one))}
    meant = of_environment.get(ADDRESS)
    if ADDRESS in given and meant not in (None, given[ADDRESS]):
        of_environment = {}
    both = {**of_environment, **given}
    if ADDRESS not in both:
        raise ConfigError(
            f"no orchestrator is named; give --{ADDRESS} HOST:PORT, or set {VARIABLES[ADDRESS]} to it"
        )
    read = {name: VARIABLES[name] for name in of_environment if name not in given}
    return Whereabouts(both.pop(ADDRESS), both, read)
