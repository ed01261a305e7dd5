"""The tool server: a process of its own."""

import json
import os
import signal
import socket

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


def answer_once() -> None:
    """Answer the first who asks, and end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        with open(os.environ["MCP_PORT_FILE"], "w") as file:
            file.write(str(server.getsockname()[1]))
        asked, _ = server.accept()
        with asked:
            asked.recv(65536)
            asked.sendall(b"HTTP/1.1 406 Not Acceptable\r\nContent-Length: 0\r\n\r\n")


if __name__ == "__main__":
    match json.loads(os.environ["VF_CONFIG"])["start"]:
        case "exits":
            raise SystemExit(7)
        case "answers once":
            answer_once()
        case _:
            CalcToolset.run()
