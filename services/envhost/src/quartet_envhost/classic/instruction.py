"""The argument `system_prompt` of a classic environment: what the model is told first, as text.

An environment that takes an argument of that name gets it; in any other it replaces the system message of
every example. (In a v1 taskset it is Verifiers' own argument, and names a file.)
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


class Told:
    """Rows with another system message in front."""

    def __init__(self, rows: Any, prompt: str) -> None:
        self._rows = rows
        self._message = {"role": "system", "content": prompt}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = dict(self._rows[index])
        messages = row["prompt"]
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
        return {**row, "prompt": [self._message, *rest]}
