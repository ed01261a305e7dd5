"""A script for TRL's GRPOTrainer, with another import: python examples/trl_script/train.py"""

import argparse
import random
import re
from difflib import SequenceMatcher

from datasets import Dataset
from quartet.trl import GRPOConfig, GRPOTrainer  # from trl import GRPOConfig, GRPOTrainer

words = argparse.ArgumentParser()
words.add_argument("--model", default="models/tiny")
words.add_argument("--output-dir", default="outputs/trl-script")
words.add_argument("--max-steps", type=int, default=50)
words.add_argument("--resume", action="store_true")
given = words.parse_args()
SHOWN = (
    "step",
    "epoch",
    "loss",
    "reward",
    "rewards/similarity/mean",
    "exact",
    "learning_rate",
    "eval_reward",
)


# 1. Data: every column but the prompt is given to the reward functions
def rows(count: int, seed: int) -> Dataset:
    draw = random.Random(seed)
    texts = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(4, 8))) for _ in range(count)]
    task = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "system", "content": task}, {"role": "user", "content": text}],
                "answer": text[::-1],
            }
            for text in texts
        ]
    )


# 2. Rewards
TAGGED = re.compile(r"<reversed_text>(.*)</reversed_text>")


def similarity(completions, answer, log_metric, **kwargs):
    """How alike the answer in the tags is to the right one, from 0 to 1."""
    found = [TAGGED.fullmatch(messages[0]["content"].strip()) for messages in completions]
    said = ["" if one is None else one[1] for one in found]
    log_metric("exact", sum(one == right for one, right in zip(said, answer, strict=True)) / len(said))
    return [SequenceMatcher(None, one, right).ratio() for one, right in zip(said, answer, strict=True)]


def tagged(completions, **kwargs):
    """Whether there are tags, and nothing beside them."""
    return [float(bool(TAGGED.fullmatch(messages[0]["content"].strip()))) for messages in completions]


# 3. Settings: rates and lengths for a model of 0.6 million parameters
args = GRPOConfig(
    output_dir=given.output_dir,
    max_steps=given.max_steps,
    per_device_train_batch_size=64,
    num_generations=8,
    max_completion_length=13,
    learning_rate=3e-4,
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=3,
    reward_weights=[1.0, 0.1],
    eval_strategy="steps",
    eval_steps=25,
    num_generations_eval=2,
    per_device_eval_batch_size=64,
    logging_steps=5,
    save_steps=10,
    use_cpu=True,
)

# 4. Train
trainer = GRPOTrainer(
    model=given.model,
    reward_funcs=[similarity, tagged],
    args=args,
    train_dataset=rows(2000, seed=0),
    eval_dataset=rows(32, seed=1),
)
done = trainer.train(resume_from_checkpoint=given.resume)
trainer.save_model(f"{given.output_dir}-model")
for row in trainer.state.log_history:
    print({name: row[name] for name in SHOWN if name in row})
print(f"{done.global_step} steps, loss {done.training_loss:+.4f}")
