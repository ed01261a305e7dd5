"""Flags of Verifiers' `vf-eval` and `vf-gepa` that there are not here, for refusals that say what to write.

The flags that there are mean the same here and there. Of the others each is refused, by what it is here: of
those of Verifiers 0.4 (`--select.skip`) whole tables, whose names end with a point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quartet.config import ConfigError

_SAVED = "results are always written, to --output-dir; leave it out"
_LOGS = "logs are in the folder that the first line names; leave it out"
_FOUND = "an environment is found in its own interpreter, where quartet env install puts it; leave it out"
_LIVE = "the live table is there wherever the output is a terminal, --plain is without; leave it out"
_SAMPLING = "write --temperature 0.7, --max-tokens 64, and each other key as --sampling.top-p 0.9"
_HUB = "nothing is uploaded; 'hf upload' sends the folder of results"
_ORDER = "examples are the first --num-examples of a split, in the environment's order; leave it out"
_ARGS = 'arguments of the environment are --env-args, such as \'{"system_prompt": "FILE"}\''
_NAMED = "name the environment without a flag: quartet eval ENVIRONMENT"
_HEADERS = "write headers in the file of endpoints"
_TIMEOUT = "write timeout_seconds in [[eval]] of a file"
_RETRIES = "write max_retries in [[eval]] of a file"

_BOTH: Mapping[str, str] = {
    "-p": _FOUND,
    "--env-dir-path": _FOUND,
    "-S": _SAMPLING,
    "--sampling-args": _SAMPLING,
    "--api-base-url": "write --base-url",
    "--endpoints-path": "write --endpoints",
    "-v": _LOGS,
    "--verbose": _LOGS,
    "-x": "arguments of the environment are --env-args",
    "--extra-env-kwargs": "arguments of the environment are --env-args",
}
OF_EVAL: Mapping[str, str] = {
    **_BOTH,
    "-s": f"results are always written, and {_ORDER}",
    "--save-results": _SAVED,
    "-H": _HUB,
    "--save-to-hf-hub": _HUB,
    "-D": _HUB,
    "--hf-hub-dataset-name": _HUB,
    "-f": _LIVE,
    "--fullscreen": _LIVE,
    "-d": _LIVE,
    "--disable-tui": _LIVE,
    "--provider": "write --base-url and --api-key-var, or name an endpoint of the file of endpoints",
    "--header": _HEADERS,
    "--timeout": _TIMEOUT,
    "--max-retries": _RETRIES,
    "--push": "nothing is uploaded; leave it out",
    "--no-push": "nothing is uploaded; leave it out",
    "--clean": "every evaluation has a folder of its own; leave it out, or delete that of --run-id yourself",
    "--run.name": "write --run-id",
    "--run.": "write --output-dir and --run-id",
    "--select.": _ORDER,
    "--env.id": _NAMED,
    "--env.taskset.id": _NAMED,
    "--env.timeout.": _TIMEOUT,
    "--env.retries.": _RETRIES,
    "--env.": _ARGS,
    "--client.headers": _HEADERS,
    "--client.": "who answers is --model, --base-url and --api-key-var, or an endpoint of the file",
    "--rich.": _LIVE,
}
OF_GEPA: Mapping[str, str] = {
    **_BOTH,
    "--run-dir": "write --output-dir and --run-id",
    "--no-save": _SAVED,
    "-u": _LIVE,
    "--tui": _LIVE,
}


def refuse_others(rest: Sequence[str], others: Mapping[str, str]) -> None:
    """Whether flags that are left are those of Verifiers' command. Raises ConfigError."""
    for argument in rest:
        flag = argument.partition("=")[0].replace("_", "-") if argument.startswith("--") else argument
        tables = (why for name, why in others.items() if name.endswith(".") and flag.startswith(name))
        if why := others.get(flag) or next(tables, None):
            raise ConfigError(f"{flag} is a flag of Verifiers' command, not of this one: {why}")
