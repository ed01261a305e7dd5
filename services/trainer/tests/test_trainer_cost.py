"""What a step costs, and that the event loop does not pay for it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from quartet.v1 import rollout_pb2
from quartet.v1 import trainer_service_pb2 as pb


async def test_the_event_loop_answers_while_a_batch_is_computed(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    """Reckoned in this process's own CPU time: how long another process kept the machine says nothing."""
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        batch = asyncio.create_task(trainer.forward_backward(1, make_samples(groups=150, members=4)))
        slowest, answered = 0.0, 0
        while not batch.done():
            began = time.process_time()
            await trainer.stub.GetRun(pb.GetRunRequest(run_id="r"))
            slowest, answered = max(slowest, time.process_time() - began), answered + 1
            await asyncio.sleep(0.005)
        await batch
        assert answered > 2 and slowest < 1.0


async def test_cpu_time_of_a_step(serve_trainer: Any, tmp_path: Path, capsys: Any) -> None:
    """128 samples of 33 tokens in 16 groups, on a model like the main job's; the figure is printed.

    What is too much is reckoned from what the model alone takes on this machine, by turns with the trainer.
    """
    config = transformers.Qwen3Config(
        vocab_size=320,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        tie_word_embeddings=True,
    )
    config.save_pretrained(tmp_path / "model")
    plain = transformers.Qwen3ForCausalLM(config)
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(16):
        prompt = rng.integers(0, 320, 22).tolist()
        for _ in range(8):
            sample = rollout_pb2.Sample(
                token_ids=prompt + rng.integers(0, 320, 11).tolist(),
                spans=[rollout_pb2.PolicySpan(start=22, length=11)],
                logprobs=[-5.7] * 11,
            )
            samples.append(pb.TrainingSample(sample=sample, advantages=[float(rng.normal())]))
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(tmp_path / "model"), from_scratch=True, retain_versions=3)
        await trainer.publish(1)
        token_ids = torch.tensor([list(one.sample.token_ids) for one in samples])
        spent, plainly = [], []
        for step in range(4):
            began = time.process_time()
            plain(token_ids, labels=token_ids).loss.backward()
            plainly.append(time.process_time() - began)
            began = time.process_time()
            done = await trainer.forward_backward(3 * step + 2, samples, verify_logprobs=True)
            await trainer.optim_step(3 * step + 3)
            await trainer.publish(3 * step + 4)
            spent.append(time.process_time() - began)
        first = trainer.forward_backward(14, samples[:1])
        await first
        began = time.process_time()
        for _ in range(10):
            await trainer.forward_backward(14, samples[:1])
        repeated_ms = 100 * (time.process_time() - began)
    with capsys.disabled():
        print(
            f"\n128 x 33 tokens, forward, backward, verification, step, publish: {min(spent):.3f} CPU s "
            f"(compute {done.compute_ms} ms; the model alone, forward and backward: {min(plainly):.3f}); "
            f"a call that computes nothing: {repeated_ms:.1f} CPU ms"
        )
    assert min(spent) < 1.5 * min(plainly)
