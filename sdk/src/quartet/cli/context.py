"""How long a sequence the model of a run takes, and what of the run does not go with that.

1. A longer `inference.max_model_len` is refused, as the embedded engine would refuse it once it has loaded
   the model. (vLLM has rules of its own.)
2. A larger `max_tokens` is told and no refusal: an answer that ends at the context is one like any other.
   What suffers is a loss that divides by it.
3. What a file of prime-rl means by as long as the context is (WHOLE_CONTEXT) is meant, and not told.
4. Of a model whose config.json says nothing, or is not here, nothing is said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from quartet.config import ConfigError
from quartet.run.config import RunConfig
from quartet.run.prime_rl.sampling import WHOLE_CONTEXT


def positions_of(folder: Path) -> int | None:
    """How long a text the model of a folder takes, as its configuration says; None where it does not."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        most = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None  # the service that loads it says what is wrong with it
    return most if isinstance(most, int) and most > 0 else None


def check_length(config: RunConfig, model: Path) -> None:
    """Refuse a longer sequence to serve than the model was made for. Raises ConfigError."""
    asked, most = config.inference.get("max_model_len"), positions_of(model)
    if config.inference.get("engine", "embedded") != "embedded" or not isinstance(asked, int):
        return
    if most is not None and asked > most:
        key, remedy = "inference.max_model_len", "set at most that, or leave it out, which is as much"
        raise ConfigError(
            f"{key} = {asked} is refused: the model was made for {most} (max_position_embeddings in its "
            f"config.json); {remedy}",
            key=key,
            value=str(asked),
            remedy=remedy,
        )


def beyond_context(config: RunConfig) -> Iterator[str]:
    """A sentence, where answers may be longer than what is served."""
    served, made_for = config.inference.get("max_model_len"), positions_of(Path(config.model))
    most, why = (served, "inference.max_model_len") if served else (made_for, "its max_position_embeddings")
    above = {key: asked for key, asked in _asked(config) if most is not None and asked > most}
    if not above:
        return
    said = " and ".join(f"{key} = {asked}" for key, asked in above.items())
    told = f"{said} {'is' if len(above) == 1 else 'are'} above the model's context of {most} tokens ({why})"
    told += ": an answer ends there, with its prompt"
    if config.algorithm.normalised_by == "constant" and config.algorithm.constant_tokens is None:
        longest = config.constant_tokens
        if longest in above.values():
            told += f"; the loss divides by {longest}, so set max_tokens or algorithm.constant_tokens lower"
    yield told


def _asked(config: RunConfig) -> Iterator[tuple[str, int]]:
    """What the run says of the length of answers, by its key."""
    said = [
        ("", config.sampling),
        *((f"env.{number}.", env.sampling) for number, env in enumerate(config.env)),
        ("eval.", config.eval.sampling if config.eval.num_examples else None),
        *((f"eval.env.{number}.", env.sampling) for number, env in enumerate(config.eval.env)),
    ]
    for table, sampling in said:
        if sampling is not None and sampling.max_tokens not in (None, WHOLE_CONTEXT):
            yield f"{table}sampling.max_tokens", sampling.max_tokens
