"""A classic environment for tests that does not load, in the way that its `kind` says. It has no use for
Verifiers, whose classes cost a worker a second of CPU."""

import asyncio
import sys


def load_environment(kind: str = "forgets to return"):
    if kind == "broken":
        raise FileNotFoundError("no data here")
    if kind == "quits":
        sys.exit("no data, no program")
    if kind == "is async":
        return asyncio.sleep(0)
