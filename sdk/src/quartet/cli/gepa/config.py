"""What is optimised: the TOML of `quartet gepa @ file.toml`, with the options of Verifiers' own command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from quartet.cli.eval.config import AnswererConfig
from quartet.cli.eval.other_flags import OF_A_GEPA_FILE
from quartet.run.hosted import HostedConfig
from quartet.run.values import Number, PositiveCount, Seed, Text

#: Settings that stand in metadata.json under the names of their keys, and may not change on a resume.
KEPT = ("num_train", "num_val", "minibatch_size", "perfect_score", "state_columns", "initial_prompt", "seed")
#: All that may not, by the names that they have there: how the command calls each.
SETTINGS = {
    "env_id": "env.id",
    "env_args": "env.args",
    "model": "model",
    "base_url": "base_url",
    "reflection_model": "reflection_model",
    "sampling_args": "sampling",
    **{key: key for key in KEPT},
}


class GepaConfig(AnswererConfig):
    """One environment, the model whose prompt it is, and the model that reflects."""

    OTHER_NAMES: ClassVar = OF_A_GEPA_FILE

    env: HostedConfig | None = None
    #: Of the file of endpoints, or at reflection_base_url; empty: the model itself.
    reflection_model: str = ""
    reflection_base_url: str = ""
    reflection_api_key_var: str = "OPENAI_API_KEY"
    reflection_max_tokens: PositiveCount = 4096
    #: Rollouts in all, before and after a resume together.
    max_calls: PositiveCount = 500
    num_train: PositiveCount = 100
    num_val: PositiveCount = 50
    #: Examples looked at together in one reflection.
    minibatch_size: PositiveCount = 3
    #: A minibatch that earns it everywhere is not reflected on.
    perfect_score: Number | None = None
    #: Further columns of a rollout for the reflecting model: metrics, rewards, fields of the task.
    state_columns: Annotated[tuple[Text, ...], Field(max_length=64)] = ()
    seed: Seed = 0
    #: A file with the prompt to begin with; default: the environment's own.
    initial_prompt: Path | None = None
