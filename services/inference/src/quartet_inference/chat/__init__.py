"""Text on both sides of the tokens: the chat template before, thinking, messages and tool calls after.

The only place that knows templates and the formats of tool calls.
"""

from quartet_inference.chat.calls import ParsedCall
from quartet_inference.chat.chat import Chat
from quartet_inference.chat.reader import Said, Turn, TurnReader
from quartet_inference.chat.template import Unextendable

__all__ = ["Chat", "ParsedCall", "Said", "Turn", "TurnReader", "Unextendable"]
