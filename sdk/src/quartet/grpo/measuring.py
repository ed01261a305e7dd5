"""trainer.evaluate(): `quartet eval`, in a process of its own, of a run's environments as [eval] samples.

1. It dies with the script, and its services with it.
2. However many scripts measure at once beside the same folder, each has a name of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from quartet.cli.eval.command import folder_name
from quartet.cli.eval.config import ALL
from quartet.cli.eval.kept import new_run_id
from quartet.cli.eval.record import METADATA, RESULTS
from quartet.cli.eval.source import Source
from quartet.cli.outputs import recover_lines
from quartet.cli.rl import RunFailed
from quartet.config import ConfigError
from quartet.config.main import EXIT_CONFIG
from quartet.grpo.translate import ALL_EXAMPLES
from quartet.kit.folder import check_folder
from quartet.local.tether import tethered
from quartet.local.toml_text import dumps
from quartet.run.config import RunConfig
from quartet.scripts.process import ERROR, in_a_script

#: In the form in which one environment's metrics are called; several have their names before them.
REWARD, DEVIATION, METRIC, FAILED = "reward", "reward_std", "rewards/{}", "failed"
#: What `quartet eval` advises where rollouts failed: here it plays all of them again.
_AGAIN = re.compile(r"try them again with quartet eval --resume .+")


#: Runs a command to its end, and has what it said.
Play = Callable[[list[str]], "subprocess.CompletedProcess[str]"]


def _play(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def measured(config: RunConfig, model: str, outputs: Path, play: Play = _play) -> dict[str, float]:
    """What a model folder earns on the environments of a run, each example played as often as [eval] says.
    Raises ConfigError, RunFailed."""
    source = Source(model, folder=model)
    names = {one.label: folder_name(one.label, source) for one in config.env}
    evaluations = outputs / "evals"
    check_folder("args.output_dir", evaluations)
    run_id = new_run_id(evaluations)
    with tempfile.NamedTemporaryFile("w", prefix="quartet-eval-", suffix=".toml", encoding="utf-8") as file:
        file.write(dumps(_table(config, model)))
        file.flush()
        words = ["eval", "@", file.name, "--output-dir", str(outputs), "--run-id", run_id, "--plain"]
        done = play(tethered([sys.executable, "-m", "quartet.cli", *words]))
    if done.returncode == EXIT_CONFIG:
        raise ConfigError(_why(done.stderr))
    folders = {label: evaluations / name / run_id for label, name in names.items()}
    if not all(map(_rewards, folders.values())):
        raise RunFailed(f"evaluate: {_why(done.stderr or done.stdout)}")
    every = [reward for folder in folders.values() for reward in _rewards(folder)]
    found = {f"eval_{REWARD}": fmean(every), f"eval_{DEVIATION}": pstdev(every)}
    for label, folder in folders.items():
        prefix = "eval_" if len(folders) == 1 else f"eval_{label}/"
        metadata = json.loads((folder / METADATA).read_text(encoding="utf-8"))
        found[prefix + REWARD] = metadata["avg_reward"]
        found |= {prefix + METRIC.format(name): value for name, value in metadata["avg_metrics"].items()}
        found[prefix + FAILED] = metadata["avg_error"]
    return found


def _table(config: RunConfig, model: str) -> dict[str, Any]:
    asked = config.eval.num_examples
    return {
        "model": model,
        "num_examples": asked if 0 < asked < ALL_EXAMPLES else ALL,
        "rollouts_per_example": config.eval.rollouts_per_example,
        "max_concurrent": config.at_once,
        "inference": config.inference,
        "envhost": config.envhost,
        "eval": [
            {
                "id": env.id,
                "name": env.label,
                "args": env.args,
                "timeout_seconds": env.timeout_seconds,
                "sampling": config.eval.sampled(env, config.sampling).model_dump(exclude_none=True),
            }
            for env in config.env
        ],
    }


def _rewards(folder: Path) -> list[float]:
    return [row["reward"] for row in recover_lines(folder / RESULTS)]


def _why(text: str) -> str:
    """The error that it ended with, of which each refusal has a line; or else its last line."""
    lines = text.strip().splitlines() or ["nothing was said"]
    begins = [at for at, line in enumerate(lines) if line.startswith(ERROR)]
    told = "\n".join(lines[begins[-1] if begins else -1 :]).removeprefix(ERROR)
    return in_a_script(_AGAIN.sub("call trainer.evaluate() again", told))
