"""A process that scores: `python -m postgrad.rewards.worker`, JSON lines in and out.

It imports only what its verifiers need (neither NumPy nor torch). A verifier which prints or reads
input cannot break the protocol (core.process). Time limits are enforced from outside: the pool
kills the process. A worker of the sandboxed lane puts a sandbox around itself before its first
score.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.core.process import die_with_parent, take_pipes, write
from postgrad.rewards import protocol
from postgrad.rewards.call import Rollouts, ScoringFailed, call, describe
from postgrad.rewards.descendants import cpu_of_this_process
from postgrad.rewards.protocol import Returned, VerifierTraits
from postgrad.rewards.registry import build
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import PromptView, RolloutView, Verifier

ScoreCall = Callable[[PromptView, Rollouts], Returned]


def main() -> None:
    """Score until the other end of the pipe closes."""
    die_with_parent()
    requests, answers = take_pipes()
    hello = json.loads(requests.readline())
    enclosure = None
    if hello["sandboxed"]:
        from postgrad.rewards.call import Enclosure, sandboxed_scorers  # others do without

        enclosure = Enclosure()
    try:
        rewards = protocol.rewards_of(hello)
        verifiers = [build(reward) for reward in rewards]
        for verifier in verifiers:
            verifier.prepare()
        scorers: list[ScoreCall] = [partial(call, verifier) for verifier in verifiers]
        if enclosure is not None:
            scorers = sandboxed_scorers(enclosure, verifiers, rewards)
    except UsageError as error:
        write(answers, protocol.refused(str(error)))
        return
    except (Exception, SystemExit) as error:  # noqa: BLE001  # code of others; told to the pool
        write(answers, protocol.refused(f"a verifier cannot be prepared: {describe(error)}"))
        return
    traits = [
        VerifierTraits(type(v).check is not Verifier.check, v.scores_groups()) for v in verifiers
    ]
    write(answers, protocol.ready(traits, cpu_of_this_process()))
    for line in requests:
        message = json.loads(line)
        prompts = [PromptView(**prompt) for prompt in message["prompts"]]
        for key, component, prompt, rollouts in message["jobs"]:
            views = None if rollouts is None else _views(rollouts, rewards[component])
            write(answers, answer(key, scorers[component], prompts[prompt], views))


def _views(rollouts: Sequence[dict[str, Any]], reward: RewardSettings) -> list[RolloutView]:
    for rollout in rollouts:
        rollout["text"] = reward.read(rollout["text"])
    return [RolloutView(**rollout) for rollout in rollouts]


def answer(key: int, score: ScoreCall, prompt: PromptView, rollouts: Rollouts) -> bytes:
    """Scores one job. Returns the line that reports how it ended (protocol.py)."""
    try:
        returned = score(prompt, rollouts)
    except ScoringFailed as ending:
        return protocol.error(key, cpu_of_this_process(), ending.message, ending.cause)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # recorded with its cause by the pool
        return protocol.error(key, cpu_of_this_process(), describe(error))
    try:
        return protocol.result(key, cpu_of_this_process(), returned)
    except (TypeError, ValueError, RecursionError) as error:
        return protocol.error(
            key, cpu_of_this_process(), f"the detail of the score is no JSON value: {error}"
        )


if __name__ == "__main__":
    main()
