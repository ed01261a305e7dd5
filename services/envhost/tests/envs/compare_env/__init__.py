"""A v1 environment as the documentation of Verifiers writes it; nothing here knows of this project.

Several attempts at a task, compared by their length when all have ended; with `goes_on` it does without one
that failed, and with `sides` the attempts are of two players. What a reply says decides what breaks.
"""

import asyncio
import sys

import verifiers.v1 as vf


class WordTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def own(self, trace: vf.Trace) -> float:
        if trace.last_reply == "raise alone":
            raise LookupError("a scorer's bug")
        if trace.last_reply == "slow":
            await asyncio.sleep(0.5)
        return 1.0


class WordTaskset(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self):
        yield WordTask(vf.TaskData(prompt="Say a word."), self.config.task)


class CompareConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    rival: vf.AgentConfig = vf.AgentConfig()
    attempts: int = 3
    sides: bool = False
    goes_on: bool = False
    together: bool = False


class CompareEnv(vf.Env[CompareConfig]):
    async def run(self, task, agents):
        if self.config.together:
            await asyncio.gather(*(agents.agent.run(task) for _ in range(self.config.attempts)))
            return
        for number in range(self.config.attempts):
            seat = agents.rival if self.config.sides and number % 2 else agents.agent
            await seat.run(task)

    async def finalize(self, task, episode):
        whole = [trace for trace in episode.traces if trace.ok]
        said = [trace.last_reply for trace in whole]
        if "break" in said:
            raise LookupError("no scale")
        if "exit" in said:
            sys.exit("no rollouts beside it")
        if "never" in said:
            await asyncio.sleep(60)
        for trace in whole:
            shorter = sum(len(other) < len(trace.last_reply) for other in said)
            trace.record_reward("rank", float("nan") if trace.last_reply == "nan" else shorter, weight=2.0)
        if whole:
            whole[0].record_metric("first", 1.0)
        if "twice" in said:
            episode.traces += [trace for trace in whole if trace.last_reply == "twice"]

    def complete(self, episode):
        return episode.ok or (self.config.goes_on and any(trace.ok for trace in episode.traces))


__all__ = ["CompareEnv", "WordTaskset"]
