"""The classic environment of benchmarks/rollouts.py: the user asks four times, any last reply will do."""

import verifiers as vf
from datasets import Dataset

TURNS = 4


def replied(completion) -> float:
    """Whether the last turn said something."""
    return float(bool(completion[-1]["content"]))


class FourTurns(vf.MultiTurnEnv):
    """Asks on until the turns are used up."""

    async def env_response(self, messages, state, **kwargs):
        """The user's next line."""
        return [vf.UserMessage(content="And what comes then?")]


def load_environment():
    """A thousand openings."""
    prompts = [[{"role": "user", "content": f"This is question {index}."}] for index in range(1000)]
    data = Dataset.from_dict({"prompt": prompts, "answer": [""] * len(prompts)})
    return FourTurns(dataset=data, rubric=vf.Rubric(funcs=[replied]), max_turns=TURNS)
