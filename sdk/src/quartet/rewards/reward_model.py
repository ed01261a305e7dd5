"""A reward model of a script: a sequence classifier of transformers, of one label, that it has loaded.

1. What it is given, and what of its answer counts, is as in TRL's GRPOTrainer: prompt and completion as text,
   of messages by the chat template of its own tokenizer; the only logit of each.
2. Neither torch nor transformers is imported: who has such a model has them, and they are found there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from quartet.config.model import ConfigError


def is_model(given: Any) -> bool:
    """Whether it is a module of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.nn.Module)


class RewardModel:
    """Its scores of completions."""

    def __init__(self, key: str, model: Any, tokenizer: Any = None) -> None:
        """`key` names it in errors. Sets its pad token, as TRL does. Raises ConfigError."""
        config = getattr(model, "config", None)
        if config is None:
            kind = type(model).__name__
            raise ConfigError(f"{key} = {kind} is refused: give a model of transformers, or a function")
        if (labels := getattr(config, "num_labels", 1)) != 1:
            raise ConfigError(
                f"{key} has {labels} labels, and a reward is one number: load it with num_labels=1"
            )
        folder = str(getattr(config, "_name_or_path", ""))
        self.name = folder.rpartition("/")[2] or type(model).__name__
        self._model, self._tokenizer = model.eval(), tokenizer or _tokenizer_of(key, folder)
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        # The reward is that of the last token that is none.
        config.get_text_config().pad_token_id = self._tokenizer.pad_token_id

    def scores(
        self, prompts: Sequence[Any], completions: Sequence[Any], settings: Mapping[str, Any]
    ) -> list[float]:
        """Of each completion; `settings` are the run's for chat templates."""
        torch = sys.modules["torch"]
        texts = [
            prompt + completion
            if isinstance(prompt, str)
            else self._rendered([*prompt, *completion], settings)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        inputs = self._tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        with torch.inference_mode():
            logits = self._model(**inputs.to(next(self._model.parameters()).device)).logits
        values: list[float] = logits[:, 0].float().tolist()
        return values

    def _rendered(self, messages: list[Any], settings: Mapping[str, Any]) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **settings))


def models_of(given: Sequence[Any], processing_classes: Any) -> list[Any]:
    """The same, with each model of torch as a RewardModel. Raises ConfigError."""
    listed = processing_classes if isinstance(processing_classes, list | tuple) else [processing_classes]
    tokenizers = [None] * len(given) if processing_classes is None else list(listed)
    if len(tokenizers) != len(given):
        raise ConfigError(
            f"reward_processing_classes has {len(tokenizers)} for {len(given)} reward functions; give one "
            "for each, None for those that are functions"
        )
    return [
        RewardModel(f"reward_funcs[{number}]", one, tokenizer) if is_model(one) else one
        for number, (one, tokenizer) in enumerate(zip(given, tokenizers, strict=True))
    ]


def _tokenizer_of(key: str, folder: str) -> Any:
    """The tokenizer that lies beside a model. Raises ConfigError."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not folder:
        raise ConfigError(f"{key} has no tokenizer; give it one as reward_processing_classes")
    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}: the tokenizer of {folder!r} cannot be loaded ({error}); give one as "
            "reward_processing_classes"
        ) from error
