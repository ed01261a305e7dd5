"""Ablations: one [[ablation]] of a file is an evaluation for each combination of the values in its `sweep`.

As Verifiers' `vf-eval` has it: `sweep` names keys of an [[eval]] with a list of values for each, arguments of
the environment in `sweep.args`, and how to sample in `sweep.sampling` or beside the others (`temperature`).

1. Nothing is swept that is also said once; no list is empty.
2. At most MAX_ENVIRONMENTS combinations, each with a name that says what it is, and a folder of its own.

Pure. Raises ValueError.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Final

from quartet.run.hosted import MAX_ENVIRONMENTS

# Tables whose keys are swept, not they themselves.
TABLES: Final = ("args", "sampling")
# Longer values are told by their place in the list, and those of which folders would have one name (such as
# of scripts that these are not written in): names become folders.
MAX_VALUE_CHARS: Final = 40

Path = tuple[str, ...]


def combinations(
    fixed: Mapping[str, Any], sweep: Mapping[str, Any], sampling: Collection[str]
) -> list[dict[str, Any]]:
    """The tables of the evaluations; `sampling` are the keys of that table."""
    lists = _lists(sweep, sampling)
    count = math.prod(map(len, lists.values()))
    if count > MAX_ENVIRONMENTS:
        raise ValueError(f"sweep has {count} combinations; at most {MAX_ENVIRONMENTS} are evaluated at once")
    for path in lists:
        if path[-1] in (fixed.get(path[0], {}) if len(path) > 1 else fixed):
            raise ValueError(f"{'.'.join(path)} is said once, and swept, too; say it in one place")
    made, told = [], {path: _told(values) for path, values in lists.items()}
    for places in itertools.product(*(range(len(values)) for values in lists.values())):
        table = {**fixed, **{name: dict(fixed.get(name, {})) for name in TABLES}}
        said = [str(fixed.get("name", fixed["id"]))]
        for (path, values), place in zip(lists.items(), places, strict=True):
            (table[path[0]] if len(path) > 1 else table)[path[-1]] = values[place]
            said.append(f"{path[-1]}={told[path][place]}")
        made.append(table | {"name": " ".join(said)})
    return made


def _lists(sweep: Mapping[str, Any], sampling: Collection[str]) -> dict[Path, list[Any]]:
    lists: dict[Path, Any] = {}
    for key, values in sweep.items():
        if key in TABLES:
            if not isinstance(values, dict):
                raise ValueError(f"sweep.{key} is a table of lists; write [ablation.sweep.{key}]")
            lists.update({(key, name): one for name, one in values.items()})
        elif key in sampling:
            lists["sampling", key] = values
        else:
            lists[key,] = values
    if not lists:
        raise ValueError("sweep names nothing; write [ablation.sweep] with a list of values for a key")
    for path, values in lists.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"sweep.{'.'.join(path)} = {values!r} is no list of values")
    return lists


def for_a_folder(text: str) -> str:
    """A text as a part of the name of a folder."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "--", text)


def _told(values: list[Any]) -> list[str]:
    """Each as a name has it."""
    texts = [value if isinstance(value, str) else json.dumps(value, default=str) for value in values]
    parts = [for_a_folder(f"={text} ") for text in texts]
    alike = Counter(dict(zip(texts, parts, strict=True)).values())
    return [
        text if len(text) <= MAX_VALUE_CHARS and alike[part] == 1 else f"#{place}"
        for place, (text, part) in enumerate(zip(texts, parts, strict=True), start=1)
    ]
