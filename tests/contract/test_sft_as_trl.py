"""A fine-tuning learns of a line the tokens that TRL's SFTTrainer learns of it, by its own code: a script for
it to the last token, `quartet sft` by roles to the end of a turn."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quartet.cli.sft.chats import read_chats
from quartet.cli.tiny.files import PHRASES, write_model_files
from quartet.config import ConfigError
from quartet.scripts.models import Model
from quartet.sft import SFTConfig
from quartet.sft.translate import translate
from quartet.v1.rollout_pb2 import Sample
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

pytest.importorskip("trl", reason="TRL is a development dependency")
# Importing it takes most of that.
pytestmark = pytest.mark.slow

ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "é?"}]
ANSWERED = [{"role": "assistant", "content": "yes"}]
TURNS = [*ASKED, {"role": "assistant", "content": "no"}, {"role": "user", "content": "sure?"}]
LISTED = [
    {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
]

Tokens = list[tuple[int, bool]]


@pytest.fixture(params=["bare", "begins"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model's folder; in one, any text begins with a token of its own."""
    folder = tmp_path / "model"
    write_model_files(folder, PHRASES)
    (folder / "chat_template.jinja").write_text(
        "{% if loud %}!{% endif %}{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
        + (folder / "chat_template.jinja").read_text()
    )
    if request.param == "begins":
        file = str(folder / "tokenizer.json")
        tokenizer = Tokenizer.from_file(file)
        begins = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
        tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[begins])
        tokenizer.save(file)
    return folder


def of_trl(model: Path, line: dict[str, Any], **arguments: Any) -> Tokens | None:
    """What SFTTrainer makes of a data set of this line, with which tokens it takes the loss of; None where it
    leaves it out. Arguments are those of SFTConfig."""
    import datasets
    from transformers import AutoTokenizer
    from trl.trainer.sft_trainer import SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(model)
    of_completion = arguments.pop("completion_only_loss", None)
    if of_completion is None:  # as its __init__ does
        of_completion = "prompt" in line
    itself = SimpleNamespace(_tokenizer=tokenizer, completion_only_loss=of_completion, chat_template=None)
    usual = {
        "dataset_num_proc": None,
        "dataset_text_field": "text",
        "assistant_only_loss": False,
        "max_length": None,
        "truncation_mode": "keep_start",
        "shuffle_dataset": False,
    }
    args = SimpleNamespace(**usual | arguments)
    given = datasets.Dataset.from_list([line])
    prepared = list(SFTTrainer._prepare_dataset(itself, given, tokenizer, args, False, None, "train"))
    if not prepared:
        return None
    (row,) = prepared
    # The first token has no prediction: its label is shifted away.
    learned = [label != -100 and at > 0 for at, label in enumerate(row["labels"])]
    return list(zip(row["input_ids"], learned, strict=True))


def of_quartet(model: Path, line: dict[str, Any], file: Path) -> Tokens:
    """By roles."""
    file.write_text(json.dumps(line))
    (sample,) = read_chats(file, model, ("assistant",), 4096).samples
    return told(sample)


def of_script(model: Path, line: dict[str, Any], file: Path, **arguments: Any) -> Tokens | None:
    """By a script, with these arguments."""
    file.write_text(json.dumps(line))
    config = translate(SFTConfig(**arguments), Model("m", str(model)), file).config
    try:
        samples = read_chats(
            file,
            model,
            config.roles,
            config.max_tokens,
            "data",
            config.overlong,
            learns=config.learns,
            learn_prompts=config.learn_prompts,
        ).samples
    except ConfigError as refused:
        assert "with anything that is learned before max_tokens" in str(refused)
        return None
    (sample,) = samples
    return told(sample)


def told(sample: Sample) -> Tokens:
    learned = {at for span in sample.spans for at in range(span.start, span.start + span.length)}
    return [(token, at in learned) for at, token in enumerate(sample.token_ids)]


@pytest.mark.parametrize(
    "line",
    [
        {"text": "Once upon a time"},
        {"text": "Once<|im_end|>"},
        {"prompt": "The sky is", "completion": " blue."},
        {"prompt": "The sky is", "completion": " blue.<|im_end|>"},
        {"prompt": "Say nothing:", "completion": ""},
        {"prompt": "", "completion": "Once"},
    ],
)
def test_text_is_learned_as_by_trl(model: Path, tmp_path: Path, line: dict[str, Any]) -> None:
    assert of_quartet(model, line, tmp_path / "line") == of_trl(model, line)


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": ASKED, "completion": ANSWERED},
        {"prompt": TURNS, "completion": ANSWERED},
        {"prompt": ASKED, "completion": ANSWERED, "tools": json.dumps(LISTED)},
        {"prompt": ASKED, "completion": ANSWERED, "chat_template_kwargs": {"loud": True}},
    ],
)
def test_a_completion_is_learned_as_by_trl_to_the_end_of_its_turn(
    model: Path, tmp_path: Path, line: dict[str, Any]
) -> None:
    """TRL also learns the line break that the template puts behind a turn, which nobody samples."""
    ours, theirs = of_quartet(model, line, tmp_path / "line"), of_trl(model, line)
    assert ours == theirs[: len(ours)]
    assert sum(learned for _, learned in theirs[len(ours) :]) == len(theirs) - len(ours) == 1


CHATS = [
    {"messages": [*ASKED, *ANSWERED]},
    {"messages": [*TURNS, *ANSWERED]},
    {"messages": [*ASKED, *ANSWERED], "tools": LISTED},
    {"messages": [*ASKED, *ANSWERED], "chat_template_kwargs": {"loud": True}},
    {"prompt": ASKED, "completion": ANSWERED},
    {"prompt": TURNS, "completion": [*ANSWERED, {"role": "user", "content": "really?"}, *ANSWERED]},
]


@pytest.mark.parametrize("line", CHATS)
@pytest.mark.parametrize("completion_only_loss", [None, False])
def test_a_script_learns_of_a_chat_what_it_learns_by_trl(
    model: Path, tmp_path: Path, line: dict[str, Any], completion_only_loss: bool | None
) -> None:
    """To the last token: what the template writes and others say, too, which is TRL's default."""
    asked = {"completion_only_loss": completion_only_loss}
    theirs = of_trl(model, line, **asked)
    assert theirs is not None and of_script(model, line, tmp_path / "line", **asked) == theirs


@pytest.mark.parametrize("line", CHATS[:2])
def test_a_script_learns_of_an_assistant_what_it_learns_by_trl(
    model: Path, tmp_path: Path, line: dict[str, Any]
) -> None:
    """assistant_only_loss, by a template that marks for TRL what an assistant says. Behind the last turn that
    is learned nothing is sent."""
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
        "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    asked = {"assistant_only_loss": True}
    ours, theirs = of_script(model, line, tmp_path / "line", **asked), of_trl(model, line, **asked)
    assert ours is not None and theirs is not None and ours == theirs[: len(ours)]
    assert not any(learned for _, learned in theirs[len(ours) :])
    assert 0 < sum(learned for _, learned in ours) < len(ours) - 1


@pytest.mark.parametrize(
    "line",
    [*CHATS, {"text": "Once upon a time, far away, there lived one."}, {"prompt": "a", "completion": "b c"}],
)
@pytest.mark.parametrize("max_length", [3, 9, 40])
def test_a_script_cuts_what_is_too_long_as_trl_does(
    model: Path, tmp_path: Path, line: dict[str, Any], max_length: int
) -> None:
    """And leaves out what nothing learned is left of."""
    asked = {"max_length": max_length}
    assert of_script(model, line, tmp_path / "line", **asked) == of_trl(model, line, **asked)


@pytest.mark.parametrize("line", [{"prompt": "The sky is", "completion": " blue."}, {"text": "Once"}])
def test_a_script_learns_prompts_of_text_as_by_trl(model: Path, tmp_path: Path, line: dict[str, Any]) -> None:
    asked = {"completion_only_loss": False}
    assert of_script(model, line, tmp_path / "line", **asked) == of_trl(model, line, **asked)
