"""What a request demands of a completion's form, from the contract to what makes its grammar."""

from __future__ import annotations

from quartet.errors import QuartetError
from quartet.v1 import inference_service_pb2 as pb

from quartet_inference.chat.enforced import Calls, TurnForm
from quartet_inference.structure.following import StructureError
from quartet_inference.structure.grammar import form_of as answer_of


def form_of(request: pb.GenerateRequest) -> TurnForm | None:
    """The form; None: any. Errors: INVALID_REQUEST."""
    choice, sampling = request.tool_choice, request.sampling
    strict = frozenset(tool.name for tool in request.tools if tool.strict)
    if not (strict or request.HasField("tool_choice") or sampling.HasField("structure")):
        return None
    if not sampling.HasField("structure"):
        answer, field = None, "tool_choice" if request.HasField("tool_choice") else "tools.strict"
    else:
        answer, field = answer_of(sampling.structure), f"structure.{sampling.structure.WhichOneof('form')}"
    calls = Calls(choice.required, tuple(choice.names), choice.single, strict)
    return TurnForm(answer, sampling.structure.from_first_token, calls, field)


def unenforceable(field: str, error: StructureError) -> QuartetError:
    """The error of a form that llguidance cannot enforce, with its reason."""
    text = f"{field} cannot be enforced: {error}"
    return QuartetError("INVALID_REQUEST", text, field=field, value="", remedy="send what can be enforced")
