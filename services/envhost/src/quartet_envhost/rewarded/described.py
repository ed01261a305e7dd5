"""What a RewardService says of itself, and what a prompt of it has to be: read, and refused where it breaks
the contract (protos/quartet/v1/reward_service.proto)."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Final

from quartet import template_settings
from quartet.kit.unknown import newer_field
from quartet.v1 import reward_service_pb2

# Of the contract.
MAX_KEY_CHARS: Final = 64
MAX_DIGEST_CHARS: Final = 64
MAX_TURNS: Final = 1024
MAX_OPENING_BYTES: Final = 1 << 20
# A run puts the numbers of all prompts into an order.
MAX_PROMPTS: Final = 1 << 22


class BrokenContract(Exception):
    """A RewardService answered something else than its contract has; str() says what."""


@dataclass(frozen=True)
class Function:
    """One part of the reward; one of weight 0 is a metric."""

    name: str
    weight: float


@dataclass(frozen=True)
class Described:
    """How many prompts there are, and of what the reward consists."""

    train_size: int
    eval_size: int
    functions: tuple[Function, ...]
    digest: str
    version: str
    #: Answers in a conversation, at most.
    max_turns: int = 1

    @property
    def identity(self) -> tuple[str, ...]:
        """What tells it from another one; its version does so where it knows no digest."""
        known = f"digest\0{self.digest}" if self.digest else f"version\0{self.version}"
        functions = (f"{one.name}\0{one.weight!r}" for one in self.functions)
        turns = (f"turns\0{self.max_turns}",) if self.max_turns > 1 else ()
        return known, str(self.train_size), str(self.eval_size), *functions, *turns


def read(said: reward_service_pb2.DescribeRewardsResponse) -> Described:
    """A description. Raises BrokenContract."""
    functions = tuple(Function(one.name, one.weight) for one in said.functions)
    if not said.train_size:
        raise BrokenContract("train_size is 0; it should have a training prompt at least")
    for name, size in (("train_size", said.train_size), ("eval_size", said.eval_size)):
        if size > MAX_PROMPTS:
            raise BrokenContract(f"{name} is {size}; it should be {MAX_PROMPTS} at most")
    if not functions:
        raise BrokenContract("it names no reward function; there should be one at least")
    names = [one.name for one in functions]
    for one in functions:
        if not one.name:
            raise BrokenContract("a reward function has an empty name")
        if names.count(one.name) > 1:
            raise BrokenContract(f"{names.count(one.name)} reward functions are called {one.name!r}")
        if not math.isfinite(one.weight):
            raise BrokenContract(f"the weight of {one.name!r} is {one.weight:g}, no finite number")
    if len(said.digest) > MAX_DIGEST_CHARS:
        raise BrokenContract(
            f"its digest has {len(said.digest)} characters; there should be {MAX_DIGEST_CHARS} at most"
        )
    if said.max_turns > MAX_TURNS:
        raise BrokenContract(f"max_turns is {said.max_turns}; it should be {MAX_TURNS} at most")
    sizes = said.train_size, said.eval_size
    return Described(*sizes, functions, said.digest, said.version, max(1, said.max_turns))


def check_prompt(prompt: reward_service_pb2.RewardPrompt, named: str) -> None:
    """Refuses a prompt that cannot be asked as it is meant. Raises BrokenContract."""
    if (newer := newer_field(prompt)) is not None:
        raise BrokenContract(
            f"{named} has {newer}, which this release does not know; upgrade the environment host, or leave "
            "that out"
        )
    match prompt.WhichOneof("prompt"):
        case "messages" if not prompt.messages.messages:
            raise BrokenContract(f"{named} is a conversation without a message")
        case "tokens" if not prompt.tokens.token_ids:
            raise BrokenContract(f"{named} is of no token")
        case "tokens" if prompt.tokens.tail_messages:
            raise BrokenContract(f"{named} has messages after its tokens; send one or the other")
        case None:
            raise BrokenContract(f"{named} has neither messages nor tokens")
    if prompt.tools and not prompt.HasField("messages"):
        raise BrokenContract(f"{named} has tools, and is no conversation, to which they could be shown")
    if prompt.opens and not prompt.HasField("messages"):
        raise BrokenContract(f"{named} opens, and has no message, to which that could be appended")
    if not 1 <= len(prompt.key) <= MAX_KEY_CHARS:
        raise BrokenContract(
            f"the key of {named} has {len(prompt.key)} characters; there should be 1 to {MAX_KEY_CHARS}"
        )
    try:
        template_settings.read(prompt.template_settings)
    except ValueError as error:
        raise BrokenContract(f"the template_settings of {named} are refused: {error}") from None
    data_of(prompt, named)


def check_opened(said: reward_service_pb2.OpenResponse) -> None:
    """Refuses what no prompt can begin with. Raises BrokenContract."""
    if (newer := newer_field(said)) is not None:
        raise BrokenContract(
            f"its Open has {newer}, which this release does not know; upgrade the environment host, or leave "
            "that out"
        )
    if (size := len(said.text.encode())) > MAX_OPENING_BYTES:
        raise BrokenContract(f"its Open says {size} bytes; there should be {MAX_OPENING_BYTES} at most")


def check_continued(said: reward_service_pb2.ContinueResponse) -> None:
    """Refuses what a conversation cannot go on with. Raises BrokenContract."""
    if (newer := newer_field(said)) is not None:
        raise BrokenContract(
            f"its Continue has {newer}, which this release does not know; upgrade the environment host, or "
            "leave that out"
        )
    for message in said.messages:
        if message.role in ("", "assistant"):
            raise BrokenContract(
                f"its Continue says a message of role {message.role!r}; it should be 'tool' or 'user'"
            )


def data_of(prompt: reward_service_pb2.RewardPrompt, named: str) -> dict[str, object]:
    """What people are shown of an example beside its prompt. Raises BrokenContract."""
    try:
        data = json.loads(prompt.data_json or "{}")
    except (ValueError, RecursionError) as error:
        raise BrokenContract(f"the data_json of {named} is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise BrokenContract(f"the data_json of {named} is no JSON object")
    return data
