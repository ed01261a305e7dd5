"""A chat as a sample to train on: rendered by the model's own template, and covered where it is learned.

1. Where roles say what is learned, a chat is rendered message by message, and each message's text is
   tokenized by itself, as it is when the model is sampled: what stands before a covered message is what the
   model is asked to go on from. Covered is what a model would have to say: from the end of the generation
   prompt to the end of the turn. White space that the template puts between turns is not, nor is a message
   of weight 0.
2. A chat whose template rewrites earlier turns (dropping their reasoning, say) has no such reading and is
   refused.
3. Where everything is learned, a chat is rendered and tokenized as a whole, and covered is every token but
   the first, as by TRL: also what the template writes, and what others say.
4. Of a prompt with a completion the completion alone is covered, unless prompts are learned, too. In a chat
   that is a whole it begins where the tokens are no longer those of the prompt with the generation prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from quartet.cli.sft.line import Conversation
from quartet.cli.sft.template import Template
from quartet.run.sft import Learns
from quartet.v1.rollout_pb2 import PolicySpan, Sample


@dataclass(frozen=True)
class Covering:
    """What of a chat the loss covers."""

    roles: tuple[str, ...]
    learns: Learns = "roles"
    #: Whether prompts are learned like their completions.
    prompts: bool = False

    def begins(self, chat: Conversation) -> int:
        """The first message of a chat that may be covered."""
        return 0 if self.prompts else chat.first_learned

    def covers(self, chat: Conversation, number: int) -> bool:
        """Whether this message of a chat is learned."""
        if number < self.begins(chat):
            return False
        is_chosen = chat.messages[number]["role"] in self.roles and number not in chat.unlearned
        return is_chosen or self.learns == "everything"


def sample_of(chat: Conversation, covering: Covering, template: Template, tokenizer: Tokenizer) -> Sample:
    """One chat. Raises ValueError."""
    if covering.learns == "everything":
        return _whole(chat, covering, template, tokenizer)
    return _by_roles(chat, covering, template, tokenizer)


def _by_roles(chat: Conversation, covering: Covering, template: Template, tokenizer: Tokenizer) -> Sample:
    sample, told = Sample(), ""

    def tell(text: str, *, covered: bool = False) -> None:
        ids = _ids(tokenizer, text)
        if covered and ids:
            sample.spans.append(PolicySpan(start=len(sample.token_ids), length=len(ids)))
        sample.token_ids.extend(ids)

    for number, message in enumerate(chat.messages):
        if not covering.covers(chat, number):
            continue
        before, assistant = chat.messages[:number], message["role"] == "assistant"
        opening = template.render(before, chat.tools, assistant, chat.settings) if number else ""
        whole = template.render(chat.messages[: number + 1], chat.tools, False, chat.settings)
        if opening.startswith(told) and not whole.startswith(opening):
            closed = template.render(before, chat.tools, False, chat.settings) if number else ""
            if opening.startswith(closed) and whole.startswith(closed):
                raise ValueError(
                    f"message {number + 1} does not go on from the chat template's generation prompt, "
                    f"{opening[len(closed) :]!r}: give it what follows that (reasoning_content, where a "
                    "thinking is opened), the row chat_template_kwargs that leave it out, or set "
                    'learns = "everything"'
                )
        if not opening.startswith(told) or not whole.startswith(opening):
            raise ValueError(
                f"the chat template renders what comes before message {number + 1} otherwise once that came; "
                "end the chat before it, or use a template that keeps earlier turns"
            )
        turn = whole[len(opening) :].rstrip()
        tell(opening[len(told) :])
        tell(turn, covered=True)
        told = opening + turn
    if not sample.spans:
        where = " in its completion" if covering.begins(chat) else ""
        where += " that has another weight than 0" if chat.unlearned else ""
        raise ValueError(f"no message of {', '.join(covering.roles)}{where}, which roles says are learned")
    if sample.spans[0].start == 0:
        raise ValueError(_unpredicted(chat, covering))
    return sample


def _unpredicted(chat: Conversation, covering: Covering) -> str:
    """Why the first token of a chat cannot be learned, and what to write."""
    first, others = chat.messages[0]["role"], [one for one in ("system", "user") if one not in covering.roles]
    if first not in covering.roles or covering.begins(chat):
        return "the chat template shows nothing before what is learned, whose first token has no prediction"
    better = f"put a {' or '.join(others)} message before it" if others else f"leave {first} out of roles"
    return f"it begins with {first}, and nothing stands before that to predict its first token; {better}"


def _whole(chat: Conversation, covering: Covering, template: Template, tokenizer: Tokenizer) -> Sample:
    whole = _ids(tokenizer, template.render(chat.messages, chat.tools, False, chat.settings))
    given = list[int]()
    if begins := covering.begins(chat):
        given = _ids(tokenizer, template.render(chat.messages[:begins], chat.tools, True, chat.settings))
    start = max(1, _alike(given, whole))
    if start >= len(whole):
        raise ValueError("the chat template renders nothing of it that could be learned")
    return Sample(token_ids=whole, spans=[PolicySpan(start=start, length=len(whole) - start)])


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many equal tokens both begin."""
    differing = (at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(differing, min(len(one), len(other)))


def cut(sample: Sample, most: int) -> Sample | None:
    """The first so many tokens of a sample; None where none of them is learned."""
    spans = [
        PolicySpan(start=span.start, length=min(span.length, most - span.start))
        for span in sample.spans
        if span.start < most
    ]
    return Sample(token_ids=sample.token_ids[:most], spans=spans) if spans else None


def covered(samples: Sequence[Sample]) -> int:
    """Tokens of samples that the loss is taken of."""
    return sum(span.length for sample in samples for span in sample.spans)
