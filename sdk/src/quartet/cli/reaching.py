"""The orchestrator that a command speaks to, which is elsewhere: its address, the channel to it, and what is
said where it does not answer.

1. What the orchestrator says cannot be asked for (INVALID_REQUEST) is a refusal, as what is refused here.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable

import grpc

from quartet.cli.variables import ADDRESS, VARIABLES, Whereabouts, whereabouts
from quartet.config import ConfigError
from quartet.config.load import validate
from quartet.errors import QuartetError
from quartet.kit.channel import ClientSecurity, connect
from quartet.kit.expiry import watched
from quartet.kit.security import check_client
from quartet.unreachable import (
    ANOTHER_NAME,
    CLOSED,
    PLAINTEXT_THERE,
    UNKNOWN_AUTHORITY,
    has_no_address,
    is_of_tls,
    listens,
    was_not_made,
    with_remedies,
)
from quartet.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub

#: What these commands have for an address that is not on this machine.
TO_ELSEWHERE = (
    "give --ca-file, or reach it by a tunnel that begins on this machine; "
    "--insecure-ok-off-loopback on a private network"
)
#: Why no connection was made, and what to write here, where keys of a configuration have options.
REMEDIES = {
    PLAINTEXT_THERE: "leave --ca-file out",
    UNKNOWN_AUTHORITY: "give --ca-file the one that signed it",
    ANOTHER_NAME: "call it by a name that its certificate has",
}

Client = Callable[[OrchestratorServiceStub, argparse.Namespace, list[str]], Awaitable[int]]


def add_arguments(parser: argparse.ArgumentParser, *, takes_run: bool) -> None:
    """Where the orchestrator is, and which run."""
    if takes_run:
        parser.add_argument("run", help="id of the run")
    add_address(parser)


def add_address(parser: argparse.ArgumentParser) -> None:
    """Where the orchestrator is, and how it is spoken to; what is left out, the environment may say."""
    parser.add_argument(
        f"--{ADDRESS}", metavar="HOST:PORT", help=f"address of the orchestrator (or {VARIABLES[ADDRESS]})"
    )
    for name, text in (
        ("ca-file", "certificate authority of the orchestrator's certificate; switches TLS on"),
        ("cert-file", "own certificate, for an orchestrator that asks for one"),
        ("key-file", "its key"),
        ("token-file", "file with the bearer token; of your own quartet rl on this machine it is found"),
    ):
        variable = VARIABLES[name.replace("-", "_")]
        parser.add_argument(f"--{name}", help=f"{text} (or {variable})")
    parser.add_argument(
        "--insecure-ok-off-loopback",
        action="store_true",
        help="speak plaintext to an orchestrator on a private network",
    )


def run(client: Client, options: argparse.Namespace, rest: list[str]) -> int:
    """Connect and let the client do its work."""
    return asyncio.run(_connected(client, options, rest))


async def _connected(client: Client, options: argparse.Namespace, rest: list[str]) -> int:
    where = whereabouts(options)
    security = _security(where, options.insecure_ok_off_loopback)
    try:
        check_client(where.address, security)
    except ConfigError as error:
        told = str(error).replace(error.remedy, TO_ELSEWHERE) if error.remedy else str(error)
        raise ConfigError(f"{where.said_by}: {told}") from None
    async with _opened(where, security) as channel:
        stub = OrchestratorServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            return await client(stub, options, rest)
        except QuartetError as error:
            if error.reason == "INVALID_REQUEST":
                raise ConfigError(error.message) from error
            if error.reason == "UNAUTHENTICATED" and where.read:
                raise QuartetError(error.reason, error.message + where.told) from error
            if "grpc_code" not in error.metadata or error.reason not in ("NOT_READY", "DEADLINE"):
                raise
            closed = _wanted(where, security)
            told, hint = with_remedies(error.message, {**REMEDIES, CLOSED: f"if it has TLS, {closed}"}), ""
            refused = was_not_made(error.message) and not has_no_address(error.message)
            if refused and not is_of_tls(error.message) and await listens(where.address):
                hint = (
                    "; somebody listens there: it is just starting (ask again), or the handshake failed: if "
                    f"it has TLS, {closed}"
                )
            raise QuartetError(
                error.reason, f"no orchestrator answers at {where.address} ({told}){hint}{where.told}"
            ) from error


def _wanted(where: Whereabouts, security: ClientSecurity) -> str:
    """What one with TLS may have missed that closed the connection."""
    if not security.encrypted:
        return "give --ca-file"
    if security.cert_file is None:
        return "give --cert-file and --key-file"
    shown_by = where.read.get("cert_file", "--cert-file")
    validity = watched(security.cert_file).validity
    if validity is not None and validity.has_expired:
        return f"it takes no certificate that has expired, as that of {shown_by} has at {validity.end}"
    return f"the certificate of {shown_by} may be of an authority that its client_ca_file does not name"


def _security(where: Whereabouts, insecure_ok_off_loopback: bool) -> ClientSecurity:
    given = {**where.files, "insecure_ok_off_loopback": insecure_ok_off_loopback}
    try:
        return validate(ClientSecurity, given)
    except ConfigError as error:
        raise ConfigError(where.named(str(error))) from None


def _opened(where: Whereabouts, security: ClientSecurity) -> grpc.aio.Channel:
    try:
        return connect(where.address, security=security)
    except ConfigError as error:  # a file that cannot be read
        raise ConfigError(where.named(str(error))) from None
