"""Invariants 6 and 9: one of two inference replicas is killed, frozen or stopped under sixteen generations.

Traffic: greedy and seeded generations on two real replicas of one random model. Nemesis: a signal to the
replica that is some way into most of its generations; what it chooses by chance is seeded, and the seed is
printed. Checker: every generation ends, equal to the one that an undisturbed replica gives, and every
log-probability is that of a plain forward pass over exactly these tokens.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quartet.replicas import Replicas, Settings
from quartet.replicas.choice import ranking
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb

from tests.conftest import REPOSITORY
from tests.forked_services import Forks, Process

GENERATIONS = 16
MAX_TOKENS = 400
START_SECONDS = 120
RUN_SECONDS = 90
# What float32 engines promise of their log-probabilities (docs/numerics.md).
TOLERANCE = 5e-5

_path = REPOSITORY / "services/inference/tests/random_models.py"
_spec = importlib.util.spec_from_file_location("inference_models", _path)
assert _spec is not None and _spec.loader is not None
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    models.qwen3(0).save_pretrained(folder)
    models.byte_tokenizer().save_pretrained(folder)
    return folder


class Pair:
    """Two inference services as processes. One that was frozen goes on; one that ended is replaced."""

    def __init__(self, model: Path, folder: Path, forks: Forks) -> None:
        self._model, self._folder, self._forks = model, folder, forks
        self._started: list[Process] = []
        self._by_address: dict[str, Process] = {}

    def _start(self) -> Path:
        """Another one: the file that will have its address."""
        port = self._folder / f"{len(self._started)}.port"
        words = ["--model", str(self._model), "--server.port-file", str(port)]
        words += ["--server.drain-seconds", "0.2"]
        self._started.append(self._forks.start("inference", words, port.with_suffix(".log")))
        return port

    def both(self) -> dict[str, Process]:
        """By address, once both serve."""
        alive = {where: one for where, one in self._by_address.items() if one.poll() is None}
        for process in alive.values():
            process.send_signal(signal.SIGCONT)
        ports = [self._start() for _ in range(2 - len(alive))]
        new = self._started[len(self._started) - len(ports) :]
        deadline = time.monotonic() + START_SECONDS
        while not all(port.exists() for port in ports):
            for port, process in zip(ports, new, strict=True):
                assert process.poll() is None, port.with_suffix(".log").read_text()[-4000:]
            assert time.monotonic() < deadline, "the replicas did not start"
            time.sleep(0.05)
        addresses = [port.read_text().strip() for port in ports]
        self._by_address = alive | dict(zip(addresses, new, strict=True))
        return dict(self._by_address)

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def pair(model_folder: Path, tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Iterator[Pair]:
    """Of all tests, one after the other."""
    pair = Pair(model_folder, tmp_path_factory.mktemp("replicas"), forks)
    try:
        yield pair
    finally:
        pair.end()


def request_of(number: int, chance: random.Random) -> pb.GenerateRequest:
    """Even ones are greedy, odd ones seeded; all go on to their last token."""
    text = "".join(chance.choice("abcdefgh ") for _ in range(chance.randrange(5, 60)))
    sampling = common_pb2.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    if number % 2:
        sampling.seed, sampling.temperature = chance.randrange(2**63), 1.0
    else:
        sampling.temperature = 0.0
    message = common_pb2.Message(role="user", content=text)
    return pb.GenerateRequest(
        messages=pb.MessagesPrompt(messages=[message]), sampling=sampling, session_id=f"session {number}"
    )


async def disturbed(
    processes: dict[str, Process], requests: list[pb.GenerateRequest], sign: signal.Signals
) -> tuple[list[Any], Replicas, str]:
    """All generations at once; the signal goes out when the victim is a tenth into its own."""
    homes = [ranking(request.session_id, list(processes))[0] for request in requests]
    victim = max(processes, key=homes.count)
    progress = dict.fromkeys(range(len(requests)), 0)
    # Tokens come all the time here, so some seconds of silence are a frozen replica.
    silence_s = 4.0 if sign == signal.SIGSTOP else 30.0
    replicas = Replicas(list(processes), settings=Settings(idle_timeout_seconds=silence_s))

    def watch(number: int, tokens: int) -> None:
        progress[number] += tokens
        mine = [count for at, count in progress.items() if homes[at] == victim]
        if sum(mine) > len(mine) * MAX_TOKENS / 10 and processes[victim].poll() is None:
            processes[victim].send_signal(sign)

    async def one(number: int, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        frames = []
        async for frame in replicas.generate(request, RUN_SECONDS):
            frames.append(frame)
            if frame.HasField("delta"):
                watch(number, len(frame.delta.token_ids))
        return frames

    async with replicas, asyncio.timeout(RUN_SECONDS + 10):
        while len(replicas.in_service) < len(processes):  # noqa: ASYNC110 - processes answer when they do
            await asyncio.sleep(0.01)
        answers = await asyncio.gather(*(one(*item) for item in enumerate(requests)))
    return answers, replicas, victim


def logprobs_by_forward(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    chosen: torch.Tensor = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return chosen


@pytest.mark.parametrize("sign", [signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM])
async def test_invariant_9_generations_outlive_their_replica(pair: Pair, sign: signal.Signals) -> None:
    torch.set_num_threads(1)
    seed = int(os.environ.get("QUARTET_FAULT_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    print(f"QUARTET_FAULT_SEED={seed}")
    chance = random.Random(seed)
    requests = [request_of(number, chance) for number in range(GENERATIONS)]
    for _ in range(5):  # replicas decode on while this process is held up
        processes = await asyncio.to_thread(pair.both)
        answers, replicas, victim = await disturbed(processes, requests, sign)
        print(f"{replicas.counts}")
        if sign != signal.SIGSTOP:
            processes[victim].wait(timeout=RUN_SECONDS)
        if replicas.counts.carried_on >= 2:
            break
    assert replicas.counts.carried_on >= 2, "the signal came too late to disturb anything"
    (survivor,) = set(processes) - {victim}
    async with Replicas([survivor]) as undisturbed:
        whole = await asyncio.gather(*(undisturbed.complete(one, RUN_SECONDS) for one in requests))
    plain = models.qwen3(0)
    for frames, wanted in zip(answers, whole, strict=True):
        assert [f.HasField("start") for f in frames].count(True) == 1
        deltas = [frame.delta for frame in frames if frame.HasField("delta")]
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert frames[0].start.prompt_token_ids == wanted.prompt_ids
        assert tokens == wanted.completions[0].token_ids and len(tokens) == MAX_TOKENS
        spans = [(span.start, span.length) for delta in deltas for span in delta.spans]
        assert [at for at, _ in spans] == [sum(n for _, n in spans[:i]) for i in range(len(spans))]
        finish = frames[-1].finish
        assert finish.message == wanted.completions[0].message
        assert finish.usage.completion_tokens == MAX_TOKENS
        assert finish.usage.prompt_tokens == len(wanted.prompt_ids)
        told = torch.tensor([one for delta in deltas for one in delta.logprobs])
        forward = logprobs_by_forward(plain, wanted.prompt_ids, tokens)
        assert (told - forward).abs().max() <= TOLERANCE
