"""The arguments of `quartet eval`. Most are short names for keys of its file."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from quartet.config import ConfigError
from quartet.local.toml_text import inline
from quartet.run.values import nulls

DESCRIPTION = """\
Play environments with a model, and measure it.

  quartet eval reverse-text -m models/tiny -n 50 -r 4       a model folder: served by the command itself
  quartet eval gsm8k --inference-addresses '["10.0.0.5:50053"]'   replicas that run already
  quartet eval gsm8k -m mini                                an endpoint of configs/endpoints.toml
  quartet eval gsm8k -m gpt-4.1-mini -b https://api.openai.com/v1 -k OPENAI_API_KEY
  quartet eval @ configs/eval/reverse-text.toml             several environments; any key also as --key value
  quartet eval --resume                                     go on with the last one, as it was asked for

Writes results.jsonl, failures.jsonl, metadata.json for each to OUTPUT/evals/ENVIRONMENT--MODEL/RUN_ID/.
Exit code 0: every rollout has a result; 1: some failed (they are counted apart, never as reward 0, and
--resume tries them again); 2: refused.
"""

OUTPUT_DIR = "outputs"
#: An environment's id, which no file and no `key=value` is.
NAME = re.compile(r"\w[\w/-]*")

_SUCH_AS = """, such as '{"key": 1}'"""

Keys = Mapping[tuple[str, ...], tuple[str, str]]

#: Flags, the key that each sets, and what it is. The last are what Verifiers 0.4 calls them.
MODEL_KEYS: Keys = {
    ("-m", "--model"): ("model", "model folder, or id in the file of endpoints"),
    ("-b", "--base-url", "--client.base-url"): ("base_url", "OpenAI-compatible endpoint"),
    ("-k", "--api-key-var", "--client.api-key-var"): ("api_key_var", "environment variable with its key"),
    ("-e", "--endpoints"): ("endpoints", "file of endpoints (default: configs/endpoints.toml)"),
}
PLAY_KEYS: Keys = {
    ("-n", "--num-examples", "--select.limit"): (
        "num_examples",
        "examples of each environment; -1 for all (default: 5)",
    ),
    ("-r", "--rollouts-per-example", "--num-rollouts"): (
        "rollouts_per_example",
        "rollouts of each example (default: 3)",
    ),
    ("-c", "--max-concurrent"): ("max_concurrent", "rollouts under way at once (default: 32)"),
    ("-t", "--max-tokens"): ("sampling.max_tokens", "most tokens of a turn"),
    ("-T", "--temperature"): ("sampling.temperature", "0 is greedy"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments besides the configuration."""
    add_keys(parser, MODEL_KEYS)
    add_keys(parser, PLAY_KEYS)
    add_env_args(parser)
    add_output(parser)
    parser.add_argument("--run-id", help="name of the folder (default: the time)")
    add_resume(parser, "an evaluation")
    parser.add_argument("--dry-run", action="store_true", help="check everything, start nothing")


def add_keys(parser: argparse.ArgumentParser, keys: Keys) -> None:
    """Short names for keys; `given_keys` turns them back."""
    for flags, (key, text) in keys.items():
        parser.add_argument(*flags, dest=_dest(key), metavar=key.rpartition(".")[2].upper(), help=text)


def add_env_args(parser: argparse.ArgumentParser) -> None:
    """-a."""
    parser.add_argument(
        "-a", "--env-args", metavar="JSON", help="arguments of the environment, a JSON object"
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """Where to, and how shown."""
    parser.add_argument(
        "-o", "--output-dir", type=Path, default=Path(OUTPUT_DIR), help="default: %(default)s"
    )
    parser.add_argument("--plain", action="store_true", help="lines instead of the live table")


def add_resume(parser: argparse.ArgumentParser, what: str) -> None:
    """-R."""
    parser.add_argument(
        "-R", "--resume", nargs="?", const="", metavar="RUN_ID",
        help=f"go on with {what}, of which nothing else need be said (default: the last one; with an "
        "environment and a model the last one of these)",
    )  # fmt: skip


def given_keys(options: argparse.Namespace, keys: Keys) -> list[str]:
    """What was given, as `--key=value` for the configuration."""
    given = {key: getattr(options, _dest(key)) for key, _ in keys.values()}
    return [f"--{key}={value}" for key, value in given.items() if value is not None]


def environment_first(rest: list[str], several: str = "") -> tuple[str, list[str]]:
    """The environment that is named without a flag, and what else there is. `several`: the tables of a file
    that has more of them. Raises ConfigError."""
    if rest[:1] == ["run"] and rest[1:] and not rest[1].startswith("-"):  # prime eval run, prime gepa run
        raise ConfigError(f"'run' is not part of the command here; write '{rest[1]}' without it")
    if rest and not rest[0].startswith(("@", "-")):
        if rest[1:] and NAME.fullmatch(rest[1]):
            in_a_file = f"; write several as {several} in a file ('@ file.toml')" if several else ""
            raise ConfigError(f"{rest[1]!r} is a second environment, and one is named here{in_a_file}")
        if rest[0].endswith(".toml"):
            raise ConfigError(f"argument {rest[0]!r} is not understood; write '@ {rest[0]}'")
        return rest[0], rest[1:]
    return "", rest


def one_run_id(options: argparse.Namespace) -> None:
    """Whether --resume and --run-id name one run, where both name one. Raises ConfigError."""
    if options.resume and options.run_id and options.resume != options.run_id:
        raise ConfigError(
            f"--resume {options.resume} and --run-id {options.run_id} name two runs; give one of the two"
        )


def env_args(options: argparse.Namespace, rest: Iterable[str]) -> dict[str, object]:
    """-a; `rest`: the arguments besides, in which it may have a run's name. Raises ConfigError."""
    if any(one == "--args" or one.startswith(("--args=", "--args.")) for one in rest):
        raise ConfigError("arguments of the environment are -a, --env-args JSON; write that for --args")
    try:
        args = json.loads(options.env_args or "{}")
    except ValueError as error:
        why = f"--env-args {options.env_args!r} is not JSON: {error}; write an object{_SUCH_AS}"
        raise ConfigError(why) from None
    if not isinstance(args, dict):
        raise ConfigError(f"--env-args {options.env_args!r} is no JSON object{_SUCH_AS}")
    return args


def in_a_file(env_id: str, args: Mapping[str, object]) -> str:
    """An environment of the command line as a file would have it, in TOML. Raises ConfigError."""
    for path in nulls(args):
        raise ConfigError(
            f"--env-args: {'.'.join(path)} = null is refused: files have no null; leave it out, and the "
            "environment's own default holds"
        )
    return inline({"id": env_id, "args": args})


def _dest(key: str) -> str:
    return f"key_{key.replace('.', '_')}"
