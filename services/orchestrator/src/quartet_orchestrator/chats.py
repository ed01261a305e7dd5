"""Whether a run's model and the replicas of inference make the same tokens of a conversation.

A run learns by the prompts that the replicas make, and its model is exported with the tokenizer and the
template of its own folder: where those differ, the model is shipped with a template that it never saw. Some
want that, so it is told, and nothing is refused. Who does not answer or say is compared with nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from quartet.chat_identity import differences
from quartet.v1.common_pb2 import ChatIdentity


def warning(model: ChatIdentity, replicas: Mapping[str, ChatIdentity]) -> str:
    """What a person should know, if anything; replicas by their addresses."""
    differing = {address: differences(model, one) for address, one in replicas.items()}
    said = [
        f"the replica at {address} ({replicas[address].model!r}) has another {' and another '.join(what)}"
        for address, what in differing.items()
        if what
    ]
    if not said:
        return ""
    remedy = "start the replicas with the run's model"
    if all("tokenizer" not in what for what in differing.values()):
        remedy += ", or give them its template (chat.template_file)"
    return (
        f"{'; '.join(said)} than the run's model ({model.model!r}): the run samples and learns by the "
        f"replica's, and is exported with its own; {remedy}, or put the replica's into the exported folder"
    )
