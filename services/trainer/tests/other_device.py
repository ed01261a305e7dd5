"""The trainer's work on the CPU and on another device: what they gave, as JSON.

In a process of its own (simulated_device.py):

    python -m tests.other_device DEVICE MODEL_FOLDER MOE_FOLDER CASE [CASE ...]
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quartet.v1 import trainer_service_pb2 as pb
from quartet.weights.store import WeightStore
from quartet_trainer import libraries
from quartet_trainer.bases import Bases
from quartet_trainer.machine import Machine
from quartet_trainer.ranks.alone import Alone
from quartet_trainer.ranks.group import Group, leave
from quartet_trainer.ranks.lead import LeadFiles, LeadRun
from quartet_trainer.ranks.meeting import MEETING
from quartet_trainer.run import Run
from quartet_trainer.sample import Sample, make_sample
from quartet_trainer.spec import LoraSpec, ReferenceSpec, RunSpec
from quartet_trainer.spec.optimizer import OptimizerSpec
from quartet_trainer.states import StateStore
from quartet_trainer.wire import loss_spec
from quartet_trainer.worker import prepare
from simulated_device import CAST_BY_HOST, NAME, modes, register

VOCAB = 96
STEPS = 2
#: What a model gives that is spread over the ranks of a group, if only of one: on CUDA, for NCCL's sake.
SPREAD = "spread"
#: What changes of a run from case to case.
CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {"optimizer": OptimizerSpec(kind="muon", learning_rate=1e-3)},
    "sgd": {"optimizer": OptimizerSpec(kind="sgd", learning_rate=1e-2)},
    "moving reference": {"reference": ReferenceSpec(sync_steps=1, mixup_alpha=0.5)},
    "recomputing": {"gradient_checkpointing": True},
    "adapter": {"lora": LoraSpec(rank=4, alpha=8)},
    "merged adapter": {"lora": LoraSpec(rank=4, alpha=8, publish_merged=True)},
    "bfloat16": {"compute_dtype": "bfloat16", "served_dtype": "bfloat16"},
    "experts": {},
    "offloaded": {},
}


def samples() -> list[Sample]:
    """Three groups of four, ragged; one has no advantage."""
    rng, made = np.random.default_rng(0), list[Sample]()
    for group in range(3):
        prompt = rng.integers(0, VOCAB, 8).tolist()
        for _ in range(4):
            tail = rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()
            sampled = rng.uniform(-6, -2, len(tail)).tolist()
            advantage = float(rng.normal()) if group else 0.0
            made.append(make_sample(len(made), prompt + tail, [(8, len(tail), 0)], sampled, [advantage]))
    return made


def trained(
    device: torch.device,
    folder: Path,
    work: Path,
    changes: dict[str, Any],
    offloaded: bool = False,
    group: Group | None = None,
) -> list[float]:
    """What a run finds that trains, verifies, publishes, scores, exports, is saved, restored, goes on."""
    settings = {"reference": ReferenceSpec(), "optimizer": OptimizerSpec(learning_rate=1e-3)} | changes
    float32 = {"compute_dtype": "float32", "served_dtype": "float32"}
    spec = RunSpec(**{"base_model": str(folder), "retain_versions": 4} | float32 | settings)
    loss = loss_spec(
        pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT, kl_coef=0.1, entropy_coef=0.01, proximal_version=0)
    )
    batch = samples()

    def opened() -> Run:
        ranks = group or Alone()
        machine = Machine(device, 112, None, False, optimizer_offload=offloaded, ranks=ranks)
        kind = Run if group is None else partial(LeadRun, group)
        return kind("r", spec, machine, WeightStore(4), lambda: None, Bases())

    def stepped(run: Run) -> list[float]:
        done = run.forward_backward(batch, loss, 10.0, verify_logprobs=True)
        assert done.verification is not None
        diagnostics = [done.diagnostics[name] for name in sorted(done.diagnostics)]
        return [done.loss, run.optim_step(None).grad_norm, done.verification.max_difference, *diagnostics]

    found, run = [], opened()
    run.publish()
    for _ in range(STEPS):
        found += stepped(run)
    run.publish()
    for version in (None, STEPS):
        found += [float(one.logprobs.sum()) for one in run.forward(batch, version, 0.7)]
    run.export(work / "exported")
    store = StateStore(work / "states", keep_last=1, files=None if group is None else LeadFiles(group))
    store.save("r", "s", STEPS, STEPS, run.content(STEPS))
    newest = store.newest_sound("r")
    assert newest is not None
    again = opened()
    again.restore(newest[1])
    following = stepped(again)
    assert stepped(run) == following, "bit for bit (run.py 2, 3)"
    found += following
    for one in (run, again):
        moments = one.content(0).tensors["moments"].values()
        assert moments and {moment.device.type for moment in moments} == {"cpu" if offloaded else device.type}
    return found


def on_both(device: str, case: str, model: Path) -> dict[str, list[float]]:
    """A case on the CPU and on the device."""
    found = {}
    for name, mode in modes(device).items():
        with tempfile.TemporaryDirectory() as work, mode():
            CAST_BY_HOST.clear()
            where, offloaded = torch.device(name), case == "offloaded"
            found[name] = trained(where, model, Path(work), CASES[case], offloaded)
    return found | {"cast by the host": [float(sum(CAST_BY_HOST))]}


def spread(device: str, model: Path) -> dict[str, list[float]]:
    """On the device, by a group of one rank that is started as torchrun would."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    where = torch.device(device, 0)
    with tempfile.TemporaryDirectory() as work:
        os.environ[MEETING] = str(Path(work) / "meeting")
        found = trained(where, model, Path(work), {}, group=Group(where))
        leave()
    return {device: found}


def main() -> None:
    device, folder, experts, *cases = sys.argv[1:]
    # As quartet.kit.imports does for a service. Every run that opens looks for garbage: a third of the CPU.
    gc.freeze()
    libraries.configure(threads=1)
    prepare(threads=1, deterministic=True)
    registered = register() if device == NAME else []
    found = {
        case: spread(device, Path(folder))
        if case == SPREAD
        else on_both(device, case, Path(experts if case == "experts" else folder))
        for case in cases
    }
    print(json.dumps(found))
    del registered  # the device is there for as long as this is


if __name__ == "__main__":
    main()
