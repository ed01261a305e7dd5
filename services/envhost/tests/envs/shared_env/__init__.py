"""An environment for tests whose rollouts share one tool server."""

import verifiers.v1 as vf

from shared_env.server import DeskServerConfig, DeskToolset


class DeskTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def done(self, trace: vf.Trace) -> float:
        return float("done" in trace.last_reply)


class DeskConfig(vf.TasksetConfig):
    #: Of a server that is there already.
    url: str | None = None
    #: Whether the server raises as it starts.
    breaks: bool = False


class DeskTaskset(vf.Taskset[DeskTask, DeskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [DeskToolset(DeskServerConfig(url=config.url, breaks=config.breaks))]

    def load(self):
        yield DeskTask(vf.TaskData(prompt="use the desk"), self.config.task)


__all__ = ["DeskTaskset"]
