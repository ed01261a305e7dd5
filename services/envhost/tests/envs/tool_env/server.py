"""The tool server: a process of its own."""

import json
import os
import signal

import verifiers.v1 as vf


class CalcState(vf.State):
    calls: int = 0


class CalcConfig(vf.ToolsetConfig):
    #: How its start ends.
    start: str = ""


class CalcToolset(vf.Toolset[CalcConfig, CalcState]):
    TOOL_PREFIX = "calc"

    async def setup(self) -> None:
        """After it has said its port."""
        if self.config.start == "raises":
            raise LookupError("no table of logarithms")
        if self.config.start == "killed":
            os.kill(os.getpid(), signal.SIGKILL)

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two integers."""
        self.state.calls += 1
        return a + b

    @vf.tool
    def explode(self) -> int:
        """End the server."""
        os._exit(1)


if __name__ == "__main__":
    if json.loads(os.environ["VF_CONFIG"])["start"] == "exits":
        raise SystemExit(7)
    CalcToolset.run()
