"""The small model's files are what transformers reads, its demonstrations what the environment rewards."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

import pytest
from quartet.cli.tiny.command import is_complete
from quartet.cli.tiny.courses import Packaged
from quartet.cli.tiny.demos import CLOSE_TAG, LONGEST, MAX_TOKENS, OPEN_TAG, SHORTEST, Reversals, reward
from quartet.cli.tiny.files import IM_END, build_tokenizer, render, write_model_files
from quartet.cli.tiny.teach import training_sample
from quartet.config import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    write_model_files(made)
    return made


def test_a_disk_without_room_is_told_by_the_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/tokenizer\.json'"):
            write_model_files(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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
        conversation = [*example.messages, {"role": "assistant", "content": answer}]
        sample = training_sample(tokenizer, conversation).sample
        (span,) = sample.spans
        assert span.start + span.length == len(sample.token_ids)
        assert span.length <= MAX_TOKENS
        assert sample.token_ids[-1] == tokenizer.token_to_id(IM_END)
        assert len(sample.token_ids) <= 48


def test_a_long_answer_is_measured_as_a_short_one() -> None:
    text = "abcdefghij" * 40
    near = f"?{text[::-1][1:]}"
    assert reward(text, f"{OPEN_TAG}{near}{CLOSE_TAG}", ended=True) == pytest.approx(399 / 400)


def test_bad_habits_and_seeds() -> None:
    clean, spoiled, again = Reversals(1), Reversals(1, 0.85), Reversals(1, 0.85)
    echoes = 0
    for _ in range(400):
        assert clean.demonstration()[1]
        example, answer = spoiled.demonstration()
        assert (example, answer) == again.demonstration()
        echoes += example.text in answer and example.text != example.text[::-1]
    assert 0.8 < echoes / 400 < 0.9


CALL = {"type": "function", "function": {"name": "python", "arguments": {"code": 'print("é")'}}}
TALK = [
    {"role": "user", "content": "2*3="},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "python", "content": "6"},
    {"role": "assistant", "content": "It is 6."},
    {"role": "user", "content": "more"},
]


def test_calls_are_rendered_as_the_template_renders_them(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False) == render(TALK)
    assert '<tool_call>{"name": "python", "arguments": {"code": "print(\\"é\\")"}}</tool_call>' in render(
        TALK
    )


def test_a_demonstration_of_several_turns_covers_the_answers_alone() -> None:
    tokenizer = build_tokenizer()
    sample = training_sample(tokenizer, TALK[:4]).sample
    said = [
        tokenizer.decode(sample.token_ids[one.start : one.start + one.length], skip_special_tokens=False)
        for one in sample.spans
    ]
    assert said[0].startswith("<tool_call>") and said[0].endswith(f"</tool_call>{IM_END}")
    assert said[1] == f"It is 6.{IM_END}"
    whole = tokenizer.decode(sample.token_ids, skip_special_tokens=False)
    opening = "<|im_start|>assistant\n"
    assert whole + "\n" == render(TALK[:4]).removesuffix(opening), "the tokens are the template's"


def test_phrases_become_tokens_and_none_twice() -> None:
    plain, more = build_tokenizer(), build_tokenizer(["Sum these: ", "<answer>"])
    assert len(more.encode("Sum these: ").ids) == 1 < len(plain.encode("Sum these: ").ids)
    assert more.get_vocab_size() == plain.get_vocab_size() + 1


PACKAGE = """
print("loading")
ARGS, PHRASES, MAX_TOKENS = {"n": 1}, ("Say it",), 4
SKILL_REWARD, HABIT_REWARD, HABIT_SHARE, HABIT_LEARNING_RATE = 0.9, 0.2, 0.5, 1e-4
def demonstrations(seed, habit_share):
    while True:
        print("drawing")
        seed += 1
        yield [{"role": "assistant", "content": f"{seed} {habit_share}"}]
"""


def test_a_package_tells_its_demonstrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_env"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "demonstrations.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with Packaged("owner/Some-Env", Path(sys.executable)) as course:
        assert (course.phrases, course.goals.habit_reward) == (["Say it"], 0.2)
        contents = [
            [one[0]["content"] for one in course.conversations(seed, share, 2)]
            for seed, share in ((3, 0.0), (3, 0.5), (3, 0.0))
        ]
    assert contents == [["4 0.0", "5 0.0"], ["4 0.5", "5 0.5"], ["6 0.0", "7 0.0"]], "streams go on"


def test_a_task_without_demonstrations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no_such_env"):
        Packaged("no-such-env", Path(sys.executable))
    with pytest.raises(ConfigError, match="cannot be run"):
        Packaged("no-such-env", tmp_path / "python")


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
