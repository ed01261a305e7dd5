"""Whether a model's chat template can show calls of tools and their results.

1. As TRL has it: a conversation with a call and its result is rendered, and the call's name, its argument
   and the result have to be in the text. Some templates refuse such a conversation, some drop parts of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from quartet.cli.extras import need
from quartet.config.model import ConfigError

#: No template has these in it.
NAME: Final = "quartet_called"
KEY: Final = "quartet_argument"
VALUE: Final = "quartet_value"
RESULT: Final = "quartet_result"


def check(folder: str) -> None:
    """Raises ConfigError."""
    need("jinja2")
    from quartet.cli.sft.template import template_of

    template = template_of(Path(folder))
    arguments: dict[str, str] = {KEY: VALUE}
    # Some templates take arguments as text alone.
    for given in (arguments, json.dumps(arguments)):
        try:
            text = template.render(_conversation(given), (), False)
        except ValueError:
            continue
        if all(mark in text for mark in (NAME, KEY, VALUE, RESULT)):
            return
    raise ConfigError(
        f"tools are refused: the chat template of the model in {folder} does not render calls of tools and "
        "their results; put one that does into chat_template.jinja of a copy of that folder, or choose "
        "another model"
    )


def _conversation(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": NAME, "arguments": arguments}}
    return [
        {"role": "user", "content": "."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": NAME, "content": RESULT},
    ]
