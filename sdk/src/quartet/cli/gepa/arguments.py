"""The arguments of `quartet gepa`."""

from __future__ import annotations

import argparse

from quartet.cli.eval.arguments import MODEL_KEYS, Keys, add_env_args, add_keys, add_output, add_resume

DESCRIPTION = """\
Improve the system prompt of an environment (GEPA): rollouts, reflection by a teacher, better prompts kept.

  quartet gepa reverse-text -m models/tiny -M teacher        teacher: an endpoint of configs/endpoints.toml
  quartet gepa gsm8k -m mini -M large -B 300 -n 50 -N 25
  quartet gepa @ configs/gepa/reverse-text.toml
  quartet gepa --resume                                      go on with the last one, as it was asked for

Writes best_prompt.txt, best_env.toml, pareto_frontier.jsonl, results.jsonl, metadata.json to
OUTPUT/gepa/ENVIRONMENT--MODEL/RUN_ID/, and says the one line of a run that uses the prompt.
"""

SAMPLING_KEYS: Keys = {
    ("-c", "--max-concurrent"): ("max_concurrent", "rollouts under way at once (default: 32)"),
    ("-t", "--max-tokens"): ("sampling.max_tokens", "most tokens of a turn"),
    ("-T", "--temperature"): ("sampling.temperature", "of the rollouts"),
}
GEPA_KEYS: Keys = {
    ("-M", "--reflection-model"): ("reflection_model", "the teacher (default: the model itself)"),
    ("-B", "--max-calls"): ("max_calls", "rollouts in all (default: 500)"),
    ("-n", "--num-train"): ("num_train", "training examples (default: 100)"),
    ("-N", "--num-val"): ("num_val", "validation examples (default: 50)"),
    ("--minibatch-size",): ("minibatch_size", "examples of one reflection (default: 3)"),
    ("--perfect-score",): ("perfect_score", "minibatches that earn it are not reflected on"),
    ("--initial-prompt",): ("initial_prompt", "file with the prompt to begin with"),
    ("--seed",): ("seed", "of the choice of examples and parents (default: 0)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments besides the configuration."""
    for keys in (MODEL_KEYS, GEPA_KEYS, SAMPLING_KEYS):
        add_keys(parser, keys)
    parser.add_argument(
        "--state-columns",
        nargs="+",
        metavar="NAME",
        help="more columns for the teacher: metrics, task fields",
    )
    add_env_args(parser)
    add_output(parser)
    parser.add_argument("--run-id", help="name of the folder (default: the time)")
    add_resume(parser, "an optimisation")
    parser.add_argument("--dry-run", action="store_true", help="check everything, start nothing")
