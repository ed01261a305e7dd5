"""Exported models on their way from a trainer's disk to whoever asks."""
