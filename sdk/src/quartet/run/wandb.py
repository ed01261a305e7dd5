"""The [wandb] table: a run in Weights & Biases.

It belongs to whoever follows the run (`quartet rl`, `quartet watch`), not to the run: another one, or none,
is the same run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from quartet.config import Config
from quartet.config.model import rule
from quartet.run.values import PositiveCount, Text

#: What Weights & Biases takes.
MAX_PROJECT = 128
MAX_TAG = 64
NOT_IN_PROJECT = "/\\#?%:"
#: A table is uploaded whole; a person reads a few conversations of a step.
MAX_COMPLETIONS = 256


class WandbConfig(Config):
    """Where the run is shown, once `project` is given."""

    #: What switches it on.
    project: Annotated[str, Field(min_length=1, max_length=MAX_PROJECT)] | None = None
    #: Of the run there; default: its name here.
    name: Text | None = None
    #: The user or team that the project belongs to; default: the account's own.
    entity: Text | None = None
    #: Of runs that belong together there.
    group: Text | None = None
    #: What it is found by there.
    tags: tuple[Annotated[str, Field(min_length=1, max_length=MAX_TAG)], ...] = ()
    #: offline: only written down, for `wandb sync`; disabled: not at all; default: what WANDB_MODE says, or
    #: online.
    mode: Literal["online", "offline", "disabled"] | None = None
    #: Conversations of a table; 0: none go along.
    completions: Annotated[int, Field(ge=0, le=MAX_COMPLETIONS, strict=True)] = 8
    #: Steps from one table to the next.
    completions_interval: PositiveCount = 10

    def mode_in(self, environment: Mapping[str, str]) -> Literal["online", "offline", "disabled"]:
        """How to report where the environment has these variables."""
        if self.project is None:
            return "disabled"
        if self.mode is not None:
            return self.mode
        match environment.get("WANDB_MODE"):
            case "offline" | "dryrun":
                return "offline"
            case "disabled":
                return "disabled"
        return "online"

    @pydantic.field_validator("project")
    @classmethod
    def _is_a_name(cls, project: str | None) -> str | None:
        wrong = sorted({char for char in project or "" if char in NOT_IN_PROJECT})
        if wrong:
            raise ValueError(
                f"a project's name has no {' '.join(wrong)}; the user or team before it is wandb.entity"
            )
        return project

    @rule
    def _has_a_project(self) -> Iterator[str]:
        given = [
            key for key, info in type(self).model_fields.items() if getattr(self, key) != info.get_default()
        ]
        if given and self.project is None and self.mode != "disabled":
            yield f"wandb.{given[0]} is set, and wandb.project is not; set it, or remove [wandb]"
