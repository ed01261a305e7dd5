"""A v1 environment whose reward is a plain function, as those of classic Verifiers may be."""

import verifiers.v1 as vf


class PlainTask(vf.Task[vf.TaskData]):
    @vf.reward
    def plain(self, trace: vf.Trace) -> float:
        return 1.0

    @vf.metric
    async def fine(self, trace: vf.Trace) -> float:
        return 1.0


class PlainTaskset(vf.Taskset[PlainTask, vf.TasksetConfig]):
    def load(self):
        yield PlainTask(vf.TaskData(prompt="Say a word."), self.config.task)


__all__ = ["PlainTaskset"]
