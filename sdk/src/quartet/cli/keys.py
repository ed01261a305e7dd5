"""`quartet keys`: what can be written into a file, key by key."""

from __future__ import annotations

import argparse
import difflib
from typing import Final

from quartet.config import ConfigError
from quartet.config.described import described
from quartet.config.keys import known_keys
from quartet.config.model import Config

DESCRIPTION = """\
What can be written into the file of a run, key by key, with the defaults.

  quartet keys                        all of them
  quartet keys sampling algorithm.kernel      of some tables alone
  quartet keys --of sft               of supervised fine-tuning; of an evaluation: --of evaluation

The keys of the tables [trainer], [orchestrator], [inference] and [envhost] are those of the services:
python -m quartet_trainer --help, and so on.
"""

KINDS: Final = ("run", "sft", "evaluation")
SERVICES: Final = ("trainer", "orchestrator", "inference", "envhost")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument(
        "tables", nargs="*", metavar="TABLE", help="a table, or a key: sampling, ckpt.interval"
    )
    parser.add_argument("--of", choices=KINDS, default="run", help="of which file (default: run)")


def run(options: argparse.Namespace) -> int:
    """The command."""
    model = _model(options.of)
    lines: list[str] = []
    for asked in options.tables or [""]:
        name = asked.replace("-", "_").strip("[]")
        found = described(model, name)
        if not found:
            raise ConfigError(f"there is no table and no key {asked!r} here{_meant(model, name)}")
        lines += found
        if name in SERVICES:
            lines.append(f"        Its keys are those of the service: python -m quartet_{name} --help")
    print("\n".join(lines))
    return 0


def _meant(model: type[Config], name: str) -> str:
    """What may have been meant by a name that is none, in words."""
    if name in KINDS:
        return f"; write --of {name}"
    if named := model.OTHER_NAMES.get(name):  # others' name of it
        return f"; {named}"
    keys = list(known_keys(model))
    tables = {".".join(key.split(".")[:depth]) for key in keys for depth in range(1, key.count(".") + 1)}
    if ended := [key for key in keys if key.endswith(f".{name}")]:
        return f"; did you mean {' or '.join(map(repr, ended))}?"
    close = difflib.get_close_matches(name, [*keys, *sorted(tables)], n=1)
    return f"; did you mean {close[0]!r}?" if close else "; 'quartet keys' lists all"


def _model(kind: str) -> type[Config]:
    match kind:
        case "sft":
            from quartet.run.sft import SftConfig

            return SftConfig
        case "evaluation":
            from quartet.run.evaluation import EvaluateConfig

            return EvaluateConfig
    from quartet.run.config import RunConfig

    return RunConfig
