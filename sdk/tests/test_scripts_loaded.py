"""Models that a script has loaded itself: taken for their folder, where they are what it holds."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quartet.config.model import ConfigError
from quartet.scripts.models import model_of
from quartet.scripts.trainer import ScriptTrainer
from quartet.trl import GRPOConfig
from transformers import AutoModel, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a model with tied weights, in bfloat16."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    # Nothing here reads it.
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", ["auto", torch.float32])
def test_a_model_as_it_was_loaded_is_its_folder(folder: Path, dtype: Any) -> None:
    """loaded.py 1: in whatever type it was loaded, and with what scripts usually set."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.config.use_cache, model.config.pad_token_id = False, 0
    _hooked(model)
    found = model_of(model.train())
    assert (found.name, found.folder) == (str(folder), str(folder))


def _scaled(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 5] += 0.5


def _with_adapter(model: Any) -> None:
    model.peft_config = {"default": None}


def _from_nowhere(model: Any) -> None:
    model.name_or_path = model.config._name_or_path = ""


def _half(model: Any) -> None:
    model.lm_head = copy.deepcopy(model.lm_head).half()


def _eighth(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.to(torch.float8_e4m3fn)


def _wrapped(model: Any) -> None:
    before = model.forward
    model.forward = lambda *given, **more: before(*given, **more)


def _wrapped_within(model: Any) -> None:
    _wrapped(model.model.layers[0].mlp)


def _hooked(model: Any) -> None:
    accelerate = pytest.importorskip("accelerate", reason="the services' installation brings it")
    accelerate.hooks.add_hook_to_module(model, accelerate.hooks.AlignDevicesHook("cpu"))


def _wrapped_and_hooked(model: Any) -> None:
    _wrapped(model)
    _hooked(model)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_scaled, "(model.layers.0.mlp.up_proj.weight has other values); save the Qwen3ForCausalLM and its"),
        (lambda model: model.resize_token_embeddings(40), "(config.vocab_size is 40, there 32)"),
        (
            lambda model: setattr(model.config, "rms_norm_eps", 0.1),
            "(config.rms_norm_eps is 0.1, there 1e-06",
        ),
        (lambda model: model.to("meta"), "(lm_head.weight is not in memory)"),
        (_with_adapter, "it has adapters; give the model without them"),
        (lambda model: setattr(model, "hf_quantizer", object()), "its weights are quantized"),
        (_half, "lm_head.weight is float16, and the others are bfloat16; load all of it with one: dtype=to"),
        (
            _eighth,
            "mlp.up_proj.weight is float8_e4m3fn, and the others are bfloat16; load all",
        ),
        (lambda model: model.to(torch.float8_e4m3fn), "its weights are float8_e4m3fn; load all of it with"),
        (_wrapped, "its forward is another one than that of its class, with which the services load '"),
        (_wrapped_within, "its model.layers.0.mlp.forward is another one than that of its class"),
        (_wrapped_and_hooked, "its forward is another one than that of its class"),
        (_from_nowhere, "it was loaded from no folder; save the Qwen3ForCausalLM"),
    ],
)
def test_what_was_changed_in_memory_would_be_lost(
    folder: Path, change: Callable[[Any], object], said: str
) -> None:
    """loaded.py 1: a weight, a row, a setting."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    change(model)
    with pytest.raises(ConfigError) as refused:
        model_of(model)
    assert said in str(refused.value)


def test_a_model_without_a_head(folder: Path) -> None:
    """loaded.py 1: its weights are those of the folder, and nothing is sampled from it."""
    model = AutoModel.from_pretrained(folder)
    with pytest.raises(ConfigError) as refused:
        model_of(model)
    assert str(refused.value) == (
        "model = Qwen3Model is refused: it has no head that tokens are sampled from; load it by "
        f"AutoModelForCausalLM.from_pretrained({str(folder)!r}), or give that name"
    )


def test_a_model_of_which_the_folder_is_gone_or_another(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    other = AutoModelForCausalLM.from_pretrained(folder)
    _scaled(other)
    other.save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"up_proj\.weight has other values"):
        model_of(model)
    folder.rename(folder.with_name("moved"))
    with pytest.raises(ConfigError, match="neither a folder here nor a model in the Hugging Face cache"):
        model_of(model)


def test_that_it_is_not_trained_in_place_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A script that saves the object behind train() would save what it has loaded."""

    class Trainer(ScriptTrainer):
        logger = logging.getLogger("quartet.trl")
        state = None  # it has not trained

    for model, is_told in ((AutoModelForCausalLM.from_pretrained(folder), True), (str(folder), False)):
        caplog.clear()
        trainer = Trainer(model, None, None)
        trainer.args = GRPOConfig()
        trainer.take_callbacks(None)
        trainer.warn_of(["a note"])
        assert ("not trained in place, and stays as it was loaded" in caplog.text) is is_told


def test_what_a_script_looks_for_in_the_model_is_told_where_the_trained_one_is(folder: Path) -> None:
    """models.py 3: `trainer.model.save_pretrained` of a script means what was trained."""
    with pytest.raises(
        AttributeError, match=r"'save_pretrained'; the trained one is in the folder of trainer\."
    ):
        _ = model_of(str(folder)).save_pretrained
