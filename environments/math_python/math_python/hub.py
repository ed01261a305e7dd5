"""Problems from elsewhere: a JSON Lines file, or a dataset of the hub by the `datasets` library.

Where rows have a difficulty (`difficulty_key`, an average reward), those outside its bounds are left out.
The order is the source's, or shuffled by `seed`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


def read_rows(config: Any, split: str) -> list[tuple[str, str]]:
    """Questions and answers of a split, by the arguments of the environment; a file has no splits. Raises
    ValueError."""
    file = Path(config.dataset_name)
    rows = list(_lines(file) if file.is_file() else enumerate(_hub(config, split), start=1))
    if config.shuffle:
        random.Random(config.seed).shuffle(rows)
    found = []
    for number, row in rows:
        place = f"{config.dataset_name}, row {number}"
        if not isinstance(row, Mapping):
            raise ValueError(
                f"{place}: it is no object with {config.question_key!r} and {config.answer_key!r}"
            )
        asked = [config.question_key, config.answer_key, *filter(None, [config.difficulty_key])]
        if missing := [key for key in asked if row.get(key) is None]:
            raise ValueError(f"{place}: it has no {missing[0]!r}; it has {', '.join(row)}")
        difficulty = row[config.difficulty_key] if config.difficulty_key else config.min_avg_reward
        if not isinstance(difficulty, int | float):
            raise ValueError(f"{place}: {config.difficulty_key} = {difficulty!r} is no number")
        if config.min_avg_reward <= difficulty <= config.max_avg_reward:
            found.append((str(row[config.question_key]), str(row[config.answer_key])))
    return found


def _lines(file: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file}, row {number}: it is no JSON ({error})") from None


def _hub(config: Any, split: str) -> Iterable[dict[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"dataset_name = {config.dataset_name!r} is no file; for a dataset of the hub "
            "install 'math-python[hub]'"
        ) from error
    return load_dataset(config.dataset_name, config.dataset_subset, split=split)
