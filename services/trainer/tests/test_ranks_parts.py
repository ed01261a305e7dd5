"""The pieces of the ranks, without any: who gets which rows, commands as bytes, tensors in parts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
import xxhash
from quartet.errors import QuartetError
from quartet_trainer.logprobs import PolicyForward
from quartet_trainer.machine import Machine
from quartet_trainer.passes import Passes
from quartet_trainer.ranks import layout
from quartet_trainer.ranks.balance import assignment, cost
from quartet_trainer.ranks.command import (
    Command,
    Digest,
    Open,
    Read,
    Score,
    Stop,
    Train,
    command_bytes,
    parse_command,
    parse_samples,
    sample_bytes,
)
from quartet_trainer.ranks.lead import part_of
from quartet_trainer.ranks.shards import digests
from quartet_trainer.run import Run
from quartet_trainer.sample import make_sample
from quartet_trainer.spec import LoraSpec, LossSpec, OptimizerSpec, RunSpec


def test_ranks_differ_by_at_most_one_row() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(200):
        ranks = rng.randint(1, 8)
        costs = [cost(rng.randint(1, 4000), 64) for _ in range(rng.randint(0, 60))]
        chosen = assignment(costs, ranks)
        assert chosen == assignment(costs, ranks)
        loads = [sum(one for one, rank in zip(costs, chosen, strict=True) if rank == r) for r in range(ranks)]
        assert sum(loads) == pytest.approx(sum(costs))
        assert max(loads) - min(loads) <= max(costs, default=0.0) + 1e-6


def test_a_long_row_costs_more_than_its_tokens() -> None:
    assert cost(12 * 64, 64) == 3 * 12 * 64
    assert assignment([cost(1000, 64), *[cost(100, 64)] * 10], 2) == [0, *[1] * 10]


@pytest.mark.parametrize(
    "command",
    [
        Open(run_id="r", spec=RunSpec(base_model="m", optimizer=OptimizerSpec(learning_rate=0.1))),
        Train(run_id="r", loss=LossSpec(clip_high=0.1 + 0.2), normalizer=1 / 3, verify_logprobs=True),
        Score(run_id="r", version=None, temperature=0.7),
        Read(run_id="r", folder=Path("/a b/@writing-x@1")),
        Digest(folder=Path("/s"), names=("run.json", "weights/shard-00001-model-00001-of-00001.safetensors")),
        Stop(),
    ],
)
def test_commands_come_back_equal(command: Command) -> None:
    back = parse_command(command_bytes(command))
    assert back == command
    if isinstance(command, Train):
        assert back.loss.model_fields_set == command.loss.model_fields_set


def test_samples_come_back_equal() -> None:
    samples = [
        make_sample(0, [1, 2, 3, 4], [(1, 1, 7), (3, 1, 8)], [-0.1, -0.2], [1.0, 2.0]),
        make_sample(1, [5], [], [], []),
        make_sample(2, [1, 2, 3], [(1, 2, 0)], [], [0.5], [-1.0, -2.0]),
        make_sample(
            3, [1, 2, 3], [(2, 1, 0)], [], [], experts_TNk=np.arange(12, dtype=np.uint8).reshape(2, 3, 2)
        ),
        make_sample(4, [1, 2], [(1, 1, 0)], [], [], experts_TNk=np.full((1, 1, 4), 9, np.uint8)),
        # Wider ones beside them: all ranks have to lay the same rows.
        make_sample(5, [1, 2], [(1, 1, 0)], [], [], experts_TNk=np.full((1, 1, 4), 300, np.uint16)),
    ]
    back = parse_samples(sample_bytes(samples))
    assert len(back) == 6
    for one, other in zip(samples, back, strict=True):
        for name in one.__slots__:
            ours, theirs = getattr(one, name), getattr(other, name)
            assert (ours is None) == (theirs is None)
            assert ours is None or (np.array_equal(ours, theirs) and ours.dtype == theirs.dtype), name
    assert parse_samples(sample_bytes([])) == []


def test_every_block_is_gathered_for_itself(alone_in_a_group: None, folder: Path) -> None:
    """No rank has the whole model on its device: only a block at a time is gathered."""
    from quartet_trainer.model import load_model, without_memory
    from quartet_trainer.ranks.sharding import shard
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    device = torch.device("cpu")
    full = load_model(folder, str(folder), device=device)
    model = shard(without_memory(folder, tied=True), full, device, layout.host_mesh())
    blocks = [module for module in model.modules() if isinstance(module, FSDPModule)]
    assert len(blocks) == 1 + full.config.num_hidden_layers
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and not layout.is_whole(parameter)
        assert torch.equal(layout.whole(parameter.detach()), dict(full.named_parameters())[name])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(one, dict(full.named_buffers())[name]) for name, one in model.named_buffers())


def test_values_are_joined_also_of_no_samples(group_of_one: Any) -> None:
    from quartet_trainer.one_pass import Pass

    for lengths in ([], [2], [1, 0, 3]):
        values = [np.arange(length, dtype=np.float32) for length in lengths]
        done = Pass(values, [-one for one in values])
        group_of_one.join(done, lengths)
        for joined, sign in ((done.logprobs, 1), (done.measured, -1)):
            assert [one.tolist() for one in joined] == [(sign * one).tolist() for one in values]


def test_what_fills_up_a_ranks_passes_has_gradients_in_a_model_that_embeds_padding_as_zero(
    group_of_one: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3n takes the square root of a mean square: at zero its slope is infinite, and zero times that
    is no number."""
    config = transformers.Gemma3nTextConfig(
        vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, vocab_size_per_layer_input=24, hidden_size_per_layer_input=4,
        laurel_rank=2, num_kv_shared_layers=0, activation_sparsity_pattern=[0.0, 0.0],
        layer_types=["full_attention", "full_attention"],
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert not model.get_input_embeddings().weight[0].any()
    sample = make_sample(0, [5, 6, 7], [(1, 2, 0)], [], [1.0])
    machine = Machine(torch.device("cpu"), 64, None, False, ranks=group_of_one)
    policy = PolicyForward(model, machine.device, None)
    passes = Passes(policy, machine, 64, lambda: None)
    # Another rank has one more.
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, *_: tensor.fill_(2))
    batches = passes._pack([sample], [0])
    assert [batch.members for batch in batches] == [(0,), ()]
    (0.0 * policy(batches[1], 1.0)[0].sum()).backward()
    assert all(one.grad is None or one.grad.isfinite().all() for one in model.parameters())


def test_what_fails_in_the_first_rank_alone_is_an_error_of_the_contract(group_of_one: Any) -> None:
    """Any other would end the ranks, and with them the runs that have nothing to do with it."""

    def fails(error: Exception) -> None:
        raise error

    for error, reason in ((KeyError("what"), "INTERNAL"), (MemoryError(), "OVERLOADED")):
        with pytest.raises(QuartetError) as raised:
            group_of_one.agree(partial(fails, error))
        assert raised.value.reason == reason


def test_a_state_that_a_rank_cannot_see_is_no_adapter_and_no_error_of_all(
    group_of_one: Any, tmp_path: Path
) -> None:
    """lead.py 2: this rank ends, and does not go on with what it has, as if the first had refused it."""
    lora = LoraSpec(rank=2, alpha=4.0, initial_adapter=str(tmp_path))
    spec = RunSpec(base_model="m", optimizer=OptimizerSpec(learning_rate=1.0), lora=lora)
    run = cast(Run, SimpleNamespace(spec=spec, is_spread=False))
    with pytest.raises(FileNotFoundError, match=r"run\.json"):
        part_of(tmp_path, run, group_of_one)


class Refuses(Exception):
    """What all ranks are told."""


def test_each_rank_hashes_its_part_of_a_state(tmp_path: Path) -> None:
    """shards.py 4: the first one alone would take as long as all of them need to write it."""
    shards = [f"{stem}/shard-{rank:05d}-model-00001-of-00001.safetensors" for stem in "mw" for rank in (1, 2)]
    names = [*shards, "model/model-00001-of-00002.safetensors", "run.json"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    def settle(refused: QuartetError | None) -> None:
        if refused is not None:
            raise Refuses(refused.message)

    def hashed(rank: int, other: bytes = b"{}") -> dict[str, str]:
        read: list[int] = []
        group = SimpleNamespace(rank=rank, size=2, settle=settle, of_each=lambda body: [other, body])
        found = digests(tmp_path, names, cast(Any, group), lambda: read.append(1))
        assert len(read) == len(found.keys() - json.loads(other).keys()), "each file's one piece is progress"
        return found

    of_second = hashed(1)
    assert list(of_second) == [name for name in names if "shard-00002" in name]
    assert list(hashed(0)) == [name for name in names if "shard-00002" not in name]
    whole = hashed(0, json.dumps(of_second).encode())
    assert whole == {name: xxhash.xxh3_128_hexdigest(name.encode()) for name in names}
    (tmp_path / shards[1]).unlink()
    hashed(0)
    with pytest.raises(Refuses, match=r"rank 1 cannot read the state in .*No such file.*; mend the disk"):
        hashed(1)


def test_parts_and_wholes_become_each_other(alone_in_a_group: None) -> None:
    values = torch.arange(15.0).view(5, 3)
    parted = layout.spread(values)
    assert not layout.is_whole(parted) and torch.equal(layout.whole(parted), values)
    assert layout.part(layout.like(values, parted)).data_ptr() != values.data_ptr()
    assert torch.equal(layout.like(parted, values), values)
    served = layout.on_host(parted, torch.bfloat16)
    assert served.dtype == torch.bfloat16 and torch.equal(layout.whole(served), values.bfloat16())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_moments_of_spread_parameters_rest_spread(alone_in_a_group: None, kind: str) -> None:
    """offload.py 3: the same bits, saved and put back."""
    from quartet_trainer.optimizer import Optimizer

    spec, found = OptimizerSpec(kind=kind, learning_rate=0.1), []
    for offloaded in (False, True):
        values = torch.arange(15.0).view(5, 3) / 15
        named = {"m": torch.nn.Parameter(layout.spread(values)), "v": torch.nn.Parameter(values[0].clone())}
        optimizer = Optimizer(named.items(), spec, (), offloaded)
        for step in range(4):
            for parameter in named.values():
                parameter.grad = layout.like(
                    torch.sin(layout.whole(parameter.detach()) * (step + 9)), parameter
                )
            optimizer.step(0.1, 1.0)
            if step == 1:
                moments = optimizer.moments()
                optimizer = Optimizer(named.items(), spec, (), offloaded)
                optimizer.restore(moments, 2)
        moments = optimizer.moments()
        assert {name: layout.is_whole(one) for name, one in moments.items()} == {
            name: not name.endswith("m") for name in moments
        }
        found.append([layout.whole(one.detach()) for one in (*named.values(), *moments.values())])
    assert len(found[0]) == len(found[1]) > 4
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_ranks_that_torchrun_did_not_start_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quartet_trainer", "--state-dir", str(tmp_path / "states")]
    env = {**os.environ, "WORLD_SIZE": "2", "RANK": "0"}
    said = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert said.returncode == 2 and "start it by torchrun, or unset WORLD_SIZE" in said.stderr
    assert "Traceback" not in said.stderr
