"""Base models that load are whole and computed rightly, others are refused (model.py, probe.py)."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.errors import (
    HfHubHTTPError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)
from quartet.errors import QuartetError
from quartet.kit.health import Health
from quartet.v1 import trainer_service_pb2 as pb
from quartet_trainer import logprobs
from quartet_trainer.logits import LogitRule, logit_rule
from quartet_trainer.logprobs import PolicyForward
from quartet_trainer.model import (
    embedding_names,
    export_folder,
    load_model,
    max_positions,
    resolve_folder,
    untied,
)
from quartet_trainer.packing import pack
from quartet_trainer.probe import probe
from quartet_trainer.publish import cast
from quartet_trainer.sample import make_sample
from quartet_trainer.trained import WholeModel
from safetensors.torch import load_file, save_file

CPU = torch.device("cpu")
TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "initializer_range": 0.2,
}


def load(folder: Path, **settings: Any) -> Any:
    return load_model(folder, "m", device=CPU, **settings)


def test_promise_1_a_missing_weight_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QuartetError, match=r"lack 1 tensors.*layers\.1\.mlp\.up_proj"):
        load(tmp_path)


def test_promise_1_a_weight_of_another_shape_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    """As of a tokenizer that grew while its model did not."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    why = r"lack 1 tensors, the first is model\.embed_tokens\.weight of \[100, 32\], which is of \[96, 32\]"
    with pytest.raises(QuartetError, match=why):
        load(tmp_path)


def test_weights_that_went_wrong_are_refused_as_such(folder: Path) -> None:
    """The architecture is not to blame."""
    model = load(folder)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(QuartetError, match=r"by its weights are no finite numbers; name a checkpoint"):
        probe(PolicyForward(model, CPU, None), 96, "m", None)


async def test_a_large_model_is_no_silence(
    folder: Path, serve_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[float] = []
    monkeypatch.setattr(Health, "progress", lambda health: heard.append(0.0))
    monkeypatch.setattr(Health, "watch_progress", lambda *_: None)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
    assert len(heard) >= len(load_file(folder / "model.safetensors"))


async def test_a_large_model_that_is_fetched_is_no_silence(
    folder: Path, serve_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a base nor a teacher: liveness would end the trainer while it fetches, time and again."""
    heard: list[str] = []
    fetched: dict[str, int] = {}

    def snapshot_download(repo: str, *, allow_patterns: list[str], tqdm_class: Any) -> str:
        before = len(heard)
        with tqdm_class(total=3, disable=True) as bar:
            for _ in range(3):
                bar.update(1)
        fetched[repo] = len(heard) - before
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(Health, "progress", lambda health: heard.append("progress"))
    monkeypatch.setattr(Health, "watch_progress", lambda *_: None)
    async with serve_trainer() as trainer:
        await trainer.create(base_model="some/model", reference=pb.ReferenceSpec(model="some/teacher"))
    assert fetched == {"some/model": 3, "some/teacher": 3}


def answered(status: int) -> HfHubHTTPError:
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError("no", response=response)


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (HfHubHTTPError.__mro__[1]("peer closed connection"), "mend that"),
        (RuntimeError("Task error: CAS Client Error: error sending request"), "mend that"),  # by hf_xet
        (answered(429), "mend that"),
        (caused_by(LocalEntryNotFoundError("no"), answered(503)), "mend that"),
        (caused_by(IncompleteSnapshotError("no", "/cache"), OSError("Connection refused")), "mend that"),
        (OSError(errno.ENOSPC, "No space left on device"), "make room there"),
    ],
)
def test_a_model_that_came_in_part_is_one_that_may_be_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception, remedy: str
) -> None:
    """What breaks off is no fault of the spec; nor one of this rank alone, for which the others would end."""

    def breaks_off(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", breaks_off)
    with pytest.raises(QuartetError, match=f"some/model cannot be fetched .*; {remedy}") as raised:
        resolve_folder("some/model", allow_hub=True)
    assert raised.value.reason == "NOT_READY"


@pytest.mark.parametrize(
    "error",
    [
        answered(404),
        caused_by(LocalEntryNotFoundError("no"), OSError("Connection refused")),
        caused_by(IncompleteSnapshotError("no", "/cache"), OfflineModeIsEnabled("by HF_HUB_OFFLINE")),
    ],
)
def test_a_model_of_which_the_hub_gave_nothing_may_be_none(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Whoever mistypes a folder where no hub can be reached waits for nothing."""

    def gives_none(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", gives_none)
    with pytest.raises(QuartetError, match="INVALID_CONFIG: base_model: some/model is neither a folder"):
        resolve_folder("some/model", allow_hub=True)


FULL = {"layer_types": ["full_attention"] * 2, "head_dim": 16, "sliding_window": 64}


@pytest.mark.parametrize(
    ("kind", "changes", "rule"),
    [
        ("granite", {"logits_scaling": 6.0}, LogitRule(6.0)),
        ("hyperclovax", {"logits_scaling": 0.25}, LogitRule(4.0)),
        ("cohere", {"logit_scale": 0.0625}, LogitRule(16.0)),
        ("gemma2", {"final_logit_softcapping": 2.0, **FULL}, LogitRule(1.0, 2.0)),
        ("nanochat", {"final_logit_softcapping": 2.0}, LogitRule(1.0, 2.0)),
        ("llama", {}, LogitRule()),
    ],
)
@pytest.mark.parametrize("chunk", [1 << 24, 400], ids=["whole", "chunks"])
def test_logits_are_scaled_and_capped_as_the_model_does(
    kind: str, changes: dict[str, Any], rule: LogitRule, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """logits.py 1 and 2, probe.py 1."""
    monkeypatch.setattr(logprobs, "LOGIT_CHUNK_ELEMENTS", chunk)
    model = made(kind, **changes)
    assert logit_rule(model.config) == rule
    policy = PolicyForward(model, CPU, None)
    probe(policy, 96, "m", 64)
    tokens = [(7 * i + 3) % 96 for i in range(20)]
    (batch,) = pack([make_sample(0, tokens, [(4, 16, 0)], [], [])], [0], 1000, 1)
    for temperature in (1.0, 0.7):
        logits = model(input_ids=torch.tensor([tokens[:-1]])).logits[0].float() / temperature
        plain = torch.log_softmax(logits, -1)[range(3, 19), tokens[4:]]
        ours = policy(batch, temperature)[0]
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=0)
        found, expected = (
            torch.autograd.grad(one.sum(), list(model.parameters()), allow_unused=True)
            for one in (ours, plain)
        )
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5 * float(other.abs().max()) + 1e-6, rtol=0)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("chunk", [1 << 24, 400], ids=["whole", "chunks"])
def test_entropy_learns_where_that_is_asked_for_however_many_tokens_there_are(
    chunk: int, learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of one's own may weigh by it: else its gradient would go by the size of a micro-batch."""
    monkeypatch.setattr(logprobs, "LOGIT_CHUNK_ELEMENTS", chunk)
    tokens = list(range(20))
    (batch,) = pack([make_sample(0, tokens, [(4, 16, 0)], [], [])], [0], 1000, 1)
    found, entropy = PolicyForward(made("llama"), CPU, None)(batch, 1.0, entropy_learns=learns)
    assert (found.requires_grad, entropy.requires_grad) == (True, learns)


def made(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**TINY, "pad_token_id": 0, **changes})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def test_what_a_configuration_does_not_say_of_logits_is_refused() -> None:
    """logits.py 3, probe.py 1 and 2.

    With random weights, too, whose logits no cap bends: the probe raises them, and back.
    """
    model = made("gemma2", final_logit_softcapping=30.0, initializer_range=0.02, **FULL)
    before = model.lm_head.weight.clone()
    policy = PolicyForward(model, CPU, None)
    probe(policy, 96, "m", 64)
    policy._rule = LogitRule()
    with pytest.raises(QuartetError, match="Gemma2ForCausalLM bends large logits otherwise"):
        probe(policy, 96, "m", 64)
    assert torch.equal(model.lm_head.weight, before)


@pytest.mark.parametrize(
    ("kind", "sizes", "why"),
    [
        ("mpt", {"d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 64}, "log-probabilities of Mpt"),
        ("bloom", {"hidden_size": 32, "n_head": 2}, "BloomForCausalLM does not take packed rows"),
        ("rwkv", {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32}, "of Rwkv"),
        ("roberta", {**TINY, "is_decoder": True, "pad_token_id": 1}, "of Roberta.* with causal attention"),
        ("openai-gpt", {"n_embd": 32, "n_layer": 2, "n_head": 2}, "GPTLMHeadModel does not take packed rows"),
    ],
)
def test_the_probe_finds_what_small_random_weights_hardly_show(
    kind: str, sizes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    """probe.py 1: distances in the row instead of positions, other positions."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**sizes, "vocab_size": 96, "initializer_range": 0.02})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(QuartetError, match=why) as raised:
        probe(PolicyForward(load(tmp_path), CPU, None), 96, "m", 64)
    assert raised.value.metadata["key"] == "base_model"
    if "row_tokens = 1" in raised.value.message:
        probe(PolicyForward(load(tmp_path), CPU, None), 96, "m", 1)


def test_a_class_that_hides_its_decoder_is_refused(tmp_path: Path) -> None:
    """Transformers' text-only Llama 4 names its decoder otherwise than its base_model_prefix says."""
    config = transformers.Llama4TextConfig(
        **TINY, head_dim=16, intermediate_size_mlp=32, num_local_experts=2, layer_types=["full_attention"] * 2
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(QuartetError, match=r"Llama4ForCausalLM .* output layer; use another") as raised:
        load(tmp_path)
    assert raised.value.reason == "INVALID_CONFIG"


def test_a_sequence_ends_where_a_longrope_would_turn_the_rows_beside_it(tmp_path: Path) -> None:
    """Transformers takes one set of frequencies for all rows: the long one where any of them is long."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    for original in (32, 128):
        folder = tmp_path / str(original)
        config = transformers.Phi3Config(
            **TINY, rope_parameters=rope, original_max_position_embeddings=original, sliding_window=None,
            max_position_embeddings=128, pad_token_id=0,
        )  # fmt: skip
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        assert max_positions(load(folder)) == original


def test_promise_2_initialisation_leaves_the_random_state_alone(folder: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = (load(folder, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [model.model.embed_tokens.weight for model in (one, two, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_positions_are_embeddings_too() -> None:
    """Muon would orthogonalise what is looked up."""
    config = transformers.GPT2Config(vocab_size=96, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert embedding_names(model) == {"transformer.wte.weight", "transformer.wpe.weight"}


def test_what_a_model_holds_still_learns_nothing_and_leaves_as_it_came(tmp_path: Path) -> None:
    """Biases by which tokens choose their experts: parameters that do not learn, or buffers, in float32."""
    mixture = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
    still = transformers.AfmoeConfig(**TINY, **mixture, num_experts=4, num_dense_layers=1)
    transformers.AutoModelForCausalLM.from_config(still).save_pretrained(tmp_path / "still")
    held = {name: one.requires_grad for name, one in load(tmp_path / "still").named_parameters()}
    assert [name for name, learns in held.items() if not learns] == ["model.layers.1.mlp.expert_bias"]

    buffered = transformers.Glm4MoeConfig(**TINY, **mixture, n_routed_experts=4, first_k_dense_replace=1)
    model = transformers.AutoModelForCausalLM.from_config(buffered)
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    bias.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    model.save_pretrained(tmp_path / "buffered")
    trained = WholeModel(load(tmp_path / "buffered"))
    trained.export(tmp_path / "buffered", tmp_path / "exported", "bfloat16")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.model.layers[1].mlp.gate.e_score_correction_bias, bias)


def test_what_a_model_sees_with_learns_nothing_from_text(tmp_path: Path) -> None:
    """No gradients, no moments, and no weight decay; it leaves as it came."""
    sees = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={**TINY, "head_dim": 16}, vision_config={**sees, "image_size": 28}, mm_tokens_per_image=1
    )
    made = transformers.Gemma3ForConditionalGeneration(config)
    made.save_pretrained(tmp_path / "made")
    trained = WholeModel(load(tmp_path / "made"))
    apart = ("model.vision_tower.", "model.multi_modal_projector.")
    assert (
        {name for name in trained.parameters if name.startswith(apart)}
        == {name for name in trained.parameters if name not in trained.moved}
        == set(trained.frozen())
    )
    with torch.no_grad():
        for parameter in trained.moved.values():
            parameter.add_(1.0)
    trained.export(tmp_path / "made", tmp_path / "exported", "float32")
    before, after = (load_file(tmp_path / one / "model.safetensors") for one in ("made", "exported"))
    kept = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    assert kept and all(name.startswith(("vision_tower.", "multi_modal_projector.")) for name in kept)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_published_snapshot_shares_no_memory_with_the_model(dtype: str) -> None:
    master = torch.tensor([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8])
    kept = cast([("w", master)], dtype)["w"]
    before = kept.clone()
    master.zero_()
    assert torch.equal(kept, before)
    if dtype == "bfloat16":
        # Halfway cases go to the even neighbour.
        assert before.tolist() == [1.0, 1.0, 1.0 + 2**-6]


def test_promise_4_a_folders_own_python_is_never_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    classes = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": classes}))
    (own / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda _: "y")  # somebody at the terminal
    with pytest.raises(QuartetError, match="custom code"):
        load_model(own, str(own), device=torch.device("cpu"))
    assert not (tmp_path / "ran").exists()


def quantized_by(
    folder: Path, target: Path, scale: str, blocks: tuple[int, int] = (1, 1), **said: Any
) -> dict[str, torch.Tensor]:
    """Write a model with matrices of 8 bits, whose scales are called so; returns what they stand for."""
    shutil.copytree(folder, target)
    tensors, meant = load_file(target / "model.safetensors"), {}
    for name in [one for one in tensors if one.endswith("_proj.weight")]:
        factor = tensors[name].abs().max() / torch.finfo(torch.float8_e4m3fn).max
        tensors[name] = (tensors[name] / factor).to(torch.float8_e4m3fn)
        tensors[name.replace("weight", scale)] = factor.expand(blocks).contiguous()
        meant[name] = tensors[name].float() * factor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return meant


def test_a_quantized_model_is_whole_or_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """quantized.py, on a machine with a GPU that computes in 8 bits, where transformers would let them be."""
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    meant = quantized_by(folder, tmp_path / "fp8", "weight_scale_inv", **fp8)
    quantized_by(folder, tmp_path / "other", "weight_scale", **fp8)
    quantized_by(folder, tmp_path / "awq", "scales", quant_method="awq", bits=4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    model = load(tmp_path / "fp8")
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    for name, weight in meant.items():
        assert torch.equal(model.get_parameter(name), weight)
    for config in (model.config, load(tmp_path / "awq", seed=0).config):
        assert "quantization_config" not in config.to_dict(), "3"
    ragged = quantized_by(folder, tmp_path / "ragged", "weight_scale_inv", **fp8, blocks=(2, 1))
    first = min(ragged).replace(".", r"\.")
    for name, why in (
        ("other", "does not read the scales"),
        ("awq", r"are quantized \(awq\); name the"),
        ("ragged", f"{first} is quantized in blocks that do not divide it"),
    ):
        with pytest.raises(QuartetError, match=why) as raised:
            load(tmp_path / name)
        assert raised.value.reason == "INVALID_CONFIG"


@pytest.mark.parametrize("seed", [None, 0])
def test_sampling_defaults_travel_with_a_model_that_begins_from_scratch_too(
    tmp_path: Path, seed: int | None
) -> None:
    """COMPANION_PATTERNS"""
    made("llama").save_pretrained(tmp_path / "source")
    told = {"eos_token_id": [2, 7], "temperature": 0.6, "do_sample": True, "top_k": 20}
    (tmp_path / "source/generation_config.json").write_text(json.dumps(told))
    loaded = load_model(tmp_path / "source", "m", device=CPU, seed=seed)
    export_folder(loaded, untied(loaded), tmp_path / "source", tmp_path / "out", "float32")
    written = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert {key: written.get(key) for key in told} == told
