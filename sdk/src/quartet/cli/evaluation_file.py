"""The file of an evaluation that is asked of a run (`quartet evaluate RUN @ file.toml`).

1. A run's own file is refused as that: what it says the run that is there says already, and each of its keys
   would be told as unknown. So is a file of `quartet eval`, which says the environments in other tables.
"""

from __future__ import annotations

from typing import Any, Final

from quartet.config import ConfigError
from quartet.config.load import read_toml

#: Keys that no evaluation has, and every run one of.
OF_A_RUN: Final = frozenset({"algorithm", "batch_size", "learning_rate", "max_steps", "model", "trainer"})


def read_evaluation(path: str) -> dict[str, Any]:
    """Its tables. Raises ConfigError."""
    table = read_toml(path)
    if isinstance(table.get("eval"), list) or "ablation" in table:  # of a run's file it is one table
        raise ConfigError(
            f"config file {path!r} is one of 'quartet eval'; write [[env]] for [[eval]], and leave out who "
            "answers: here it is the run's policy ('quartet keys --of evaluation' lists what may be)"
        )
    if any(key.replace("-", "_") in OF_A_RUN for key in table):
        raise ConfigError(
            f"config file {path!r} is a run's, and an evaluation is of a run that is there: leave the file "
            "out, what is not said is as that run says ('quartet keys --of evaluation' lists what may be)"
        )
    return table
