"""A message with images is refused, and never answered as if it had none."""

from __future__ import annotations

import pytest
from quartet.errors import QuartetError
from quartet.v1 import common_pb2
from quartet_inference.messages import to_template


def test_images_are_refused_by_name() -> None:
    message = common_pb2.Message(role="user")
    message.parts.add(text="What is this?")
    message.parts.add(image_url="data:image/gif;base64,R0lG")
    with pytest.raises(QuartetError, match="reads text") as caught:
        to_template(message)
    assert caught.value.reason == "INVALID_REQUEST" and caught.value.metadata["field"] == "messages.parts"
