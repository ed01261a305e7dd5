"""Whether a model can be asked in messages, as every environment asks but the one that is built in.

1. A folder whose tokenizer has no chat template, as those of base models, is refused before anything starts:
   every rollout would fail.
2. One whose template is given by another file, or not told by the files that transformers reads it from, is
   the service's to refuse. So is a run of the built-in environment alone: its prompts may be tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from quartet.chat_identity import template_of
from quartet.cli.env.installed import module_of
from quartet.config import ConfigError
from quartet.run.hosted import BUILT_IN

# Templates under names, and mistral-common's tokenizer, which has its own.
_ELSEWHERE: Final = ("additional_chat_templates", "tekken.json")


def check_chat_template(model: Path, inference: Mapping[str, Any], env_ids: Iterable[str]) -> None:
    """Refuse a model that knows no messages where environments ask in them. Raises ConfigError."""
    asking = [env_id for env_id in env_ids if module_of(env_id) not in BUILT_IN]
    # By whatever key: what is wrong with the table its service says.
    if not asking or inference.get("chat") or any((model / name).exists() for name in _ELSEWHERE):
        return
    try:
        has_one = bool(template_of(model))
    except (OSError, ValueError, AttributeError):
        return
    if not has_one:
        raise ConfigError(
            f"the model in {model} has no chat template, and {asking[0]!r} asks it in messages; take the "
            "instruct model, put a template into chat_template.jinja of the folder, or name one as "
            "inference.chat.template_file"
        )
