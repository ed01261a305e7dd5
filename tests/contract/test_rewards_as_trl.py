"""Reward functions and reward models are given what TRL's GRPOTrainer gives them, by its own code, of the
same rows and the same tokens (quartet.rewards.functions 1, prompts.py 1, reward_model.py 1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from quartet.rewards.functions import RewardFunctions, Scores
from quartet.rewards.prompts import Prompts
from quartet.rewards.tokenizer import TextTokenizer

pytest.importorskip("trl", reason="TRL is a development dependency")
# Importing it takes most of that.
pytestmark = pytest.mark.slow

TEXT = [{"prompt": f"é {n} <|im_end|> is", "answer": n, "tools": ["f"], "completion": "c"} for n in range(2)]
CHATS = [
    {
        "prompt": [
            {"role": "system", "content": "be brief", "name": None},
            {"role": "user", "content": f"{n}?", "name": "me"},
        ],
        "answer": {"value": n, "unit": None},
        "chat_template_kwargs": {"x": 1},
        "completion_ids": [n],
    }
    for n in range(2)
]
OPENED = [
    {"prompt": [*row["prompt"], {"role": "assistant", "content": "so", "name": None}], "answer": "a"}
    for row in CHATS
]
#: An answer that ended, one that was cut, one with special tokens alone, one of bytes that are no text.
ANSWERS = ["yes<|im_end|>", "n", "<|im_end|>", "<think>é<|im_end|>"]
COUNT = len(ANSWERS)
#: What TRL adds that is its own.
OWN = ("trainer_state", "log_extra", "log_metric")


def of_trl(model: Path, rows: Sequence[Any], functions: Any, answers: list[list[int]], output: Path) -> Any:
    """Of the first row and these answers: the rows, the prompt's tokens, the rewards of each function."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    settings = {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    args = GRPOConfig(
        output_dir=str(output),
        per_device_train_batch_size=COUNT,
        num_generations=COUNT,
        shuffle_dataset=False,
        **settings,
    )
    data = Dataset.from_list(list(rows))
    trainer: Any = GRPOTrainer(model=str(model), reward_funcs=functions, args=args, train_dataset=data)
    asked: list[list[list[int]]] = []

    def generate(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        asked.append(prompt_ids)
        return answers, None

    trainer._generate_single_turn = generate
    inputs = next(iter(trainer.get_train_dataloader()))
    rewards: list[Any] = []
    calculate = trainer._calculate_rewards
    trainer._calculate_rewards = lambda *given: rewards.append(calculate(*given)) or rewards[-1]
    trainer._generate_and_score_completions(inputs)
    return data, asked[0][0], rewards[0].T.tolist()


async def of_ours(data: Any, functions: Any, answers: list[list[int]], tokenizer: TextTokenizer) -> Any:
    group = Prompts("train_dataset", data, tokenizer).group(0, answers)
    found = await RewardFunctions(functions).score(group)
    assert isinstance(found, Scores), found
    return found.values


@pytest.mark.parametrize("rows", [TEXT, CHATS, OPENED], ids=["text", "chats", "opened"])
async def test_functions_see_the_same(untrained_model: Path, tmp_path: Path, rows: list[Any]) -> None:
    seen: list[dict[str, Any]] = []

    def spy(**keywords: Any) -> list[float | None]:
        seen.append(keywords)
        return [1.0, None, 0.25, True]

    async def beside(**keywords: Any) -> list[float]:
        seen.append(keywords)
        return [2.0] * len(keywords["prompts"])

    tokenizer = TextTokenizer(str(untrained_model))
    answers = [tokenizer.encode(text) for text in ANSWERS]
    data, prompt_ids, theirs = of_trl(untrained_model, rows, [spy, beside], answers, tmp_path / "out")
    ours = await of_ours(data, [spy, beside], answers, tokenizer)
    assert [[None if value != value else value for value in values] for values in theirs] == ours
    assert len(seen) == 4 and all(one.keys() == seen[0].keys() for one in seen)
    told = [{name: one[name] for name in one if name not in OWN} for one in seen]
    assert told == [told[0]] * 4
    if rows is TEXT:
        (prompt, *_) = Prompts("train_dataset", data, tokenizer).page(0, 1)
        assert list(prompt.tokens.token_ids) == prompt_ids
    else:
        from quartet_inference.chat.template import Template
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(untrained_model)
        (sent, *_) = Prompts("train_dataset", data, tokenizer).page(0, 1)
        messages = [{"role": one.role, "content": one.content} for one in sent.messages.messages]
        text = Template(loaded, {}).render(messages, [])
        assert loaded(text, add_special_tokens=False)["input_ids"] == prompt_ids


@pytest.mark.parametrize("rows", [TEXT, CHATS], ids=["text", "chats"])
async def test_reward_models_say_the_same(untrained_model: Path, tmp_path: Path, rows: list[Any]) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(3)
    scorer = AutoModelForSequenceClassification.from_pretrained(untrained_model, num_labels=1)
    scorer.save_pretrained(tmp_path / "reward-model")
    AutoTokenizer.from_pretrained(untrained_model).save_pretrained(tmp_path / "reward-model")

    def loaded() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward-model", num_labels=1)

    tokenizer = TextTokenizer(str(untrained_model))
    answers = [tokenizer.encode(text) for text in ANSWERS]
    data, _, theirs = of_trl(untrained_model, rows, [loaded()], answers, tmp_path / "out")
    functions = RewardFunctions(loaded())
    assert functions.names == ("reward-model",)
    found = await functions.score(Prompts("train_dataset", data, tokenizer).group(0, answers))
    assert isinstance(found, Scores), found
    assert found.values[0] == pytest.approx(theirs[0], abs=1e-5) and len(set(theirs[0])) > 1
