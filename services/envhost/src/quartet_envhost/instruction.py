"""The argument `system_prompt`: what the model is told first, in place of what the environment would tell it.

An environment that takes an argument of that name gets it; in any other it replaces the system message of
every example. So a prompt that was found for an environment (`quartet gepa`) is one line of a run.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Final

from quartet.errors import QuartetError

SYSTEM_PROMPT: Final = "system_prompt"


def split_off(env_id: str, args: Mapping[str, Any], own: Container[str]) -> tuple[dict[str, Any], str | None]:
    """The environment's own arguments, and the prompt where it takes none. Raises QuartetError."""
    if SYSTEM_PROMPT not in args or SYSTEM_PROMPT in own:
        return dict(args), None
    prompt = args[SYSTEM_PROMPT]
    if not isinstance(prompt, str) or not prompt:
        raise QuartetError(
            "INVALID_CONFIG",
            f"environment {env_id!r} refuses args.{SYSTEM_PROMPT} = {prompt!r}: write a text",
            key=f"args.{SYSTEM_PROMPT}",
            value=prompt,
            remedy="write a text",
        )
    return {name: value for name, value in args.items() if name != SYSTEM_PROMPT}, prompt
