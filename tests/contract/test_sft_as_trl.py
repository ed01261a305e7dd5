"""`quartet sft` learns of a line the tokens that TRL's SFTTrainer learns of it, by its own code."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quartet.cli.sft.chats import read_chats
from quartet.cli.tiny.files import PHRASES, write_model_files
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


def of_trl(model: Path, line: dict[str, Any]) -> Tokens:
    """What SFTTrainer makes of a data set of this line; with which tokens it takes the loss of."""
    import datasets
    from transformers import AutoTokenizer
    from trl.trainer.sft_trainer import SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(model)
    of_completion = "prompt" in line  # what it does where completion_only_loss is left out
    itself = SimpleNamespace(_tokenizer=tokenizer, completion_only_loss=of_completion, chat_template=None)
    args = SimpleNamespace(
        dataset_num_proc=None,
        dataset_text_field="text",
        assistant_only_loss=False,
        max_length=None,
        shuffle_dataset=False,
    )
    given = datasets.Dataset.from_list([line])
    prepared = SFTTrainer._prepare_dataset(itself, given, tokenizer, args, False, None, "train")
    (row,) = prepared
    # The first token has no prediction: its label is shifted away.
    learned = [label != -100 and at > 0 for at, label in enumerate(row["labels"])]
    return list(zip(row["input_ids"], learned, strict=True))


def of_quartet(model: Path, line: dict[str, Any], file: Path) -> Tokens:
    file.write_text(json.dumps(line))
    (sample,) = read_chats(file, model, ("assistant",), 4096).samples
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
