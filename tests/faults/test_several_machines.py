"""A run over three machines, which are three loopback addresses here: two ranks of the trainer on the first
two, two replicas of inference on the third; and what becomes of it when parts of it end.

One run has all of it: its launcher is killed and a machine leaves while doors are as they are without a word;
it goes on behind TLS of the user's own, and a rank and a replica are killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
import tomllib
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from certificates import needs_openssl, write_certificates

from tests.conftest import QUARTET, summary_of, under_way
from tests.faults.test_kill_each_service import (
    FIRST_STEP_SECONDS,
    LOADED,
    NEXT_STEP_SECONDS,
    RUN_SECONDS,
    children,
    steps_done,
    wait_for_steps,
)
from tests.forked_services import with_imports_of

HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
#: Another suite on this machine has other ones.
FIRST_PORT = random.SystemRandom().randrange(11_000, 18_900)
PLACED = ["--trainer.nodes=2", "--inference.nodes=1", "--inference.replicas=2"]
STEPS, BATCH_SIZE = 16, 64
#: Of ranks over gloo, which else meet by what the machine's own name means.
ENVIRONMENT = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}


def started(command: list[str], log: Path, **more: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """A process, with more in its environment, which does not outlive the block; its log is printed."""
    return under_way([*QUARTET, *command], log, ENVIRONMENT | more)


def launch(model: Path, output: Path, *more: str) -> list[str]:
    command = ["rl", "@", "configs/reverse-text.toml", "--model", str(model), "--output-dir", str(output)]
    # Two ranks on one loaded machine train slowly: few steps are done once more after a kill.
    sizes = [f"--max-steps={STEPS}", f"--batch-size={BATCH_SIZE}", "--eval.num-examples=16"]
    placed = [*PLACED, f"--first-port={FIRST_PORT}", "--hosts", ",".join(HOSTS)]
    return [*command, *sizes, "--ckpt.interval=2", *placed, *more]


def node(output: Path, host: str) -> list[str]:
    return ["node", str(output), "--host", host]


def rank_of(launched: int) -> int:
    """The rank that a torchrun started."""
    return next(pid for pid, line in children(launched) if "quartet_trainer" in line)


def pid_of(output: Path, machine: int, name: str) -> int:
    """A process of another machine, as that reports it."""
    report = json.loads((output / "machines" / f"{machine}.json").read_text())
    return next(int(status["pid"]) for status in report["statuses"] if status["name"] == name)


def said(log: Path, words: str, seconds: float) -> None:
    """Wait for it."""
    ends = time.monotonic() + seconds
    while words not in log.read_text():
        assert time.monotonic() < ends, f"{log.name} does not say {words!r} within {seconds} s"
        time.sleep(0.1)


def doors(folder: Path) -> list[str]:
    """Options for TLS and a token of the user's own, between all services."""
    write_certificates(folder)
    (folder / "token").write_text("a-token-of-mine")
    door = {"tls.cert_file": "server.crt", "tls.key_file": "server.key", "token_file": "token"}
    keys = {
        f"{service}.server.{key}": folder / file
        for service in ("trainer", "inference", "envhost")
        for key, file in door.items()
    }
    for table in ("orchestrator.security", "envhost.inference_security", "inference.weights_security"):
        keys |= {f"{table}.ca_file": folder / "ca.crt", f"{table}.token_file": folder / "token"}
    return [f"--{key}={value}" for key, value in keys.items()]


def kill_in_turn(first: subprocess.Popen[str], output: Path) -> None:
    """A rank and a replica of other machines, in any order: two steps are done after each."""
    seed = int(os.environ.get("QUARTET_FAULT_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    print(f"QUARTET_FAULT_SEED={seed}")
    chance = random.Random(seed)
    victims = {"trainer-2": 2, "inference-1": 3}
    for name in chance.sample(list(victims), len(victims)):
        time.sleep(chance.uniform(0.0, 1.0))
        pid = pid_of(output, victims[name], name)
        before = steps_done(output)
        assert before < STEPS - 1, "the run ended before all were killed; raise STEPS"
        os.kill(rank_of(pid) if name == "trainer-2" else pid, signal.SIGKILL)
        seconds = wait_for_steps(first, output, min(before + 2, STEPS), NEXT_STEP_SECONDS * LOADED * 2)
        print(f"{seconds:.1f} s to the second step after {name} was killed")


def check_whole(output: Path) -> None:
    """Every step once, whole, by log-probabilities that agree."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1)), "every step once, in order"
    assert max(row["train/logprob_difference_max"] for row in steps) <= 2e-5
    summary = summary_of(output)
    assert summary["steps"] == STEPS
    assert (summary["ledger"]["trained"], summary["ledger"]["in_flight"]) == (STEPS * BATCH_SIZE, 0)


@needs_openssl
@pytest.mark.timeout(2 * RUN_SECONDS)
def test_a_run_outlives_its_launcher_a_machine_that_left_and_ranks_and_replicas_of_others(
    tiny_model: Path, tmp_path: Path, importer: str
) -> None:
    output = tmp_path / "run"
    with ExitStack() as opened:
        second = opened.enter_context(started(node(output, HOSTS[1]), tmp_path / "second.log"))
        third = opened.enter_context(started(node(output, HOSTS[2]), tmp_path / "third.log"))
        with started(launch(tiny_model, output), tmp_path / "killed.log") as killed:
            wait_for_steps(killed, output, 2, FIRST_STEP_SECONDS)
            killed.kill()
        third.send_signal(signal.SIGTERM)
        assert third.wait(timeout=60) == 130
        log, before = tmp_path / "again.log", steps_done(output)
        command = launch(tiny_model, output, *doors(tmp_path), "--resume")
        again = opened.enter_context(started(command, log))
        said(log, f"waiting for {HOSTS[2]}; start there: quartet node {output} --host {HOSTS[2]}", 60)
        # Once it was started as by anybody.
        command, imports = node(output, HOSTS[2]), with_imports_of(importer)
        third = opened.enter_context(started(command, tmp_path / "third-again.log", **imports))
        said(log, f"{HOSTS[2]} is there", 60)
        wait_for_steps(again, output, before + 1, FIRST_STEP_SECONDS)
        kill_in_turn(again, output)
        assert again.wait(timeout=RUN_SECONDS) == 0
        assert [one.wait(timeout=30) for one in (second, third)] == [0, 0], "they end with the run"
    check_whole(output)
    restarts = summary_of(output)["restarts"]
    assert restarts["trainer-2"] >= 1 and restarts["trainer"] >= 1, "ranks end and begin together"
    assert restarts["inference-1"] == 1 and restarts["inference-2"] == 0
    configs = [tomllib.loads(file.read_text()) for file in (output / "config").iterdir()]
    assert not any("insecure_ok_off_loopback" in config["server"] for config in configs)


@pytest.mark.timeout(RUN_SECONDS)
def test_a_machine_that_cannot_do_its_part_fails_the_run_in_its_own_words(
    tiny_model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    wrong = ["--inference.embedded.device=cuda"]
    with ExitStack() as opened:
        second = opened.enter_context(started(node(output, HOSTS[1]), tmp_path / "second.log"))
        third = opened.enter_context(started(node(output, HOSTS[2]), tmp_path / "third.log"))
        first = opened.enter_context(started(launch(tiny_model, output, *wrong), tmp_path / "first.log"))
        assert first.wait(timeout=120) == 1
        assert third.wait(timeout=30) == 2
        assert second.wait(timeout=30) == 0, "it ends with the launch"
        refused = '[inference] embedded.device = "cuda", but this machine has no GPU'
        assert f"error: {refused}" in (tmp_path / "third.log").read_text()
        assert f"error: on {HOSTS[2]}: {refused}" in (tmp_path / "first.log").read_text()
