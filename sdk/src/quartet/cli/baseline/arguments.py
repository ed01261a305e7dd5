"""The arguments of `quartet baseline`."""

from __future__ import annotations

import argparse

from quartet.cli.eval.arguments import MODEL_KEYS, Keys, add_env_args, add_keys, add_output

DESCRIPTION = """\
Before training: is the task too hard, too easy, without diversity, or fit to learn from?

  quartet baseline @ configs/reverse-text.toml        the environments, model and sampling of a run
  quartet baseline gsm8k -m models/small -t 512       one environment

A baseline should be above 0 % and under 80 % of the full reward, and rollouts of one example should differ.
Says so for each environment, and which keys to change. Exit code 0: all are fit; 1: some are not, or failed.
"""

SAMPLING_KEYS: Keys = {
    ("-t", "--max-tokens"): ("sampling.max_tokens", "most tokens of a turn"),
    ("-T", "--temperature"): ("sampling.temperature", "default: the run's"),
}
NUM_EXAMPLES = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments besides those of the run."""
    add_keys(parser, MODEL_KEYS)
    add_keys(parser, SAMPLING_KEYS)
    parser.add_argument("-n", "--num-examples", type=int, default=NUM_EXAMPLES, help="default: %(default)s")
    parser.add_argument("-r", "--rollouts-per-example", type=int, help="default: the run's")
    parser.add_argument("-c", "--max-concurrent", type=int, default=32, help="default: %(default)s")
    parser.add_argument(
        "--inference-address", action="append", default=[], help="a replica that runs already"
    )
    parser.add_argument(
        "--full-reward",
        type=float,
        help="what a right answer earns (default: FULL_REWARD of the environment's oracle, else 1)",
    )
    add_env_args(parser)
    add_output(parser)
