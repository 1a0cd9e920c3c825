"""A small MCP server over standard input and output, or HTTP where an argument names a port."""

import asyncio
import base64
import os
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("numbers")
SQUARE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAGUlEQVR4nGPktI9iIAUwkaR6VMOohiGl"
    "AQAiuQDCu8G5WgAAAABJRU5ErkJggg=="
)


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def fail(why: str) -> str:
    """Fails."""
    raise ToolError(why)


@server.tool()
async def hang() -> str:
    """Never answers."""
    await asyncio.Event().wait()
    return "never"


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool(structured_output=False)
def draw():
    """Draws a square, and says so."""
    return ["drawn", Image(data=SQUARE, format="png"), "the end"]


@server.tool()
def process() -> str:
    """The number of the server's process."""
    return str(os.getpid())


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
