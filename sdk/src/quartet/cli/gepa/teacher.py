"""Who reflects on the rollouts of an optimisation, found before anything starts."""

from __future__ import annotations

from quartet.cli.eval.endpoints import endpoint_at, read_endpoints
from quartet.cli.eval.source import Source, asked
from quartet.cli.gepa.config import GepaConfig
from quartet.config import ConfigError


def teacher_of(config: GepaConfig, source: Source) -> Source | None:
    """None where the model reflects on itself. Raises ConfigError."""
    name, url = config.reflection_model, config.reflection_base_url
    if url and not name:
        raise ConfigError("reflection_base_url needs the name of a model there; set reflection_model")
    if url:
        try:
            return asked(name, endpoint_at(url, name, config.reflection_api_key_var))
        except ConfigError as error:
            raise ConfigError(f"the teacher: {error}") from None
    if name in ("", config.model):
        return None
    ids = read_endpoints(config.endpoints) if config.endpoints.exists() else {}
    if name in ids:
        return asked(name, ids[name])
    if source.endpoint is not None:
        # Another model of the endpoint, as Verifiers' own command has it.
        return asked(name, source.endpoint.with_model(name))
    there = ", ".join(sorted(ids)) or "there is none"
    raise ConfigError(
        f"reflection_model = {name!r} is no endpoint of {config.endpoints} ({there}); name one, or serve the "
        "model (quartet_inference has an OpenAI-compatible front) and give its reflection_base_url"
    )
