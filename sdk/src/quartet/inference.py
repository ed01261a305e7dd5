"""What both sides of InferenceService must name alike, and its generated code does not say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from quartet.v1 import inference_service_pb2 as pb

#: As its health is asked for.
INFERENCE: Final[str] = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
#: GenerateRequest.n says so.
MAX_COMPLETIONS: Final = 256
#: SamplingParams.stop says so.
MAX_STOPS: Final = 16
#: A longer one would make every token look at too much text.
MAX_STOP_CHARS: Final = 1024
#: Of one that is not 0, which is greedy. Below, float32 logits overflow when they are divided by it.
MIN_TEMPERATURE: Final = 0.01
MAX_TEMPERATURE: Final = 100.0
#: Beyond these, so do logits that are divided or multiplied by it.
MIN_REPETITION_PENALTY: Final = 0.01
MAX_REPETITION_PENALTY: Final = 100.0
#: The field that is refused where a chat template leaves no way to append messages to given tokens, and the
#: conversation is not remembered: sent whole, as messages, it is answered.
NO_EXTENSION: Final = "tokens.tail_messages"
#: Those that are refused for how many completions a request asks for, of which a replica lets fewer wait; and
#: for the structure that one of them cannot go on with, once it was sampled so far.
TOO_MANY: Final = "n"
STUCK: Final = "structure"


@dataclass(frozen=True, slots=True)
class UpdateRefusal:
    """Why versions that are offered are not served: of a run, or of all where none is named."""

    why: str
    run_id: str = ""


def refusal(why: str, run_id: str = "") -> UpdateRefusal:
    """Of a text that may have several lines."""
    return UpdateRefusal(" ".join(why.split()), run_id)


def line(one: UpdateRefusal | pb.UpdateRefusal) -> str:
    """One in words, for a person who reads of several runs."""
    return f"run {one.run_id}: {one.why}" if one.run_id else one.why


def concerning(refusals: Iterable[UpdateRefusal | pb.UpdateRefusal], run_id: str) -> str:
    """What a replica's update_refusals say to a run: what is about it, and what is about all of them.

    Where no run is named: everything.
    """
    found = [one for one in refusals if not run_id or one.run_id in ("", run_id)]
    return "; ".join(dict.fromkeys(one.why if run_id else line(one) for one in found))
