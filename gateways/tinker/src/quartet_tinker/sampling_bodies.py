"""The JSON of sampling clients; as in bodies.py, nothing is ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic

from quartet_tinker.bodies import Body
from quartet_tinker.refusal import Refused

#: GenerateRequest.n says so.
MAX_SAMPLES = 256


class CreateSamplingSession(Body):
    """A sampler of the weights at `model_path`; without it, of the base model."""

    type: Literal["create_sampling_session"] = "create_sampling_session"
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class JoinSamplingSession(Body):
    """Another process uses a sampler."""

    type: Literal["join_sampling_session"] = "join_sampling_session"
    sampling_session_id: str


class TextChunk(Body):
    """Token ids of a prompt."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Annotated[int, pydantic.Field(ge=0, lt=2**31)]]


class OtherChunk(pydantic.BaseModel):
    """An image or audio: refused by what it is."""

    type: str


class Prompt(Body):
    """What is to be completed, in chunks."""

    chunks: list[TextChunk | OtherChunk]

    def tokens(self) -> list[int]:
        """All of them. Raises Refused."""
        ids: list[int] = []
        for chunk in self.chunks:
            if not isinstance(chunk, TextChunk):
                raise Refused(f"prompt has a chunk of type {chunk.type!r}; only token ids from 0 are served")
            ids.extend(chunk.tokens)
        if not ids:
            raise Refused("prompt is empty; give at least one token")
        return ids


class SamplingParams(Body):
    """How to sample. None: as the inference service does; `stop` = []: not even at the model's own end."""

    max_tokens: int | None = pydantic.Field(default=None, ge=1, lt=2**31)
    seed: int | None = None
    stop: str | list[str] | list[Annotated[int, pydantic.Field(ge=0, lt=2**31)]] | None = None
    temperature: float = 1.0
    top_k: int = pydantic.Field(default=-1, ge=-1)
    top_p: float = 1.0


class SampleBody(Body):
    """Completions to sample, `num_samples` of one prompt."""

    type: Literal["sample"] = "sample"
    sampling_session_id: str
    seq_id: int
    prompt: Prompt
    sampling_params: SamplingParams
    num_samples: int = pydantic.Field(default=1, ge=1, le=MAX_SAMPLES)
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None

    def check(self) -> None:
        """Refuse what the inference service does not do. Raises Refused."""
        length, last = len(self.prompt.tokens()), self.prompt_logprobs_last_n
        if last is not None and not self.prompt_logprobs:
            raise Refused("prompt_logprobs_last_n is refused without prompt_logprobs = True; give both")
        if last is not None and not 1 <= last < length:
            raise Refused(
                f"prompt_logprobs_last_n = {last} is refused; give 1 to {length - 1}, the tokens of the "
                "prompt but the first"
            )
        if self.record_stability_info:
            raise Refused(
                "record_stability_info is not served here, nor is loss_fn = 'stable_reinforce', which alone "
                "reads it; train with 'ppo', 'cispo' or 'importance_sampling'"
            )
        for field in (
            "topk_prompt_logprobs",
            "topk_sample_logprobs",
            "target_prompt_logprobs",
            "prompt_alt_tokens_k",
        ):
            if getattr(self, field) not in (None, 0, False):
                raise Refused(f"{field} is not served here; leave it out")
