"""`quartet delete RUN ...`: removes runs that rest from an orchestrator, and their states from the trainer.

1. What would go is told before anything does, and somebody at a terminal has to say yes; --yes says it
   beforehand. Where there is no terminal and no --yes nothing is deleted, and nobody is asked anything: all
   that the command lacks is told at once.
2. Nobody is asked inside the event loop: Ctrl-C ends the question, and nothing was deleted.
3. Of several, none is deleted where one cannot be. What goes is told of each, as it is gone.
4. Where the answer was lost on the way it is asked again, for LOST_SECONDS: a run that is unknown then, and
   was there before, is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from quartet.cli import clients, exits, reaching
from quartet.cli.variables import whereabouts
from quartet.config import ConfigError
from quartet.config.refusals import gathered, together
from quartet.counted import counted
from quartet.errors import QuartetError
from quartet.kit.awake import awake_s
from quartet.kit.call import unary
from quartet.unreachable import was_not_made
from quartet.v1.orchestrator_service_pb2 import DeleteRunRequest, DeleteRunResponse
from quartet.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub

#: Above what the orchestrator gives the trainer to remove terabytes from a slow disk.
DELETE_SECONDS = 700.0
#: An orchestrator that was ended over it is started again by then.
LOST_SECONDS = 60.0
AGAIN_SECONDS = 1.0


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
    # Also of one that is not asked about: nobody deletes what never was.
    found = [_asked(options, rest, run, dry_run=True) or DeleteRunResponse() for run in runs]
    if not options.yes and not _says_yes(f"delete {named} for good: {_told(*found)}? [y/N] "):
        print("nothing was deleted", file=sys.stderr)
        return exits.FAILED
    for run in runs:
        gone = _asked(options, rest, run, dry_run=False)
        what = "the answer that tells what it had was lost" if gone is None else _told(gone)
        print(f"run {run!r} is deleted: {what}", flush=True)
    return exits.DONE


def _asked(
    options: argparse.Namespace, rest: list[str], run: str, *, dry_run: bool
) -> DeleteRunResponse | None:
    """What goes. None where it is gone and the answer was lost."""
    found: list[DeleteRunResponse] = []

    async def ask(stub: OrchestratorServiceStub, options: argparse.Namespace, rest: list[str]) -> int:
        request = DeleteRunRequest(run_id=run, dry_run=dry_run)
        timeout_s = clients.CALL_SECONDS if dry_run else DELETE_SECONDS
        lost_at: float | None = None
        while True:
            try:
                found.append(await unary(stub.DeleteRun, request, timeout_s=timeout_s))
            except QuartetError as error:
                if error.reason == "RUN_UNKNOWN" and lost_at is not None:
                    return exits.DONE
                # One that could not be called has not begun with it.
                called = "grpc_code" in error.metadata and not was_not_made(error.message)
                if lost_at is None and called and not dry_run:
                    lost_at = awake_s()
                if error.reason != "NOT_READY" or lost_at is None or awake_s() - lost_at > LOST_SECONDS:
                    raise
                await asyncio.sleep(AGAIN_SECONDS)
            else:
                return exits.DONE

    reaching.run(ask, options, rest)
    return found[0] if found else None


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
