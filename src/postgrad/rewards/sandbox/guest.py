"""Runs a task inside the sandbox: a program, one call, calls on demand, or tests.

The zygote's child calls `run` with a task (JSON values) and exits with its return value. A program
can read everything in its task.
"""

import _sitebuiltins
import atexit
import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import json
import linecache
import os
import sys
import threading
import traceback
from types import ModuleType
from typing import Any

from postgrad.rewards.sandbox import remote
from postgrad.rewards.sandbox.values import decode, encode

TASK, RESULT, ASK, REPLY = 3, 4, 5, 6  # descriptors
_STREAMS = (
    ("stdin", 0, "r", "surrogateescape"),
    ("stdout", 1, "w", "surrogateescape"),
    ("stderr", 2, "w", "backslashreplace"),  # as Python's default: a message may hold anything
)


def run(task: dict[str, Any]) -> int:
    """Runs the task. Returns the exit status that Python would end with."""
    _fresh_streams()
    try:
        _MODES[task["mode"]](task)
        code = 0
    except SystemExit as ending:
        code = _exit_code(ending)
    except BaseException:  # noqa: BLE001  # as the interpreter does
        traceback.print_exc()
        code = 1
    try:
        _finish()
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = code or 1
    return code


def load(name: str, *sources: str) -> ModuleType:
    """A module made by running the sources one after another."""
    module = ModuleType(name)
    sys.modules[name] = module
    for number, source in enumerate(sources):
        path = f"<{'program' if number == len(sources) - 1 else 'prelude'}>"
        linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
        loader = _TextLoader(source, path)
        module.__spec__ = importlib.machinery.ModuleSpec(name, loader)
        loader.exec_module(module)
    return module


class _TextLoader(importlib.abc.InspectLoader):
    """Runs a source text as a module, with the standard library's import machinery."""

    def __init__(self, source: str, path: str) -> None:
        self._source = source
        self._path = path

    def get_source(self, fullname: str) -> str:
        return self._source

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self._source.encode("utf-8", "surrogatepass"), self._path)


def _script(task: dict[str, Any]) -> None:
    load("__main__", *task["sources"])


def _call(task: dict[str, Any]) -> None:
    """Only the return value leaves: a program that forges it has just chosen what to return."""
    function = _function(load("program", *task["sources"]), task["function"])
    value = function(*[decode(argument) for argument in task["arguments"]])
    _write_result({"value": encode(value)})


def _serve(task: dict[str, Any]) -> None:
    module = load("program", *task["sources"])
    with open(ASK, "rb") as asks, open(REPLY, "wb", buffering=0) as replies:
        remote.ProgramServer(module).serve(asks, replies)


def _judge(task: dict[str, Any]) -> None:
    """Runs the tests, in a process in which the program never runs."""
    with open(REPLY, "rb") as replies, open(ASK, "wb", buffering=0) as asks:
        client = remote.Client(asks, replies, task["line_bytes"])
        names = client.names()
        tests = ModuleType("tests")
        vars(tests).update(names)
        entry = task["entry_point"]
        if entry is not None:
            tests.candidate = _entry(names, entry)  # pyright: ignore
        sys.modules["tests"] = tests
        for number, source in enumerate(task["sources"]):
            path = f"<tests {number}>"
            linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
            _TextLoader(source, path).exec_module(tests)
        check = vars(tests).get("check")
        if entry is not None and callable(check) and check is not names.get("check"):
            check(tests.candidate)  # pyright: ignore
        if client.lost is not None:  # a test has caught Lost
            raise remote.Lost(client.lost)
    _write_result({"passed": True})


def _entry(names: dict[str, Any], entry: str) -> Any:
    if entry not in names:
        raise NameError(f"the program defines no {entry!r}")
    return names[entry]


def _function(module: ModuleType, name: str) -> Any:
    """A function of the module, or the method of its class Solution."""
    solution = vars(module).get("Solution")
    if name not in vars(module) and solution is not None:
        return getattr(solution(), name)
    if name not in vars(module):
        raise NameError(f"the program defines no {name!r}")
    return getattr(module, name)


def _write_result(result: dict[str, Any]) -> None:
    with os.fdopen(RESULT, "wb") as file:
        file.write(json.dumps(result).encode())


def _fresh_streams() -> None:
    for name, descriptor, mode, errors in _STREAMS:
        stream = os.fdopen(descriptor, mode, encoding="utf-8", errors=errors)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = ["program"]
    for name in ("exit", "quit"):  # of the module `site`, which is not there
        setattr(builtins, name, _sitebuiltins.Quitter(name, "end of file"))


def _finish() -> None:
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()  # templates of fast output register their last write here
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _exit_code(ending: SystemExit) -> int:
    if ending.code is None or isinstance(ending.code, int):
        return (ending.code or 0) & 0xFF
    print(ending.code, file=sys.stderr)
    return 1


_MODES = {"script": _script, "call": _call, "serve": _serve, "judge": _judge}
