"""The command that goes on with a run that an error ended."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from quartet.cli import rl
from quartet.cli.display import Plain
from quartet.cli.drive import Outcome
from quartet.cli.job import plan
from quartet.cli.told_to_change import to_say_again
from quartet.run.config import RunConfig
from quartet.v1 import orchestrator_service_pb2 as pb


@pytest.mark.parametrize(
    ("argument", "error", "open_"),
    [
        (["--on-environment-change", "stop"], 'go on with on_environment_change = "warn"', True),
        (["--on-environment-change=stop"], 'go on with on_environment_change = "warn"', True),
        (["--env.0.timeout_seconds", "5"], "raise timeout_seconds of [[env]]", True),
        (["--env.0.timeout-seconds", "5"], "raise env.0.timeout_seconds", True),
        (["--trainer.microbatch-tokens", "9"], "give --trainer.microbatch-tokens a smaller one", True),
        (["--seed", "3"], "seed = 3 is refused", True),
        # Words that are no keys, keys of other tables, files of such a name.
        (["--seed", "3"], "sampling.seed = 3 is refused; another seed than that", False),
        (["--model", "m"], "see to the environment, its host and the model, then resume the run", False),
        (["--run.max_steps", "3"], "/tmp/max_steps cannot be written", False),
        (["--max-steps", "3"], "raise timeout_seconds", False),
        (["--no-eval.before"], "eval.before = false is refused", False),
        (["@", "timeout_seconds"], "raise timeout_seconds", False),
    ],
)
def test_what_an_error_names_is_left_open_and_nothing_else_is(
    argument: list[str], error: str, open_: bool
) -> None:
    """told_to_change.py 1 and 2, between others that stay as they were said."""
    said = ["@", "run.toml", *argument, "--learning-rate", "1e-5"]
    name = argument[0].partition("=")[0]
    wanted = ["@", "run.toml", name, "VALUE", "--learning-rate", "1e-5"] if open_ else said
    assert to_say_again(said, error) == wanted
    assert to_say_again(said, "") == said


def test_a_run_that_an_option_stopped_is_not_gone_on_with_by_the_same(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drive(*_: object) -> Outcome:
        error = 'another (on_environment_change = "stop"): or go on with on_environment_change = "warn"'
        return Outcome(pb.Run(phase=pb.RUN_PHASE_STOPPED, error=error), {}, interrupted=False)

    monkeypatch.setattr(rl, "drive", drive)
    said = ["@", "my run.toml", "--on-environment-change", "stop", "--sampling", "{ top_k = 3 }"]
    job = plan(config, tmp_path / "run", None, resume=False, overwrite=False, words=rl._words(said))
    with pytest.raises(rl.RunFailed) as caught:
        rl.launch(job, Plain, time.monotonic())
    again = "quartet rl @ 'my run.toml' --on-environment-change VALUE --sampling '{ top_k = 3 }'"
    assert str(caught.value).endswith(f"go on with: {again} --output-dir {job.folder} --resume")
