"""What is measured of the calls of tools, as TRL's GRPOTrainer measures it.

1. Of each completion its calls are a metric (CALLS), and those whose result is an error (FAILED).
2. Of a step, or an evaluation, the share of its calls that failed is told (SHARE): all that failed by all
   that were made, which is the quotient of the two means; 0 where none was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: As TRL calls it: of its calls of a batch for each completion this is the mean.
CALLS: Final = "tools/call_frequency"
FAILED: Final = "tools/failures"
SHARE: Final = "tools/failure_frequency"


def with_share(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Means of metrics, whatever stands before their names, with the share in the place of those that
    failed."""
    found = dict(figures)
    for name in figures:
        family = name.removesuffix(FAILED)
        if family != name and family + CALLS in figures:
            failed, calls = found.pop(name), figures[family + CALLS]
            found[family + SHARE] = failed / calls if calls else 0.0
    return found
