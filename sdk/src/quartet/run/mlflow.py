"""The [mlflow] table: a run in MLflow.

It belongs to whoever follows the run (`quartet rl`, `quartet sft`, `quartet watch`), as [wandb] does: with it
or without, it is the same run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Annotated, Final
from urllib.parse import urlsplit

import pydantic
from pydantic import Field

from quartet.config import Config
from quartet.config.model import rule
from quartet.run.values import Text

#: What MLflow takes.
MAX_EXPERIMENT, MAX_NAME, MAX_TAG = 500, 250, 8000
#: What its names may not have; and it may make files of them: no empty part of a path, none that is "." or
#: "..", none at the root.
NOT_IN_NAMES: Final = re.compile(r"[^/\w.\- :]")
NO_PATH: Final = re.compile(r"^/|^\.\.|(?:^|/)\.{0,2}(?=/|$)")
#: Tags that tell which run it is, and how far it goes.
OWN_TAGS: Final = "quartet."
#: Of addresses that are no servers the client alone knows nothing.
SERVERS: Final = ("http://", "https://", "databricks")

Tag = Annotated[str, Field(max_length=MAX_TAG)]


def named(name: str) -> str:
    """As MLflow takes a name."""
    clean = NOT_IN_NAMES.sub("_", name)[:MAX_NAME]
    return NO_PATH.sub(lambda found: "_" * len(found[0]), clean) or "_"


def is_server(tracking_uri: str) -> bool:
    """Whether an address is that of a tracking server."""
    return tracking_uri.lower().startswith(SERVERS)


def _tag_name(name: str) -> str:
    if name != named(name):
        raise ValueError(f"no name for MLflow; write {named(name)!r}")
    if name.startswith(OWN_TAGS):
        raise ValueError(f"tags that begin with {OWN_TAGS!r} tell which run it is; take another name")
    return name


TagName = Annotated[str, pydantic.AfterValidator(_tag_name)]


def is_installed() -> bool:
    """Whether a run can be told of from here."""
    return find_spec("mlflow") is not None


class MlflowConfig(Config):
    """Where the run is shown, once `experiment` is given."""

    #: What switches it on; it is made where there is none of that name.
    experiment: Annotated[str, Field(min_length=1, max_length=MAX_EXPERIMENT)] | None = None
    #: The tracking server; default: what MLFLOW_TRACKING_URI says.
    tracking_uri: Text | None = None
    #: Of the run there; default: its name here.
    name: Text | None = None
    #: What it is found by there.
    tags: dict[TagName, Tag] = Field(default_factory=dict)

    @pydantic.field_validator("tracking_uri")
    @classmethod
    def _has_no_password(cls, uri: str | None) -> str | None:
        if uri and "@" in urlsplit(uri).netloc:
            raise ValueError(
                "an address that is kept with the run has no user or password; set the variables "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or all of it in MLFLOW_TRACKING_URI"
            )
        return uri

    @rule
    def _has_an_experiment(self) -> Iterator[str]:
        given = [key for key in type(self).model_fields if getattr(self, key)]
        if given and self.experiment is None:
            yield (
                f"mlflow.{given[0]} is set, and mlflow.experiment is not; set it to a name, or remove "
                "[mlflow]"
            )
