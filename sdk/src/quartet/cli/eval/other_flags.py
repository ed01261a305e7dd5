"""Flags of Verifiers' `vf-eval` and `vf-gepa`, and keys of their files, that there are not here, for refusals
that say what to write.

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
_ENVHOST = "an environment always runs in processes of its own; --envhost.workers 2 is how many"
_SCORING = "each rollout is scored as it ends, those that are compared together; leave it out"
_COLUMNS = "all metrics and rewards of a rollout are written; leave it out"
_SUMMARY = "the summary has no conversations; leave it out"
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
    "--header-from-state": _HEADERS,
    "--api-client-type": "only chat completions are spoken; leave it out",
    "--shuffle": _ORDER,
    "--shuffle-seed": _ORDER,
    "-N": _SCORING,
    "--no-interleave-scoring": _SCORING,
    "-i": _SCORING,
    "--independent-scoring": _SCORING,
    "-C": _COLUMNS,
    "--state-columns": _COLUMNS,
    "-w": _ENVHOST,
    "--num-workers": _ENVHOST,
    "--disable-env-server": _ENVHOST,
    "--no-serve": _ENVHOST,
    "--serve.": _ENVHOST,
    "-A": _SUMMARY,
    "--abbreviated-summary": _SUMMARY,
    "--heartbeat-url": "nobody is told that it goes on; leave it out",
    "--num-tasks": "write --num-examples",
    "--group-size": "write --rollouts-per-example",
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
    "--no-rich": "write --plain",
}
OF_GEPA: Mapping[str, str] = {
    **_BOTH,
    "--run-dir": "write --output-dir and --run-id",
    "--no-save": _SAVED,
    "-u": _LIVE,
    "--tui": _LIVE,
}

_CALLED: Mapping[str, str] = {
    "endpoint_id": "model",
    "api_base_url": "base_url",
    "endpoints_path": "endpoints",
    "sampling_args": "sampling",
    "max_tokens": "sampling.max_tokens",
    "temperature": "sampling.temperature",
}
_SAID: Mapping[str, str] = {
    **{
        flag.removeprefix("--").replace("-", "_"): why
        for flag, why in OF_EVAL.items()
        if flag.startswith("--") and "." not in flag
    },
    "headers": _HEADERS,
    "output_dir": "write --output-dir",
}
_OF_A_FILE: Mapping[str, str] = {
    **_SAID,
    **{name: f"it is called {key!r} here" for name, key in _CALLED.items()},
}
OF_A_GEPA_FILE: Mapping[str, str] = {
    **{name: why for name, why in _OF_A_FILE.items() if name != "state_columns"},
    "run_dir": OF_GEPA["--run-dir"],
    "gepa": "its keys stand above the first table here; leave the header [gepa] out",
}
_INSIDE: Mapping[str, str] = {
    **_CALLED,
    **{"env_id": "id", "env_args": "args", "timeout": "timeout_seconds"},
}
OF_AN_EVAL_FILE: Mapping[str, str] = {
    **_OF_A_FILE,
    "env_id": "write [[eval]] with id",
    "env_args": "write [[eval]] with args",
    **{
        f"{table}.{name}": why
        for table in ("eval", "ablation")
        for name, why in _SAID.items()
        if name != "max_retries"
    },
    **{
        f"{table}.{name}": f"it is called '{table}.{key}' here"
        for table in ("eval", "ablation")
        for name, key in _INSIDE.items()
    },
}


def refuse_others(rest: Sequence[str], others: Mapping[str, str]) -> None:
    """Whether flags that are left are those of Verifiers' command. Raises ConfigError."""
    for argument in rest:
        flag = argument.partition("=")[0].replace("_", "-") if argument.startswith("--") else argument
        tables = (why for name, why in others.items() if name.endswith(".") and flag.startswith(name))
        if why := others.get(flag) or next(tables, None):
            raise ConfigError(f"{flag} is a flag of Verifiers' command, not of this one: {why}")
