"""The tool server that the rollouts of a worker share."""

import os
import time

import verifiers.v1 as vf


class DeskServerConfig(vf.SharedToolsetConfig):
    breaks: bool = False


class DeskToolset(vf.Toolset[DeskServerConfig, vf.State]):
    TOOL_PREFIX = "desk"

    async def setup(self) -> None:
        """After it has said its port."""
        if self.config.breaks:
            raise LookupError("no drawer")

    @vf.tool
    def block(self, seconds: float) -> str:
        """Hold the server up."""
        time.sleep(seconds)
        return f"slept {seconds:g}"

    @vf.tool
    def leave(self, code: int) -> str:
        """End the server."""
        os._exit(code)

    @vf.tool
    def half(self) -> str:
        """Half a surrogate pair, which no message can carry."""
        return "half \ud800"


if __name__ == "__main__":
    DeskToolset.run()
