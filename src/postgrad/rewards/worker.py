"""A process that scores: `python -m postgrad.rewards.worker`, JSON lines in and out.

It imports what its verifiers need and nothing more (neither NumPy nor torch). A verifier which
prints or reads input cannot break the protocol (core.pipes). Nobody interrupts a score from inside:
the pool kills the process.
"""

import json
import math
import os
import traceback
from numbers import Real
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.core.pipes import die_with_parent, take_pipes, write
from postgrad.rewards import cpu, protocol
from postgrad.rewards.registry import build
from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier

MAX_MESSAGE = 500  # characters of an error


def main() -> None:
    """Score until the other end of the pipe closes."""
    die_with_parent()
    requests, answers = take_pipes()
    try:
        verifiers = [build(r) for r in protocol.rewards_of(json.loads(requests.readline()))]
        for verifier in verifiers:
            verifier.prepare()
    except UsageError as error:
        write(answers, protocol.refused(str(error)))
        return
    except (Exception, SystemExit) as error:  # noqa: BLE001  # code of others; told to the pool
        write(answers, protocol.refused(f"a verifier cannot be prepared: {describe(error)}"))
        return
    checks = [type(v).check is not Verifier.check for v in verifiers]
    write(answers, protocol.ready(checks, cpu.own()))
    for line in requests:
        message = json.loads(line)
        prompts = [PromptView(**prompt) for prompt in message["prompts"]]
        for key, component, prompt, rollout in message["jobs"]:
            view = None if rollout is None else RolloutView(**rollout)
            write(answers, answer(key, verifiers[component], prompts[prompt], view))


def answer(key: int, verifier: Verifier, prompt: PromptView, rollout: RolloutView | None) -> bytes:
    """The line that tells how one job ended."""
    try:
        if rollout is None:
            value, detail = None, verifier.check(prompt)
        else:
            value, detail = as_score(verifier.score(prompt, rollout))
    except (Exception, SystemExit) as error:  # noqa: BLE001  # recorded with its cause by the pool
        return protocol.error(key, cpu.own(), describe(error))
    try:
        return protocol.result(key, cpu.own(), value, detail)
    except (TypeError, ValueError, RecursionError) as error:
        return protocol.error(key, cpu.own(), f"the detail of the score is no JSON value: {error}")


def as_score(returned: Any) -> tuple[float, Any]:
    """(value, detail) of what a verifier returned; ValueError where it is no finite number."""
    value, detail = (
        (returned.value, returned.detail) if isinstance(returned, Score) else (returned, None)
    )
    if not isinstance(value, Real):
        raise ValueError(f"returned {_short(value)}, which is no number")
    if not math.isfinite(value):
        raise ValueError(f"returned {float(value)}, which is no score")
    return float(value), detail


def describe(error: BaseException) -> str:
    """One line: the error and the line of code that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    where = f" ({os.path.basename(last.filename)}:{last.lineno})" if last else ""  # noqa: PTH119
    try:
        text = str(error)
    except Exception as second:  # noqa: BLE001  # its __str__ is code of others too
        text = f"its message cannot be made: {type(second).__name__}"
    return f"{type(error).__name__}: {text[:MAX_MESSAGE]}{where}"


def _short(value: Any) -> str:
    return repr(value)[:60] if isinstance(value, str | None) else f"a {type(value).__name__}"


if __name__ == "__main__":
    main()
