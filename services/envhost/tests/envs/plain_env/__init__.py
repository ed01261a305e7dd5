"""A v1 environment whose reward is a plain function, as those of classic Verifiers may be; its prompt tells
how often its examples were read.
"""

import itertools

import verifiers.v1 as vf

LOADED = itertools.count(1)


class PlainTask(vf.Task[vf.TaskData]):
    @vf.reward
    def plain(self, trace: vf.Trace) -> float:
        return 1.0

    @vf.metric
    async def fine(self, trace: vf.Trace) -> float:
        return 1.0


class PlainTaskset(vf.Taskset[PlainTask, vf.TasksetConfig]):
    def load(self):
        yield PlainTask(vf.TaskData(prompt=f"Say a word, {next(LOADED)}."), self.config.task)


__all__ = ["PlainTaskset"]
