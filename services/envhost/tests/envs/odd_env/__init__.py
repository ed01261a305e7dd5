"""A v1 environment with the mistakes that authors make; `mistake` says which."""

import asyncio
import os
import sys

import verifiers.v1 as vf


class OddTask(vf.Task[vf.TaskData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        # The child has nothing to run, and comes back.
        if self.data.name == "forks" and os.fork() == 0:
            await asyncio.sleep(0)

    @vf.stop
    async def stops_at_all(self, trace: vf.Trace) -> bool:
        return self.data.name == "stops_raise" and {}["at all"]

    @vf.stop
    async def stops_on_request(self, request: vf.Request) -> bool:
        return self.data.name == "stops_raise_on_request" and {}["on request"]

    @vf.stop
    def stops_on_answer(self, response: vf.Response) -> bool:
        return self.data.name == "stops_raise_on_answer" and {}["on answer"]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float | dict[int, float]:
        return {7: 1.0} if self.data.name == "numbers_a_reward" else 1.0


class OddConfig(vf.TasksetConfig):
    mistake: str


class OddTaskset(vf.Taskset[OddTask, OddConfig]):
    def load(self):
        return {"gives_none": nothing, "is_async": later, "gives_data": self.data}.get(
            self.config.mistake, self.tasks
        )()

    def data(self):
        yield from self.tasks()
        yield vf.TaskData(prompt="Say a word.")

    def tasks(self):
        is_long = self.config.mistake == "is_long"
        for _ in range(2 if is_long else 1):
            prompt = 5_000_000 * "x" if is_long else "Say a word."
            yield OddTask(vf.TaskData(prompt=prompt, name=self.config.mistake), self.config.task)


def nothing():
    return None


async def later():
    return []


class OddEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    start: str = ""


class OddEnv(vf.Env[OddEnvConfig]):
    async def start(self):
        if self.config.start == "raises":
            raise ConnectionError("no data base at db:5432")
        if self.config.start == "exits":
            sys.exit(3)

    async def run(self, task, agents):
        await agents.agent.run(task)


__all__ = ["OddEnv", "OddTaskset"]
