"""The arguments of `quartet env`."""

from __future__ import annotations

import argparse
from pathlib import Path

from quartet.cli.env.installed import OWN
from quartet.cli.env.scaffold import KINDS
from quartet.cli.eval.arguments import MODEL_KEYS, PLAY_KEYS, Keys, add_env_args, add_keys

DESCRIPTION = """\
Environments on this machine.

  quartet env init my-env                     a package that works, to be changed: environments/my_env
  quartet env init my-env --kind tool         the same with tools; --kind turns: with several turns
  quartet env install environments/my_env     an interpreter for it (.quartet/envs/my_env), with its Verifiers
  quartet env check my-env                    its oracle earns everything, a wrong answer does not
  quartet env check my-env -m models/tiny     rewards, failures, times and tokens of a model
  quartet env list                            what is installed, and where
  quartet env show my-env                     what the host says of it, and an example

The oracle is the module `oracle` of the package, or `my_env_oracle` beside an environment that is a single
module: def answer(task: dict, messages: list[dict]) -> str.
"""

#: One rollout of each of a few examples shows what is broken.
CHECK_DEFAULTS = ("--num-examples=5", "--rollouts-per-example=1")
CHECK_KEYS: Keys = {
    **PLAY_KEYS,
    ("-r", "--rollouts-per-example", "--num-rollouts"): (
        "rollouts_per_example",
        "rollouts of each example (default: 1)",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-command each."""
    commands = parser.add_subparsers(dest="env_command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, allow_abbrev=False)

    init = add("init", "write a package from a template")
    init.add_argument("name", help="such as my-env")
    init.add_argument("-p", "--path", type=Path, default=OWN, help="where to (default: %(default)s)")
    init.add_argument(
        "--kind",
        choices=KINDS,
        default="single",
        help="; ".join(f"{kind}: {what}" for kind, what in KINDS.items()) + " (default: %(default)s)",
    )
    install = add("install", "make an interpreter for a package and install it there")
    install.add_argument(
        "package",
        help="folder with a pyproject.toml, name of one in environments or on the package index, "
        "'NAME @ git+https://...', or OWNER/NAME with an index",
    )
    install.add_argument("--index-url", metavar="URL", help="the package index, as pip takes it")
    install.add_argument(
        "--extra-index-url", metavar="URL", action="append", default=[], help="another beside it; repeatable"
    )
    install.add_argument("--generation", choices=("v1", "classic"), help="default: read from the package")
    install.add_argument("--into", type=Path, metavar="PYTHON", help="an interpreter that exists instead")
    listing = add("list", "what is installed, and where")
    listing.add_argument("--python", action="append", default=[], help="look there too")
    show = add("show", "load an environment and say what the host says of it")
    check = add("check", "play an environment and report")
    for one in (show, check):
        one.add_argument("environment", help="its id")
        add_env_args(one)
    add_keys(check, MODEL_KEYS)
    add_keys(check, CHECK_KEYS)
    check.add_argument(
        "--full-reward", type=float, help="what a right answer earns (default: what the oracle says, or 1)"
    )
