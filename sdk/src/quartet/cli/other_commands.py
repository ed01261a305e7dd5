"""Commands and flags of Verifiers' and prime-rl's command lines: those that are called otherwise here, for
refusals that say what to write, and one that means two things. Those of `vf-eval` and `vf-gepa` are in
quartet.cli.eval.other_flags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: What each command is called here, behind `quartet`.
COMMANDS: Mapping[str, str] = {
    "lab": "init",
    "setup": "init",
    "vf-setup": "init",
    "prime-rl": "rl",
    "vf-rl": "rl",
    "train": "rl",
    "vf-init": "env init",
    "vf-install": "env install",
    "vf-eval": "eval",
    "vf-gepa": "gepa",
    "vf-tui": "rollouts",
    "tmux": "panes",
    "evals": "eval",
}
#: prime-rl's programs of one service each.
PROGRAMS: Mapping[str, str] = {
    "trainer": "quartet_trainer",
    "orchestrator": "quartet_orchestrator",
    "inference": "quartet_inference",
    "env-server": "quartet_envhost",
}

_FROM_REPO = (
    "a package of a repository is 'NAME @ git+https://HOST/REPOSITORY#subdirectory=environments/NAME'; what "
    "'quartet env list' shows is installed"
)
#: Of a command, what to write in place of each flag.
FLAGS: Mapping[str, Mapping[str, str]] = {
    "init": {"--prime-rl": "leave it out: the files in configs/rl are what prime-rl's workspace has"},
    "env install": {"--from-repo": _FROM_REPO, "-r": _FROM_REPO},
}


def here(command: str) -> str | None:
    """What a command is called here; None where it is nobody's."""
    if command in PROGRAMS:
        return f"'python -m {PROGRAMS[command]}', of a service that 'quartet rl' starts by itself"
    return f"'quartet {COMMANDS[command]}'" if command in COMMANDS else None


def instead(command: str, argument: str) -> str | None:
    """What to write in place of an argument; None where it is nobody's."""
    return FLAGS.get(command, {}).get(argument.partition("=")[0])


#: Stands for the name of a table while argparse reads; no argument has it, for no argument has a NUL.
_TABLE = "--orchestrator\0"


def tables_hidden(arguments: Sequence[str]) -> list[str]:
    """The arguments of `quartet submit`, whose `--orchestrator HOST:PORT` is an address: before an `@` it is
    prime-rl's, the table that a file is of, and argparse is not to take the `@` for the address."""
    following = [*arguments[1:], ""]
    return [
        _TABLE if word == "--orchestrator" and after.startswith("@") else word
        for word, after in zip(arguments, following, strict=True)
    ]


def tables_shown(rest: Sequence[str]) -> list[str]:
    """What argparse left of these, as it was written."""
    return ["--orchestrator" if word == _TABLE else word for word in rest]
