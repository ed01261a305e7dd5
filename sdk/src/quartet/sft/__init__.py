"""The Python API of supervised fine-tuning: scripts that were written for SFTTrainer of TRL.

    from quartet.sft import SFTConfig, SFTTrainer

    args = SFTConfig("outputs/mine", max_steps=30)
    trainer = SFTTrainer(model="models/tiny", args=args, train_dataset="chats.jsonl")
    trainer.train()

Importing it imports neither torch nor transformers nor gRPC. docs/python.md has every argument.
"""

from quartet.config.model import ConfigError
from quartet.scripts.adapter import LoraConfig
from quartet.scripts.models import Model, Tokenizer, get_model, get_model_and_tokenizer, get_tokenizer
from quartet.sft.arguments import SFTConfig
from quartet.sft.trainer import SFTTrainer, TuningFailed

__all__ = [
    "ConfigError",
    "LoraConfig",
    "Model",
    "SFTConfig",
    "SFTTrainer",
    "Tokenizer",
    "TuningFailed",
    "get_model",
    "get_model_and_tokenizer",
    "get_tokenizer",
]
