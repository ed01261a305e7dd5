"""Runs that begin with an adapter as peft saved it: what it computes there, it computes here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import structlog
import torch
import transformers
from quartet.v1 import trainer_service_pb2 as pb
from quartet.weights.fetch import fetch_version
from safetensors.torch import load_file, save_file

Make = Callable[..., Any]
RANK, ALPHA = 3, 5.0
TARGETS = ["q_proj", "v_proj"]
FILE, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


def lora(begins: Path, **changed: Any) -> pb.LoraSpec:
    return pb.LoraSpec(
        **{
            "rank": RANK,
            "alpha": ALPHA,
            "target_modules": TARGETS,
            "initial_adapter": str(begins),
            **changed,
        }
    )


def made_by_peft(folder: Path, target: Path, **settings: Any) -> Any:
    """A model with a random adapter, saved by peft."""
    given = {"r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS, "init_lora_weights": False}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **{**given, **settings}))
    with torch.no_grad():  # one that says something, and whole modules that are no copies
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and ".lora_" not in name:
                parameter.add_(0.05)
    model.save_pretrained(target)
    return model


@pytest.fixture
def adapter(folder: Path, tmp_path: Path) -> Path:
    """A folder of the run's shape."""
    made_by_peft(folder, tmp_path / "adapter")
    return tmp_path / "adapter"


def assert_close(ours: Any, theirs: Any, tolerance: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["plain", "rslora", "whole modules", "bfloat16"])
async def test_version_0_is_the_base_model_with_that_adapter(
    kind: str, folder: Path, tmp_path: Path, serve_trainer: Make, make_samples: Make, plain_logprobs: Make
) -> None:
    """initial_adapter.py 1: as peft computes it, and what is published are its tensors."""
    asked: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    if kind == "rslora":
        settings, asked = {"use_rslora": True}, {"rslora": True}
    if kind == "whole modules":
        settings = {"modules_to_save": ["o_proj"]}
        asked = {"modules_to_save": ["o_proj"], "publish_merged": True}
    begins, samples = tmp_path / "adapter", make_samples()
    model = made_by_peft(folder, begins, **settings)
    if kind == "bfloat16":
        held = {name: one.bfloat16() for name, one in load_file(begins / FILE).items()}
        save_file(held, begins / FILE, metadata={"format": "pt"})
        peft.set_peft_model_state_dict(model, {name: one.float() for name, one in held.items()})
    async with serve_trainer() as trainer:
        run = await trainer.create(base_model=str(folder), lora=lora(begins, **asked))
        assert (run.applied_seq_id, run.policy_version) == (0, 0)
        assert_close(await trainer.forward(samples), plain_logprobs(model, samples), 1e-5)
        await trainer.publish(1)
        fetched = await fetch_version(trainer.channel, "r", 0)
        assert fetched.manifest.HasField("canary")
        if kind != "whole modules":
            held = load_file(begins / FILE)
            assert fetched.tensors.keys() == held.keys()
            for name, one in fetched.tensors.items():
                ours = torch.frombuffer(bytearray(one.data), dtype=torch.float32).view(one.shape)
                assert torch.equal(ours, held[name].float()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
async def test_what_peft_saves_of_an_untied_head_is_left_out(
    dtype: torch.dtype,
    untied: Path,
    tmp_path: Path,
    serve_trainer: Make,
    make_samples: Make,
    plain_logprobs: Make,
) -> None:
    """initial_adapter.py 4: whatever the model was loaded in where the adapter was made."""
    begins, samples, targets = tmp_path / "adapter", make_samples(), [*TARGETS, "lm_head"]
    model = made_by_peft(untied, begins, target_modules=targets)
    held, copy = load_file(begins / FILE), "base_model.model.lm_head.base_layer.weight"
    rounded = held[copy].to(dtype)
    assert dtype == torch.float32 or not torch.equal(rounded.float(), held[copy])
    save_file({**held, copy: rounded}, begins / FILE)
    asked = lora(begins, target_modules=targets)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(untied), lora=asked)
        assert_close(await trainer.forward(samples), plain_logprobs(model, samples), 1e-5)
        await trainer.publish(1)
        fetched = await fetch_version(trainer.channel, "r", 0)
        assert fetched.tensors.keys() == held.keys() - {copy}
        save_file({**held, copy: held[copy] + 0.01}, begins / FILE)
        other = trainer.create("other", base_model=str(untied), lora=asked)
        error = await trainer.refused(other, "INVALID_CONFIG")
    assert error.metadata["key"] == "lora.initial_adapter"
    assert f"its {copy} has other values than base_model" in error.message
    assert "merge the adapter into a model" in error.message


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
async def test_embeddings_that_peft_is_told_to_save_are_left_out(
    is_tied: bool, folder: Path, untied: Path, tmp_path: Path, serve_trainer: Make
) -> None:
    """initial_adapter.py 4: of a tied model by both of their names."""
    base, begins = folder if is_tied else untied, tmp_path / "adapter"
    made_by_peft(base, begins).save_pretrained(begins, save_embedding_layers=True)
    held = load_file(begins / FILE)
    copies = {f"base_model.model.{name}.weight" for name in ("model.embed_tokens", "lm_head")}
    assert copies <= held.keys()
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(base), lora=lora(begins))
        await trainer.publish(1)
        fetched = await fetch_version(trainer.channel, "r", 0)
        assert fetched.tensors.keys() == held.keys() - copies
        for number, name in enumerate(sorted(copies)):
            save_file({**held, name: held[name] + 0.01}, begins / FILE)
            other = trainer.create(f"other-{number}", base_model=str(base), lora=lora(begins))
            error = await trainer.refused(other, "INVALID_CONFIG")
            assert f"its {name} has other values than base_model" in error.message


async def test_it_learns_on_from_there_against_the_base(
    adapter: Path, folder: Path, serve_trainer: Make, make_samples: Make
) -> None:
    """initial_adapter.py 1: the reference is the base without the adapter; trainer and versions agree."""
    loss = pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT, kl_coef=0.1, kl_estimator=pb.KL_ESTIMATOR_K3)
    async with serve_trainer() as trainer:
        spec = {"base_model": str(folder), "reference": pb.ReferenceSpec()}
        await trainer.create(lora=lora(adapter), **spec)
        await trainer.create("base", lora=lora(Path(), initial_adapter=""), **spec)
        begun = await trainer.forward_backward(1, make_samples(), loss=loss)
        random = await trainer.forward_backward(1, make_samples(), "base", loss=loss)
        assert begun.diagnostics["reference_kl"] > 1e-4 > abs(random.diagnostics["reference_kl"])
        await trainer.optim_step(2)
        await trainer.publish(3)
        fetched = await fetch_version(trainer.channel, "r", 1)
        before = load_file(adapter / FILE)
        moved = [
            (torch.frombuffer(bytearray(one.data), dtype=torch.float32).view(one.shape) - before[name]).abs()
            for name, one in fetched.tensors.items()
        ]
        assert all(0 < one.max() < 0.05 for one in moved), "a step away from where it began"


async def test_what_a_run_begins_with_is_logged_once_it_has_begun(
    adapter: Path, folder: Path, serve_trainer: Make, make_samples: Make
) -> None:
    async with serve_trainer() as trainer:
        with structlog.testing.capture_logs() as logged:
            await trainer.refused(
                trainer.create(
                    "narrow", base_model=str(folder), lora=lora(adapter, target_modules=["v_proj"])
                ),
                "INVALID_CONFIG",
            )
            await trainer.create(base_model=str(folder), lora=lora(adapter))
            await trainer.one_step(1, make_samples())
            state = (await trainer.save(4, "a")).path
            plain = {"base_model": str(folder), "lora": lora(Path(), initial_adapter="")}
            await trainer.create("kept", initial_state=state, **plain)
            await trainer.create("fresh", initial_state=state, fresh_optimizer=True, **plain)
            await trainer.create("plain", **plain)
    said = [one for one in logged if one["event"] == "run_begins_with"]
    assert [(one["run_id"], one["path"], one["fresh_optimizer"]) for one in said] == [
        ("r", str(adapter), True),
        ("kept", state, False),
        ("fresh", state, True),
    ]


async def test_the_folder_is_read_once(
    adapter: Path, folder: Path, serve_trainer: Make, make_samples: Make
) -> None:
    """initial_adapter.py 3."""
    spec = {"base_model": str(folder), "lora": lora(adapter)}
    async with serve_trainer() as trainer:
        await trainer.create(**spec)
        await trainer.one_step(1, make_samples())
        tuned = await trainer.forward(make_samples())
        await trainer.save(4, "there")
    elsewhere = Path(shutil.move(adapter, adapter.with_name("elsewhere")))
    async with serve_trainer() as trainer:
        restored = await trainer.create(**spec)
        assert (restored.applied_seq_id, restored.policy_version) == (4, 1)
        assert_close(await trainer.forward(make_samples()), tuned, 0.0)
        gone = await trainer.refused(trainer.create("new", **spec), "INVALID_CONFIG")
        assert gone.metadata["key"] == "lora.initial_adapter" and f"has no {SETTINGS}" in gone.message
        other = {**spec, "lora": lora(elsewhere)}
        conflict = await trainer.refused(trainer.create(**other), "RUN_CONFLICT")
        assert conflict.metadata["field"] == "lora.initial_adapter"


async def test_before_it_has_a_state_another_content_gives_another_version(
    adapter: Path, folder: Path, serve_trainer: Make
) -> None:
    """initial_adapter.py 3: as a base model that was changed does."""
    spec, digests = {"base_model": str(folder), "lora": lora(adapter)}, []
    for factor in (1.0, 1.0, 1.5):
        held = load_file(adapter / FILE)
        save_file({name: one * factor for name, one in held.items()}, adapter / FILE)
        async with serve_trainer() as trainer:
            await trainer.create(**spec)
            digests.append((await trainer.publish(1)).digest)
    assert digests[0] == digests[1] != digests[2]


async def test_an_exported_adapter_begins_another_run(
    adapter: Path, folder: Path, serve_trainer: Make, make_samples: Make
) -> None:
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), lora=lora(adapter))
        await trainer.one_step(1, make_samples())
        tuned = await trainer.forward(make_samples())
        saved = await trainer.save(4, "end", export=True)
        exported = Path(saved.model_path) / "adapter"
        await trainer.create("second", base_model=str(folder), lora=lora(exported))
        assert_close(await trainer.forward(make_samples(), run_id="second"), tuned, 0.0)


@pytest.mark.parametrize(
    ("changed", "key", "said"),
    [
        ({"rank": 4}, "lora.rank", "it has r = 3; set that"),
        ({"alpha": 6.0}, "lora.alpha", "it has lora_alpha = 5; set that"),
        ({"rslora": True}, "lora.rslora", "it has use_rslora = False; set that"),
        (
            {"modules_to_save": ["o_proj"], "publish_merged": True},
            "lora.modules_to_save",
            "it has modules_to_save = []; set that",
        ),
        (
            {"target_modules": ["q_proj"]},
            "lora.target_modules",
            'it has matrices of q_proj, v_proj, the run would train q_proj; set ["q_proj", "v_proj"]',
        ),
        (
            {"target_modules": ["layers.0.self_attn.q_proj", "v_proj"]},
            "lora.target_modules",
            "it has matrices of base_model.model.model.layers.1.self_attn.q_proj, and the run would have",
        ),
    ],
)
async def test_what_does_not_fit_is_refused_by_the_key_of_the_run(
    changed: dict[str, Any], key: str, said: str, adapter: Path, folder: Path, serve_trainer: Make
) -> None:
    """initial_adapter.py 2; and nothing is left of such a run."""
    async with serve_trainer() as trainer:
        asked = trainer.create(base_model=str(folder), lora=lora(adapter, **changed))
        error = await trainer.refused(asked, "INVALID_CONFIG")
        assert error.metadata["key"] == key and said in error.message, error.message
        assert str(adapter) in error.message
        await trainer.create(base_model=str(folder), lora=lora(adapter))


async def test_modules_that_differ_both_ways_are_told_as_what_they_are(
    folder: Path, tmp_path: Path, serve_trainer: Make
) -> None:
    """initial_adapter.py 2."""
    first, second = ([f"layers.{layer}.self_attn.q_proj", "v_proj"] for layer in (0, 1))
    made_by_peft(folder, tmp_path / "adapter", target_modules=second)
    async with serve_trainer() as trainer:
        asked = trainer.create(base_model=str(folder), lora=lora(tmp_path / "adapter", target_modules=first))
        error = await trainer.refused(asked, "INVALID_CONFIG")
    lacking = "base_model.model.model.layers.0.self_attn.q_proj"
    assert f"it has no matrices of {lacking}, and the run would train some; name" in error.message


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_dora": True}, "its use_dora = True"),
        ({"peft_type": "IA3"}, "its peft_type = 'IA3'"),
        ({"rank_pattern": {"q_proj": 2}}, "its rank_pattern = {'q_proj': 2}"),
        ({"init_lora_weights": "pissa"}, "its init_lora_weights = 'pissa'"),
        ({"r": None}, "adapter_config is not peft's"),
    ],
)
async def test_what_no_adapter_here_has_is_refused_before_anything_is_loaded(
    settings: dict[str, Any], said: str, adapter: Path, folder: Path, serve_trainer: Make
) -> None:
    """initial_adapter.py 2."""
    file = adapter / SETTINGS
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    async with serve_trainer() as trainer:
        check = pb.CheckRunRequest(spec=pb.RunSpec(base_model=str(folder), lora=lora(adapter)))
        error = await trainer.refused(trainer.stub.CheckRun(check), "INVALID_CONFIG")
        assert error.metadata["key"] == "lora.initial_adapter" and said in error.message, error.message


async def test_an_adapter_of_another_model_or_none_is_refused(
    adapter: Path, folder: Path, serve_trainer: Make
) -> None:
    async with serve_trainer() as trainer:

        async def refused(reason: str = "INVALID_CONFIG", begins: Path = adapter, **spec: Any) -> str:
            spec = {"base_model": str(folder), "lora": lora(begins), **spec}
            error = await trainer.refused(trainer.create(**spec), reason)
            return f"{error.metadata['key']}: {error.message}"

        held = load_file(adapter / FILE)
        name = min(held)
        wide = {**held, name: torch.zeros(RANK, 7)}
        save_file(wide, adapter / FILE)
        assert "has shape [3, 7], and base_model needs [3, 32]" in await refused()
        save_file({**held, "base_model.model.lm_head.weight": torch.zeros(2)}, adapter / FILE)
        assert "it has base_model.model.lm_head.weight, unlike what the run trains" in await refused()
        for odd, said in (
            (held[name] * torch.nan, "is not finite in float32"),
            (held[name].double() + 1e300, "is not finite in float32"),
            (held[name].to(torch.int8), "is of int8, where numbers of a floating point are wanted"),
            (held[name].to(torch.complex64), "is of complex64, where"),
        ):
            save_file({**held, name: odd}, adapter / FILE)
            assert f"{name} in {adapter / FILE} {said}" in await refused()
        (adapter / FILE).write_bytes(b"torn")
        assert f"{adapter / FILE} cannot be read" in await refused()
        (adapter / FILE).unlink()
        assert f"has no {FILE}; save the adapter with save_pretrained" in await refused()
        long = Path("x" * 300)
        assert "it cannot be read: File name too long" in await refused(begins=long)
        save_file(held, adapter / FILE)
        assert "leave one of them out" in await refused(from_scratch=True)
        assert "leave one of them out" in await refused(initial_state="/states/a@1")
        shutil.rmtree(adapter)
        assert (await refused()).startswith("lora.initial_adapter: ")
