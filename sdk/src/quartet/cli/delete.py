"""`quartet delete RUN`: removes a run that rests from an orchestrator, and its states from the trainer.

1. What would go is told before anything does, and somebody at a terminal has to say yes; --yes says it
   beforehand. Where there is no terminal and no --yes nothing is deleted, and nobody is asked anything: all
   that the command lacks is told at once.
2. Nobody is asked inside the event loop: Ctrl-C ends the question, and nothing was deleted.
"""

from __future__ import annotations

import argparse
import sys

from quartet.cli import clients, exits
from quartet.cli.variables import whereabouts
from quartet.config import ConfigError
from quartet.config.refusals import gathered, together
from quartet.kit.call import unary
from quartet.v1.orchestrator_service_pb2 import DeleteRunRequest, DeleteRunResponse
from quartet.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub

#: Above what the orchestrator gives the trainer to remove terabytes from a slow disk.
DELETE_SECONDS = 700.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Besides those of every client."""
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(options: argparse.Namespace, rest: list[str]) -> int:
    """The command."""
    refused: list[ConfigError] = []
    with gathered(refused):
        whereabouts(options)
    if not options.yes and not sys.stdin.isatty():
        why = f"quartet delete asks at a terminal whether run {options.run!r} may go, and there is none"
        refused.append(ConfigError(f"{why}; add --yes"))
    if refused:
        raise together(refused)
    if not options.yes:
        found = _asked(options, rest, dry_run=True)
        if not _says_yes(f"delete run {options.run!r} for good: {_told(found)}? [y/N] "):
            print("nothing was deleted", file=sys.stderr)
            return exits.FAILED
    print(f"run {options.run!r} is deleted: {_told(_asked(options, rest, dry_run=False))}")
    return exits.DONE


def _asked(options: argparse.Namespace, rest: list[str], *, dry_run: bool) -> DeleteRunResponse:
    found = DeleteRunResponse()

    async def ask(stub: OrchestratorServiceStub, options: argparse.Namespace, rest: list[str]) -> int:
        request = DeleteRunRequest(run_id=options.run, dry_run=dry_run)
        timeout_s = clients.CALL_SECONDS if dry_run else DELETE_SECONDS
        found.CopyFrom(await unary(stub.DeleteRun, request, timeout_s=timeout_s))
        return exits.DONE

    clients.run(ask, options, rest)
    return found


def _says_yes(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _told(found: DeleteRunResponse) -> str:
    states = "1 state" if found.states == 1 else f"{found.states} states"
    at_trainer = f"{states} at the trainer ({_size(found.states_bytes)})"
    return f"its journal ({_size(found.journal_bytes)}), {at_trainer}"


def _size(size_bytes: int) -> str:
    size, units = float(size_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, _ = size / 1024, units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "bytes" else f"{size:.1f} {units[0]}"
