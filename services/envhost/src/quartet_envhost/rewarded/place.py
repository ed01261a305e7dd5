"""Where a RewardService is served, as `args` say it: its address, and how to be let in there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import field_validator
from quartet.config import Config, ConfigError
from quartet.config.load import validate
from quartet.errors import QuartetError
from quartet.kit.channel import ClientSecurity
from quartet.kit.security import check_client, host_port

from quartet_envhost.arguments import not_taken


class Place(Config):
    """The arguments of the environment."""

    #: "host:port", or "unix:path".
    address: str
    security: ClientSecurity = ClientSecurity()

    @field_validator("address")
    @classmethod
    def _is_address(cls, address: str) -> str:
        return address if re.match("unix:.", address) else host_port(address)


def place_of(env_id: str, args: Mapping[str, Any]) -> Place:
    """The place that arguments name. Raises INVALID_CONFIG."""
    for name in args:
        if name not in Place.model_fields:
            raise not_taken(env_id, name, Place.model_fields)
    if "address" not in args:
        remedy = 'say where RewardService is served, such as args = { address = "127.0.0.1:50060" }'
        raise _refused(env_id, "address", "nothing", remedy)
    try:
        place = validate(Place, dict(args))
    except ConfigError as error:
        raise _refused(env_id, error.key, error.value, error.remedy) from error
    try:
        check_client(place.address, place.security)
    except ConfigError as error:
        raise _refused(env_id, "address", place.address, f"{error}: keys of args.security") from error
    return place


def _refused(env_id: str, key: str, value: str, remedy: str) -> QuartetError:
    text = f"environment {env_id!r} refuses args.{key} = {value}: {remedy}"
    return QuartetError("INVALID_CONFIG", text, key=f"args.{key}", value=value, remedy=remedy)
