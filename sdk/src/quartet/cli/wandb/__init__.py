"""A run in Weights & Biases, read off its output folder by a process of its own."""
