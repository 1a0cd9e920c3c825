"""What holds for every recipe: more never takes less, and advice that is followed fits."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from postgrad.models.known_shapes import shape_of_model
from postgrad.plan.advice import advise
from postgrad.plan.hardware import parse_hardware
from postgrad.plan.plan import Facts, make_plan
from postgrad.plan.reserved import NCCL
from postgrad.recipe.load import parse_recipe, with_overrides
from postgrad.recipe.recipe import Recipe

MODELS = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-7B")
STAGES = ("none", "zero1", "zero2", "zero3")
HARDWARE = st.sampled_from(["8xH200", "CPU"])  # with flexible attention, and with gathered keys


JOBS = ("sft", "reward", "preference", "grpo", "ppo")
# Of each job what may stand in [algorithm]; the last of preferences has labelled answers, no pairs.
ALGORITHMS: dict[str, tuple[dict[str, Any], ...]] = {
    "sft": ({"type": "sft"},),
    "reward": ({"type": "bradley_terry"},),
    "preference": ({"type": "dpo"}, {"type": "simpo"}, {"type": "kto"}),
    "grpo": ({"type": "grpo"}, {"type": "grpo", "kl_coef": 0.1}, {"type": "rloo"}),
    "ppo": ({"type": "ppo", "kl_coef": 0.1}, {"type": "ppo", "kl_coef": 0.0}),
}


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    """A recipe in which everything that a plan reads is stated."""
    job = draw(st.sampled_from(JOBS))
    max_len = draw(st.sampled_from([256, 1024, 4096]))
    ranks = draw(st.sampled_from([1, 2, 4, 8]))
    sharding = draw(st.sampled_from(STAGES)) if ranks > 1 else "none"
    model: dict[str, Any] = {
        "path": draw(st.sampled_from(MODELS)),
        "dtype": draw(st.sampled_from(["auto", "float32", "bfloat16"])),
        "gradient_checkpointing": draw(st.booleans()),
    }
    if draw(st.booleans()):
        model["lora"] = {"rank": draw(st.sampled_from([8, 64])), "alpha": 64}
    learner: dict[str, Any] = {
        "ranks": ranks,
        "sharding": sharding,
        "context_parallel": draw(st.sampled_from([1, 2])) if ranks > 1 else 1,
        "ema_decay": draw(st.sampled_from([0.0, 0.99])),
    }
    if "lora" not in model:
        learner["optimizer"] = draw(st.sampled_from(["adamw", "muon"]))
    table: dict[str, Any] = {
        "job": "rl" if job in ("grpo", "ppo") else job,
        "run_dir": "run",
        "steps": 10,
        "model": model,
        "data": {"path": "rows.jsonl", "max_len": max_len},
        "batch": {"micro_train_tokens": 2 * max_len * draw(st.sampled_from([1, 4]))},
        "algorithm": draw(st.sampled_from(ALGORITHMS[job])),
        "learner": learner,
        "cluster": {"type": "ray" if ranks > 1 else "local"},
        "checkpoint": {"save_steps": draw(st.sampled_from([0, 5]))},
    }
    if table["job"] == "rl":
        table["rewards"] = [{"type": "gsm8k"}]
        table["rollout"] = {"max_new_tokens": max_len // 2, "slots": 16, "cache_tokens": 131072}
        table["batch"] |= {"rollout_batch_size": 64, "n_samples_per_prompt": 8}
    else:
        table["batch"] |= {"train_batch_size": 512}
    if job == "ppo" and draw(st.booleans()):
        table["rewards"] = [{"type": "reward_model"}]
        table["reward_model"] = {"model": {"path": draw(st.sampled_from(MODELS))}}
    return table


def peak(recipe: Recipe, hardware: str = "8xH200", *, buffers: bool = True) -> int:
    """buffers: those of NCCL too, which a single rank does not have."""
    memory = make_plan(recipe, Facts(shape_of_model, parse_hardware(hardware))).memory
    outside = sum(max(line.bytes.values()) for line in memory.lines if line.purpose == NCCL)
    return memory.peak_bytes - (0 if buffers else outside)


SAME_SUM: dict[str, Any] = {  # activations grow by what the backward pass of a layer shrinks
    **{"job": "sft", "run_dir": "run", "steps": 10, "algorithm": {"type": "sft"}},
    "model": {"path": "Qwen/Qwen2.5-7B", "gradient_checkpointing": True},
    "data": {"path": "rows.jsonl", "max_len": 1024},
    "batch": {"micro_train_tokens": 2048, "train_batch_size": 512},
    "learner": {"ranks": 4, "sharding": "zero2", "context_parallel": 2},
    "cluster": {"type": "ray"},
}


@settings(max_examples=40)
@given(tables(), HARDWARE)
@example(SAME_SUM, "8xH200")
def test_a_larger_micro_batch_never_takes_less(table: dict[str, Any], hardware: str) -> None:
    recipe = parse_recipe(table)
    tokens = recipe.batch.micro_train_tokens
    assert tokens is not None
    larger = with_overrides(recipe, ["--batch.micro_train_tokens", str(2 * tokens)])
    assert peak(larger, hardware) >= peak(recipe, hardware)


@settings(max_examples=40)
@given(tables(), HARDWARE)
def test_longer_sequences_never_take_less(table: dict[str, Any], hardware: str) -> None:
    recipe = parse_recipe(table)
    longer = ["--data.max_len", str(2 * recipe.data.max_len)]
    longer += ["--batch.micro_train_tokens", str(8 * recipe.data.max_len)]
    same = ["--batch.micro_train_tokens", str(8 * recipe.data.max_len)]
    short = peak(with_overrides(recipe, same), hardware)
    assert peak(with_overrides(recipe, longer), hardware) >= short


@settings(max_examples=40)
@given(tables(), st.integers(0, len(MODELS) - 2), HARDWARE)
def test_a_bigger_model_never_takes_less(table: dict[str, Any], place: int, hardware: str) -> None:
    small, big = (
        parse_recipe({**table, "model": {**table["model"], "path": MODELS[n]}})
        for n in (place, place + 1)
    )
    assert peak(big, hardware) >= peak(small, hardware)


@settings(max_examples=40)
@given(tables())
def test_fewer_ranks_never_take_less(table: dict[str, Any]) -> None:
    recipe = parse_recipe(table)
    learner = recipe.learner
    least = learner.context_parallel * (1 if learner.sharding == "none" else 2)
    fewer = learner.ranks // 2
    if fewer < least:  # one rank has no sharding to keep
        return
    if recipe.job == "rl" and fewer == 1:  # an engine beside a single rank reads its weights
        return
    least_peak = peak(with_overrides(recipe, ["--learner.ranks", str(fewer)]), buffers=False)
    assert least_peak >= peak(recipe, buffers=False)


@settings(max_examples=40)
@given(tables())
def test_gradients_added_in_every_micro_batch_never_take_more(table: dict[str, Any]) -> None:
    recipe = parse_recipe(table)
    if recipe.learner.ranks == 1:
        return
    peaks = [peak(with_overrides(recipe, ["--learner.sharding", stage])) for stage in STAGES[1:3]]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.slow
@settings(max_examples=40)
@given(tables(), st.sampled_from(["RTX-4090", "2xA100-40G", "8xA100-80G"]))
def test_advice_that_is_followed_fits_and_is_a_recipe(table: dict[str, Any], hardware: str) -> None:
    recipe, facts = parse_recipe(table), Facts(shape_of_model, parse_hardware(hardware))
    start = make_plan(recipe, facts)
    advice = advise(start, facts)
    if not advice:
        return
    flags = [flag for offer in advice for flag in offer.overrides]
    there = advice[-1].after.hardware  # more devices may be the advice
    after = make_plan(with_overrides(recipe, flags), replace(facts, hardware=there))
    assert after.memory == advice[-1].after.memory
    assert after.fits == advice[-1].after.fits
    if start.fits:
        assert after.fits
        assert there.count <= facts.hardware.count  # of the others some may be given back
        spent = [run_plan.timing.step_seconds for run_plan in (start, after)]
        devices = [run_plan.timing.devices for run_plan in (start, after)]
        assert spent[1] <= spent[0] or spent[1] * devices[1] < spent[0] * devices[0]
