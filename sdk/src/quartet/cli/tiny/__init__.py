"""`quartet model tiny`: a small Qwen3 model, made here by training it through the trainer service."""
