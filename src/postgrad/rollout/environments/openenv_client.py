"""The process that speaks with an OpenEnv server, for environments/openenv.py.

It runs as a script with the Python of an environment that has the package `openenv`, whose pins are
not those of postgrad, and imports nothing of postgrad. JSON lines, any number of requests at once:

    {"id": 7, "session": "12", "do": "reset", "with": {"seed": 3}}
    {"id": 7, "observation": {...}, "reward": 0.0, "done": false}

"do" is reset, step, close or schema. The answer to "schema" has "schema", that of an action; one to
what the server refuses has "refused", one to what failed otherwise has "error".
"""

import asyncio
import json
import sys
from typing import Any
from urllib.request import urlopen

MOST_BYTES = 2**24  # of a request
SCHEMA_SECONDS = 10.0
REFUSED = "VALIDATION_ERROR"  # the server's code for an action that is none


class Sessions:
    """A connection, and so an episode of its own, for each session."""

    def __init__(self, url: str) -> None:
        # Where the package is not installed, type checkers take environments/openenv.py for it.
        from openenv import (  # pyright: ignore[reportMissingImports]
            GenericEnvClient,  # pyright: ignore[reportAttributeAccessIssue]
        )

        self._url = url
        self._kind = GenericEnvClient
        self._clients: dict[str, Any] = {}

    async def do(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request."""
        if request["do"] == "schema":
            return {"schema": await asyncio.to_thread(self._schema)}
        session = request["session"]
        if request["do"] == "close":
            client = self._clients.pop(session, None)
            if client is not None:
                await client.close()
            return {}
        if session not in self._clients:
            self._clients[session] = self._kind(base_url=self._url)
            await self._clients[session].connect()
        client = self._clients[session]
        if request["do"] == "reset":
            result = await client.reset(**request["with"])
        else:
            result = await client.step(request["with"])
        return {"observation": result.observation, "reward": result.reward, "done": result.done}

    def _schema(self) -> Any:
        with urlopen(f"{self._url}/schema", timeout=SCHEMA_SECONDS) as answer:
            return json.load(answer)["action"]


async def serve(url: str) -> None:
    """Until standard input closes."""
    sessions, lines = Sessions(url), asyncio.StreamReader(limit=MOST_BYTES)
    loop, under_way = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)

    async def answer(request: dict[str, Any]) -> None:
        try:
            reply = await sessions.do(request)
        except Exception as error:  # noqa: BLE001  # of a server and a client of others
            reply = {"refused" if REFUSED in str(error) else "error": f"{error!r}"[:1000]}
        print(json.dumps({"id": request["id"], **reply}), flush=True)

    while line := await lines.readline():
        task = asyncio.create_task(answer(json.loads(line)))
        under_way.add(task)
        task.add_done_callback(under_way.discard)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
