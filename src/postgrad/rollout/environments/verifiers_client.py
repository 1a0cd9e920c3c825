"""The process that runs tasks of the package verifiers, for environments/verifiers.py.

It runs as a script with the Python of an environment that has `verifiers` and the taskset, whose
pins are not those of postgrad, and imports nothing of postgrad. See environments/client.py for the
lines. "do" is "load", "prompts", "play" or "close", which ends the play of a session.

A task is played by the package's own agent, with a harness that holds the conversation here, in
place of a program that would be installed for it: it asks the policy and calls the task's tools.
"""

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack
from itertools import islice
from typing import Any

MOST_BYTES = 2**24  # of a request


class Tasks:
    """A taskset, and the servers of tools that its tasks share."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()  # ends with the process
        self._drawn: Any = iter(())
        self._tasks: list[Any] = []
        self._shared: Any = {}
        self._plays: dict[str, asyncio.Task[dict[str, Any]]] = {}

    async def do(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request."""
        about, session = request["with"], request["session"]
        if request["do"] == "load":
            return await self._load(about["taskset"], about["settings"])
        if request["do"] == "prompts":
            numbers = range(about["first"], about["first"] + about["count"])
            tasks = [task for number in numbers if (task := self._task(number)) is not None]
            return {"prompts": [opening(task.data) for task in tasks]}
        if request["do"] == "close":
            if (playing := self._plays.get(session)) is not None:
                playing.cancel()
            return {}
        self._plays[session] = playing = asyncio.create_task(self._play(session, about))
        try:
            return await playing
        finally:
            del self._plays[session]

    async def _load(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]  # its own
        from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]

        if loaders.environment_class(name) is not vf.SingleAgentEnv:
            raise ValueError("its tasks are played by several agents; only one is trained here")
        config = loaders.taskset_config_type(name).model_validate({**settings, "id": name})
        taskset = loaders.load_taskset(config)
        self._drawn = iter(taskset)
        if toolsets := type(taskset).toolsets(config):
            from verifiers.v1.mcp import serve_shared  # pyright: ignore[reportMissingImports]

            self._shared = await self._stack.enter_async_context(serve_shared(toolsets))
        return {}

    def _task(self, number: int) -> Any:
        """The task of a number, None behind the last."""
        self._tasks += islice(self._drawn, max(0, number + 1 - len(self._tasks)))
        return self._tasks[number] if number < len(self._tasks) else None

    async def _play(self, session: str, about: dict[str, Any]) -> dict[str, Any]:
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

        task = self._task(about["task"])
        if task is None:
            raise ValueError(f"the taskset has no task {about['task']}")
        key = f"POSTGRAD_API_KEY_{session}"  # such names are kept from programs that tasks start
        os.environ[key] = about["api_key"]
        try:
            config = vf.AgentConfig.model_validate(
                {
                    "harness": {"id": "null"},
                    "runtime": {"type": "subprocess"},
                    "model": about["model"],
                    "client": {
                        "type": "eval", "base_url": about["base_url"], "api_key_var": key,
                    },
                    "network_notice": False,
                }
            )  # fmt: skip
            agent = vf.Agent(config)
            agent.harness = here(agent.harness.config, about["tools"])
            trace = await agent.run(task, tools=self._shared)
        finally:
            del os.environ[key]
        if not trace.ok:
            error = trace.errors[-1] if trace.errors else None
            raise RuntimeError("no error is known" if error is None else error.message)
        metrics = {name: float(v) for name, v in trace.metrics.items() if v is not None}
        return {"reward": float(trace.reward), "metrics": metrics}


def opening(data: Any) -> list[dict[str, Any]]:
    """The messages that a task begins with. Raises ValueError where it has none."""
    from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports]

    if data.prompt is None:
        raise ValueError("a task has no prompt: whoever plays its user would have to begin")
    system = data.system_prompt
    messages = [{"role": "system", "content": system}] if system else []
    if isinstance(data.prompt, str):
        return [*messages, {"role": "user", "content": data.prompt}]
    return [*messages, *(message_to_wire(message) for message in data.prompt)]


def here(config: Any, wanted: list[dict[str, Any]]) -> Any:
    """A harness that holds the conversation in this process. wanted: schemas of the tools that the
    policy is shown; []: those of the task.
    """
    from verifiers.v1.harnesses.null import NullHarness  # pyright: ignore[reportMissingImports]

    class Here(NullHarness):
        async def setup(self, runtime: Any) -> None:
            pass  # no program is installed

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str,
            mcp_urls: dict[str, str], data: Any, tool_interception_url: str | None = None,
        ) -> Any:  # fmt: skip
            import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

            url = f"{endpoint.rstrip('/')}/chat/completions"
            async with AsyncExitStack() as stack:
                await converse(stack, url, secret, mcp_urls, data, wanted)
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    return Here(config)


async def converse(
    stack: AsyncExitStack,
    url: str,
    key: str,
    mcp_urls: dict[str, str],
    data: Any,
    wanted: list[dict[str, Any]],
) -> None:
    """Asks the policy, and calls the tools that it wants, until it answers without a call."""
    import httpx
    from verifiers.v1.harnesses.utils.mcp import (  # pyright: ignore[reportMissingImports]
        call_mcp,
        connect_mcp,
    )

    about = {"mcpServers": {name: {"url": address} for name, address in mcp_urls.items()}}
    tools, dispatch, servers = await connect_mcp(about, stack)
    if wanted and tools != wanted:
        raise ValueError(
            f"environment.tools is not what the task gives; say tools = {json.dumps(tools)}"
        )
    policy = await stack.enter_async_context(
        httpx.AsyncClient(timeout=None, headers={"Authorization": f"Bearer {key}"})
    )
    messages = opening(data)
    while True:
        shown = {"tools": tools} if tools else {}
        answer = await policy.post(url, json={"model": "policy", "messages": messages, **shown})
        if answer.is_error:
            raise RuntimeError(answer.text[:500])
        turn = answer.json()["choices"][0]["message"]
        messages.append({name: value for name, value in turn.items() if value is not None})
        if not turn.get("tool_calls"):
            return
        for call in turn["tool_calls"]:
            function, content = call["function"], ""
            try:
                arguments = json.loads(function["arguments"])
                content = await call_mcp(servers, dispatch, function["name"], arguments)
            except (ValueError, KeyError) as error:
                content = f"no such tool or arguments: {error}"
            reply = {"role": "tool", "tool_call_id": call["id"], "content": content}
            messages.append(reply)


async def serve() -> None:
    """Until standard input closes."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what tasks print is no answer
    tasks, lines = Tasks(), asyncio.StreamReader(limit=MOST_BYTES)
    loop, under_way = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)

    async def answer(request: dict[str, Any]) -> None:
        try:
            reply = await tasks.do(request)
        except asyncio.CancelledError:
            reply = {"error": "it was ended"}
        except Exception as error:  # noqa: BLE001  # of tasks of others
            reply = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps({"id": request["id"], **reply}), file=answers, flush=True)

    while line := await lines.readline():
        task = asyncio.create_task(answer(json.loads(line)))
        under_way.add(task)
        task.add_done_callback(under_way.discard)


if __name__ == "__main__":
    asyncio.run(serve())
