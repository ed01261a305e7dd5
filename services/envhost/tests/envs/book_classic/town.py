"""An MCP server over stdio, as the MCP documentation has it."""

from mcp.server.fastmcp import FastMCP

server = FastMCP("town")


@server.tool()
def inhabitants(town: str) -> str:
    """How many people live in a town."""
    return {"Ulm": "120000"}.get(town, "unknown")


if __name__ == "__main__":
    server.run()
