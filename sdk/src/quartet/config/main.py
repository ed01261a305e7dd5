"""The body of every service's `__main__`.

1. Exit code 0 for a finished or a dry run; 2, with a sentence on stderr for each thing that is wrong,
   for a configuration that is refused.
2. `--dry-run` looks at the configuration alone, so that a deployment's files can be checked anywhere.
   `--preflight` also looks at this machine (ports, folders, secrets), starting and making nothing.
3. A service that is to run looks at this machine first, too: what it would find after loading for minutes, a
   port in use, is told at once.
4. A service that runs may open as many files as the system lets it: a thousand rollouts hold more than a
   shell's limit, in an environment's processes as in a server.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from quartet.config.load import Draft, load, usage
from quartet.config.model import Config, ConfigError
from quartet.kit.limits import raise_open_files
from quartet.kit.standard_streams import hold_closed, unread

C = TypeVar("C", bound=Config)

EXIT_CONFIG = 2
FLAGS = ("--dry-run", "--preflight", "--help")


def main(
    model: type[C],
    run: Callable[[C], None],
    argv: list[str] | None = None,
    *,
    preflight: Callable[[C], None] | None = None,
) -> int:
    """Load the configuration, then print it (`--dry-run`, `--preflight`) or run. Returns the exit code.

    `preflight` raises ConfigError where this machine cannot do what the configuration asks of it.
    """
    arguments = sys.argv[1:] if argv is None else argv
    hold_closed()
    try:
        if "--help" in arguments or "-h" in arguments:
            return _say(usage(model))
        loaded = load(model, arguments, Draft(flags=FLAGS))
        if preflight is not None and not loaded.dry_run:
            preflight(loaded.config)
        if loaded.dry_run or loaded.preflight:
            return _say(loaded.config.model_dump_json(indent=2))
        raise_open_files()
        run(loaded.config)
    except ConfigError as error:
        return _refuse(error)
    except BaseExceptionGroup as group:
        # A task group inside run() wraps what its children raise.
        refused, rest = group.split(ConfigError)
        if refused is None or rest is not None:
            raise
        return _refuse(_first(refused))
    return 0


def _say(text: str) -> int:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head`
        unread(sys.stdout)
        return 1
    return 0


def _refuse(error: BaseException) -> int:
    print(f"error: {error}", file=sys.stderr)
    return EXIT_CONFIG


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
