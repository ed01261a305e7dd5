"""A run in MLflow, read off its output folder by a process of its own."""
