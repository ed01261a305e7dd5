"""Where a rollout's CPU time went, and what was done about it (benchmarks/envhost.py measures it).

- pydantic reads the signature of a default factory anew for every `model_construct`, and Verifiers builds
  its trace nodes that way: three per turn, a third of a rollout's CPU. The answer depends on the factory
  alone, so it is remembered.
- Every rollout with tools makes an HTTP client of its own for its tool server, and each would read the
  machine's certificates anew: more than half of such a rollout's CPU. They are read once.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from pydantic._internal import _fields


def remember_default_factories() -> None:
    """Cache pydantic's inspection of default factories for the life of this process."""
    internals: Any = _fields
    internals.takes_validated_data_argument = functools.lru_cache(maxsize=4096)(
        internals.takes_validated_data_argument
    )


def remember_certificates() -> None:
    """Share one TLS context among the HTTP clients of this process that use the machine's certificates."""
    transport: Any = importlib.import_module("httpcore2")
    transport.default_ssl_context = functools.lru_cache(maxsize=8)(transport.default_ssl_context)
