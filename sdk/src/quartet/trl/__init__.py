"""The Python API for scripts of TRL: those that were written for its GRPOTrainer or SFTTrainer run on
Quartet's services.

    from quartet.trl import GRPOConfig, GRPOTrainer

    def reward_len(completions, **kwargs):
        return [-abs(20 - len(one)) for one in completions]

    args = GRPOConfig(output_dir="outputs/mine", max_steps=50)
    trainer = GRPOTrainer("models/tiny", reward_len, args, train_dataset=[{"prompt": "..."}])
    trainer.train()

Importing it imports neither torch nor transformers nor gRPC. docs/trl.md has every argument.
"""

from __future__ import annotations

from typing import Any

from quartet.config.model import ConfigError
from quartet.scripts.adapter import LoraConfig
from quartet.scripts.outcome import TrainOutput
from quartet.sft import SFTConfig, SFTTrainer, TuningFailed
from quartet.trl.arguments import GRPOConfig
from quartet.trl.elsewhere import OF_TRL
from quartet.trl.so_far import TrainerState
from quartet.trl.trainer import GRPOTrainer

__all__ = [
    "ConfigError",
    "GRPOConfig",
    "GRPOTrainer",
    "LoraConfig",
    "RunFailed",
    "SFTConfig",
    "SFTTrainer",
    "TrainOutput",
    "TrainerState",
    "TuningFailed",
]


def __getattr__(name: str) -> Any:
    if name == "RunFailed":
        # With the command's machinery, which imports gRPC.
        from quartet.cli.rl import RunFailed

        return RunFailed
    if name in OF_TRL:
        raise AttributeError(f"quartet.trl has no {name}: {OF_TRL[name]}")
    raise AttributeError(f"module 'quartet.trl' has no attribute {name!r}")
