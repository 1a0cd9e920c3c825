"""The names of the package verifiers that environments/verifiers_client.py asks for, in one file.

It stands for the whole package: its submodules are this module too. A rollout is a call of the
harness, then of the task's rewards and metrics.
"""

import importlib
import inspect
import os
import sys
from types import SimpleNamespace

import httpx

for name in ("v1", "v1.mcp", "v1.harnesses", "v1.harnesses.null", "v1.dialects.chat"):
    sys.modules[f"verifiers.{name}"] = sys.modules[__name__]
for name in ("v1.utils", "v1.utils.loaders", "v1.harnesses.utils.mcp", "v1.dialects"):
    sys.modules[f"verifiers.{name}"] = sys.modules[__name__]
sys.modules["verifiers.v1.harnesses.utils"] = sys.modules[__name__]
v1 = loaders = sys.modules[__name__]


class Fields:
    """Settings or data: class attributes that keywords replace."""

    def __class_getitem__(cls, other):
        return cls

    def __init__(self, **values):
        for key in dir(type(self)):
            if isinstance(default := getattr(type(self), key), Fields):
                values[key] = type(default).model_validate(values.get(key, {}))
        vars(self).update(values)

    @classmethod
    def model_validate(cls, values):
        return values if isinstance(values, cls) else cls(**values)


class TaskConfig(Fields):
    pass


class TasksetConfig(Fields):
    pass


class ToolsetConfig(Fields):
    pass


class TaskData(Fields):
    system_prompt = None


class AgentConfig(Fields):
    pass


class State(Fields):
    pass


class SingleAgentEnv:
    pass


class Toolset:
    def __class_getitem__(cls, other):
        return cls

    def __init__(self, config):
        self.config = config


class Task:
    def __class_getitem__(cls, other):
        return cls

    def __init__(self, data, config):
        self.data, self.config = data, config


class Taskset:
    def __class_getitem__(cls, other):
        return cls

    def __init__(self, config):
        self.config = config

    def __iter__(self):
        return iter(self.load())

    @classmethod
    def toolsets(cls, config):
        return []


class NullHarness:
    def __init__(self, config):
        self.config = config


class ProgramResult(SimpleNamespace):
    pass


def message_to_wire(message):
    return message


def tool(function):
    function.tool = True
    return function


def metric(function):
    function.metric = True
    return function


def reward(function=None, weight=1.0):
    if function is None:
        return lambda other: reward(other, weight)
    function.weight = weight
    return function


SERVERS = {}  # address -> toolset
TRACES = {}  # what a request's key belongs to
_post = httpx.AsyncClient.post


async def post(self, url, **options):
    answer = await _post(self, url, **options)
    if answer.is_success:
        trace = TRACES[self.headers["authorization"]]
        trace.last_reply = answer.json()["choices"][0]["message"].get("content") or ""
        trace.num_turns += 1
    return answer


httpx.AsyncClient.post = post


async def connect_mcp(about, stack):
    schemas, dispatch = [], {}
    for server, place in about["mcpServers"].items():
        for name, function in inspect.getmembers(SERVERS[place["url"]], inspect.ismethod):
            if not hasattr(function, "tool"):
                continue
            words = list(inspect.signature(function).parameters)
            fields = {word: {"title": word.title(), "type": "integer"} for word in words}
            parameters = {"type": "object", "properties": fields, "required": words}
            called = f"{server}_{name}"
            schemas.append(
                {
                    "type": "function",
                    "function": {
                        "name": called,
                        "description": function.__doc__,
                        "parameters": parameters | {"title": f"{name}Arguments"},
                    },
                }
            )
            dispatch[called] = function
    return schemas, dispatch, None


async def call_mcp(servers, dispatch, name, arguments):
    return str(await dispatch[name](**arguments))


class Agent:
    def __init__(self, config):
        self.config, self.harness = config, NullHarness({})

    async def run(self, task, tools):
        about = self.config.client
        trace = SimpleNamespace(
            ok=True, errors=[], metrics={}, reward=0.0, num_turns=0, last_reply=""
        )
        urls = {}
        for toolset in type(task).toolsets(task.config):
            urls[type(toolset).__name__.lower()] = f"http://{id(toolset)}"
            SERVERS[f"http://{id(toolset)}"] = toolset
        key = os.environ[about["api_key_var"]]
        TRACES[f"Bearer {key}"] = trace
        try:
            await self.harness.launch(
                None, trace, None, about["base_url"], key, urls, task.data, None
            )
            await self.score(task, trace)
        except Exception as error:  # noqa: BLE001  # as the package does
            trace.ok = False
            trace.errors.append(SimpleNamespace(message=f"{type(error).__name__}: {error}"))
        return trace

    async def score(self, task, trace):
        for name, function in inspect.getmembers(task, inspect.ismethod):
            if hasattr(function, "weight"):
                trace.reward += function.weight * await function(trace)
            elif hasattr(function, "metric"):
                trace.metrics[name] = await function(trace)


def environment_class(name):
    importlib.import_module(name)
    return SingleAgentEnv


def _of(name, kind):
    module = importlib.import_module(name)
    return next(
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, kind) and value.__module__ == name
    )


def taskset_config_type(name):
    return _of(name, TasksetConfig)


def load_taskset(config):
    return _of(config.id, Taskset)(config)
