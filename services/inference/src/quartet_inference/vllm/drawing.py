"""Quartet's sampler inside vLLM, as one of its logits processors.

vLLM's own log-probabilities are either those before temperature and penalties or those renormalised after
top-k and top-p; a trainer needs the ones between. So this processor does all that turns logits into a token:

1. The logits that vLLM goes on with are log-probabilities after penalties and temperature: what it reports in
   the mode "processed_logits" is what Quartet reports.
2. All of a row but the drawn token is -inf; vLLM, always asked for greedy sampling, finds it there.
3. Tokens depend on seed, position and distribution only (quartet_inference.sampler): vLLM's generators, which
   restart with a request and whose CPU kind ends the engine when a prefill is split, are never used.
4. A forced row gets the token that it names: that is how the last token of a scored sequence is scored. The
   others, a prompt to vLLM, are reported as log-probabilities: its runner looks at the mode again for them.
5. A row whose alternatives are asked for keeps its other tokens too. The drawn or forced one has its sign
   turned (`sign_turned`), so that it is still the largest: no log-probability is above 0.
6. A row that follows a structure accepts, before each step, what vLLM has sampled since. Its list is whole
   then, also where steps are scheduled ahead: vLLM puts the tokens in before it calls logits processors that
   are not its own. What takes a row up again (a preemption, an update) begins with all of its tokens.
7. A row that is stuck (`sampler` 6) has infinity alone, its alternatives or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from quartet_inference.chat.tokenizer import load_tokenizer
from quartet_inference.completion import Completion
from quartet_inference.engine import Sampling
from quartet_inference.sampler import Sampler
from quartet_inference.structure.following import Follower, Structures
from quartet_inference.structure.vocabulary import ll_tokenizer

#: Where SamplingParams.extra_args carries a Draw.
KEY = "quartet"
#: Where the engine's additional_config says the model's end tokens.
END_TOKENS = "quartet_end_tokens"


@dataclass(frozen=True)
class Draw:
    """What a worker must know to draw the tokens of a completion."""

    seed: int = 0
    resumed: int = 0  # the last tokens of the prompt were sampled by it before
    forced: int | None = None
    top: int = 0  # so many alternatives of each token are asked for
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    grammar: str = ""
    min_tokens: int = 0
    ends: Sequence[int] = ()  # what it may not sample before

    @classmethod
    def of(cls, completion: Completion) -> Draw:
        """The Draw of a completion, behind what it has sampled."""
        sampling = completion.sampling
        early = completion.sampled < sampling.min_tokens
        return cls(
            completion.seed, completion.sampled, None, completion.top,
            sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p,
            sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty,
            sampling.grammar, sampling.min_tokens, sorted(completion.ends) if early else (),
        )  # fmt: skip

    def sampling(self) -> Sampling:
        """The sampler's view of it; when a completion ends is no matter of the worker's."""
        return Sampling(
            max_tokens=0, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p,
            repetition_penalty=self.repetition_penalty, presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty, min_tokens=self.min_tokens,
        )  # fmt: skip


@dataclass(eq=False)
class Drawn:
    """A row of vLLM's batch as the sampler sees it."""

    draw: Draw
    prompt: list[int]
    out: list[int]  # vLLM's own list, which grows with every step
    device: torch.device
    structures: Structures
    sampling: Sampling = field(init=False)
    ends: frozenset[int] = field(init=False)
    _follower: Follower | None = None
    _followed: int = 0
    _counts: Tensor | None = None
    _counted: int = 0
    _seen: Tensor | None = None

    def __post_init__(self) -> None:
        self.sampling = self.draw.sampling()
        self.ends = frozenset(self.draw.ends)
        if self.draw.grammar:
            before = self.prompt[len(self.prompt) - self.draw.resumed :]
            self._follower = self.structures.follower(self.draw.grammar, before)

    @property
    def follower(self) -> Follower | None:
        """Where it is in its structure."""
        if self._follower is not None:
            for token in self.out[self._followed :]:
                self._follower.accept(token)
            self._followed = len(self.out)
        return self._follower

    @property
    def seed(self) -> int:
        """Its own seed."""
        return self.draw.seed

    @property
    def top(self) -> int:
        """How many alternatives of each of its tokens are asked for."""
        return self.draw.top

    @property
    def sampled(self) -> int:
        """How many tokens were sampled so far."""
        return self.draw.resumed + len(self.out)

    def token_counts(self, vocabulary: int) -> Tensor:
        """How often each token was sampled so far."""
        if self._counts is None:
            before = self.prompt[len(self.prompt) - self.draw.resumed :]
            self._counts = self._count(before, vocabulary)
        if self._counted < len(self.out):
            self._counts += self._count(self.out[self._counted :], vocabulary)
            self._counted = len(self.out)
        return self._counts

    def _count(self, tokens: list[int], vocabulary: int) -> Tensor:
        ids = torch.tensor(tokens, dtype=torch.long, device=self.device)
        return torch.bincount(ids, minlength=vocabulary).float()

    def prompt_tokens_seen(self, vocabulary: int) -> Tensor:
        """Which tokens the prompt contains."""
        if self._seen is None:
            self._seen = torch.zeros(vocabulary, dtype=torch.bool, device=self.device)
            self._seen[torch.tensor(self.prompt, dtype=torch.long, device=self.device)] = True
        return self._seen


class DrawTokens(LogitsProcessor):  # type: ignore[misc]
    """Draws the token of every row."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """As vLLM calls it, in each of its workers."""
        self._device = device
        self._rows: dict[int, Drawn] = {}
        self._batch: list[Drawn] = []
        self._sampler: Sampler | None = None
        self._forced: list[tuple[int, int]] = []  # rows and their tokens
        self._structures = structures_of(vllm_config)
        # vLLM's sampler has taken over "processed_logits" by now; what reads it later are prompts' scores.
        vllm_config.model_config.logprobs_mode = "processed_logprobs"

    def is_argmax_invariant(self) -> bool:
        """No: it decides what the largest logit is."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows as they join, leave and move."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, prompt, out in batch_update.added:
            self._rows[index] = Drawn(_draw_of(params), prompt or [], out, self._device, self._structures)
        for one, other, direction in batch_update.moved:
            moved, replaced = self._rows.pop(one, None), self._rows.pop(other, None)
            if moved is not None:
                self._rows[other] = moved
            if replaced is not None and direction is MoveDirectionality.SWAP:
                self._rows[one] = replaced
        self._batch = [self._rows[index] for index in range(batch_update.batch_size)]
        self._sampler = None

    def apply(self, logits: Tensor) -> Tensor:
        """Log-probabilities, and in each row the drawn token alone but where alternatives are asked for."""
        sampler = self._arranged() if self._sampler is None else self._sampler
        tokens, logprobs = sampler.choose(logits)
        for index, token in self._forced:
            tokens[index] = token
        drawn = logprobs.gather(-1, tokens[:, None])
        alone = torch.full_like(logprobs, -torch.inf)
        alone.scatter_(-1, tokens[:, None], drawn)
        if (asking := sampler.asking_rows) is not None:
            rows = logprobs[asking]
            rows.scatter_(-1, tokens[asking, None], sign_turned(drawn[asking]))
            alone[asking] = rows
        for index in sampler.stuck:
            alone[index] = -torch.inf
            alone[index, tokens[index]] = torch.inf
        return alone

    def _arranged(self) -> Sampler:
        """The sampler of the rows that there are now."""
        sampler = self._sampler = Sampler(self._batch, self._device)
        forced = ((index, row.draw.forced) for index, row in enumerate(self._batch))
        self._forced = [(index, token) for index, token in forced if token is not None]
        return sampler


def structures_of(vllm_config: Any) -> Structures:
    """Those of the model that a worker serves."""
    folder, end_tokens = vllm_config.model_config.model, vllm_config.additional_config.get(END_TOKENS, ())
    return Structures(lambda: ll_tokenizer(load_tokenizer(Path(folder)), end_tokens), end_tokens)


def sign_turned(logprob: Any) -> Any:
    """Of the drawn token of an open row, there and back: exact, as no sum would be."""
    return -logprob


def _draw_of(params: SamplingParams) -> Draw:
    """What came with the request; vLLM's own warm-up requests bring nothing."""
    return Draw(**(params.extra_args or {}).get(KEY, {}))
