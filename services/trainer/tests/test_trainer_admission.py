"""CheckRun: what is known against a run before anything is loaded for it (admission.py)."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from quartet.chat_identity import chat_identity
from quartet.v1 import trainer_service_pb2 as pb
from quartet_trainer.admission import check_run
from quartet_trainer.machine import Machine
from quartet_trainer.routing import may_have_routers
from quartet_trainer.spec import OptimizerSpec, ReferenceSpec, RunSpec

from .conftest import run_spec
from .held_up import WAIT_SECONDS, held_up


def own(spec: Any, tokens: Any) -> torch.Tensor:
    return -tokens.advantages_K * tokens.logp_K


async def test_what_creation_or_the_first_batch_would_refuse_is_refused_at_once(
    folder: Path, serve_trainer: Any, tmp_path: Path
) -> None:
    """admission.py 1 and 2."""
    bare, broken, packed = (tmp_path / name for name in ("bare", "broken", "packed"))
    good = str(folder)
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(folder, broken)
    (broken / "config.json").write_text('{"model_type": "nothing-of-the-kind"}')
    shutil.copytree(folder, packed)
    said = json.loads((packed / "config.json").read_text())
    said["quantization_config"] = {"quant_method": "gptq"}
    (packed / "config.json").write_text(json.dumps(said))
    beside = shutil.copytree(folder, tmp_path / "beside")
    (beside / "adapter_config.json").write_text("{}")
    teacher = pb.ReferenceSpec(model=str(tmp_path / "gone"))
    cases = (
        (run_spec(base_model=str(tmp_path / "gone")), "", "base_model", "there is no folder"),
        (run_spec(base_model="nobody/has-this"), "", "base_model", "neither a folder here nor a model"),
        (run_spec(base_model=str(bare)), "", "base_model", "has no weights (*.safetensors)"),
        (run_spec(base_model=str(broken)), "", "base_model", "cannot be read: "),
        (run_spec(base_model=str(packed)), "", "base_model", "its weights are quantized (gptq); name the"),
        (run_spec(base_model=str(beside)), "", "base_model", "would be loaded with it; move that elsewhere"),
        (run_spec(base_model=good, reference=teacher), "", "reference.model", "there is no folder"),
        (run_spec(base_model=good, learning_rate=-1.0), "", "optimizer.learning_rate", "greater than"),
        (
            run_spec(base_model=good),
            "yours",
            "custom_loss",
            "its losses are mine, prime_rl_dppo, prime_rl_ipo; name one of them, or start",
        ),
    )
    async with serve_trainer(losses={"mine": f"{__name__}:own"}) as trainer:
        for spec, loss, key, says in cases:
            asked = pb.CheckRunRequest(spec=spec, custom_loss=loss)
            error = await trainer.refused(trainer.stub.CheckRun(asked), "INVALID_CONFIG")
            assert error.metadata["key"] == key and says in error.message, error
            assert ("bfloat16" in error.message) == ("quantized" in says), "its own remedy"
            assert "yours" not in error.message or 'losses.yours = "package.module:function"' in error.message
        for spec, loss in (
            (run_spec(base_model=good), "mine"),
            (run_spec(base_model=str(bare), from_scratch=True), ""),
            (run_spec(base_model=str(packed), from_scratch=True), ""),
        ):
            await trainer.stub.CheckRun(pb.CheckRunRequest(spec=spec, custom_loss=loss))
        assert not [one for one in trainer.state_dir.iterdir() if one.is_dir()], "nothing is kept"
        await trainer.refused(trainer.stub.GetRun(pb.GetRunRequest(run_id="r")), "RUN_UNKNOWN")


async def test_what_a_model_makes_prompts_with_is_told(
    folder: Path, tmp_path: Path, serve_trainer: Any
) -> None:
    """The folder's tokenizer and template, with which a run's model is exported."""
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    async with serve_trainer() as trainer:
        told = await trainer.stub.CheckRun(pb.CheckRunRequest(spec=run_spec(base_model=str(model))))
    assert told.chat == chat_identity(model, str(model)) and told.chat.template_digest


async def test_a_run_is_checked_and_looked_at_while_the_worker_computes(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """admission.py 2, roster.py 2: a batch may take minutes, and who submits a run waits seconds."""
    begun, go_on = held_up(monkeypatch, "forward_backward")
    check = pb.CheckRunRequest(spec=run_spec(base_model=str(folder)))
    look = pb.GetRunRequest(run_id="r")
    async with serve_trainer(max_runs=1) as trainer:
        await trainer.create(base_model=str(folder))
        await trainer.publish(1)
        before = (await trainer.stub.GetRun(look)).run
        batch = asyncio.create_task(trainer.forward_backward(2, make_samples()))
        try:
            assert await asyncio.to_thread(begun.wait, WAIT_SECONDS)
            async with asyncio.timeout(WAIT_SECONDS / 2):
                await trainer.stub.CheckRun(check)
                seen = (await trainer.stub.GetRun(look)).run
        finally:
            go_on.set()
        assert seen == before and seen.applied_seq_id == 1
        await batch
        assert (await trainer.stub.GetRun(look)).run.applied_seq_id == 2


def test_of_a_hub_id_the_configuration_alone_is_fetched(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """admission.py 2: not the weights, which may be hundreds of gigabytes, nor are they missed."""
    fetched: list[list[str]] = []
    shutil.copy(folder / "config.json", tmp_path)

    def snapshot_download(repo: str, *, allow_patterns: list[str], tqdm_class: Any) -> str:
        fetched.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    machine = Machine(torch.device("cpu"), microbatch_tokens=64, row_tokens=64, hub=True)
    reference = ReferenceSpec(model="somebody/teacher")
    optimizer = OptimizerSpec(learning_rate=1e-2)
    check_run(RunSpec(base_model="somebody/model", optimizer=optimizer, reference=reference), "", {}, machine)
    assert fetched == [["config.json"]] * 2


async def test_a_trainer_without_a_loss_says_how_to_get_it(folder: Path, serve_trainer: Any) -> None:
    async with serve_trainer() as trainer:
        asked = pb.CheckRunRequest(spec=run_spec(base_model=str(folder)), custom_loss="mine")
        error = await trainer.refused(trainer.stub.CheckRun(asked), "INVALID_CONFIG")
        assert "its losses are prime_rl_dppo, prime_rl_ipo; name one of them" in error.message
        assert 'or start the trainer with losses.mine = "package.module:function"' in error.message


async def test_whether_a_model_may_have_routers_is_told(
    folder: Path, tmp_path: Path, serve_trainer: Any
) -> None:
    """Of what declares some nothing is said: by its configuration it may have none all the same."""
    mixture = tmp_path / "mixture"
    shutil.copytree(folder, mixture)
    transformers.Qwen3MoeConfig(num_hidden_layers=1).save_pretrained(mixture)
    async with serve_trainer() as trainer:
        told = [
            await trainer.stub.CheckRun(pb.CheckRunRequest(spec=run_spec(base_model=str(model))))
            for model in (folder, mixture)
        ]
    assert told[0].HasField("has_routers") and not told[0].has_routers
    assert not told[1].HasField("has_routers")


@pytest.mark.parametrize(
    ("kind", "may"),
    [("Qwen3Config", False), ("GPT2Config", False), ("Gemma4TextConfig", True), ("AriaTextConfig", True)],
)
def test_what_declares_routers_is_known_by_its_kind(kind: str, may: bool) -> None:
    """Also where the body of the model alone declares them."""
    assert may_have_routers(getattr(transformers, kind)()) is may
