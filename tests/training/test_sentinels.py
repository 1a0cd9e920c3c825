"""A sick run makes its sentinel speak and no other; a healthy run makes none.

Illnesses are planted in whole runs. Answers of a model that was never taught to stop are cut off:
runs end them at letters where truncation is not the illness.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from helpers.model_types import make_model
from helpers.runs import assert_same_run, lines, tensors, train_until_killed
from helpers.tiny_runs import MakeRecipe
from postgrad.checkpoint.state import RunState
from postgrad.core.process import done
from postgrad.learner.optimizer import MasterOptimizer
from postgrad.learner.policy import PolicyLearner
from postgrad.models.fresh import PRINTABLE
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.observe.sentinels.base import SentinelStop
from postgrad.observe.sentinels.stall import Stall
from postgrad.observe.settings import SentinelSettings
from postgrad.observe.watchdog import Watchdog
from postgrad.recipe.pipeline import load_pipeline
from postgrad.rollout.local import step as decode
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.local.rows import Rows
from postgrad.rollout.source import LiveSource
from postgrad.tools.pipeline import train_pipeline
from postgrad.training.rl import RLJob
from postgrad.training.start import resume, train

ENDS = {"max_new_tokens": 6, "stop": list("aeiouAEIOU .,;:!?bcdfghjklmnpqrstvwxyz")}
ROOM = {**ENDS, "max_new_tokens": 16}  # sharper answers end later
RECIPES = Path(__file__).parents[2] / "recipes"
Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


def spoken(run_dir: str) -> list[tuple[str, int | None]]:
    """Which sentinels spoke, and at which step."""
    event_lines = lines(Path(run_dir) / "events.jsonl")
    return [
        (event["sentinel"], event.get("step"))
        for event in event_lines
        if event["event"] == "sentinel"
    ]


def other_old_logprobs(patch: Patch) -> None:
    """What scores before the step is not what trains: every logprob off by 0.001."""
    right = PolicyLearner.logprobs

    def off(self: Any, sequences: Any, temperature: float | None = None) -> Any:
        column = right(self, sequences, temperature).result()
        return done(column.like(column.values + np.float32(1e-3) * (column.values != 0)))

    patch.setattr(PolicyLearner, "logprobs", off)


def other_sampler(patch: Patch) -> None:
    """The engine says other logprobs than it samples with, by half."""
    right = LocalEngine.completed

    def off(self: Any, awaited: Any = None) -> Any:
        completions = right(self, awaited)
        for completion in completions:
            completion.logprobs[...] *= 0.5
        return completions

    patch.setattr(LocalEngine, "completed", off)


def stale_engine(patch: Patch) -> None:
    patch.setattr(LocalEngine, "load_weights", lambda self, weights, version: None)


def outlier_batch(patch: Patch) -> None:
    """One update's gradients are a hundred times as large."""
    right = MasterOptimizer.step

    def step(self: Any, rate: float) -> float:
        if self.updates == 12:
            for master in self.master.values():
                master.grad *= 100
        return right(self, rate)

    patch.setattr(MasterOptimizer, "step", step)


def collapsed_routers(patch: Patch) -> None:
    """From the seventh update on routers prefer nothing, and all tokens go to the first experts."""
    right = MasterOptimizer._publish

    def publish(self: Any) -> None:
        if self.updates >= 7:
            with torch.no_grad():
                for name, master in self.master.items():
                    if name.endswith("mlp.gate.weight"):
                        master.zero_()
        right(self)

    patch.setattr(MasterOptimizer, "_publish", publish)


def hanging_engine(patch: Patch) -> None:
    right = LocalEngine.load_weights

    def slow(self: Any, weights: Any, version: int) -> None:
        right(self, weights, version)
        if version == 2:
            time.sleep(0.6)

    patch.setattr(LocalEngine, "load_weights", slow)


def sharper(scale: float, after: int) -> Plant:
    """After so many updates the policy's logits are multiplied, in learner and engine alike."""

    def plant(patch: Patch) -> None:
        right = MasterOptimizer._publish

        def publish(self: Any) -> None:
            if self.updates == after - 1:
                with torch.no_grad():
                    self.master["model.norm.weight"].mul_(scale)
            right(self)

        patch.setattr(MasterOptimizer, "_publish", publish)

    return plant


def writes(choose: Callable[[Rows, int], str | None], after: int = 0) -> Plant:
    """From a version of the weights on the engine writes what it is told, with the model's own
    logprobs: what is sampled does not hang on what was learned.
    """

    def plant(patch: Patch) -> None:
        start, draw = LocalEngine._step, decode.sample
        now: list[Any] = []

        def marked(self: Any, *more: Any) -> None:
            now[:] = [self._rows, self._version]
            start(self, *more)

        def planted(logits: torch.Tensor, *more: Any) -> Any:
            logprobs = logits.log_softmax(-1)
            drawn = draw(logits, *more)
            rows, version = now
            for row in range(rows.count if version >= after else 0):
                letter = choose(rows, row)
                if letter is not None:
                    token = 3 + PRINTABLE.index(letter)  # behind the special ones
                    drawn[0][row], drawn[1][row] = token, logprobs[row, token]
            return drawn

        patch.setattr(LocalEngine, "_step", marked)
        patch.setattr(decode, "sample", planted)

    return plant


def padding(rows: Rows, row: int) -> str | None:
    """Nine digits before anything else, other ones in each answer."""
    place = int(rows.written[row])
    return str((rows.ticket[row] + rows.sample[row] + place) % 10) if place < 9 else None


def one_answer(rows: Rows, row: int) -> str | None:
    """The same in three of four samples."""
    return "a" if rows.sample[row] % 4 else None


def a_vowel(rows: Rows, row: int) -> str | None:
    """Any of them, in three of four answers: what the reward pays for, whatever is right."""
    number = int(rows.ticket[row] + rows.sample[row])
    return "aeiou"[number % 5] if number % 4 else None


class Illness(NamedTuple):
    """sentinel: who speaks of it; recipe: what it takes beside the tiny RL recipe."""

    sentinel: str
    plant: Plant | None = None
    job: str = "rl"
    recipe: dict[str, Any] = {}


SLOW: dict[str, Any] = {"learner": {"lr": 1e-6}}  # what is planted is all that happens


def pays(name: str) -> list[dict[str, Any]]:
    return [{"type": f"tiny_rewards:{name}"}]


ILLNESSES = [
    Illness("on_policy", other_old_logprobs, recipe={"batch": {"train_batch_size": 8}}),
    Illness("mismatch", other_sampler),
    Illness(
        "staleness",
        recipe={
            "steps": 6,
            "rollout": {**ENDS, "max_staleness": 2, "slots": 5},
            "algorithm": {"type": "grpo", "correction": "tis"},
            "sentinels": {"staleness": {"limit": 1.001, "steps": 1}},
        },
    ),
    Illness("publish", stale_engine, recipe={"steps": 1, "sentinels": {"publish": "warn"}}),
    Illness(
        "gradient", outlier_batch, "sft", {"steps": 14, "sentinels": {"gradient": {"after": 8}}}
    ),
    Illness(
        "entropy",
        sharper(14.0, after=6),
        recipe={
            "steps": 12,
            **SLOW,
            "rollout": ROOM,
            "sentinels": {"entropy": {"share": 0.9, "steps": 3}},
        },
    ),
    Illness(
        "kl",
        sharper(10.0, after=1),
        recipe={
            "steps": 6,
            **SLOW,
            "rollout": ROOM,
            "algorithm": {"type": "grpo", "kl_coef": 1e-4},
            "sentinels": {"kl": {"reference": 0.05, "step": 1e9}},
        },
    ),
    Illness(
        "evaluation",
        writes(a_vowel, after=5),
        recipe={
            "steps": 10,
            **SLOW,
            "rewards": [*pays("vowels"), {"type": "tiny_rewards:no_vowel", "weight": 0.0}],
            "eval": {"component": "no_vowel", "every": 4, "size": 16},
        },
    ),
    Illness(
        "length",
        writes(padding, after=6),
        recipe={
            "steps": 12,
            **SLOW,
            "rewards": pays("long"),
            "rollout": {**ENDS, "max_new_tokens": 16},
        },
    ),
    Illness("repetition", writes(one_answer), recipe={"steps": 4, **SLOW}),
    Illness("truncation", recipe={"rollout": {"stop": []}}),
    Illness("no_gradient", recipe={"steps": 6, "rewards": pays("nothing")}),
    Illness(
        "verifier",
        recipe={"rewards": pays("sometimes_broken"), "scoring": {"max_failed_fraction": 1.0}},
    ),
    Illness("router", collapsed_routers, "sft", {"steps": 16, **SLOW}),
    Illness("stall", hanging_engine, recipe={"sentinels": {"stall": {"seconds": 0.2}}}),
]


def test_every_sentinel_has_its_illness() -> None:
    assert {illness.sentinel for illness in ILLNESSES} == set(SentinelSettings.model_fields)


@pytest.mark.slow
@pytest.mark.parametrize("illness", ILLNESSES, ids=lambda illness: illness.sentinel)
def test_a_sick_run_makes_its_sentinel_speak_and_no_other(
    illness: Illness,
    make_recipe: Any,
    models: Callable[[int], str],
    console: Console,
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    if illness.plant is not None:
        illness.plant(monkeypatch)
    usual: dict[str, Any] = {"rollout": ENDS} if illness.job == "rl" else {}
    if illness.sentinel == "router":
        vocabulary = len(load_tokenizer(models(0)))
        mixture = make_model("qwen3_moe", Path(models(0)), vocabulary, tmp_path / "mixture")
        usual["model"] = {"path": str(mixture), "init": None}
    recipe = make_recipe(illness.job, **(usual | illness.recipe))
    train(recipe, console)
    assert {name for name, _ in spoken(recipe.run_dir)} == {illness.sentinel}


HEALTHY = {
    # At 1e-2 an embedding of this size may pass through 0, where a norm's gradient is 80 times as
    # large: an illness, and told.
    "sft": ("sft", {"steps": 20, "learner": {"lr": 3e-3}}),
    "rl": ("rl", {"steps": 12, "rollout": ENDS}),
    "rl of several updates": (
        "rl",
        {"steps": 12, "rollout": ENDS, "batch": {"train_batch_size": 8, "epochs_per_rollout": 2}},
    ),
    "rl with kl and an evaluation": (
        "rl",
        {
            "steps": 12,
            "rollout": ENDS,
            "eval": {"every": 3},
            "algorithm": {"type": "rloo", "kl_in": "reward", "kl_coef": 0.1},
        },
    ),
    "rl in bfloat16": (
        "rl",
        {
            "steps": 8,
            "rollout": ENDS,
            "model": {"dtype": "bfloat16"},
            "batch": {"train_batch_size": 8},
        },
    ),
    "reward": ("reward", {"steps": 20}),
    "preference": ("preference", {"steps": 20}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_keeps_every_sentinel_silent(
    name: str, make_recipe: Any, console: Console
) -> None:
    job, changes = HEALTHY[name]
    recipe = make_recipe(job, **changes)
    train(recipe, console)
    assert spoken(recipe.run_dir) == []


@pytest.mark.slow
def test_a_sentinel_that_stops_saves_the_run_and_says_how_to_go_on(
    make_recipe: Any, console: Console
) -> None:
    changes = {"rewards": pays("nothing"), "rollout": ENDS, "checkpoint": {"save_steps": 0}}
    watched = {"no_gradient": {"action": "stop", "steps": 2}}
    recipe = make_recipe("rl", steps=6, sentinels=watched, **changes)
    with pytest.raises(SentinelStop) as stopped:
        train(recipe, console)
    message = str(stopped.value)
    assert message.startswith(
        "sentinel no_gradient: 100% of the groups have no gradient (limit 90%)"
    )
    assert "the checkpoint of step 2 is kept; continue with postgrad resume" in message
    fork = f"postgrad fork {recipe.run_dir} --checkpoint STEP --to DIR"
    assert message.endswith(f"; {fork} goes back to an earlier checkpoint")
    assert stopped.value.exit_code == 1
    run = Path(recipe.run_dir)
    resume(run, ["--sentinels.no_gradient.action", "observe"], [], console)
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert spoken(recipe.run_dir) == [("no_gradient", 2)]  # it is still the same illness


@pytest.mark.slow
def test_a_resumed_run_that_is_still_sick_is_stopped_again(
    make_recipe: Any, console: Console
) -> None:
    watched = {"no_gradient": {"action": "stop", "steps": 2}}
    recipe = make_recipe("rl", steps=6, sentinels=watched, rewards=pays("nothing"), rollout=ENDS)
    for step in (2, 3):
        with pytest.raises(SentinelStop, match=f"stopped after step {step}"):
            train(recipe, console)


@pytest.mark.slow
def test_a_stall_that_stops_leaves_the_last_boundary(
    make_recipe: Any, console: Console, monkeypatch: Patch
) -> None:
    """The second step hangs before anything of it is trained: the first is whole, and saved."""
    next_groups, dogs = LiveSource.next, list[Any]()

    def hang(self: Any, step: int, *more: Any) -> Any:
        if step == 2:
            patient, dogs[0]._settings = dogs[0]._settings, Stall(action="stop", seconds=0.2)
            try:
                time.sleep(60)
            finally:
                dogs[0]._settings = patient  # what is saved then may take its time
        return next_groups(self, step, *more)

    watch = Watchdog.__enter__
    monkeypatch.setattr(Watchdog, "__enter__", lambda self: dogs.append(self) or watch(self))
    monkeypatch.setattr(LiveSource, "next", hang)
    recipe = make_recipe(
        "rl",
        sentinels={"stall": {"action": "stop", "seconds": 60.0}},
        rollout=ENDS,
        checkpoint={"save_steps": 0},
    )
    with pytest.raises(SentinelStop, match=r"phase sample made no progress .* after step 1: the"):
        train(recipe, console)
    assert RunState.from_json(_newest_state(recipe.run_dir)).step == 1


def _newest_state(run_dir: str) -> Any:
    newest = max((Path(run_dir) / "checkpoints").glob("step-*"))
    return json.loads((newest / "state.json").read_text("utf-8"))


@pytest.mark.slow
def test_a_killed_and_resumed_run_speaks_as_one_that_never_stopped(
    make_recipe: Any, console: Console, monkeypatch: Patch
) -> None:
    """What has been seen is run state: five steps without gradient are five after a kill too."""
    changes = {"steps": 7, "rewards": pays("nothing"), "rollout": ENDS}
    uninterrupted, killed = (
        make_recipe("rl", "whole", **changes),
        make_recipe("rl", "killed", **changes),
    )
    train(uninterrupted, console)
    train_until_killed(monkeypatch, RLJob, 3, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert spoken(uninterrupted.run_dir) == spoken(killed.run_dir) == [("no_gradient", 5)]
    assert_same_run(uninterrupted, killed, 7)
    states = [_newest_state(recipe.run_dir)["sentinels"] for recipe in (uninterrupted, killed)]
    assert states[0] == states[1]
    assert states[0]["no_gradient"]["since"] == 5


@pytest.mark.slow
def test_sentinels_that_are_off_change_no_bit(
    make_recipe: Any, trained: MakeRecipe, console: Console
) -> None:
    off = dict.fromkeys(SentinelSettings.model_fields, "off")
    with_sentinels, without_sentinels = trained("rl"), make_recipe("rl", "two", sentinels=off)
    train(without_sentinels, console)
    a, b = tensors(with_sentinels.run_dir, 3), tensors(without_sentinels.run_dir, 3)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert spoken(without_sentinels.run_dir) == []


@pytest.mark.slow
@pytest.mark.long
def test_the_quickstart_is_healthy(tmp_path: Path, console: Console) -> None:
    """As shipped: its SFT and its RL."""
    train_pipeline(load_pipeline(RECIPES / "quickstart", ["--run_dir", str(tmp_path)]), console)
    for stage in ("sft", "rl"):
        assert spoken(str(tmp_path / stage)) == []
