"""`quartet delete RUN ...`: removes runs that rest from an orchestrator, and their states from the trainer.

1. What would go is told before anything does, and somebody at a terminal has to say yes; --yes says it
   beforehand. Where there is no terminal and no --yes nothing is deleted, and nobody is asked anything: all
   that the command lacks is told at once.
2. Nobody is asked inside the event loop: Ctrl-C ends the question, and nothing was deleted.
3. Of several, none is deleted where one cannot be. What goes is told of each, as it is gone.
"""

from __future__ import annotations

import argparse
import sys

from quartet.cli import clients, exits, reaching
from quartet.cli.variables import whereabouts
from quartet.config import ConfigError
from quartet.config.refusals import gathered, together
from quartet.counted import counted
from quartet.kit.call import unary
from quartet.v1.orchestrator_service_pb2 import DeleteRunRequest, DeleteRunResponse
from quartet.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub

#: Above what the orchestrator gives the trainer to remove terabytes from a slow disk.
DELETE_SECONDS = 700.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Besides those of every client."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="id of a run")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(options: argparse.Namespace, rest: list[str]) -> int:
    """The command."""
    refused: list[ConfigError] = []
    with gathered(refused):
        whereabouts(options)
    runs = list(dict.fromkeys(options.runs))
    named = f"run{'s' if len(runs) > 1 else ''} {', '.join(map(repr, runs))}"
    if not options.yes and not sys.stdin.isatty():
        why = f"quartet delete asks at a terminal whether {named} may go, and there is none"
        refused.append(ConfigError(f"{why}; add --yes"))
    if refused:
        raise together(refused)
    if not options.yes or len(runs) > 1:
        found = [_asked(options, rest, run, dry_run=True) for run in runs]
    if not options.yes and not _says_yes(f"delete {named} for good: {_told(*found)}? [y/N] "):
        print("nothing was deleted", file=sys.stderr)
        return exits.FAILED
    for run in runs:
        print(f"run {run!r} is deleted: {_told(_asked(options, rest, run, dry_run=False))}", flush=True)
    return exits.DONE


def _asked(options: argparse.Namespace, rest: list[str], run: str, *, dry_run: bool) -> DeleteRunResponse:
    found = DeleteRunResponse()

    async def ask(stub: OrchestratorServiceStub, options: argparse.Namespace, rest: list[str]) -> int:
        request = DeleteRunRequest(run_id=run, dry_run=dry_run)
        timeout_s = clients.CALL_SECONDS if dry_run else DELETE_SECONDS
        found.CopyFrom(await unary(stub.DeleteRun, request, timeout_s=timeout_s))
        return exits.DONE

    reaching.run(ask, options, rest)
    return found


def _says_yes(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _told(*found: DeleteRunResponse) -> str:
    """What goes of all of them."""
    states = counted(sum(one.states for one in found), "state")
    journal = "its journal" if len(found) == 1 else "their journals"
    at_trainer = f"{states} at the trainer ({_size(sum(one.states_bytes for one in found))})"
    return f"{journal} ({_size(sum(one.journal_bytes for one in found))}), {at_trainer}"


def _size(size_bytes: int) -> str:
    size, units = float(size_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, _ = size / 1024, units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "bytes" else f"{size:.1f} {units[0]}"
