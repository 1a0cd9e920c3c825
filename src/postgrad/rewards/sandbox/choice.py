"""Chooses the layer that isolates programs here: the first that withstands an escape attempt."""

import json
import sys
from functools import lru_cache

from postgrad.core.errors import UsageError
from postgrad.rewards.sandbox import layers
from postgrad.rewards.sandbox.client import Limits, Program, Sandbox, SandboxError


def choose(unsafe: bool = False) -> Sandbox:
    """A running sandbox in the first layer that withstands a program which tries to get out.

    Where no layer does, raises UsageError with the reasons; with `unsafe` it returns a sandbox
    that isolates nothing.
    """
    reasons: list[str] = []
    for layer in layers.in_order():
        reason = layer.missing()
        if reason is None:
            sandbox = Sandbox(layer)
            reason = _weakness(sandbox)
            if reason is None:
                return sandbox
            sandbox.close()
        reasons.append(f"{layer.name}: {reason}")
    if unsafe:
        return Sandbox(layers.NONE)
    way_out = "Install bubblewrap or allow unprivileged user namespaces"
    if sys.platform != "linux":
        way_out = "Run it on Linux, such as in a virtual machine"
    raise UsageError(
        f"there is no sandbox for programs that a model wrote ({'; '.join(reasons)}). {way_out}; "
        "or set `unsafe = true` in the recipe, on a machine that holds nothing of value"
    )


@lru_cache(maxsize=2)
def shared(unsafe: bool = False) -> Sandbox:
    """The sandbox of this process: chosen at the first call, ends with the process."""
    return choose(unsafe)


def describe() -> str:
    """The layer that would be chosen, or why there is none."""
    try:
        with choose() as sandbox:
            return sandbox.layer.name
    except UsageError as error:
        return f"none: {error}"


def _weakness(sandbox: Sandbox) -> str | None:
    """Why the sandbox does not isolate here, or None where it does."""
    task = {"mode": "script", "sources": [layers.probe()]}
    try:
        end = sandbox.run([Program(task)], Limits())
    except SandboxError as error:
        return str(error)
    if end.cause is not None:
        return f"the first program ended with {end.cause}: {end.errors[0][-200:]}"
    if end.output == layers.HELD:
        return None
    could = json.loads(end.output.partition(b"\n")[0]) or ["execute a file"]
    return f"a program could {', '.join(could)}"
