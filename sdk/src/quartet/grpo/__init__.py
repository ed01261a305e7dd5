"""The Python API: scripts that were written for GRPOTrainer of verifiers run on Quartet's services.

    import quartet.grpo as vf

    env = vf.load_environment("reverse-text")
    model, tokenizer = vf.get_model_and_tokenizer("models/tiny")
    args = vf.grpo_defaults(run_name="my-experiment")
    trainer = vf.GRPOTrainer(model=model, processing_class=tokenizer, env=env, args=args)
    trainer.train()

Importing it imports neither torch nor transformers nor gRPC. docs/python.md has every argument.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from quartet.config.model import ConfigError
from quartet.grpo.arguments import GRPOConfig, grpo_defaults, lora_defaults
from quartet.grpo.environments import Environment, load_environment
from quartet.grpo.trainer import GRPOTrainer
from quartet.scripts.adapter import LoraConfig
from quartet.scripts.models import get_model, get_model_and_tokenizer, get_tokenizer
from quartet.scripts.outcome import TrainerState, TrainOutput

__all__ = [
    "ConfigError",
    "Environment",
    "GRPOConfig",
    "GRPOTrainer",
    "LoraConfig",
    "RunFailed",
    "TrainOutput",
    "TrainerState",
    "get_model",
    "get_model_and_tokenizer",
    "get_tokenizer",
    "grpo_defaults",
    "load_environment",
    "lora_defaults",
    "setup_logging",
]

#: What verifiers has and a script of a trainer may name: why it is not here.
_IN_AN_ENVIRONMENT = (
    "Environment classes, parsers and rubrics belong into the environment's package, where verifiers is "
    "installed: 'quartet env init my-env' makes one, and vf.load_environment(\"my-env\") names it"
)
_ELSEWHERE = {
    **dict.fromkeys(
        (
            *("SingleTurnEnv", "MultiTurnEnv", "ToolEnv", "StatefulToolEnv", "TextArenaEnv"),
            *("Parser", "ThinkParser", "XMLParser", "Rubric", "JudgeRubric", "RubricGroup", "ToolRubric"),
            *("extract_boxed_answer", "extract_hash_answer", "load_example_dataset"),
        ),
        _IN_AN_ENVIRONMENT,
    ),
    "EnvGroup": "give GRPOTrainer a list of environments as env; the weight of each is its share",
    "RLTrainer": "a TOML file of vf-rl is run by 'quartet rl @ file.toml'",
    "RLConfig": "a TOML file of vf-rl is run by 'quartet rl @ file.toml'",
}


def __getattr__(name: str) -> Any:
    if name == "RunFailed":
        # With the command's machinery, which imports gRPC.
        from quartet.cli.rl import RunFailed

        return RunFailed
    if name in _ELSEWHERE:
        raise AttributeError(f"quartet.grpo has no {name}: {_ELSEWHERE[name]}")
    raise AttributeError(f"module 'quartet.grpo' has no attribute {name!r}")


def setup_logging(level: str = "INFO", log_format: str | None = None, date_format: str | None = None) -> None:
    """Print what the logger of this package says, once, as setup_logging of verifiers did. Handlers of the
    script's own stay."""
    handler = logging.StreamHandler(sys.stderr)
    handler.set_name(f"{__name__}.setup_logging")
    handler.setFormatter(
        logging.Formatter(log_format or "%(asctime)s - %(name)s - %(levelname)s - %(message)s", date_format)
    )
    logger = logging.getLogger(__name__)
    logger.setLevel(level.upper())
    # A cell of a notebook is run again.
    logger.handlers[:] = [*(one for one in logger.handlers if one.name != handler.name), handler]
    logger.propagate = False
