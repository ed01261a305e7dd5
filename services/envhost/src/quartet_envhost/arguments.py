"""The refusal of an argument that an environment does not take, for both generations of Verifiers."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from quartet.errors import QuartetError
from quartet.run.config import EnvConfig, RunConfig
from quartet.run.sampling import SamplingConfig

#: Keys that stand beside `args` where a file of others has them in it, and where they stand here.
_ELSEWHERE = (
    dict.fromkeys(SamplingConfig.model_fields, "a key of [sampling]")
    | dict.fromkeys(EnvConfig.model_fields, "a key of [[env]], beside 'args'")
    | dict.fromkeys(RunConfig.model_fields, "a key of the run, at the top of its file")
)


def not_taken(env_id: str, name: str, known: Collection[str]) -> QuartetError:
    """INVALID_CONFIG, with what was meant, as far as that can be told."""
    close = difflib.get_close_matches(name, known, n=1)
    if name in _ELSEWHERE:
        remedy = f"it is {_ELSEWHERE[name]}"
    elif close:
        remedy = f"did you mean {close[0]!r}?"
    else:
        remedy = f"it takes {', '.join(sorted(known)) or 'none'}"
    text = f"environment {env_id!r} takes no argument {name!r}; {remedy}"
    return QuartetError("INVALID_CONFIG", text, key=f"args.{name}", value="", remedy=remedy)
