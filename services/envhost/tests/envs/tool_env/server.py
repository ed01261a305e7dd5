"""The tool server: a process of its own."""

import os

import verifiers.v1 as vf


class CalcState(vf.State):
    calls: int = 0


class CalcToolset(vf.Toolset[vf.ToolsetConfig, CalcState]):
    TOOL_PREFIX = "calc"

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
    CalcToolset.run()
