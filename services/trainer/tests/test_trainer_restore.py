"""What a restored run still knows: the versions it retained, what it had published, and who follows it."""

from __future__ import annotations

import asyncio
import gc
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from quartet.errors import QuartetError
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1 import weights_pb2
from quartet.v1.weights_pb2_grpc import WeightServiceStub
from quartet.weights.fetch import fetch_version
from quartet.weights.store import WeightStore
from quartet_trainer import optimizer
from quartet_trainer.bases import Bases
from quartet_trainer.content import WEIGHTS, Content
from quartet_trainer.gradients import Gradients
from quartet_trainer.machine import Machine
from quartet_trainer.publish import Snapshot, cast, wire_tensors
from quartet_trainer.run import Run
from quartet_trainer.spec import OptimizerSpec, RunSpec
from quartet_trainer.states import StateStore
from quartet_trainer.versions import Versions

WAIT_SECONDS = 60.0
RETAINED = 3


async def sampled(trainer: Any, make_samples: Any, version: int, seed: int) -> Any:
    """Samples whose log-probabilities are those of the live weights, stamped with their version."""
    samples = make_samples(groups=1, seed=seed, version=version)
    for one, logprobs in zip(samples, await trainer.forward(samples), strict=True):
        one.sample.logprobs[:] = logprobs
    return samples


async def three_versions(trainer: Any, make_samples: Any) -> Any:
    """Publish versions 0, 1, 2 by calls 1-7; return samples of each."""
    await trainer.publish(1)
    seen = await sampled(trainer, make_samples, 0, seed=0)
    for version in (1, 2):
        await trainer.forward_backward(3 * version - 1, make_samples(seed=version))
        await trainer.optim_step(3 * version)
        await trainer.publish(3 * version + 1)
        seen += await sampled(trainer, make_samples, version, seed=version)
    return seen


def assert_all_compared(done: Any) -> None:
    assert done.verification.tokens_skipped == 0
    assert done.verification.tokens_compared == done.loss_tokens
    assert done.verification.max_difference < 1e-5
    # Three versions were told apart: the live weights alone would not have agreed.
    assert done.diagnostics["logprob_difference_max"] > 0.01


def mapped() -> str:
    """Files whose contents are memory of this process."""
    return Path("/proc/self/maps").read_text()


def saved_versions(path: str) -> list[str]:
    return sorted(file.stem for file in Path(path).glob("version-*"))


async def test_invariant_9_a_resumed_run_verifies_the_tokens_of_every_retained_version(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    """versions.py 1 and 3."""
    spec = {"base_model": str(folder), "retain_versions": RETAINED, "learning_rate": 0.05}
    async with serve_trainer() as trainer:
        await trainer.create(**spec)
        samples = await three_versions(trainer, make_samples)
        state = await trainer.save(8, "a")
        straight = await trainer.forward_backward(9, samples, verify_logprobs=True)
        assert_all_compared(straight)
        # The newest is cast again from the masters, so that only the older ones are written.
        assert saved_versions(state.path) == ["version-0", "version-1"]
        await trainer.optim_step(10)
        await trainer.publish(11)
        await trainer.stub.LoadState(pb.LoadStateRequest(run_id="r", seq_id=12, name="a"))
        loaded = await trainer.forward_backward(9, samples, verify_logprobs=True)
        assert loaded.verification == straight.verification
    async with serve_trainer() as trainer:
        assert (await trainer.create(**spec)).applied_seq_id == 8
        restarted = await trainer.forward_backward(9, samples, verify_logprobs=True)
        assert restarted.verification == straight.verification
        # Bounded in a second life too: the oldest makes room.
        await trainer.optim_step(10)
        await trainer.publish(11)
        await trainer.refused(trainer.forward(samples, policy_version=0), "VERSION_UNKNOWN")
        await trainer.forward(samples, policy_version=1)


async def test_a_restored_run_holds_no_file_of_its_state(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    """The state is pruned while its versions are kept: over NFS its folder could not be removed then, and a
    rank of another machine would read what is gone."""
    spec = {"base_model": str(folder), "retain_versions": RETAINED}
    async with serve_trainer() as trainer:
        await trainer.create(**spec)
        samples = await three_versions(trainer, make_samples)
        state = await trainer.save(8, "a")
    async with serve_trainer() as trainer:
        await trainer.create(**spec)
        gc.collect()
        assert state.path not in mapped()
        assert_all_compared(await trainer.forward_backward(9, samples, verify_logprobs=True))


async def test_a_state_between_step_and_publication_restores_what_was_published(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        digest = (await trainer.publish(1)).digest
        await trainer.forward_backward(2, make_samples())
        await trainer.optim_step(3)
        await trainer.save(4, "between")
        straight = await trainer.publish(5)
    async with serve_trainer() as trainer:
        run = await trainer.create(base_model=str(folder))
        assert (run.policy_version, run.published_version) == (1, 0)
        assert (await fetch_version(trainer.channel, "r", 0)).manifest.digest == digest
        assert await trainer.publish(5) == straight


def test_versions_keep_the_dtype_they_were_published_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default of served_dtype is the device's, and a run may be restored on another device."""
    # An accelerator computes the canary as the served type says; a CPU does not let it be seen.
    canaries_of, plain = [], Run._canary

    def noted(run: Run, weights: Any) -> Any:
        canaries_of.append(run._state.served_dtype)
        return plain(run, weights)

    monkeypatch.setattr(Run, "_canary", noted)
    store = WeightStore(4)
    machine = Machine(torch.device("cpu"), microbatch_tokens=4096, row_tokens=256, hub=False)
    spec = {"base_model": str(folder), "optimizer": OptimizerSpec(learning_rate=1e-2)}
    there = Run("r", RunSpec(**spec, served_dtype="bfloat16"), machine, store, lambda: None, Bases())
    published = there.publish()
    here = Run("r", RunSpec(**spec), machine, store, lambda: None, Bases())
    here.restore(there.content(1))
    assert here.status.published_version == 0
    assert store.get("r").manifest.digest == published.digest == here.publish().digest
    assert canaries_of == ["bfloat16"] * 3


def test_a_state_that_does_not_fit_changes_nothing_and_one_that_fails_half_way_tears(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """live_state.py 2 and 3."""

    def harmed(*_: Any) -> None:
        raise MemoryError

    machine = Machine(torch.device("cpu"), microbatch_tokens=4096, row_tokens=256, hub=False)
    spec = RunSpec(base_model=str(folder), optimizer=OptimizerSpec(learning_rate=1e-2))
    run = Run("r", spec, machine, WeightStore(4), lambda: None, Bases())
    run.publish()
    content, before = run.content(1), run.content(1).meta
    with torch.no_grad():
        other = {name: one + 1 for name, one in content.tensors[WEIGHTS].items()}
    meta = {**content.meta, "skipped_steps": 7, "loss_broken": True}
    with pytest.raises(QuartetError, match="CHECKSUM_MISMATCH"):
        run.restore(Content(meta, {**content.tensors, WEIGHTS: other}))
    assert run.content(1).meta == before and not run.is_torn
    assert all(not torch.equal(one, other[name]) for name, one in run.content(1).tensors[WEIGHTS].items())
    monkeypatch.setattr(Gradients, "restore", harmed)
    with pytest.raises(MemoryError):
        run.restore(content)
    assert run.is_torn


async def test_a_run_whose_states_cannot_be_listed_is_not_opened(
    folder: Path, serve_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk went away behind its restoration. What is not open is not published either."""
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        await trainer.publish(1)
        await trainer.save(2, "a")
        await trainer.stub.CloseRun(pb.CloseRunRequest(run_id="r"))
        calls, plain = [], StateStore.list

        def second_fails(states: StateStore, run_id: str) -> Any:
            calls.append(run_id)
            if len(calls) == 2:
                raise QuartetError("NOT_READY", "the disk is away")
            return plain(states, run_id)

        with monkeypatch.context() as patched:
            patched.setattr(StateStore, "list", second_fails)
            await trainer.refused(trainer.create(base_model=str(folder)), "NOT_READY")
        manifest = WeightServiceStub(trainer.channel).GetManifest(weights_pb2.GetManifestRequest(run_id="r"))
        await trainer.refused(manifest, "RUN_UNKNOWN")
        assert (await trainer.create(base_model=str(folder))).applied_seq_id == 2


def test_saved_weights_that_give_another_digest_are_refused_and_change_nothing() -> None:
    """versions.py 2."""
    store = WeightStore(4)
    weights = cast([("w", torch.ones(3))], "float32")
    versions = Versions("r", store, 2)
    versions.publish(5, weights)
    meta = versions.meta()
    versions.publish(6, cast([("w", torch.zeros(3))], "float32"))
    with pytest.raises(QuartetError, match="CHECKSUM_MISMATCH"):
        versions.read(meta, {}, 5, cast([("w", torch.full((3,), 2.0))], "float32"))
    assert versions.newest == 6 and store.get("r").number == 6
    versions.restore(meta, versions.read(meta, {}, 5, weights))
    assert versions.newest == 5 and store.get("r").manifest.digest.hex() == meta["published_digest"]


def filled(value: float) -> Snapshot:
    return cast([("w", torch.full((3,), value))], "float32")


def test_the_oldest_version_makes_room_whatever_order_a_state_names_them_in() -> None:
    """versions.py 1: of the files of a state version-10 stands before version-9."""
    store = WeightStore(4)
    versions = Versions("r", store, 3)
    for number in (9, 10, 11):
        versions.publish(number, filled(number))
    saved = versions.tensors(11)
    files = {stem: saved[stem] for stem in sorted(saved)}
    assert list(files) == ["version-10", "version-9"]
    other = Versions("r", store, 3)
    other.restore(versions.meta(), other.read(versions.meta(), files, 11, filled(11.0)))
    other.publish(12, filled(12.0))
    assert sorted(other.kept) == [10, 11, 12]
    with pytest.raises(QuartetError, match=r"version 9 is not retained \(held: 10, 11, 12\)") as raised:
        other.find(9)
    assert raised.value.metadata["latest"] == "12" and "raise retain_versions" in raised.value.message


def test_a_version_that_never_was_is_not_said_to_have_been_dropped() -> None:
    versions = Versions("r", WeightStore(4), 2)
    versions.publish(3, filled(3.0))
    versions.publish(7, filled(7.0))
    for never in (5, 77):
        with pytest.raises(
            QuartetError, match=rf"version {never} was never published \(held: 3, 7\)"
        ) as raised:
            versions.find(never)
        assert "PublishWeights" in raised.value.message and "retain_versions" not in raised.value.message
    with pytest.raises(QuartetError, match=r"version 2 is not retained \(held: 3, 7\)"):
        versions.find(2)


def test_a_return_to_before_the_first_publication_has_published_nothing() -> None:
    store = WeightStore(4)
    versions = Versions("r", store, 3)
    before = versions.meta()
    versions.publish(0, filled(0.0))
    versions.restore(before, versions.read(before, {}, 0, filled(0.0)))
    assert versions.newest is None and not versions.kept
    with pytest.raises(QuartetError, match=r"held: none"):
        versions.find(0)
    with pytest.raises(QuartetError):
        store.get("r")


def test_what_is_kept_and_what_is_handed_out_are_one_memory() -> None:
    """versions.py: a version costs nothing while the store holds it."""
    weights = {**filled(1.0), **cast([("v", torch.ones(2, 3))], "bfloat16")}
    for name, tensor in wire_tensors(weights).items():
        shared = torch.frombuffer(tensor.data, dtype=torch.uint8)
        assert shared.data_ptr() == weights[name].data_ptr()


async def test_a_run_that_cannot_be_restored_is_not_open(
    folder: Path, serve_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve_trainer(max_runs=1) as trainer:
        await trainer.create(base_model=str(folder))
        await trainer.publish(1)
        await trainer.save(2, "a")
        await trainer.stub.CloseRun(pb.CloseRunRequest(run_id="r"))
        # As if this release cast otherwise than the one that saved.
        monkeypatch.setattr(
            "quartet_trainer.versions.build_manifest", lambda *_, **__: weights_pb2.WeightManifest()
        )
        await trainer.refused(trainer.create(base_model=str(folder)), "CHECKSUM_MISMATCH")
        monkeypatch.undo()
        with pytest.raises(QuartetError, match="RUN_UNKNOWN"):
            await fetch_version(trainer.channel, "r", 0)
        assert (await trainer.create(base_model=str(folder))).applied_seq_id == 2


async def test_a_state_does_not_go_on_in_a_model_of_another_shape(
    folder: Path, serve_trainer: Any, tmp_path: Path, write_qwen3: Any
) -> None:
    moved = tmp_path / "base"
    shutil.copytree(folder, moved)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(moved))
        await trainer.save(1, "s")
    shape = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16}
    for layers, width, what in ((3, 64, "layers.2"), (1, 64, "layers.1"), (2, 48, "mlp")):
        shutil.rmtree(moved)
        sizes = {"num_hidden_layers": layers, "intermediate_size": width, "max_position_embeddings": 128}
        write_qwen3(moved, seed=1, **shape, **sizes)
        async with serve_trainer() as trainer:
            error = await trainer.refused(trainer.create(base_model=str(moved)), "CHECKSUM_MISMATCH")
        assert what in error.message and error.metadata["what"] == "base_model"


async def test_a_state_that_cannot_be_loaded_does_not_become_the_newest(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stands as before, in this process and in the next."""
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        await trainer.publish(1)
        await trainer.save(2, "first")
        await trainer.forward_backward(3, make_samples())
        await trainer.save(4, "second")
        with monkeypatch.context() as patched:
            patched.setattr(
                "quartet_trainer.versions.build_manifest", lambda *_, **__: weights_pb2.WeightManifest()
            )
            back = pb.LoadStateRequest(run_id="r", seq_id=5, name="first")
            await trainer.refused(trainer.stub.LoadState(back), "CHECKSUM_MISMATCH")
    async with serve_trainer() as trainer:
        assert (await trainer.create(base_model=str(folder))).applied_seq_id == 4


async def test_invariant_3_a_run_that_was_loaded_half_publishes_nothing(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = {"base_model": str(folder)}

    def no_room(*_: Any) -> None:
        raise MemoryError("no room")

    async with serve_trainer() as trainer:
        await trainer.create(**spec)
        await trainer.one_step(1, make_samples(seed=1))
        await trainer.save(4, "first")
        await trainer.forward_backward(5, make_samples(seed=2))
        await trainer.optim_step(6)
        await trainer.save(7, "second")
        straight = await trainer.publish(8)
        with monkeypatch.context() as patched:
            patched.setattr("quartet_trainer.optimizer.Optimizer.restore", no_room)
            back = pb.LoadStateRequest(run_id="r", seq_id=9, name="first")
            await trainer.refused(trainer.stub.LoadState(back), "OVERLOADED")
        await trainer.refused(trainer.publish(9), "RUN_UNKNOWN")
        # The memory may be there now; it stands where it was saved last.
        assert (await trainer.create(**spec)).applied_seq_id == 7
        assert await trainer.publish(8) == straight


async def test_a_run_whose_return_to_a_state_is_not_noted_stands_where_it_was_saved_last(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights have moved back by then, and its sequence has not: it would train on as neither."""
    spec = {"base_model": str(folder)}

    def full(*_: Any) -> None:
        raise QuartetError("NOT_READY", "no space left on device")

    async with serve_trainer() as trainer:
        await trainer.create(**spec)
        await trainer.save(1, "first")
        await trainer.one_step(2, make_samples(seed=1))
        await trainer.save(5, "second")
        with monkeypatch.context() as patched:
            patched.setattr("quartet_trainer.states.StateStore.touch", full)
            back = pb.LoadStateRequest(run_id="r", seq_id=6, name="first")
            await trainer.refused(trainer.stub.LoadState(back), "NOT_READY")
        await trainer.refused(trainer.forward_backward(6, make_samples(seed=2)), "RUN_UNKNOWN")
        run = await trainer.create(**spec)
        assert (run.applied_seq_id, run.policy_version) == (5, 1)
        await trainer.stub.LoadState(pb.LoadStateRequest(run_id="r", seq_id=6, name="first"))


async def test_who_watches_learns_of_the_older_version_that_a_run_returned_to(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    """versions.py 4."""
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        zero = await trainer.publish(1)
        await trainer.save(2, "start")
        await trainer.forward_backward(3, make_samples())
        await trainer.optim_step(4)
        one = await trainer.publish(5)
        stub = WeightServiceStub(trainer.channel)
        # One was told what is newest in this stream; the other holds it, and was told nothing yet.
        told = announcements(stub.Watch(weights_pb2.WatchRequest(run_id="r")))
        holding = announcements(stub.Watch(weights_pb2.WatchRequest(run_id="r", held_version=1)))
        async with asyncio.timeout(WAIT_SECONDS), aclosing(told), aclosing(holding):
            first = await anext(told)
            assert (first.version, first.digest) == (1, one.digest)
            waiting = asyncio.ensure_future(anext(holding))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await trainer.stub.LoadState(pb.LoadStateRequest(run_id="r", seq_id=6, name="start"))
            for news in (await anext(told), await waiting):
                assert (news.version, news.digest) == (0, zero.digest)
            # Numbers are given again, with other contents.
            await trainer.forward_backward(3, make_samples(seed=5))
            await trainer.optim_step(4)
            other = await trainer.publish(5)
            assert other.digest != one.digest
            for news in (await anext(told), await anext(holding)):
                assert (news.version, news.digest) == (1, other.digest)


async def announcements(call: Any) -> AsyncIterator[weights_pb2.VersionAnnounced]:
    async for response in call:
        if response.WhichOneof("event") == "announced":
            yield response.announced


async def test_a_publication_repeated_under_another_number_gives_the_same_digest(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    """versions.py 2."""
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        assert (await trainer.publish(1)).digest == (await trainer.publish(2)).digest


async def test_a_state_whose_moments_are_of_another_mover_is_refused_when_it_is_restored(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Muon in a release that knew fewer embeddings: otherwise the next step would fail, by reading."""
    spec = {"base_model": str(folder), "kind": pb.OPTIMIZER_KIND_MUON}
    movers = optimizer._movers
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "_movers", lambda parameters, spec, embeddings: movers(parameters, spec, ()))
        async with serve_trainer() as trainer:
            await trainer.create(**spec)
            await trainer.forward_backward(1, make_samples())
            await trainer.optim_step(2)
            await trainer.save(3, "a")
    async with serve_trainer() as trainer:
        error = await trainer.refused(trainer.create(**spec), "INVALID_CONFIG")
        assert "embed" in error.message and "go on with the release that wrote it" in error.message
