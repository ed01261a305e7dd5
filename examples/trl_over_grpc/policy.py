"""The policy: questions of the environment, answered by the model that TRL trains.

1. Questions that wait are answered as one batch.
2. Tokens of earlier turns are never rendered or encoded again: a later prompt is the earlier tokens and what
   the chat template writes behind them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from copy import copy
from typing import Any, Self

import torch
from quartet.v1 import envhost_service_pb2 as pb
from quartet.v1.common_pb2 import Message, SamplingParams
from transformers import PreTrainedTokenizerBase
from trl.models import unwrap_model_for_generation

QUIET_SECONDS = 0.02  # a batch is complete when no question came for so long


class TrainersModel:
    """`async with` it around the rollouts; it is a policy for `quartet.interact`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._tokenizer: PreTrainedTokenizerBase = trainer.processing_class
        self._ends = set(trainer.eos_token_ids)
        self._settings = trainer.generation_config
        self._version = trainer.state.global_step
        self._waiting: asyncio.Queue[tuple[pb.ModelQuestion, asyncio.Future[pb.ModelAnswer]]] = (
            asyncio.Queue()
        )

    @property
    def sampling(self) -> SamplingParams:
        """What the host is told; an environment may lower the limit of a turn."""
        return SamplingParams(
            max_tokens=self._settings.max_new_tokens, temperature=self._settings.temperature
        )

    async def __call__(self, question: pb.ModelQuestion) -> pb.ModelAnswer:
        answer: asyncio.Future[pb.ModelAnswer] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((question, answer))
        return await answer

    async def __aenter__(self) -> Self:
        self._serving = asyncio.create_task(self._serve())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._serving.cancel()
        with suppress(asyncio.CancelledError):
            await self._serving

    async def _serve(self) -> None:
        while True:
            batch = [await self._waiting.get()]
            with suppress(TimeoutError):
                while True:
                    batch.append(await asyncio.wait_for(self._waiting.get(), QUIET_SECONDS))
            try:
                # In a thread: the host's heartbeats are read meanwhile.
                answers = await asyncio.to_thread(self._answer, [question for question, _ in batch])
            except Exception as error:  # noqa: BLE001 - each question's rollout fails with it
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():  # its rollout may have ended meanwhile
                    future.set_result(answer)

    def _answer(self, questions: list[pb.ModelQuestion]) -> list[pb.ModelAnswer]:
        prompts = [prompt_tokens(self._tokenizer, question) for question in questions]
        limits = [question.sampling.max_tokens for question in questions]
        settings = copy(self._settings)
        settings.update(max_new_tokens=max(limits), return_dict_in_generate=True, output_scores=True)
        padded = self._tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        # As TRL does it: while activations are checkpointed a model generates without its cache, and wrongly.
        generating = unwrap_model_for_generation(self._trainer.model_wrapped, self._trainer.accelerator)
        with generating as model, torch.no_grad():
            out = model.generate(**padded.to(model.device), generation_config=settings)
            # After temperature and cuts, as it was sampled.
            logprobs = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        sampled = out.sequences[:, padded["input_ids"].shape[1] :].tolist()
        return [self._turn(*row) for row in zip(prompts, sampled, logprobs.tolist(), limits, strict=True)]

    def _turn(
        self, prompt: list[int], tokens: list[int], logprobs: list[float], limit: int
    ) -> pb.ModelAnswer:
        end = next((n for n, token in enumerate(tokens, 1) if token in self._ends), len(tokens))
        tokens = tokens[: min(end, limit)]
        return pb.ModelAnswer(
            prompt_token_ids=prompt,
            token_ids=tokens,
            logprobs=logprobs[: len(tokens)],
            message=Message(content=self._tokenizer.decode(tokens, skip_special_tokens=True)),
            truncated=tokens[-1] not in self._ends,
            policy_version=self._version,
        )


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, question: pb.ModelQuestion) -> list[int]:
    """The whole prompt; of a later turn only what follows the earlier tokens is rendered."""
    if question.tools:
        raise ValueError("the environment offers tools, and this example parses no calls of tools")

    def render(messages: list[dict[str, str]], opening: bool) -> list[int]:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=opening, return_dict=False)

    tail = [
        {"role": message.role, "content": message.content}
        for message in question.messages[question.prefix_messages :]
    ]
    earlier = list(question.prefix_token_ids)
    if not earlier:
        return render(tail, opening=True)
    # What the template writes behind a turn: the new messages behind a stand-in, without the stand-in.
    end = tokenizer.eos_token_id
    stand_in = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    before = render(stand_in, opening=False)
    closed = len(before) - before[::-1].index(end)
    behind = render([*stand_in, *tail], opening=True)[closed:]
    # A turn that its limit cut has no end of its own.
    return [*earlier, *([] if earlier[-1] == end else [end]), *behind]
