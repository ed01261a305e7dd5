"""The arguments of an environment, as a request has them: `args_json`.

1. They are one JSON object of at most MAX_ARGS_BYTES, else INVALID_CONFIG with what to write.
2. Equal ones are written alike, however the request wrote them: they name one pool of workers.
"""

from __future__ import annotations

import json
from typing import Any, Final

from quartet.errors import QuartetError
from quartet.v1 import envhost_service_pb2

#: Written as JSON; with the host's own settings they go to a worker in one frame (frames.py).
MAX_ARGS_BYTES: Final = 3 * 1024 * 1024


def read(ref: envhost_service_pb2.EnvironmentRef) -> tuple[dict[str, Any], str]:
    """The arguments, and equal ones always written alike. Raises INVALID_CONFIG."""
    remedy = 'write the arguments as a JSON object, such as {"num_train": 100}'
    try:
        args = json.loads(ref.args_json or "{}")
        written = json.dumps(args, sort_keys=True)
    except (ValueError, RecursionError) as error:  # nested too deeply is no JSON for this reader
        text = f"the arguments of {ref.id!r} are not JSON: {error}; {remedy}"
        raise QuartetError(
            "INVALID_CONFIG", text, key="args_json", value=ref.args_json, remedy=remedy
        ) from error
    if not isinstance(args, dict):
        text = f"the arguments of {ref.id!r} are not an object; {remedy}"
        raise QuartetError("INVALID_CONFIG", text, key="args_json", value=ref.args_json, remedy=remedy)
    # As they came, and as a worker is told them: numbers and accents may be longer there.
    size = max(len(ref.args_json.encode()), len(written))
    if size > MAX_ARGS_BYTES:
        remedy = f"at most {MAX_ARGS_BYTES} bytes; name a file instead"
        text = f"the arguments of {ref.id!r} have {size} bytes; {remedy}"
        raise QuartetError("INVALID_CONFIG", text, key="args_json", value=size, remedy=remedy)
    return args, written
