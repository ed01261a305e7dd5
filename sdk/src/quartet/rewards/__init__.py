"""RewardService of a script: the prompts of its data set, and its reward functions, called as TRL calls them.

    functions = RewardFunctions([reward_len], weights=[1.0])
    prompts = Prompts("train_dataset", rows, TextTokenizer("models/tiny"))
    with served(functions, prompts, None, "unix:/tmp/mine/rewards", failed):
        ...

1. Rows and functions stay in the process that has them; only prompts, tokens and numbers leave it.
2. What functions are given is what TRL's GRPOTrainer gives them, of one group at a time.
3. Nothing here imports torch, transformers or datasets; but where a script has tools, transformers makes
   their schemas.
"""
