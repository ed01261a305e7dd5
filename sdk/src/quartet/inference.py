"""What both sides of InferenceService must name alike, and its generated code does not say."""

from __future__ import annotations

from typing import Final

from quartet.v1 import inference_service_pb2 as pb

#: As its health is asked for.
INFERENCE: Final[str] = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
#: GenerateRequest.n says so.
MAX_COMPLETIONS: Final = 256
#: The field that is refused where a chat template leaves no way to append messages to given tokens, and the
#: conversation is not remembered: sent whole, as messages, it is answered.
NO_EXTENSION: Final = "tokens.tail_messages"
