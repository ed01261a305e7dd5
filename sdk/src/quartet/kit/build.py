"""Which code a process runs: its release, and digests of the source files that it was started from.

1. Equal files have equal digests, wherever they were installed from: a checkout, a wheel, an image. The
   number of a release says nothing of an image that was built again.
2. The SDK is in every service, so its digest tells whether two services are of one build; a service has one
   of its own package besides.
3. A service tells it with every answer of its health (metadata METADATA_KEY), in its first line of log, and
   to Prometheus. `ask` asks: of one that does not tell, an earlier release or a program of somebody else's,
   the build is UNKNOWN.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import grpc
import prometheus_client
import xxhash
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet.errors import from_rpc

METADATA_KEY: Final = "quartet-build"
SDK: Final = "quartet"
#: Of what nobody installed.
NO_RELEASE: Final = "unknown"
#: Of 16 hexadecimal digits; two builds of one machine park are told apart by fewer.
DIGITS: Final = 12

INFO: Final = prometheus_client.Gauge(
    "quartet_build_info", "What a service runs.", ["service", "version", "build", "sdk", "python", "torch"]
)


@dataclass(frozen=True)
class Build:
    """What is told of the code of a process."""

    release: str
    sdk: str
    #: Of the service's own package; empty where it has none.
    own: str = ""

    def __str__(self) -> str:
        """For a person."""
        own = f", own {self.own}" if self.own else ""
        return f"{self.release} (sdk {self.sdk}{own})"

    @property
    def text(self) -> str:
        """On the wire."""
        return f"{self.release} {self.sdk} {self.own}".strip()


UNKNOWN: Final = Build("", "")


@cache
def build_of(package: str = SDK) -> Build:
    """Of a process that runs a package; read off the files once. None is imported for it."""
    sdk = _digest(Path(__file__).parents[1])
    if package == SDK:
        return Build(release_of(SDK), sdk)
    places = getattr(sys.modules.get(package), "__path__", [])
    return Build(_release(package) or release_of(SDK), sdk, _digest(*map(Path, places)) if places else "")


def of_servicer(servicer: object) -> Build:
    """Of the service that serves it."""
    return build_of(type(servicer).__module__.partition(".")[0])


def scraped(service: str, build: Build) -> None:
    """Let Prometheus know. torch is named where the process has it already."""
    torch = getattr(sys.modules.get("torch"), "__version__", "")
    labels = (service, build.release, build.own, build.sdk, platform.python_version(), str(torch))
    INFO.labels(*labels).set(1)


@dataclass(frozen=True)
class Answer:
    """What a service says of itself."""

    build: Build = UNKNOWN
    ready: bool = False
    #: Why it said nothing; empty where it did.
    error: str = ""


async def ask(channel: grpc.aio.Channel, timeout_s: float) -> Answer:
    """The service at the end of a channel."""
    call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    try:
        response = await call
        trailers: Any = await call.trailing_metadata()
    except grpc.RpcError as error:
        return Answer(error=from_rpc(error).message)
    told = dict(trailers or ()).get(METADATA_KEY, "").split(" ")
    build = Build(*told) if 2 <= len(told) <= 3 else UNKNOWN
    return Answer(build, response.status == health_pb2.HealthCheckResponse.SERVING)


def release_of(package: str) -> str:
    """What is installed; NO_RELEASE where it is only found."""
    return _release(package) or NO_RELEASE


def _release(package: str) -> str:
    try:
        return version(package.replace("_", "-"))
    except PackageNotFoundError:  # found by PYTHONPATH alone
        return ""


def _digest(*folders: Path) -> str:
    digest = xxhash.xxh3_64()
    for folder in folders:
        # No link to nowhere, as an editor locks a file with.
        for file in sorted(file for file in folder.rglob("*.py") if file.is_file()):
            digest.update(f"{file.relative_to(folder).as_posix()}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:DIGITS]
