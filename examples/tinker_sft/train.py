"""A script for the Tinker SDK, unchanged: it trains wherever TINKER_BASE_URL points."""

import sys

import numpy as np
import tinker
from tinker import types

PAIRS = [("capital of france?", " paris."), ("capital of italy?", " rome."), ("capital of japan?", " tokyo.")]
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 40


def datum(tokenizer, question: str, answer: str) -> types.Datum:
    """Question and answer as one sequence; the answer alone has weight."""
    prompt, completion = tokenizer.encode(question), tokenizer.encode(answer)
    tokens = prompt + completion
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(completion)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:], dtype=np.int64),
            "weights": np.array(weights, dtype=np.float32),
        },
    )


service = tinker.ServiceClient()
[model] = tinker.RestClient().get_server_capabilities().result().supported_models
training = service.create_lora_training_client(model.model_name, rank=16, seed=0).result()
tokenizer = training.get_tokenizer()
data = [datum(tokenizer, *pair) for pair in PAIRS]
for step in range(STEPS):
    passes = training.forward_backward(data, "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    print(f"step {step + 1}: loss {passes.result().metrics['loss:sum']:.3f}")

sampler = training.save_weights_and_get_sampling_client().result()
for question, answer in PAIRS:
    prompt = types.ModelInput.from_ints(tokenizer.encode(question))
    params = types.SamplingParams(max_tokens=len(tokenizer.encode(answer)), temperature=0.0)
    [said] = sampler.sample(prompt, 1, params).result().sequences
    print(question, tokenizer.decode(said.tokens))
print("saved as", training.save_state("final", overwrite=True).result().path)
service.close("success").result()
