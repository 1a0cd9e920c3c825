"""A process that calls functions: `python -m postgrad.rollout.environments.function_worker`.

JSON lines in and out, one call at a time; time limits are enforced from outside, by killing it:

    {"function": "package.module:function", "arguments": {...}}
    {"value": what it returned}, or {"error": what it raised}, and of an error that a model may
    read also {"told": its message}
"""

import json
from functools import cache
from typing import Any

from postgrad.core.errors import UsageError, described
from postgrad.core.process import die_with_parent, take_pipes, write
from postgrad.core.text import resolve

TOLD = (ValueError, ArithmeticError, LookupError)  # what a tool raises for the model


def main() -> None:
    """Calls until the other end of the pipe closes."""
    die_with_parent()
    requests, answers = take_pipes()
    function = cache(lambda name: resolve(name, {}, "function"))
    for line in requests:
        message = json.loads(line)
        write(answers, json.dumps(_answer(function, message)).encode() + b"\n")


def _answer(function: Any, message: dict[str, Any]) -> dict[str, Any]:
    try:
        value = function(message["function"])(**message["arguments"])
    except TOLD as error:
        return {"told": str(error), "error": described(error)}
    except UsageError as error:
        return {"error": str(error)}
    except (Exception, SystemExit) as error:  # noqa: BLE001  # code of others: told with its cause
        return {"error": described(error)}
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return {"error": f"returned {type(value).__name__}, which is not JSON: {error}"}
    return {"value": value}


if __name__ == "__main__":
    main()
