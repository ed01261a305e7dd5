"""The small model's files are what transformers reads, its demonstrations what the environment rewards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from quartet.cli.tiny.command import is_complete
from quartet.cli.tiny.demos import LONGEST, MAX_TOKENS, SHORTEST, Reversals, reward
from quartet.cli.tiny.files import IM_END, build_tokenizer, render, write_model_files
from quartet.cli.tiny.teach import training_sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    write_model_files(made)
    return made


def test_transformers_loads_config_and_tokenizer(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert isinstance(tokenizer, transformers.PreTrainedTokenizerFast)
    assert config.model_type == "qwen3"
    assert config.vocab_size % 32 == 0 and config.vocab_size >= len(tokenizer)
    assert tokenizer.eos_token_id == config.eos_token_id == tokenizer.convert_tokens_to_ids(IM_END)
    messages = Reversals(0).example().messages
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == render(messages), "the trainer is taught exactly what the engine renders"
    ours = build_tokenizer().encode(rendered, add_special_tokens=False).ids
    assert tokenizer.encode(rendered, add_special_tokens=False) == ours


def test_the_model_has_the_published_size(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert 0.6e6 < sum(p.numel() for p in model.parameters()) < 0.7e6


@pytest.mark.parametrize(
    "text", ["abc", "Grüße, 世界 🙂", "<reversed_text>x</reversed_text>", "\n\t\x00 a  b"]
)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_demonstrations_fit_and_are_rewarded() -> None:
    tokenizer = build_tokenizer()
    demos = Reversals(3)
    for _ in range(200):
        example, answer = demos.demonstration()
        assert SHORTEST <= len(example.text) <= LONGEST
        assert reward(example.text, answer, ended=True) == 1.0
        sample = training_sample(tokenizer, example, answer).sample
        (span,) = sample.spans
        assert span.start + span.length == len(sample.token_ids)
        assert span.length <= MAX_TOKENS
        assert sample.token_ids[-1] == tokenizer.token_to_id(IM_END)
        assert len(sample.token_ids) <= 48


def test_bad_habits_and_seeds() -> None:
    clean, spoiled, again = Reversals(1), Reversals(1, 0.85), Reversals(1, 0.85)
    echoes = 0
    for _ in range(400):
        assert clean.demonstration()[1]
        example, answer = spoiled.demonstration()
        assert (example, answer) == again.demonstration()
        echoes += example.text in answer and example.text != example.text[::-1]
    assert 0.8 < echoes / 400 < 0.9


@pytest.mark.parametrize(
    ("answer", "ended", "expected"),
    [
        ("<reversed_text>cba</reversed_text>", True, 1.0),
        ("<reversed_text>cba</reversed_text>", False, 0.0),
        ("<reversed_text>abc</reversed_text>", True, 1 / 3),
        ("<reversed_text>cba</reversed_text>junk", True, 0.0),
        ("<reversed_text>cba</reversed_text></reversed_text>", True, 0.0),
        ("cba", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_reward(answer: str, ended: bool, expected: float) -> None:
    assert reward("abc", answer, ended) == pytest.approx(expected)


def test_a_folder_without_weights_is_not_complete(tmp_path: Path) -> None:
    write_model_files(tmp_path)
    assert not is_complete(tmp_path)
    (tmp_path / "quartet.json").write_text(json.dumps({}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert is_complete(tmp_path)
