"""`quartet sft`: starts a trainer here, trains a model on a file of chats, and writes the model's folder."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from quartet.cli.job import model_path
from quartet.cli.outputs import append_line, take_model
from quartet.cli.sft.chats import Chats, batches, read_chats
from quartet.cli.sft.place import CHECKPOINT, METRICS, Calls, cut_metrics, taken
from quartet.config.load import Draft, load
from quartet.errors import QuartetError
from quartet.kit.call import RetryBudget, unary
from quartet.kit.channel import connect
from quartet.kit.folder import check_folder
from quartet.kit.standard_streams import say
from quartet.local.beside import AddressBook, beside
from quartet.local.child import ChildSpec
from quartet.local.deployment import check, wire, write
from quartet.local.supervisor import ServiceFailed
from quartet.run.sft import SftConfig
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1.rollout_pb2 import Sample
from quartet.v1.trainer_service_pb2_grpc import TrainerServiceStub

RUN_ID = "sft"
FINAL = "final"
# The first call waits for the service to import torch and to load the model; with --resume also until it has
# read the saved state and checked it. As long as the orchestrator allows the same call.
CREATE_SECONDS = 1800.0
CALL_SECONDS = 3600.0  # the largest batch on the slowest machine
DRAIN_SECONDS = 2.0
# Well below the limit of a message, 4 MiB.
FRAME_BYTES = 1 << 20
SCHEDULES = {"constant": pb.SCHEDULE_CONSTANT, "linear": pb.SCHEDULE_LINEAR, "cosine": pb.SCHEDULE_COSINE}


def run(options: argparse.Namespace, rest: list[str]) -> int:
    """The command. `rest` is what argparse left: `@ file.toml --key value`."""
    config = load(SftConfig, rest, Draft(flags=options.flags)).config
    config = config.model_copy(update={"model": model_path(config.model)})
    output: Path = options.output_dir.absolute()
    check_folder("--output-dir", output)
    chats = read_chats(config.data, Path(config.model), config.roles, config.max_tokens)
    covered = sum(span.length for sample in chats.samples for span in sample.spans)
    print(
        f"{len(chats.samples)} chats, {covered} tokens to learn, {chats.left_out} left out as too long; "
        f"{config.steps(len(chats.samples))} steps"
    )
    for notice in chats.notices:
        print(notice)
    with tempfile.TemporaryDirectory(prefix="quartet-check-") as scratch:
        asyncio.run(check(_deploy(config, Path(scratch))))
    if options.dry_run:
        return 0
    with taken(output, config, resume=options.resume):
        try:
            asyncio.run(_train(config, chats, output))
        except (KeyboardInterrupt, OSError, QuartetError, ServiceFailed):
            print(f"what was done is kept; go on with --resume --output-dir {output}", file=sys.stderr)
            raise
    print(f"model and metrics: {output}")
    return 0


def _deploy(config: SftConfig, folder: Path) -> list[ChildSpec]:
    """Write the trainer's config into a folder."""
    trainer = {"keep_last": config.ckpt.keep_last, **config.trainer}
    return write(wire(config.model, folder / "data", {"trainer": trainer}), folder)


async def _train(config: SftConfig, chats: Chats, output: Path) -> None:
    async def work(book: AddressBook) -> Path:
        async with connect(book["trainer"][0]) as channel:
            stub = TrainerServiceStub(channel)  # type: ignore[no-untyped-call]
            return await _steps(stub, config, chats.samples, output)

    exported = await beside(_deploy(config, output), work, drain_s=DRAIN_SECONDS)
    take_model(exported, output / CHECKPOINT)


async def _steps(stub: Any, config: SftConfig, samples: Sequence[Sample], output: Path) -> Path:
    """All steps that are not done yet. The exported model's folder."""
    calls = Calls(config.steps(len(samples)), config.ckpt.interval)
    create = pb.CreateRunRequest(run_id=RUN_ID, spec=run_spec(config, len(samples)))
    created = await unary(
        stub.CreateRun, create, timeout_s=CREATE_SECONDS, budget=RetryBudget(), wait_for_ready=True
    )
    done = calls.step_after(created.run.applied_seq_id)
    cut_metrics(output, done)
    if done:
        say(f"going on after step {done}/{calls.steps}", sys.stdout)
    began = time.monotonic()
    for step, batch in islice(enumerate(batches(samples, config.batch_size, config.seed)), done, calls.steps):
        await _step(stub, calls, step, batch, output, began)
        if calls.saves_after(step):
            await _save(stub, calls.first_of(step) + 2, f"step-{step + 1}", export=False)
    if done == calls.steps:
        states = await unary(stub.ListStates, pb.ListStatesRequest(run_id=RUN_ID), timeout_s=CALL_SECONDS)
        return Path(next(one.model_path for one in states.states if one.name == FINAL))
    return await _save(stub, calls.last, FINAL, export=True)


async def _step(
    stub: Any, calls: Calls, step: int, batch: Sequence[Sample], output: Path, began: float
) -> None:
    seq_id = calls.first_of(step)
    done = await unary(stub.ForwardBackward, list(frames(batch, seq_id)), timeout_s=CALL_SECONDS)
    stepped = await unary(
        stub.OptimStep, pb.OptimStepRequest(run_id=RUN_ID, seq_id=seq_id + 1), timeout_s=CALL_SECONDS
    )
    row = {
        "step": step + 1,
        "loss": done.loss,
        "tokens": done.tokens,
        "loss_tokens": done.loss_tokens,
        "learning_rate": stepped.learning_rate,
        "grad_norm": stepped.grad_norm,
        "seconds": time.monotonic() - began,
    }
    append_line(output / METRICS, row)
    say(
        f"step {step + 1}/{calls.steps}  loss {done.loss:.4f}  learning rate {stepped.learning_rate:.3g}",
        sys.stdout,
    )


async def _save(stub: Any, seq_id: int, name: str, *, export: bool) -> Path:
    save = pb.SaveStateRequest(run_id=RUN_ID, seq_id=seq_id, name=name, export_model=export)
    saved = await unary(stub.SaveState, save, timeout_s=CALL_SECONDS)
    return Path(saved.state.model_path)


def run_spec(config: SftConfig, chats: int) -> pb.RunSpec:
    """What the trainer is asked for."""
    return pb.RunSpec(
        base_model=config.model,
        optimizer=pb.OptimizerSpec(
            learning_rate=config.learning_rate,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            schedule=SCHEDULES[config.lr_scheduler],
            warmup_steps=config.warmup_steps,
            total_steps=max(config.steps(chats), config.warmup_steps + 1),
        ),
        seed=config.seed,
        microbatch_tokens=config.microbatch_tokens,
    )


def frames(samples: Sequence[Sample], seq_id: int) -> Iterator[pb.ForwardBackwardRequest]:
    """A batch as the trainer takes it: the mean over its covered tokens."""
    covered = sum(span.length for sample in samples for span in sample.spans)
    yield pb.ForwardBackwardRequest(
        start=pb.ForwardBackwardStart(
            run_id=RUN_ID,
            seq_id=seq_id,
            loss=pb.LossSpec(kind=pb.LOSS_KIND_CROSS_ENTROPY),
            normalizer=covered,
        )
    )
    part = pb.SampleBatch()
    for sample in samples:
        part.samples.append(pb.TrainingSample(sample=sample))
        if part.ByteSize() >= FRAME_BYTES:
            yield pb.ForwardBackwardRequest(batch=part)
            part = pb.SampleBatch()
    if part.samples:
        yield pb.ForwardBackwardRequest(batch=part)
    tokens = sum(len(sample.token_ids) for sample in samples)
    yield pb.ForwardBackwardRequest(commit=pb.StreamCommit(sample_count=len(samples), token_count=tokens))
