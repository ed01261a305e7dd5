"""The quick start of verifiers' GRPOTrainer, with another import: python examples/grpo_script/train.py"""

import argparse

import quartet.grpo as vf

words = argparse.ArgumentParser()
words.add_argument("--model", default="models/tiny")
words.add_argument("--run-name", default="my-experiment")
words.add_argument("--max-steps", type=int, default=50)
words.add_argument("--lora", action="store_true")
words.add_argument("--resume", action="store_true")
given = words.parse_args()
SHOWN = ("step", "loss", "reward", "kl", "learning_rate", "eval_reward")

# 1. Create environment
env = vf.load_environment("reverse-text", min_chars=4, max_chars=8)

# 2. Load model
model, tokenizer = vf.get_model_and_tokenizer(given.model)

# 3. Configure training: rates and lengths for a model of 0.6 million parameters
args = vf.grpo_defaults(run_name=given.run_name)
args.max_steps = given.max_steps
args.per_device_train_batch_size = 32
args.learning_rate = 3e-3 if given.lora else 3e-4
args.warmup_steps = 3
args.max_grad_norm = 1.0
args.max_seq_len = 256
args.max_tokens = 13
args.eval_strategy = "steps"
args.eval_steps = 10
args.overrides = {"eval": {"after": True}}  # also where the last step is no tenth
args.eval_on_start = True
args.logging_steps = 5

# 4. Train
trainer = vf.GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    env=env,
    args=args,
    peft_config=vf.lora_defaults(r=8, alpha=16) if given.lora else None,
)
done = trainer.train(resume_from_checkpoint=given.resume)
before, after = (done.metrics[name] for name in ("reward_before", "reward_after"))
print(f"{done.global_step} steps, loss {done.training_loss:+.4f}, reward {before:.3f} -> {after:.3f}")
for row in trainer.state.log_history:
    print({name: row[name] for name in SHOWN if name in row})
