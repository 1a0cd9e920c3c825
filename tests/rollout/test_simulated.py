"""The built-in engine, driven by the live source, makes the passes that are simulated."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from helpers.rollouts import Chosen, Numbers
from postgrad.core.cursor import Cursor
from postgrad.plan.simulate import BatchLoad, Pace, Simulation
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.settings import RolloutSettings
from postgrad.rollout.source import LiveSource

GROUPS, SAMPLES, NEW, STEPS = 3, 4, 20, 5


def sampled_lengths(
    engine: LocalEngine, tokenizer: Any, staleness: int, seed: int
) -> tuple[dict[tuple[int, int], int], list[int]]:
    """Tokens of each (ticket, sample), and the engine's passes up to the end of each step."""
    source = LiveSource(
        engine, Numbers(1000), Chosen(lambda ticket, sample: float(sample)),
        seed=seed, prompts_per_step=GROUPS, samples_per_prompt=SAMPLES, tokenizer=tokenizer,
        sampling=RolloutSettings(max_new_tokens=NEW, max_staleness=staleness),
    )  # fmt: skip
    lengths, passes = dict[tuple[int, int], int](), list[int]()
    cursor, pending = Cursor(), {}
    for step in range(1, STEPS + staleness + 2):  # the last ones only for what was under way
        sampled = source.next(step, cursor, {}, pending)
        cursor, pending = sampled.cursor, source.pause().pending
        passes.append(engine.stats.decode_steps)
        for group in sampled.groups:
            for rollout in group.rollouts:
                lengths[group.prompt.ticket, rollout.sample] = sum(
                    len(turn.token_ids) for turn in rollout.turns
                )
    return lengths, passes


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize(("slots", "seed"), [(3, 0), (8, 1), (64, 2)])
def test_passes_of_a_real_run_are_those_of_the_simulation(
    staleness: int, slots: int, seed: int, model: Callable[..., Any], tokenizer: Any
) -> None:
    engine = LocalEngine(model("qwen3"), tokenizer, slots=slots, cache_tokens=slots * 64)
    lengths, passes = sampled_lengths(engine, tokenizer, staleness, seed)
    assert len(set(lengths.values())) > 3  # answers end where the policy ends them
    load = BatchLoad(GROUPS, SAMPLES, 2, lambda ticket, sample: lengths[ticket, sample])
    tick = Pace(
        slots, math.inf, lambda rows, cached: 1.0, lambda tokens: 0.0, lambda tokens: 1.0, 0.0
    )
    for steps in range(2, STEPS + 1):
        simulated = Simulation(load, tick, 1, staleness, apart=False).run(steps, 1)
        assert simulated.passes == passes[steps - 1]
