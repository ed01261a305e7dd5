"""The `quartet` command: `quartet init`, `keys`, `rl`, `node`, `slurm`, `sft`, `export`, `compare`,
`rollouts`, `model tiny`; `env`, `eval`, `baseline`, `gepa`; and clients of a running orchestrator.

Exit codes: 0 done, 1 failed, 2 refused (a wrong argument or configuration; a sentence for each thing that is
wrong), 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

try:
    from quartet.kit.imports import uncollected

    with uncollected():
        from quartet.cli import exits
        from quartet.cli.dispatch import dispatch
        from quartet.cli.env.installed import REFUSALS
        from quartet.cli.other_commands import here, tables_hidden, tables_shown
        from quartet.config import ConfigError
        from quartet.errors import QuartetError
        from quartet.kit.proxies import past_proxies
        from quartet.kit.standard_streams import escape_unknown, has_no_reader, hold_closed, say, unread
        from quartet.local.supervisor import ServiceFailed
except KeyboardInterrupt:  # they take a second
    sys.exit(130)  # INTERRUPTED of what was not imported
except RuntimeError as error:  # as Python 3.11 has it of one that comes while a class is made
    if isinstance(error.__cause__, KeyboardInterrupt):
        sys.exit(130)
    raise

#: A pipe whose reader left (`| head`), a terminal that was closed.
NOBODY_READS = (errno.EPIPE, errno.EIO)

#: What argparse says of one.
INVALID_CHOICE = re.compile(r"invalid choice: '(?P<given>[^']*)' \(choose from (?P<known>.*)\)$")

DESCRIPTION = """\
Quartet trains language models with reinforcement learning on Verifiers environments.

  quartet init my-project                     configurations to begin with
  quartet keys sampling                       what can be written into the file of a run
  quartet model tiny models/tiny              make a small model (a minute on a CPU)
  quartet rl @ configs/reverse-text.toml      train it: four services on this machine
  quartet slurm @ run.toml                    the same, as a job of SLURM on one machine or several
  quartet sft @ sft.toml                      fine-tune a model on a file of chats
  quartet export outputs/RUN models/mine      the model of a run that was stopped, or is elsewhere
  quartet compare outputs/RUN outputs/OTHER   runs beside each other
  quartet rollouts outputs/RUN                what its model said, and what that earned
  quartet env init my-env                     make an environment; install, check, list, show
  quartet baseline @ configs/reverse-text.toml    before training: too hard, too easy, or fit
  quartet eval reverse-text -m models/tiny    measure a model on environments
  quartet gepa reverse-text -m MODEL          improve an environment's system prompt
  quartet runs --orchestrator HOST:PORT       see what a deployed orchestrator runs
"""

USUAL = """\
quartet trains language models with reinforcement learning. Usually:

  quartet init my-project                     a folder with configurations to begin with
  quartet baseline @ run.toml                 before training: too hard, too easy, or fit
  quartet rl @ run.toml --output-dir outputs/first    train (--dry-run: only check)
  quartet rl --output-dir outputs/first --resume      go on with what was stopped
  quartet eval ENVIRONMENT -m outputs/first/checkpoint    measure the model

All commands: quartet --help; what one of them takes: quartet rl --help
"""

RL_DESCRIPTION = """\
Start trainer, inference, envhost and orchestrator, run one run, and end them again: on this machine, or with
--hosts A,B,... on several, of which this is the first (docs/deploy.md).

  quartet rl @ run.toml [@ more.toml ...] [--key value ...]

A file of vf-rl ([env], [inference.args], [trainer.args]) or of prime-rl ([model] name, [orchestrator],
[trainer.optim]) is recognised by its form, and read as it is.
Every key of the run can be set on the command line (--max-steps 20, --sampling.temperature 0.8), also those
of the services (--inference.embedded.max-num-seqs 64); 'quartet keys' lists those of the run. Writes
metrics.jsonl, rollouts/, checkpoint/, reward.png, summary.json, logs/ to the output folder.
"""


class Parser(argparse.ArgumentParser):
    """Of the command, or of one of its commands. What it parses knows the `flags`: a key of the configuration
    may be a misspelt one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._flags: list[str] = []
        super().__init__(*args, **kwargs)
        self.set_defaults(flags=self._flags)

    def error(self, message: str) -> NoReturn:
        """Also say which command was meant, or what that of another system is called here."""
        if wrong := INVALID_CHOICE.search(message):
            known = re.findall(r"[\w-]+", wrong["known"])
            if " " not in self.prog and (meant := here(wrong["given"])):
                message = f"{message}; here it is {meant}"
            elif close := difflib.get_close_matches(wrong["given"], known, n=1):
                message = f"{message}; did you mean {close[0]!r}?"
        super().error(message)

    def add_argument(self, *names: Any, **kwargs: Any) -> argparse.Action:
        """Also note the long options; and no path is empty, as a shell's variable is that nobody set."""
        self._flags += [name for name in names if name.startswith("--")]
        if kwargs.get("type") is Path:
            kwargs["type"] = _path
        return super().add_argument(*names, **kwargs)


class _Version(argparse.Action):
    """Looks at the files only where somebody asks."""

    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from quartet.kit.build import build_of

        print(f"quartet {build_of()}, Python {platform.python_version()}")
        parser.exit()


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("it is empty; name a file or a folder")
    try:
        text.encode()  # into what is written down of it
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no text in UTF-8; name another") from None
    return Path(text)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = Parser(
        prog="quartet",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, help="which release and build this is")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    with uncollected():  # most of it is what the commands import
        _add_training(commands)
        _add_environments(commands)
        _add_models(commands)
        _add_clients(commands)
    return parser


def _add(commands: Any, name: str, help_text: str, description: str | None = None) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help_text,
        description=description or help_text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser


def _add_training(commands: Any) -> None:
    """What trains on this machine, with what is read off a run's folder."""
    from quartet.cli import export, keys, node, panes, rl, rollouts
    from quartet.cli.compare import command as compare
    from quartet.cli.init import command as init
    from quartet.cli.sft import arguments as sft
    from quartet.cli.slurm import command as slurm

    init.add_arguments(_add(commands, "init", "a workspace with configurations", init.DESCRIPTION))
    keys.add_arguments(_add(commands, "keys", "what a run's file may say", keys.DESCRIPTION))
    rl.add_arguments(
        _add(commands, "rl", "reinforcement learning, on this machine or several", RL_DESCRIPTION)
    )
    node.add_arguments(_add(commands, "node", "this machine's part of a run over several", node.DESCRIPTION))
    slurm.add_arguments(_add(commands, "slurm", "hand a run to SLURM", slurm.DESCRIPTION))
    panes.add_arguments(
        _add(commands, "panes", "the logs of a run's services side by side", panes.DESCRIPTION)
    )
    export.add_arguments(_add(commands, "export", "the model of a saved state", export.DESCRIPTION))
    compare.add_arguments(_add(commands, "compare", "runs beside each other", compare.DESCRIPTION))
    rollouts.add_arguments(_add(commands, "rollouts", "conversations of a run", rollouts.DESCRIPTION))
    sft.add_arguments(_add(commands, "sft", "supervised fine-tuning on this machine", sft.DESCRIPTION))


def _add_environments(commands: Any) -> None:
    """What plays environments without training."""
    from quartet.cli.baseline import arguments as baseline
    from quartet.cli.env import arguments as environments
    from quartet.cli.eval import arguments as evaluation
    from quartet.cli.gepa import arguments as gepa

    evaluation.add_arguments(
        _add(commands, "eval", "measure a model on environments", evaluation.DESCRIPTION)
    )
    environments.add_arguments(
        _add(commands, "env", "make, install, describe, check environments", environments.DESCRIPTION)
    )
    baseline.add_arguments(
        _add(commands, "baseline", "too hard, too easy, or fit to train on", baseline.DESCRIPTION)
    )
    gepa.add_arguments(_add(commands, "gepa", "improve an environment's system prompt", gepa.DESCRIPTION))


def _add_models(commands: Any) -> None:
    """What makes a model of nothing."""
    from quartet.cli.tiny import command as tiny

    kinds = _add(commands, "model", "make a model")
    models = kinds.add_subparsers(dest="model_command", required=True, metavar="KIND")
    tiny.add_arguments(_add(models, "tiny", "a small Qwen3 with its tokenizer, trained here", tiny.__doc__))


def _add_clients(commands: Any) -> None:
    """What asks an orchestrator that is elsewhere."""
    from quartet.cli import clients, delete, follow, reaching
    from quartet.cli.eval.arguments import add_keys

    for name, text, takes_run in (
        ("submit", "hand a run (@ run.toml --key value) to an orchestrator", False),
        ("watch", "follow a run", True),
        ("evaluate", "measure a run's policy now (@ evaluation.toml --key value)", True),
        ("runs", "list the runs of an orchestrator", False),
        ("stop", "stop a run after the step under way", True),
        ("resume", "go on with a run that was stopped, or failed before it sampled", True),
        ("delete", "remove runs that have ended: their journals, their states at the trainer", False),
    ):
        client = _add(commands, name, text)
        reaching.add_arguments(client, takes_run=takes_run)
        if name == "submit":
            client.add_argument("--run-id", help="name of the run (default: run-<time>)")
            client.add_argument("--dry-run", action="store_true", help="only check")
        if name == "evaluate":
            add_keys(client, clients.EVALUATE_KEYS)
        if name == "runs":
            client.add_argument("--services", action="store_true", help="also each service and its build")
            client.add_argument(
                "--environments",
                action="store_true",
                help="also the environments of each run, with their digests",
            )
        if name == "delete":
            delete.add_arguments(client)
        if name == "watch":
            follow.add_arguments(client)


def main(argv: list[str] | None = None) -> int:
    """The command. Returns the exit code."""
    hold_closed()
    escape_unknown()
    os.environ.update(past_proxies(os.environ))
    try:
        words = sys.argv[1:] if argv is None else argv
        if not words:
            say(USUAL.rstrip("\n"), sys.stderr)
            return exits.REFUSED
        options, rest = build_parser().parse_known_args(
            tables_hidden(words) if words[0] == "submit" else words
        )
        code = dispatch(options, tables_shown(rest))
        sys.stdout.flush()
        return code
    except ConfigError as error:
        say(f"error: {error}", sys.stderr)
        return exits.REFUSED
    except (QuartetError, ServiceFailed) as error:
        say(f"error: {error}", sys.stderr)
        refused = isinstance(error, QuartetError) and error.reason in REFUSALS
        return exits.REFUSED if refused else exits.FAILED
    except OSError as error:  # a full disk, a folder that may not be written
        if error.errno in NOBODY_READS and has_no_reader(sys.stdout):
            unread(sys.stdout)
            return exits.FAILED
        where = f"{error.filename}: " if error.filename else ""
        say(f"error: {where}{error.strerror or error}", sys.stderr)
        return exits.FAILED
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except RuntimeError as error:  # as above, of what the command imports
        if isinstance(error.__cause__, KeyboardInterrupt):
            return exits.INTERRUPTED
        raise


if __name__ == "__main__":
    sys.exit(main())
