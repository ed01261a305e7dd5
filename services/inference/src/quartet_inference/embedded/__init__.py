"""The embedded engine: continuous batching over a transformers model, in this process."""
