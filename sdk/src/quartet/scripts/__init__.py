"""What a script that was written for another library's trainer is to Quartet: its arguments, what it holds of
a model, and what it hears of what was started for it.

1. Nothing here knows what is trained, or how: what stands on it does, and this on none of it.
2. Nothing here imports torch, transformers or gRPC.
"""
