"""A trainer that knows nothing of Quartet teaches a model one answer, and hands its weights to a replica.

python examples/weights_from_elsewhere/train.py [--model models/tiny] [--run elsewhere] [--steps 20]

Its loop is plain PyTorch. What it uses of Quartet are two calls, `connect` and `push_version`; it samples
from what it pushed with the `openai` client.
"""

from __future__ import annotations

import argparse
import asyncio

import torch
from openai import AsyncOpenAI
from quartet.kit.channel import connect
from quartet.weights.fetched import Fetched
from quartet.weights.push import push_version
from quartet.weights.tensor import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTION, ANSWER = "hello", "good day"
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of the parameters, tied ones once, under the names that they have in the checkpoint."""
    return {
        name: Tensor(
            DTYPES[parameter.dtype],
            tuple(parameter.shape),
            # A copy, for the optimizer changes parameters in place, and the next delta is made from this one.
            parameter.detach().to("cpu", copy=True).contiguous().view(torch.uint8).numpy(),
        )
        for name, parameter in model.named_parameters()
    }


async def main() -> None:
    """Train, push, ask."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/tiny")
    parser.add_argument("--inference", default="127.0.0.1:50051")
    parser.add_argument("--openai", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--run", default="elsewhere")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--push-every", type=int, default=4)
    given = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    asked = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    answer = [*tokenizer.encode(ANSWER, add_special_tokens=False), tokenizer.eos_token_id]
    tokens, labels = torch.tensor([[*prompt, *answer]]), torch.tensor([[-100] * len(prompt) + answer])

    client = AsyncOpenAI(base_url=given.openai, api_key="none")
    base: Fetched | None = None  # the version pushed before: then only what changed is sent
    async with connect(given.inference, bulk=True) as channel:
        for step in range(1, given.steps + 1):
            loss = model(input_ids=tokens, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % given.push_every:
                continue
            base = await push_version(channel, given.run, step, weights_of(model), base=base)
            # Waits until the replica serves this version.
            completion = await client.chat.completions.create(
                model="policy",
                messages=asked,
                temperature=0,
                max_tokens=16,
                extra_body={"run_id": given.run, "min_policy_version": step, "return_token_ids": True},
            )
            (choice,) = completion.choices
            versions = sorted({span["policy_version"] for span in choice.policy_versions})
            print(
                f"step {step}  loss {loss:.3f}  {choice.message.content!r}, sampled by version {versions}",
                flush=True,
            )


if __name__ == "__main__":
    asyncio.run(main())
