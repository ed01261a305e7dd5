"""Text on both sides of the tokens: the chat template before, thinking, messages and tool calls after.

The only place that knows templates and the formats of tool calls.
"""

from quartet_inference.chat.calls import ParsedCall
from quartet_inference.chat.chat import Chat
from quartet_inference.chat.reader import FormatReader, Said, Turn, TurnReader, hold_partial
from quartet_inference.chat.template import Unextendable

__all__ = [
    "Chat",
    "FormatReader",
    "ParsedCall",
    "Said",
    "Turn",
    "TurnReader",
    "Unextendable",
    "hold_partial",
]
