"""The thin clients, as processes, against a small orchestrator that keeps runs in a dict.

Of how they reach it, test_cli_reaching.py.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from forked_command import quartet
from kept_runs import MODEL, Orchestrator, serving
from quartet.cli.compare.folders import recorded
from quartet.kit.build import Build, build_of
from quartet.run.config import parse_run
from quartet.run.evaluation import ALL_EXAMPLES
from quartet.v1 import orchestrator_service_pb2 as pb

RUN_TOML = 'model = "m"\nmax_steps = 3\n[[env]]\nid = "reverse-text"\n[trainer]\nstate_dir = "elsewhere"\n'


@pytest.fixture
async def orchestrator() -> AsyncIterator[tuple[Orchestrator, str]]:
    servicer = Orchestrator()
    async with serving(servicer) as address:
        yield servicer, address


async def test_a_run_through_all_clients(orchestrator: tuple[Orchestrator, str], tmp_path: Path) -> None:
    servicer, address = orchestrator
    config = tmp_path / "run.toml"
    config.write_text(RUN_TOML)
    at = ["--orchestrator", address]
    told = await quartet("submit", "@", str(config), *at, "--dry-run", "--run-id", "r")
    note = "not read, the services are running already: "
    assert told == (0, f"{note}[trainer]\nr would be accepted; not submitted\n")
    code, printed = await quartet("submit", "@", str(config), *at, "--run-id", "taken")
    assert code == 2 and "exists otherwise; choose another --run-id" in printed, "as it is called here"
    assert servicer.runs == {}
    assert await quartet("runs", *at) == (0, "there is no run: none was submitted yet, or all were deleted\n")
    code, printed = await quartet("submit", "@", str(config), "--max-steps", "5", *at, "--run-id", "r")
    assert (code, printed) == (0, "r  pending  step 0/5\n"), "where states lie concerns no run"
    config.write_text(
        f'{RUN_TOML}[inference.chat]\ntool_parser = "hermes"\n[inference.embedded]\nthreads = 2\n'
    )
    code, printed = await quartet("submit", "@", str(config), "--max-steps", "5", *at, "--run-id", "r")
    assert (code, printed) == (0, f"{note}[inference]\nr  pending  step 0/5\n"), "what a run may count on"
    code, printed = await quartet("submit", "@", str(config), "--trainer.threads", "2", *at)
    assert code == 2 and "--trainer.threads is a setting of the trainer service" in printed
    code, printed = await quartet("submit", "@", str(config), *at, "--run-id", "")
    assert code == 2 and printed.startswith("error: --run-id '' is refused"), "a shell's variable, unset"
    assert "state_dir" not in servicer.runs["r"].config_toml, "the deployment is not the orchestrator's"
    assert await quartet("runs", *at) == (0, "r  pending  step 0/5\n")
    assert await quartet("stop", "r", *at) == (0, "r  stopped  step 0/5\n")
    code, printed = await quartet("submit", "@", str(config), "--max-steps", "5", *at, "--run-id", "r")
    there = "r  stopped  step 0/5\nrun 'r' was there and is STOPPED: 'quartet resume r' goes on with it\n"
    assert (code, printed.removeprefix(f"{note}[inference]\n")) == (0, there), "which nobody waits for"
    code, printed = await quartet("watch", "r", *at)
    assert code == 130 and printed.endswith("run r: stopped\n")
    servicer.runs["r"].error = "the trainer has been away for 600 s"
    code, printed = await quartet("watch", "r", *at)
    assert code == 1 and printed.endswith("stopped: the trainer has been away for 600 s\n"), "by itself"
    servicer.runs["r"].error = ""
    servicer.runs["r"].phase = pb.RUN_PHASE_STOPPING
    code, printed = await quartet("resume", "r", *at)
    waited = "run 'r' is STOPPING (saving for 1 s); it goes on once that is over\n"
    assert (code, printed) == (0, f"{waited}r  completed  step 0/5  saving for 2 s\n"), "it is told once"
    servicer.runs["r"].doing = ""
    assert (await quartet("watch", "r", *at))[0] == 0


async def test_plaintext_leaves_this_machine_only_where_that_is_said(
    orchestrator: tuple[Orchestrator, str],
) -> None:
    # Not loopback to whoever reads it, and to the kernel this machine.
    at = ["--orchestrator", orchestrator[1].replace("127.0.0.1", "0.0.0.0")]
    code, said = await quartet("runs", *at)
    assert code == 2 and "--insecure-ok-off-loopback on a private network" in said
    assert (await quartet("runs", *at, "--insecure-ok-off-loopback"))[0] == 0


async def test_who_watches_leaves_with_whoever_reads(orchestrator: tuple[Orchestrator, str]) -> None:
    """`quartet watch RUN | head`, of a run that goes on."""
    servicer, address = orchestrator
    servicer.runs["r"] = pb.Run(run_id="r", phase=pb.RUN_PHASE_TRAINING)
    reader, writer = os.pipe()
    os.close(reader)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "quartet.cli", "watch", "r", "--orchestrator", address,
        stdout=writer, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    os.close(writer)
    _, said = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, said) == (1, b"")


async def test_a_run_that_was_stopped_once_is_watched_to_its_end(
    orchestrator: tuple[Orchestrator, str],
) -> None:
    """Its old end is history, also where it has ended for good since."""
    servicer, address = orchestrator
    servicer.past = [pb.RUN_PHASE_TRAINING, pb.RUN_PHASE_STOPPED, pb.RUN_PHASE_TRAINING]
    servicer.runs["r"] = pb.Run(run_id="r", phase=pb.RUN_PHASE_COMPLETED, last_event=4)
    code, printed = await quartet("watch", "r", "--orchestrator", address)
    assert code == 0 and printed.endswith("run r: completed\n"), printed
    assert printed.index("run r: stopped") < printed.index("run r: completed")


async def test_a_file_of_vf_rl_is_submitted_as_the_run_that_it_is(
    orchestrator: tuple[Orchestrator, str], tmp_path: Path
) -> None:
    servicer, address = orchestrator
    file = tmp_path / "theirs.toml"
    file.write_text(
        'model = "m"\n[env]\nid = "owner/e"\n[inference]\ngpus = 2\n'
        "[trainer]\ngpus = 1\n[trainer.args]\nmax_steps = 7\n"
    )
    options = ["--trainer.args.batch_size", "64", "--orchestrator", address, "--run-id", "r"]
    code, printed = await quartet("submit", "@", str(file), *options)
    assert code == 0 and printed.endswith("r  pending  step 0/7\n")
    assert "theirs.toml: read as vf-rl" in printed
    assert "inference.gpus" not in printed, "nobody here knows the engine there"
    assert "not read" not in printed, "that is how many devices a machine has"
    run = parse_run(servicer.runs["r"].config_toml)
    assert (run.batch_size, run.rollouts_per_example, run.algorithm.proximal) == (64, 16, True)
    assert run.trainer == run.inference == {}


async def test_files_of_prime_rls_services_are_submitted(
    orchestrator: tuple[Orchestrator, str], tmp_path: Path
) -> None:
    """--orchestrator is the table that a file is of where a file follows, and else an address."""
    servicer, address = orchestrator
    files = {
        "trainer": "max_steps = 7\n[optim]\nlr = 3e-5\n",
        "orchestrator": 'batch_size = 16\nrollouts_per_example = 4\n[environment]\nid = "e"\n',
        "inference": '[model]\nname = "m"\n',
    }
    for joined in (False, True):
        said: list[str] = []
        for name, text in files.items():
            (tmp_path / f"{name}.toml").write_text(text)
            at = [f"@{tmp_path}/{name}.toml"] if joined else ["@", f"{tmp_path}/{name}.toml"]
            said += [f"--{name}", *at]
        run_id = f"joined-{joined}"
        code, printed = await quartet("submit", *said, "--orchestrator", address, "--run-id", run_id)
        assert code == 0 and "inference.toml: read as prime-rl" in printed, printed
        run = parse_run(servicer.runs[run_id].config_toml)
        assert (run.max_steps, run.batch_size, run.rollouts_per_example) == (7, 16, 4)
        assert (run.learning_rate, run.env[0].id) == (3e-5, "e")


async def test_where_a_run_is_shown_goes_along_for_who_watches(
    orchestrator: tuple[Orchestrator, str], tmp_path: Path
) -> None:
    servicer, address = orchestrator
    config, at = tmp_path / "run.toml", ["--orchestrator", address]
    config.write_text(RUN_TOML)
    code, printed = await quartet("submit", "@", str(config), *at, "--run-id", "plain")
    assert code == 0 and "whoever follows" not in printed
    code, printed = await quartet("submit", "@", str(config), *at, "--run-id", "l", "--lora.enabled", "true")
    assert code == 0 and "hardly moves an adapter; 1e-5 to 1e-4 are usual" in printed, "as quartet rl says it"
    assert "wandb" not in servicer.runs["plain"].config_toml
    shown = ["submit", "@", str(config), *at, "--wandb.project", "theirs", "--run-id", "shown"]
    told = "[wandb]: whoever follows the run reports it there; write 'quartet watch shown --wandb'\n"
    code, printed = await quartet(*shown, "--dry-run")
    assert code == 0 and "whoever follows" not in printed, "there is no run to watch"
    code, printed = await quartet(*shown)
    assert code == 0 and told in printed, "a platform would do it by itself"
    assert "[wandb], [tensorboard]" in (await quartet(*shown, "--tensorboard.enabled", "true"))[1]
    assert parse_run(servicer.runs["shown"].config_toml).wandb.project == "theirs"
    code, printed = await quartet("watch", "plain", *at, "--wandb")
    assert code == 2 and "names no project of Weights & Biases; add --wandb.project NAME" in printed
    code, printed = await quartet("watch", "shown", *at, "--wandb", "--after-event", "3")
    assert code == 2 and "--after-event leaves out events, and the folder is to have all" in printed
    code, printed = await quartet("watch", "shown", *at, "--wandb.projekt", "p")
    assert code == 2 and "did you mean 'wandb.project'" in printed


async def test_a_run_is_recorded_where_it_is_watched(
    orchestrator: tuple[Orchestrator, str], tmp_path: Path
) -> None:
    servicer, address = orchestrator
    for run_id in ("r", "other"):
        servicer.runs[run_id] = pb.Run(
            run_id=run_id, phase=pb.RUN_PHASE_COMPLETED, last_event=1, step=3, reward_after=0.5
        )
    folder = tmp_path / "there"
    watch = ["--orchestrator", address, "--output-dir", str(folder)]
    for _ in range(2):
        code, printed = await quartet("watch", "r", *watch)
        assert code == 0 and f"run r is recorded in {folder}" in printed
    assert {file.name for file in folder.iterdir()} == {".lock", "rollouts", "watched.json"}
    end = recorded(folder).end
    assert (end["phase"], end["steps"], end["reward_after"]) == ("completed", 3, 0.5), "follow.py 2"
    for slip in ("--tensorbord", "--tensorbord=true"):
        code, printed = await quartet("watch", "r", *watch, slip)
        assert code == 2 and "did you mean '--tensorboard'?" in printed, "a flag, of a table's name"
    code, printed = await quartet("watch", "r", *watch, "--tensorboard")
    assert code == 0 and f"TensorBoard: tensorboard --logdir {folder / 'tensorboard'}" in printed
    assert [file.name[:20] for file in (folder / "tensorboard").iterdir()] == ["events.out.tfevents."]
    code, printed = await quartet("watch", "other", *watch)
    assert code == 2 and "holds something else than the run 'other'" in printed
    code, printed = await quartet("watch", "r", "--orchestrator", address, "--keep-rollouts", "3")
    assert code == 2 and "--keep-rollouts is about what --output-dir records" in printed
    code, printed = await quartet("watch", "r", *watch, "--keep-rollouts", "0")
    assert code == 2 and "give a number of steps from 1 on" in printed
    assert (await quartet("watch", "r", *watch, "--keep-rollouts", "3"))[0] == 0


async def test_a_policy_is_measured_and_only_what_was_said_is_sent(
    orchestrator: tuple[Orchestrator, str], tmp_path: Path
) -> None:
    servicer, address = orchestrator
    servicer.runs["r"] = pb.Run(run_id="r")
    file = tmp_path / "evaluation.toml"
    file.write_text('num_examples = 8\n[sampling]\ntemperature = 0.0\n[[env]]\nid = "gsm8k"\n')
    asked = ["evaluate", "r", "@", str(file), "--rollouts-per-example", "2", "--orchestrator", address]
    code, printed = await quartet(*asked)
    assert (code, printed) == (0, "r  version 3, after step 3\neval/coverage  1\neval/reward  0.25\n")
    assert servicer.evaluated == [
        {
            "num_examples": 8,
            "rollouts_per_example": 2,
            "sampling": {"temperature": 0.0},
            "env": [{"id": "gsm8k"}],
        }
    ]
    assert (await quartet(*asked))[0] == 1, "something is missing"
    code, printed = await quartet(*asked, "--interval", "2")
    assert code == 2 and "interval" in printed and len(servicer.evaluated) == 2


async def test_an_evaluation_takes_the_short_flags_of_eval(orchestrator: tuple[Orchestrator, str]) -> None:
    servicer, address = orchestrator
    servicer.runs["r"] = pb.Run(run_id="r")
    short = ["-n", "4", "-r", "2", "-c", "8", "-t", "9", "-T", "0"]
    code, printed = await quartet("evaluate", "r", *short, "--orchestrator", address)
    assert code == 0, printed
    sampling = {"max_tokens": 9, "temperature": 0.0}
    assert servicer.evaluated == [
        {"num_examples": 4, "rollouts_per_example": 2, "max_concurrent": 8, "sampling": sampling}
    ]
    await quartet("evaluate", "r", "-n", "-1", "--orchestrator", address)
    assert servicer.evaluated[1:] == [{"num_examples": ALL_EXAMPLES}], (
        "as an older orchestrator reads it, too"
    )
    code, printed = await quartet("evaluate", "r", "-n", "-2", "--orchestrator", address)
    assert code == 2 and "num_examples = -2 is refused" in printed


async def test_runs_tells_what_they_do_and_which_services_to_see_to(
    orchestrator: tuple[Orchestrator, str],
) -> None:
    servicer, address = orchestrator
    at = ["--orchestrator", address]
    doing = "training step 3 for 9 s; the trainer is away"
    servicer.runs["r"] = pb.Run(run_id="r", phase=pb.RUN_PHASE_TRAINING, step=2, max_steps=5, doing=doing)
    line, here = f"r  training  step 2/5  {doing}\n", build_of()
    same: dict[str, Any] = {"release": here.release, "sdk_build": here.sdk, "ready": True}
    servicer.services = [
        pb.ServiceStatus(service="orchestrator", build="o", **same),
        pb.ServiceStatus(service="inference", address="h:1", build="i", **same),
        pb.ServiceStatus(service="inference", address="h:2", build="i", **same),
    ]
    assert await quartet("runs", *at) == (0, line), "nothing where nothing is to be said"
    servicer.runs["r"].environments.add(id="toy", version="1.0", digest="aaaa", later_digests=["bbbb"])
    of_it = "  environment toy  version 1.0  digest aaaa -> bbbb\n"
    assert await quartet("runs", *at, "--environments") == (0, line + of_it)
    code, printed = await quartet("runs", *at, "--services")
    assert printed == line + "".join(
        f"{name}: ready, {Build(here.release, here.sdk, own)}\n"
        for name, own in (("orchestrator", "o"), ("inference at h:1", "i"), ("inference at h:2", "i"))
    )
    servicer.services[2].build, servicer.services[1].ready = "older", False
    assert "inference at h:1: not ready, its log says why" in (await quartet("runs", *at, "--services"))[1]
    servicer.runs["r"].phase = pb.RUN_PHASE_COMPLETED
    assert "inference at h:1: idle, serves from a run's f" in (await quartet("runs", *at, "--services"))[1]
    servicer.runs["r"].phase = pb.RUN_PHASE_TRAINING
    servicer.services.append(pb.ServiceStatus(service="trainer", address="h:3", error="Connection refused"))
    code, printed = await quartet("runs", *at)
    assert code == 0 and line in printed
    assert "trainer at h:3 does not answer: Connection refused\n" in printed
    assert (
        f"builds differ: this command {here}, orchestrator {here.release} (sdk {here.sdk}, own o)" in printed
    )
    assert f"inference {here.release} (sdk {here.sdk}, own older)\n" in printed
    measured = servicer.runs["r"]
    measured.reward_before, measured.reward_after = 0.0, 0.0
    for role, sign in (("blue", 1), ("red\x1b", -1)):
        measured.agents.add(environment="game", agent=role, reward_before=sign / 4, reward_after=sign / 2)
    sides = "  reward before 0.000 (blue 0.250, red\\x1b -0.250), after 0.000 (blue 0.500, red\\x1b -0.500)"
    line = line.replace("step 2/5", f"step 2/5{sides}")
    servicer.knows_services = False
    assert await quartet("runs", *at) == (0, line), "of an orchestrator of an earlier release"


async def test_a_model_that_is_elsewhere_is_fetched(
    orchestrator: tuple[Orchestrator, str], tmp_path: Path
) -> None:
    """export.py 4."""
    servicer, address = orchestrator
    at, target = ["--orchestrator", address], tmp_path / "models" / "mine"
    code, printed = await quartet("export", "r", str(target), *at)
    assert (code, printed) == (1, "error: RUN_UNKNOWN: no run 'r'\n")
    servicer.runs["r"], servicer.breaks_after = pb.Run(run_id="r"), [2]
    what = "the model of state final, policy version 7: 2 files, 0.0 MB"
    torn = "broken off, goes on from byte 0 of model.safetensors: the trainer was killed"
    code, printed = await quartet("export", "r", str(target), *at, "--state", "final", "--adapter")
    assert (code, printed) == (0, f"fetching {what}\n{torn}\n{target}: {what}\n")
    assert {file.name: file.read_bytes() for file in target.iterdir()} == MODEL
    assert [(one.state, one.adapter, one.resume.path) for one in servicer.fetched] == [
        ("final", True, ""),
        ("final", True, "model.safetensors"),
    ]
    code, printed = await quartet("export", "r", str(target), *at)
    assert code == 2 and "it exists and is no empty folder; name one that does not" in printed
    assert len(servicer.fetched) == 2


async def test_errors_are_one_sentence(orchestrator: tuple[Orchestrator, str]) -> None:
    _, address = orchestrator
    assert await quartet("stop", "x", "--orchestrator", address) == (1, "error: RUN_UNKNOWN: no run 'x'\n")
    code, printed = await quartet("runs", "--orchestrator", address, "stray")
    assert code == 2 and "'stray' is not understood" in printed
