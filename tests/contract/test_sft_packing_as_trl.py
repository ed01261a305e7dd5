"""A fine-tuning packs rows as TRL does, by TRL's own code: the same samples in the same rows and order."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from quartet.cli.sft.best_fit import GROUP, Rows
from quartet.cli.sft.sets import read_sets
from quartet.cli.sft.shelf import Shelf
from quartet.cli.tiny.files import PHRASES, write_model_files
from quartet.scripts.models import Model
from quartet.sft import SFTConfig
from quartet.sft.translate import translate
from quartet.v1.rollout_pb2 import PolicySpan, Sample

pytest.importorskip("trl", reason="TRL is a development dependency")
# Importing it takes most of that.
pytestmark = pytest.mark.slow


def packed_by_trl(lengths: list[int], most: int) -> list[list[int]]:
    """The numbers of the samples of each row."""
    import datasets
    import pyarrow
    from trl import pack_dataset

    # As of the trainer: lists of 32 bits. Each token is the number of its sample.
    rows = pyarrow.table({"input_ids": [[at] * one for at, one in enumerate(lengths)]})
    packed = pack_dataset(datasets.Dataset(rows), most, "bfd")
    return [list(dict.fromkeys(row["input_ids"])) for row in packed]


def packed(lengths: list[int], most: int) -> list[list[int]]:
    shelf = Shelf()
    for one in lengths:
        shelf.put(Sample(token_ids=[0] * one, spans=[PolicySpan(start=1, length=one - 1)]))
    rows = Rows(shelf, most)
    return [list(rows.numbers(row)) for row in range(len(rows))]


@pytest.mark.parametrize("most", [16, 100, 1024])
@pytest.mark.parametrize("count", [1, 7, GROUP, 2 * GROUP + 31])
def test_rows_are_those_of_trl_in_its_order(most: int, count: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    drawn = random.Random(seed)
    lengths = [min(most, 2 + int(drawn.expovariate(3 / most))) for _ in range(count)]
    assert packed(lengths, most) == packed_by_trl(lengths, most)


def test_a_script_has_the_rows_that_it_has_with_trl(tmp_path: Path) -> None:
    """From its arguments and chats on, by what SFTTrainer itself prepares: tokens, what is learned of them,
    and where each begins; one is cut."""
    import datasets
    from transformers import AutoTokenizer
    from trl.trainer.sft_trainer import SFTTrainer

    model, most, drawn = tmp_path / "model", 120, random.Random(3)
    write_model_files(model, PHRASES)
    lines = [
        {
            "messages": [
                {"role": "user", "content": "a" * drawn.randint(1, 30)},
                {"role": "assistant", "content": "b" * drawn.randint(1, 60 if number % 9 else 200)},
            ]
        }
        for number in range(60)
    ]
    tokenizer = AutoTokenizer.from_pretrained(model)
    itself = SimpleNamespace(_tokenizer=tokenizer, completion_only_loss=False, chat_template=None)
    args = SimpleNamespace(
        dataset_num_proc=None,
        dataset_text_field="text",
        assistant_only_loss=False,
        max_length=most,
        truncation_mode="keep_start",
        shuffle_dataset=False,
        packing_strategy="bfd",
    )
    given = datasets.Dataset.from_list(lines)
    theirs = SFTTrainer._prepare_dataset(itself, given, tokenizer, args, True, None, "train")

    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = SFTConfig(packing=True, max_length=most, per_device_train_batch_size=4, num_train_epochs=2)
    config = translate(asked, Model("m", str(model)), file).config
    sets = read_sets(config.model_copy(update={"model": str(model)}))
    rows = sets.drawn
    assert len(rows) == len(theirs) and sets.validation.steps == 2 * -(-len(rows) // 4), "as many steps"
    for number, row in enumerate(theirs):
        ours = rows.taken([number])
        assert [token for sample in ours for token in sample.token_ids] == row["input_ids"]
        assert [len(sample.token_ids) for sample in ours] == row["seq_lengths"]
        learned = [at > 0 for sample in ours for at in range(len(sample.token_ids))]
        # Of each sample the first token has no label in the collator.
        begins = {sum(row["seq_lengths"][:at]) for at in range(len(row["seq_lengths"]))}
        assert learned == [label != -100 and at not in begins for at, label in enumerate(row["labels"])]
    assert any(
        len(sample.token_ids) == most for number in range(len(rows)) for sample in rows.taken([number])
    )
