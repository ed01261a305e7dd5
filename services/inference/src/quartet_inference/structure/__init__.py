"""Completions of a given form: the grammar that says it, and the tokens that it allows at each step.

By llguidance, in one way for both engines. Nothing here knows chat templates or calls of tools, whose
grammars `chat/enforced` makes, and nothing but `masks` needs torch.
"""
