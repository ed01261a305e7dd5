"""The stub policy of benchmarks/rollouts.py: what it says, and the tokens of it.

A user's turn is PROMPT tokens, an answer SAMPLED of them; nothing is computed.
"""

TEXT = "Then comes the next one, and after that another."
PROMPT = list(range(100, 116))
SAMPLED = list(range(200, 224))
LOGPROBS = [-0.5] * len(SAMPLED)
