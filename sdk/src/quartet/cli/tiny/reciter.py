"""Tells the demonstrations of an environment package, one JSON line for each line it reads.

Run as `python -m quartet.cli.tiny.reciter ID` in the interpreter that has the package; nothing but the
standard library and the package is imported. First it writes what the course needs to know, from the module
`<package>.demonstrations`:

    {"args": {...}, "phrases": [...], "max_tokens": 32, "skill_reward": 0.9, "habit_reward": 0.4, ...}

ARGS are the environment's arguments; PHRASES texts that become one token; MAX_TOKENS of one answer;
SKILL_REWARD at which the skill is learnt, HABIT_REWARD at which the bad habit is; HABIT_SHARE of the
demonstrations show it, and it is learnt with HABIT_LEARNING_RATE.

Then it answers [seed, habit_share, count] with the next `count` conversations (lists of chat messages) of
`demonstrations(seed, habit_share)`, an endless iterator.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any


def main() -> None:
    """Answer until the input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the package prints is no answer
    package = sys.argv[1].rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    told = importlib.import_module(f"{package}.demonstrations")
    about = {
        "args": told.ARGS,
        "phrases": list(told.PHRASES),
        "max_tokens": told.MAX_TOKENS,
        "skill_reward": told.SKILL_REWARD,
        "habit_reward": told.HABIT_REWARD,
        "habit_share": told.HABIT_SHARE,
        "habit_learning_rate": told.HABIT_LEARNING_RATE,
    }
    print(json.dumps(about), file=out, flush=True)
    streams: dict[tuple[int, float], Iterator[Any]] = {}
    for line in sys.stdin:
        seed, habit_share, count = json.loads(line)
        stream = streams.get((seed, habit_share))
        if stream is None:
            stream = streams[seed, habit_share] = told.demonstrations(seed, habit_share)
        print(json.dumps(list(islice(stream, count))), file=out, flush=True)


if __name__ == "__main__":
    main()
