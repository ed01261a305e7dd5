"""`quartet model tiny`: a small Qwen3 model, made on this machine by training it through the trainer service."""
