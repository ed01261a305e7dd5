"""Whether a model's chat template can show tools, calls of them and their results.

1. As TRL has it: a conversation with a call and its result is rendered, and the call's name, its argument
   and the result have to be in the text. Some templates refuse such a conversation, some drop parts of it.
2. A template that shows no definitions of tools (DeepSeek's) is TRL's to take; who trains is told.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from quartet.cli.extras import need
from quartet.config.model import ConfigError
from quartet.left_out import ARGUMENT, NAME, TOOL

logger = logging.getLogger("quartet.rewards")

#: No template has these in it, nor NAME and ARGUMENT.
VALUE: Final = "quartet_value"
RESULT: Final = "quartet_result"
QUESTION: Final = {"role": "user", "content": "."}
CALL: Final = {"type": "function", "function": {"name": NAME, "arguments": {ARGUMENT: VALUE}}}
CALLED: Final = (
    QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": NAME, "content": RESULT},
)


def check(folder: str) -> None:
    """Raises ConfigError."""
    need("jinja2")
    from quartet.cli.sft.template import template_of

    template = template_of(Path(folder))

    def rendered(messages: Sequence[Any], tools: Sequence[Any], prompt: bool) -> str:
        try:
            return template.render(messages, tools, prompt)
        except ValueError:
            return ""

    text = rendered(CALLED, (), False)
    if not all(mark in text for mark in (NAME, ARGUMENT, VALUE, RESULT)):
        raise ConfigError(
            f"tools are refused: the chat template of the model in {folder} does not render calls of tools "
            "and their results; put one that does into chat_template.jinja of a copy of that folder, or "
            "choose another model"
        )
    if NAME not in rendered([QUESTION], [TOOL], True):
        logger.warning(
            "tools: the chat template of the model in %s shows no definitions of tools, so that the model "
            "knows of them only what the prompts say",
            folder,
        )
