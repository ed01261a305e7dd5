"""Where a rollout's CPU time went, and what was done about it (benchmarks/envhost.py measures it).

- pydantic reads the signature of a default factory anew for every `model_construct`, and Verifiers builds
its trace nodes that way: three per turn, a third of a rollout's CPU. The answer depends on the factory
alone, so it is remembered. - The garbage collector walks the hundred thousands of objects that verifiers
and its imports leave; they are frozen.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

from pydantic._internal import _fields


def remember_default_factories() -> None:
    """Cache pydantic's inspection of default factories for the life of this process."""
    internals: Any = _fields
    internals.takes_validated_data_argument = functools.lru_cache(maxsize=4096)(
        internals.takes_validated_data_argument
    )


def freeze_heap() -> None:
    """Take what was loaded so far out of garbage collection."""
    gc.collect()
    gc.freeze()
