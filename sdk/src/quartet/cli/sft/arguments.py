"""The arguments of `quartet sft`, apart from the command, which needs a tokenizer and a template engine."""

from __future__ import annotations

import argparse
from pathlib import Path

#: Where nothing is said.
OUTPUT = Path("outputs/sft")
DESCRIPTION = """\
Start a trainer on this machine, train a model on a file of chats or of text, and write its folder.

  quartet sft @ sft.toml [@ more.toml ...] [--key value ...]

    model = "models/tiny"
    data = "chats.jsonl"     # a line each: {"messages": [{"role": "user", "content": "..."}, ...]}, and
                             # "tools" beside it; rollouts/*.jsonl of a run are such lines. Or ShareGPT's
                             # {"conversations"}, {"prompt", "completion"}, {"text"}. Also one JSON list,
                             # Parquet, Arrow, compressed; a folder of files, or "data/train-*.parquet"
    validation = "more.jsonl"  # such lines that are not learned: the loss on them is told
    epochs = 2
    learning_rate = 1e-4
    roles = ["assistant"]    # whose messages are learned; or learns = "everything", as TRL does

    [ckpt]
    interval = 10            # steps between states, from which --resume goes on
    [eval]
    interval = 20            # steps between measurements of validation; also before the first, after the last
    [lora]
    enabled = true           # an adapter, as of a run: r, alpha, dropout, target_modules, ...
    [wandb]
    project = "mine"         # in Weights & Biases, too, as a run

Writes metrics.jsonl, checkpoint/ (of an adapter the merged model, and adapter/ in it), logs/ to the output
folder. Ctrl-C saves the step under way: quartet sft --output-dir FOLDER --resume goes on from there.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments besides the configuration."""
    parser.add_argument("--output-dir", type=Path, help=f"default: {OUTPUT}, or what prime-rl's file says")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with what the output folder holds; it says itself what it is",
    )
    # Of `quartet rl`: nothing is overwritten here, which the command says.
    parser.add_argument("--overwrite", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--plain", action="store_true", help="a line for a step now and then instead of the live line"
    )
    parser.add_argument("--dry-run", action="store_true", help="only check, and say what would run")
