"""The environment that is built in: prompts and rewards of a RewardService. It needs no Verifiers."""
