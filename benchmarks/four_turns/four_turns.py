"""The v1 environment of benchmarks/rollouts.py: the user asks four times, any last reply will do."""

import verifiers.v1 as vf

TURNS = 4


class FourTurnsTask(vf.Task[vf.TaskData]):
    """Any reply will do."""

    @vf.reward
    async def replied(self, trace: vf.Trace) -> float:
        """Whether the last turn said something."""
        return float(bool(trace.last_reply))


class FourTurnsTaskset(vf.Taskset[FourTurnsTask, vf.TasksetConfig]):
    """A thousand openings."""

    def load(self):
        """The tasks."""
        for index in range(1000):
            yield FourTurnsTask(vf.TaskData(prompt=f"This is question {index}."), self.config.task)


class FourTurnsEnv(vf.SingleAgentEnv):
    """Asks on until the turns are used up."""

    async def run(self, task, agents):
        """One episode."""
        async with agents.agent.interaction(task) as talk:
            await talk.turn()
            for _ in range(TURNS - 1):
                await talk.turn("And what comes then?")


__all__ = ["FourTurnsEnv", "FourTurnsTaskset"]
