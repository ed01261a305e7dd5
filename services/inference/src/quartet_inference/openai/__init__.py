"""The OpenAI-compatible HTTP front: the policy being trained, for clients that speak that dialect."""
