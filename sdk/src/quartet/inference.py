"""What both sides of InferenceService must name alike, and its generated code does not say."""

from __future__ import annotations

import re
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


_OF_RUN: Final = re.compile(r"run ([A-Za-z0-9_.-]+): (.*)")


def told(why: str, run_id: str = "") -> str:
    """A line of GetModelResponse.update_refused: about this run, or about all where none is named."""
    line = " ".join(why.split())
    return f"run {run_id}: {line}" if run_id else line


def about(line: str) -> str:
    """The run that such a line is about; empty where it is about all of them."""
    of_run = _OF_RUN.fullmatch(line)
    return of_run[1] if of_run is not None else ""


def concerning(update_refused: str, run_id: str) -> str:
    """What a replica's update_refused says to a run: what is about it, and what is about all of them.

    Where no run is named: everything.
    """
    lines = [line for line in update_refused.splitlines() if not run_id or about(line) in ("", run_id)]
    return "; ".join(dict.fromkeys(line.removeprefix(f"run {run_id}: ") for line in lines))
