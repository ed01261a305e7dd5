"""Gateway for scripts of the Tinker SDK: their requests become calls of the trainer and of inference.

It owns nothing: runs and their states are the trainer's, weights that answer are the inference service's.
What it holds in memory (sessions, futures, which model is which run) a restart loses; docs/tinker.md says
what that means for a script.
"""
