"""Problems from elsewhere: a JSON Lines file, or a dataset of the hub by the `datasets` library.

Where rows have a difficulty (`difficulty_key`, an average reward), those outside its bounds are left out.
The order is the source's, or shuffled by `seed`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_rows(config: Any, split: str) -> list[tuple[str, str]]:
    """Questions and answers of a split, by the arguments of the environment; a file has no splits. Raises
    ValueError."""
    file = Path(config.dataset_name)
    rows = list(_lines(file) if file.is_file() else _hub(config, split))
    if config.shuffle:
        random.Random(config.seed).shuffle(rows)
    found = []
    for row in rows:
        missing = [key for key in (config.question_key, config.answer_key) if key not in row]
        if missing:
            raise ValueError(f"{config.dataset_name}: a row has no {missing[0]!r}; it has {', '.join(row)}")
        difficulty = row[config.difficulty_key] if config.difficulty_key else config.min_avg_reward
        if config.min_avg_reward <= difficulty <= config.max_avg_reward:
            found.append((str(row[config.question_key]), str(row[config.answer_key])))
    return found


def _lines(file: Path) -> Iterable[dict[str, Any]]:
    return (json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip())


def _hub(config: Any, split: str) -> Iterable[dict[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"dataset_name = {config.dataset_name!r} is no file; for a dataset of the hub "
            "install 'math-python[hub]'"
        ) from error
    return load_dataset(config.dataset_name, config.dataset_subset, split=split)
