"""Runs the command that was chosen. Where a package that it needs is missing, it is refused at once."""

from __future__ import annotations

import argparse
import difflib

from quartet.cli.extras import need
from quartet.cli.other_commands import instead
from quartet.config import ConfigError
from quartet.config.explain import LIKENESS

#: Commands that read `@ file.toml --key value` beside what argparse knows.
TAKE_KEYS = ("rl", "slurm", "sft", "eval", "env", "baseline", "gepa", "submit", "evaluate", "watch")


def dispatch(options: argparse.Namespace, rest: list[str]) -> int:
    """Run the chosen command."""
    if rest and options.command not in TAKE_KEYS:
        command = " ".join(filter(None, (options.command, getattr(options, "model_command", ""))))
        close = difflib.get_close_matches(rest[0].partition("=")[0], options.flags, n=1, cutoff=LIKENESS)
        meant = f"did you mean {close[0]!r}?" if close else f"see 'quartet {command} --help'"
        raise ConfigError(f"argument {rest[0]!r} is not understood; {instead(command, rest[0]) or meant}")
    match options.command:
        case "eval" | "env" | "baseline" | "gepa":
            return _run_environments(options, rest)
        case "model":
            from quartet.cli.tiny import command as tiny

            need("tokenizers")
            return tiny.run(options)
        case "delete":
            from quartet.cli import delete

            return delete.run(options, rest)
        case "submit" | "watch" | "evaluate" | "runs" | "stop" | "resume":
            from quartet.cli import clients, reaching

            return reaching.run(getattr(clients, options.command), options, rest)
        case _:
            return _run_training(options, rest)


def _run_training(options: argparse.Namespace, rest: list[str]) -> int:
    """Of `_add_training`."""
    from quartet.cli import export, keys, node, panes, rl, rollouts

    match options.command:
        case "init":
            from quartet.cli.init import command as init

            return init.run(options)
        case "keys":
            return keys.run(options)
        case "rl":
            need("rich", "matplotlib")
            return rl.run(options, rest)
        case "node":
            return node.run(options)
        case "slurm":
            from quartet.cli.slurm import command as slurm

            return slurm.run(options, rest)
        case "panes":
            return panes.run(options)
        case "export":
            return export.run(options)
        case "rollouts":
            return rollouts.run(options)
        case "compare":
            need("rich")
            from quartet.cli.compare import command as compare

            return compare.run(options)
        case command:
            assert command == "sft"
            need("tokenizers", "jinja2")
            from quartet.cli.sft import command as sft

            return sft.run(options, rest)


def _run_environments(options: argparse.Namespace, rest: list[str]) -> int:
    """Of `_add_environments`."""
    if options.command == "gepa":
        need("gepa", "rich", extra="gepa")
        from quartet.cli.gepa import command as gepa

        return gepa.run(options, rest)
    need("rich")
    match options.command:
        case "eval":
            from quartet.cli.eval import command as evaluation

            return evaluation.run(options, rest)
        case "baseline":
            from quartet.cli.baseline import command as baseline

            return baseline.run(options, rest)
        case command:
            assert command == "env"
            from quartet.cli.env import command as environments

            return environments.run(options, rest)
