"""TRL's GRPOTrainer, unmodified, on an environment that a Quartet host runs: README.md beside this file.

python examples/trl_over_grpc/train.py --config examples/trl_over_grpc/grpo.yaml [--max_steps 3 ...]
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hosted import HostedEnvironment, environment_reward
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, TrlParser


@dataclass
class Arguments:
    """What is trained, and on what."""

    model: str = field(metadata={"help": "Hub id or folder."})
    host: str = field(metadata={"help": "host:port of the environment host."})
    environment: str = field(metadata={"help": "Id of the environment."})
    environment_args: str = field(default="", metadata={"help": "Its arguments, a JSON object."})
    tasks: int = field(
        default=2000, metadata={"help": "How many of its tasks, 4096 at most; all, where it has fewer."}
    )
    rollout_seconds: float = field(default=120.0, metadata={"help": "Time of one rollout with its scoring."})


def main() -> None:
    """Train, and save the model into `output_dir`."""
    arguments, config = TrlParser((Arguments, GRPOConfig)).parse_args_and_config()
    environment = HostedEnvironment(
        arguments.host, arguments.environment, arguments.environment_args, arguments.rollout_seconds
    )
    trainer = GRPOTrainer(
        model=arguments.model,
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        args=config,
        train_dataset=environment.tasks(arguments.tasks),
        rollout_func=environment.rollouts,
        reward_funcs=environment_reward,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
