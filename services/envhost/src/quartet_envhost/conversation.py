"""Conversations as rollouts tell them."""

from __future__ import annotations

from quartet.v1 import common_pb2


def without_images(message: common_pb2.Message) -> common_pb2.Message:
    """The text of a message: an image may have megabytes, and these messages are there to be read."""
    if message.parts:
        message.content = "".join(part.text for part in message.parts)
        del message.parts[:]
    return message
