"""Asks a service for its health: `python -m quartet.kit.probe --address H:P [--service S]`; exit 0 when
SERVING, else 1.

Services: "" (ready, the default), "liveness", or a full service name. Made for container health checks and
scripts. Liveness is not denied, exit 0, to a process that takes connections and cannot be asked because the
certificate shown has expired: its calls go on upon the connections that stand, and to be started again brings
it no other one.
"""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet.config import ConfigError, validate
from quartet.kit.expiry import validity_of
from quartet.kit.health import LIVENESS
from quartet.kit.options import client_options
from quartet.kit.security import ClientSecurity, client_credentials
from quartet.unreachable import explained


def main(argv: list[str] | None = None) -> int:
    """Probe once and say the outcome in one line."""
    parser = argparse.ArgumentParser(
        prog="python -m quartet.kit.probe", description="Ask a service for its health."
    )
    parser.add_argument("--address", required=True, help="host:port")
    parser.add_argument("--service", default="", help='"" (ready), "liveness", or a full service name')
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds (default 3)")
    parser.add_argument("--ca-file", type=Path, help="use TLS and trust this CA")
    parser.add_argument("--cert-file", type=Path, help="client certificate")
    parser.add_argument("--key-file", type=Path, help="its key")
    parser.add_argument("--server-name", default="", help="name in the server's certificate, if not the host")
    asked = parser.parse_args(argv)
    try:
        names = ("ca_file", "cert_file", "key_file", "server_name")
        security = validate(ClientSecurity, {name: getattr(asked, name) for name in names})
        status = _check(asked.address, asked.service, asked.timeout, security)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(status)
    unasked = status.startswith(grpc.StatusCode.UNAVAILABLE.name) and _takes(asked.address, asked.timeout)
    if asked.service == LIVENESS and unasked and _has_expired(security.cert_file):
        print(f"passed over: the certificate {security.cert_file} has expired; put a new pair in its place")
        return 0
    return 0 if status == "SERVING" else 1


def _takes(address: str, timeout_s: float) -> bool:
    """Whether somebody takes a connection there."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s):
            return True
    except (OSError, ValueError):
        return False


def _has_expired(cert_file: Path | None) -> bool:
    validity = validity_of(cert_file.read_bytes()) if cert_file else None
    return validity is not None and validity.has_expired


def _check(address: str, service: str, timeout_s: float, security: ClientSecurity) -> str:
    options = client_options(server_name=security.server_name)
    # A health question holds no secret, so plaintext is fine wherever the server accepts it.
    channel = (
        grpc.secure_channel(address, client_credentials(security), options)
        if security.encrypted
        else grpc.insecure_channel(address, options)
    )
    with channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {explained(error.details() or '')}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


if __name__ == "__main__":
    sys.exit(main())
