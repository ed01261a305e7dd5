"""An environment for tests with a tool server of its own."""

import verifiers.v1 as vf
from quartet_envhost.v1 import harness

from tool_env.server import CalcConfig, CalcState, CalcToolset

#: What the host allows.
MODEL_CALLS = harness.MAX_MODEL_CALLS


class ToolConfig(vf.TaskConfig):
    tools: CalcConfig = CalcConfig()


class ToolTask(vf.Task[vf.TaskData, CalcState, ToolConfig]):
    @classmethod
    def toolsets(cls, config):
        return [CalcToolset(config.tools)]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float("42" in trace.last_reply)

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(trace.state.calls)


class ToolTasksetConfig(vf.TasksetConfig):
    task: ToolConfig = ToolConfig()
    #: Of the calls of the model that the host allows, one in so many.
    calls_divided_by: int = 1


class ToolTaskset(vf.Taskset[ToolTask, ToolTasksetConfig]):
    def load(self):
        harness.MAX_MODEL_CALLS = MODEL_CALLS // self.config.calls_divided_by
        yield ToolTask(vf.TaskData(prompt="what is 40 plus 2?"), self.config.task)


__all__ = ["ToolTaskset"]
