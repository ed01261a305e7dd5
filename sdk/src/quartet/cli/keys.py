"""`quartet keys`: what can be written into a file, key by key."""

from __future__ import annotations

import argparse
import difflib
import sys
from typing import Final

from quartet.config import ConfigError
from quartet.config.described import described
from quartet.config.keys import known_keys
from quartet.config.model import Config
from quartet.kit.standard_streams import say

DESCRIPTION = """\
What can be written into the file of a run, key by key, with the defaults.

  quartet keys                        all of them
  quartet keys sampling algorithm.kernel      of some tables alone
  quartet keys --of sft               of supervised fine-tuning; of an evaluation: --of evaluation

The keys of the tables [trainer], [orchestrator], [inference] and [envhost] are those of the services:
python -m quartet_trainer --help, and so on.
"""

KINDS: Final = ("run", "sft", "evaluation")


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
    for table in options.tables or [""]:
        found = described(model, table.replace("-", "_").strip("[]"))
        if not found:
            names = sorted({key.split(".")[0] for key in known_keys(model)})
            close = difflib.get_close_matches(table, names, n=1)
            meant = f"; did you mean {close[0]!r}?" if close else f": {', '.join(names)}"
            raise ConfigError(f"{table!r} is no table and no key of a file of {options.of}{meant}")
        lines += found
    say("\n".join(lines), sys.stdout)
    return 0


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
