"""Invariants 2, 7 and 9 where no process dies: each way between two services is cut without a word, and then
opened.

Traffic: the main job, over services that are started one by one, as on machines of their own. Nemesis: a
proxy on each way that the circle has (cut_link.py), cut in a seeded order, both ways or in one direction, for
a time below and for one above that after which a silent peer is given up; what was sent meanwhile comes late,
or never, an answer to a call that was applied among it. Checker: the run goes on by itself,
in time, every step is recorded once, in order, and applied once: the trainer's own count of steps is in its
learning rate.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from loopback import LOOPBACK
from severed import Cut, Way

from tests.conftest import QUARTET, REPOSITORY
from tests.faults.cut_link import Links
from tests.faults.test_kill_each_service import FIRST_STEP_SECONDS, LOADED, steps_done
from tests.forked_services import Forks, Process

RUN = "cut"
BATCH_SIZE = 32
LEARNING_RATE = 2e-4
#: More than the run comes to: until then the rate of step n is n parts of it.
WARMUP_STEPS = 10_000
#: What nobody notices but by waiting, and what the ping of a connection has found by then.
SHORT_SECONDS = (1.0, 4.0)
LONG_SECONDS = 35.0
#: The promise of docs/deploy.md, from the moment on at which the way is open.
NEXT_STEP_SECONDS = 15.0
START_SECONDS = 180.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@contextmanager
def killed(process: Process, log: Path) -> Iterator[Process]:
    """It does not outlive the block; the end of its log is printed."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        print(f"--- {log.name}", log.read_text()[-3000:], sep="\n")


class Circle:
    """Four services and the ways between them."""

    def __init__(self, folder: Path, model: Path, forks: Forks, opened: ExitStack) -> None:
        """Start them all; who calls another does so by a way of its own."""
        self._folder, self._forks = folder, forks
        self._opened = opened
        self.links = opened.enter_context(Links())
        self.ways: dict[str, Way] = {}
        self._start("trainer", "--state-dir", folder / "states")
        weights = self._way("inference to trainer")
        self._start("inference", "--model", model, "--weights-address", weights, "--shared-memory", "false")
        tokens = self._way("envhost to inference")
        envs = REPOSITORY / ".venv-envs/bin/python"
        self._start("envhost", "--python", envs, "--inference-addresses", f'["{tokens}"]')
        reached = ["--trainer-address", self._way("orchestrator to trainer")]
        reached += ["--envhost-addresses", f'["{self._way("orchestrator to envhost")}"]']
        reached += ["--inference-addresses", f'["{self._way("orchestrator to inference")}"]']
        self._start("orchestrator", "--data-dir", folder / "data", *reached)
        #: From whoever follows the run, who is no service.
        self.entry = self._way("follower to orchestrator")
        for name, way in self.ways.items():
            port = self._port(name.rpartition(" ")[2])
            self.wait(port.exists, START_SECONDS, f"no {port.name}")
            way.there = port.read_text().strip()

    def _start(self, service: str, *arguments: object) -> None:
        words = ["--server.address", f"{LOOPBACK}:0", "--server.port-file", str(self._port(service))]
        log = self._folder / f"{service}.log"
        self._opened.enter_context(
            killed(self._forks.start(service, [*map(str, arguments), *words], log), log)
        )

    def _port(self, service: str) -> Path:
        return self._folder / f"{service}.port"

    def _way(self, name: str) -> str:
        """The address of a new way, which leads to nobody before all of them serve."""
        self.ways[name] = self.links.to(f"{LOOPBACK}:9")
        return self.ways[name].address

    def command(self, *words: str) -> list[str]:
        """A command of whoever has the run."""
        return [*QUARTET, *words, "--orchestrator", self.entry]

    @staticmethod
    def wait(is_so: Callable[[], bool], seconds: float, otherwise: str) -> float:
        """Seconds until it is so."""
        began = time.monotonic()
        while not is_so():
            assert time.monotonic() - began < seconds, f"{otherwise} within {seconds:g} s"
            time.sleep(0.05)
        return time.monotonic() - began


def rows_of(output: Path) -> list[dict[str, Any]]:
    """What the run recorded of its steps."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


@pytest.mark.timeout(900)
def test_a_run_goes_on_over_every_way_that_was_cut_and_no_step_is_lost_or_applied_twice(
    tiny_model: Path, tmp_path: Path, forks: Forks, record_property: Callable[[str, object], None]
) -> None:
    seed = int(os.environ.get("QUARTET_FAULT_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    print(f"QUARTET_FAULT_SEED={seed}")
    chance = random.Random(seed)
    output = tmp_path / "run"
    settings = [f"--model={tiny_model}", f"--batch-size={BATCH_SIZE}", f"--learning-rate={LEARNING_RATE}"]
    settings += [f"--warmup-steps={WARMUP_STEPS}", f"--max-steps={WARMUP_STEPS}", "--eval.num-examples=16"]
    with ExitStack() as opened:
        circle = Circle(tmp_path, tiny_model, forks, opened)
        submit = circle.command("submit", "@", "configs/reverse-text.toml", "--run-id", RUN, *settings)
        subprocess.run(submit, cwd=REPOSITORY, env=ENVIRONMENT, check=True, timeout=START_SECONDS)
        watch = circle.command("watch", RUN, "--output-dir", str(output))
        log = tmp_path / "watch.log"
        with log.open("w") as out:
            watching = subprocess.Popen(watch, cwd=REPOSITORY, env=ENVIRONMENT, stdout=out, stderr=out)
        follower = opened.enter_context(killed(watching, log))
        circle.wait(lambda: steps_done(output) >= 2, FIRST_STEP_SECONDS * LOADED, "no two steps")

        long = chance.choice(list(circle.ways))
        for name in chance.sample(list(circle.ways), len(circle.ways)):
            cut, lost = chance.choice([Cut.BOTH, Cut.REQUESTS, Cut.ANSWERS]), chance.choice([True, False])
            seconds = LONG_SECONDS if name == long else chance.uniform(*SHORT_SECONDS)
            what = f"{cut}, {seconds:.1f} s, {'lost' if lost else 'held back'}"
            time.sleep(chance.uniform(0.0, 1.0))  # in the middle of whatever is under way
            circle.links.cut(circle.ways[name], cut)
            time.sleep(seconds)
            circle.links.mend(circle.ways[name], lost=lost)
            before = steps_done(output)
            # One may have been on its way to whoever records it.
            took = circle.wait(
                lambda before=before: steps_done(output) >= before + 2,
                NEXT_STEP_SECONDS * LOADED,
                f"no two steps after {name} was cut ({what})",
            )
            print(f"{name} ({what}): {took:.1f} s to the second step after it was open")
            record_property(name, took)
        subprocess.run(circle.command("stop", RUN), env=ENVIRONMENT, check=True, timeout=START_SECONDS)
        follower.wait(timeout=START_SECONDS)
        check_whole(output)


def check_whole(output: Path) -> None:
    """Every step once, whole and applied once, and every rollout accounted for."""
    rows = rows_of(output)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "every step once, in order"
    rates = [row["train/learning_rate"] for row in rows]
    warmed = [LEARNING_RATE * row["step"] / WARMUP_STEPS for row in rows]
    assert rates == pytest.approx(warmed, rel=1e-4), "an optimizer step was lost, or applied twice"
    assert max(row["train/logprob_difference_max"] for row in rows) <= 2e-5
    assert {row["train/logprob_tokens_skipped"] for row in rows} == {0}
    last = rows[-1]
    assert last["ledger/trained"] == len(rows) * BATCH_SIZE, "each step trained one whole batch, once"
    gone = sum(last["ledger/discarded"].values())
    assert last["ledger/dispatched"] == last["ledger/trained"] + gone + last["ledger/in_flight"]
